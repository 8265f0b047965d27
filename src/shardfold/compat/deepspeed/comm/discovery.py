"""Which rank this process is, where no launcher of PyTorch's kind has said so: Slurm, Open MPI and other MPIs."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from collections.abc import Mapping

from shardfold.errors import UsageError

__all__ = ["discover", "first_host"]

#: Rank, number of ranks, rank on this machine, ranks on this machine; the first variable is only there under a launch.
LAUNCHERS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
AZURE_PORT = 6105


def discover(environment: Mapping[str, str], port: int) -> dict[str, str]:
    """PyTorch's variables (``RANK``, ``WORLD_SIZE``, ...) as other launchers tell them; empty if there is none.

    Args:
        environment: of this process; a ``MASTER_ADDR`` or ``MASTER_PORT`` in it holds.
        port: of rank 0, where nothing says another.

    Raises:
        UsageError: there are several machines, and nothing says which one has rank 0.
    """
    found = _slurm(environment)  # srun speaks PMI too, and knows more
    for rank, size, local_rank, local_size in () if found else LAUNCHERS:
        if rank in environment and size in environment:
            found = {
                "RANK": environment[rank],
                "WORLD_SIZE": environment[size],
                "LOCAL_RANK": environment.get(local_rank, environment[rank]),
                "LOCAL_WORLD_SIZE": environment.get(local_size, environment[size]),
            }
            break
    if found:
        found.setdefault("MASTER_PORT", environment.get("MASTER_PORT", str(port)))
        if environment.get("MASTER_ADDR"):
            found["MASTER_ADDR"] = environment["MASTER_ADDR"]
        elif "MASTER_ADDR" not in found:
            found["MASTER_ADDR"] = _master(environment, found, port)
    return found


def _slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """A task of ``srun``; what a batch script runs without it is one process alone."""
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return {}
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
    }
    per_node = re.match(r"\d+$", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if per_node:
        found["LOCAL_WORLD_SIZE"] = per_node[0]
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if hosts:
        found["MASTER_ADDR"] = first_host(hosts)
    return found


def first_host(hosts: str) -> str:
    """The first host of a list as Slurm writes it: ``"node[003-010,012],other"`` -> ``"node003"``."""
    first = re.match(r"[^,\[]+(\[[^\]]*\])?[^,\[]*", hosts)
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", first[0]) if first else hosts


def _master(environment: Mapping[str, str], found: dict[str, str], port: int) -> str:
    azure = environment.get("AZ_BATCH_MASTER_NODE")
    if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
        return "127.0.0.1"
    if azure:
        address, _, azure_port = azure.partition(":")
        found["MASTER_PORT"] = environment.get("MASTER_PORT") or azure_port or str(AZURE_PORT)
        return address
    if importlib.util.find_spec("mpi4py") is not None:
        from mpi4py import MPI  # pyright: ignore[reportMissingImports]

        return MPI.COMM_WORLD.bcast(socket.gethostbyname(socket.gethostname()), root=0)
    raise UsageError(
        f"rank {found['RANK']} of {found['WORLD_SIZE']} was started by MPI on several machines, and nothing says where "
        f"rank 0 is: set MASTER_ADDR to its address (mpirun -x MASTER_ADDR=...; port {port} is taken unless "
        "MASTER_PORT says another), or install mpi4py."
    )


def local_rank() -> int:
    """This process's rank on its machine; 0 where nothing says it."""
    names = ("LOCAL_RANK", *(names[2] for names in LAUNCHERS), "SLURM_LOCALID")
    return int(next((os.environ[name] for name in names if name in os.environ), "0"))
