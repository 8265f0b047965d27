"""Who launchers say that this process is, by DeepSpeed's names."""

from __future__ import annotations

import os

from shardfold.compat.deepspeed.comm.discovery import discover, local_rank
from shardfold.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT

__all__ = [
    "get_local_rank_from_launcher",
    "get_world_rank_from_launcher",
    "get_world_size_from_launcher",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "mpi_discovery",
]


def mpi_discovery(distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True) -> None:
    """Writes what Slurm or MPI say of this process into the environment in PyTorch's words (``RANK``, ...)."""
    os.environ.update(discover(os.environ, distributed_port))


def get_local_rank_from_launcher() -> int:
    """Of this process on its machine; 0 where nothing says it."""
    return local_rank()


def get_world_rank_from_launcher() -> int:
    """Of this process; 0 where nothing says it."""
    return int(_told("RANK", "0"))


def get_world_size_from_launcher() -> int:
    """Number of processes; 1 where nothing says it."""
    return int(_told("WORLD_SIZE", "1"))


def _told(name: str, default: str) -> str:
    if name in os.environ:
        return os.environ[name]
    return discover(os.environ, TORCH_DISTRIBUTED_DEFAULT_PORT).get(name, default)


def in_aml() -> bool:
    """Whether this is a job of Azure Machine Learning."""
    return "AZUREML_EXPERIMENT_ID" in os.environ


def in_aws_sm() -> bool:
    """Whether this is a job of Amazon SageMaker."""
    return "SM_TRAINING_ENV" in os.environ


def in_dlts() -> bool:
    """Whether this is a job of Microsoft's DLTS."""
    return "DLTS_JOB_ID" in os.environ
