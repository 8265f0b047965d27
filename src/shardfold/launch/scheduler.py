"""What Slurm and MPI say of the job that this process is part of. Pure functions of the environment.

``srun`` and ``mpirun`` start this process on each node, or once for each rank, and say in environment variables which
one it is. Under ``sbatch`` alone there is one process on the first node: that is no step, and says nothing of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from zlib import crc32

from shardfold.errors import ConfigError

__all__ = ["Task", "expand_nodelist", "expand_tasks", "find_task", "scheduler_step", "slurm_nodes"]

# Steps that are no `srun` of a job: the batch script, an interactive shell, ...
NO_STEP = 0xFFFFFFF0

# Ports that depend on the job alone, below those that Linux gives to outgoing connections.
FIRST_PORT, NUM_PORTS = 20000, 10000


@dataclass(frozen=True)
class Task:
    """One of the processes that a scheduler started together.

    Attributes:
        scheduler: ``Slurm`` or ``MPI``, for messages.
        rank: of this task among ``size``.
        local_rank: of this task among the ``local_size`` on this node.
        node_rank: of this node among ``num_nodes``; None if the scheduler does not say.
        hosts: names of the nodes in the order of their ranks; empty if the scheduler does not say.
        port: one that all tasks agree on; None if the scheduler says nothing that it could be made from.
    """

    scheduler: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int | None
    num_nodes: int
    hosts: tuple[str, ...] = ()
    port: int | None = None

    @property
    def one_per_node(self) -> bool:
        return self.num_nodes > 1 and self.size == self.num_nodes


def split_outside_brackets(text: str) -> list[str]:
    """Split at commas that are not within brackets."""
    return [part for part in re.findall(r"(?:[^,\[]|\[[^\]]*\]|\[)+", text) if part]


def expand_nodelist(text: str) -> list[str]:
    """Return the hosts of one of Slurm's node lists, such as ``gpu[01-03,7],login1`` or ``r[1-2]n[0-1]``.

    Raises:
        ConfigError: it is not such a list.
    """
    hosts: list[str] = []
    for part in split_outside_brackets(text.strip()):
        expanded = [""]
        for piece in re.findall(r"\[[^\]]*\]|[^\[\]]+|.", part):
            choices = bracket(piece, text) if piece.startswith("[") else [piece]
            expanded = [head + tail for head in expanded for tail in choices]
        hosts += expanded
    if not hosts:
        raise ConfigError("the job's node list is empty.")
    return hosts


def bracket(piece: str, text: str) -> list[str]:
    """Return the numbers of ``[01-03,7]``, with their leading zeros."""
    numbers: list[str] = []
    for span in piece[1:-1].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", span)
        if match is None or not piece.endswith("]") or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(
                f"the job's node list {text!r} cannot be read: {piece!r} is not a range such as [01-03,7]."
            )
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node, from Slurm's ``4(x2),3``.

    Raises:
        ConfigError: it is not of that form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"the job's tasks per node, {text!r}, cannot be read: {part!r} is not like 4 or 4(x2).")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def find_task(environment: Mapping[str, str]) -> Task | None:
    """Return which task of a Slurm step or of an ``mpirun`` this process is; None if it is none of several."""
    task = slurm_task(environment) or mpi_task(environment)
    return task if task is not None and task.size > 1 else None


def slurm_nodes(environment: Mapping[str, str]) -> int:
    """Return the number of nodes of the Slurm job that this process belongs to; 1 if it belongs to none."""
    return int(environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or 1)


def slurm_task(environment: Mapping[str, str]) -> Task | None:
    step = environment.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= NO_STEP or "SLURM_PROCID" not in environment:
        return None

    def first(*names: str) -> str:
        for name in names:
            if environment.get(name):
                return environment[name]
        raise ConfigError(f"this is a step of a Slurm job, but {names[0]} is not set: start it with srun.")

    hosts = expand_nodelist(first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    counts = expand_tasks(first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node_rank = int(first("SLURM_NODEID"))
    name = f"{first('SLURM_JOB_ID', 'SLURM_JOBID')}.{step}"
    return Task(
        scheduler="Slurm",
        rank=int(environment["SLURM_PROCID"]),
        size=int(first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")),
        local_rank=int(first("SLURM_LOCALID")),
        local_size=counts[node_rank] if node_rank < len(counts) else 1,
        node_rank=node_rank,
        num_nodes=int(environment.get("SLURM_STEP_NUM_NODES") or len(hosts)),
        hosts=tuple(hosts),
        port=FIRST_PORT + crc32(name.encode()) % NUM_PORTS,
    )


def scheduler_step(environment: Mapping[str, str]) -> str:
    """What tells this run of ranks from others: the job and its step, as steps of one job are runs of their own;
    ``none`` where no scheduler says."""
    job, step = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_STEP_ID", "")
    return ".".join(filter(None, (job, step))) if job else "none"


# Of Open MPI; of MPICH, Intel MPI and MVAPICH, whose process manager is Hydra; of MVAPICH's older one.
MPI_NAMES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)


def mpi_task(environment: Mapping[str, str]) -> Task | None:
    for names in MPI_NAMES:
        values = [environment.get(name, "") for name in names]
        if not (values[0].isdecimal() and values[1].isdecimal()):
            continue
        if not (values[2].isdecimal() and values[3].isdecimal()):
            if int(values[1]) == 1:
                return None
            raise ConfigError(
                f"{names[0]} is set, but {names[2]} and {names[3]} are not: start it with Open MPI's, MPICH's or "
                "Intel MPI's mpirun, or with torchrun's options."
            )
        rank, size, local_rank, local_size = map(int, values)
        # Ranks are placed node by node unless asked otherwise; with one per node every placing is this.
        even = size % local_size == 0
        return Task(
            scheduler="MPI",
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=rank // local_size if even else None,
            num_nodes=size // local_size if even else 0,
        )
    return None
