"""Which rank this process is, where no launcher of PyTorch's kind has said so: under Slurm and MPI."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping

from shardfold.compat.deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from shardfold.errors import UsageError
from shardfold.launch.scheduler import Task, find_task

__all__ = ["discover", "local_rank"]

AZURE_PORT = 6105


def discover(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """PyTorch's variables (``RANK``, ``WORLD_SIZE``, ...) as a scheduler tells them; empty if it started one process.

    Args:
        environment: of this process; a ``MASTER_ADDR`` or ``MASTER_PORT`` in it holds.
        port: of rank 0, where nothing says another.

    Raises:
        UsageError: there are several machines, and nothing says which one has rank 0.
        ConfigError: the scheduler's variables cannot be read.
    """
    task = find_task(environment)
    if task is None:
        return {}
    of_job = task.port if port == TORCH_DISTRIBUTED_DEFAULT_PORT and task.port else port
    address, azure_port = _master(task, environment)
    return {
        "RANK": str(task.rank),
        "WORLD_SIZE": str(task.size),
        "LOCAL_RANK": str(task.local_rank),
        "LOCAL_WORLD_SIZE": str(task.local_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": environment.get("MASTER_PORT") or azure_port or str(of_job),
    }


def _master(task: Task, environment: Mapping[str, str]) -> tuple[str, str]:
    """Where rank 0 is, and its port if that is known from the same place."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], ""
    if task.hosts:
        return task.hosts[0], ""
    if task.local_size == task.size:
        return "127.0.0.1", ""
    azure = environment.get("AZ_BATCH_MASTER_NODE")
    if azure:
        address, _, azure_port = azure.partition(":")
        return address, azure_port or str(AZURE_PORT)
    if importlib.util.find_spec("mpi4py") is not None:
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]

        return MPI.COMM_WORLD.bcast(socket.gethostbyname(socket.gethostname()), root=0), ""
    raise UsageError(
        f"rank {task.rank} of {task.size} was started by {task.scheduler} on several machines, and nothing says where "
        "rank 0 is: set MASTER_ADDR to its address (mpirun -x MASTER_ADDR=...), or install mpi4py."
    )


def local_rank() -> int:
    """This process's rank on its machine; 0 where nothing says it."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    task = find_task(os.environ)
    return 0 if task is None else task.local_rank
