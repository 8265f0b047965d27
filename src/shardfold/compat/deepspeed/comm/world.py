"""The process group, and who this process is in it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardfold.comm.backend import start_group
from shardfold.comm.mesh import pick_device
from shardfold.compat.deepspeed.comm.discovery import discover, local_rank
from shardfold.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from shardfold.compat.deepspeed.utils.comms_logging import configure
from shardfold.errors import ConfigError, UsageError

__all__ = [
    "destroy_process_group",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "initialize_mesh_device",
    "is_available",
    "is_initialized",
    "new_group",
]

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initializes ``torch.distributed``, or adopts what is initialized.

    Who is who is told by ``init_method``, ``rank`` and ``world_size``; else by the environment that ``torchrun`` and
    other launchers set; else by Slurm's or MPI's, which is written into the environment in these words. A process of
    which nothing is told is rank 0 of 1.

    Args:
        dist_backend: of ``torch.distributed``; None: ``nccl`` where each rank of a machine has a GPU, else ``gloo``.
        auto_mpi_discovery: whether to ask Slurm's and MPI's environment.
        distributed_port: of rank 0, where Slurm or MPI says who is who and ``MASTER_PORT`` is not set.
        verbose: whether to log what was found.
        timeout: of collectives; the environment's ``DEEPSPEED_TIMEOUT`` (minutes) is the default.
        init_method: a URL, as of ``torch.distributed.init_process_group``.
        dist_init_required: False: there must be a group already.
        config: a configuration whose ``comms_logger`` is used.
        rank, world_size: of this process, for an ``init_method``.

    Raises:
        UsageError: there is no group and ``dist_init_required`` is False, or the environment says only a part.
        ConfigError: ``timeout`` is no ``timedelta``.
    """
    configure(config)
    if is_initialized():
        return
    if dist_init_required is False:
        raise UsageError(
            "torch.distributed is not initialized, and dist_init_required is False: call "
            "deepspeed.init_distributed() or torch.distributed.init_process_group() first."
        )
    if not isinstance(timeout, timedelta):
        raise ConfigError(f"init_distributed(timeout={timeout!r}): it is a datetime.timedelta.")
    where: dict[str, Any] = {"rank": rank, "world_size": world_size}
    if init_method is not None:
        where["init_method"] = init_method
    else:
        if auto_mpi_discovery and not all(name in os.environ for name in LAUNCHED):
            found = discover(os.environ, distributed_port)
            os.environ.update(found)
            if found and verbose:
                _log(f"{', '.join(f'{name}={value}' for name, value in found.items())} by the launcher's environment")
        size = int(os.environ.get("WORLD_SIZE", "1")) if world_size < 0 else world_size
        missing = [name for name in LAUNCHED[:4] if name not in os.environ]
        if size == 1 and missing:
            where = {"rank": 0, "world_size": 1, "store": dist.HashStore()}  # pyright: ignore[reportPrivateImportUsage]
        elif missing and (rank < 0 or set(missing) - {"RANK", "WORLD_SIZE"}):
            raise UsageError(
                f"WORLD_SIZE is {size} but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set: start "
                "the script with shardfold run, deepspeed or torchrun, or unset WORLD_SIZE."
            )
    device = pick_device()
    start_group(device, timeout, dist_backend, **where)
    if verbose:
        _log(f"torch.distributed was started with backend {dist.get_backend()}")
    atexit.register(_close)  # a group that outlives the interpreter may end the process by a signal


def _close() -> None:
    if is_initialized():
        dist.destroy_process_group()


def _log(message: str) -> None:
    from shardfold.compat.deepspeed.utils.logging import logger

    logger.info(message)


# -- who there is


def is_available() -> bool:
    """Whether this PyTorch has ``torch.distributed``."""
    return dist.is_available()


def is_initialized() -> bool:
    """Whether there is a process group, whoever made it."""
    return dist.is_available() and dist.is_initialized()


def alone() -> bool:
    """Whether this process is the only one, and has no group.

    Raises:
        UsageError: there are others, but no group yet.
    """
    if is_initialized():
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UsageError("torch.distributed is not initialized: call deepspeed.init_distributed() first.")
    return True


def get_rank(group: Any = None) -> int:
    """This process's rank in the group; -1 if it is not of it."""
    return 0 if alone() else dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """How many ranks the group has."""
    return 1 if alone() else dist.get_world_size(group)


def get_local_rank() -> int:
    """This process's rank on its machine."""
    return local_rank()


def get_world_group() -> Any:
    """The group of all ranks."""
    return dist.group.WORLD


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The rank among all of a group's rank."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of a group among all, in its order."""
    return [0] if alone() else dist.get_process_group_ranks(group or get_world_group())


def new_group(ranks: Sequence[int]) -> Any:
    """A group of these ranks; every rank of all calls it."""
    return dist.new_group(list(ranks))


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """A ``DeviceMesh`` of all ranks."""
    return init_device_mesh(pick_device().type, mesh_shape, mesh_dim_names=mesh_dim_names)


def destroy_process_group(group: Any = None) -> None:
    """Ends a group; None: all of them."""
    if is_initialized():
        dist.destroy_process_group(group)
