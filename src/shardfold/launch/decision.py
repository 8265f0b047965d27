"""What a call of ``shardfold run`` is to do, decided from its options and the environment alone. No torch."""

from __future__ import annotations

import os
import socket
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardfold.errors import ConfigError
from shardfold.launch import hosts, scheduler
from shardfold.launch.options import Options
from shardfold.launch.scheduler import Task

__all__ = ["Hosts", "Node", "Rank", "decide", "exported", "script_command"]

# Options that need a process here that starts the ranks.
FOR_AGENTS = (
    "nproc_per_node",
    "num_gpus",
    "nnodes",
    "num_nodes",
    "max_restarts",
    "spares",
    "replace",
    "notice",
    "redirects",
    "tee",
    "local_ranks_filter",
    "enable_each_rank_log",
    "virtual_local_rank",
    "bind_cores_to_rank",
)

DEFAULT_PORT = 29500
DEEPSPEED_HOSTFILE = "/job/hostfile"

# Variables of this shell that the other hosts' processes are given too; CUDA_VISIBLE_DEVICES is each host's own.
EXPORTED = (
    "NCCL",
    "GLOO",
    "TORCH",
    "PYTHON",
    "OMP_",
    "UCX",
    "FI_",
    "MV2",
    "MLFLOW",
    "WANDB",
    "HF_",
    "TRANSFORMERS_",
    "SHARDFOLD_",
)
EXPORTED_NAMES = ("PATH", "LD_LIBRARY_PATH")


@dataclass(frozen=True)
class Node:
    """This process starts the ranks of one node and watches them.

    Attributes:
        procs: a number, ``auto``, ``gpu``, ``cpu`` or None for what this machine has.
        slots: the GPUs to use, of those that this process sees; None for all.
        nodes: fewest and most.
        rank: of this node, or None where ``backend`` gives it.
        backend: ``static``, or one of torch's: ``c10d``, ``etcd-v2``.
        host, port: where the nodes meet; of a single node, where its ranks do. Port None: any that is free.
        name: of this node in a list of hosts; its ranks' lines are labelled with it.
        address: of this node, as others see it; None: torch finds one.
    """

    procs: str | None = None
    slots: tuple[int, ...] | None = None
    nodes: tuple[int, int] = (1, 1)
    rank: int | None = 0
    backend: str = "static"
    host: str = "127.0.0.1"
    port: int | None = None
    name: str | None = None
    address: str | None = None


@dataclass(frozen=True)
class Rank:
    """This process becomes one rank: the scheduler has started it and all others."""

    environment: dict[str, str]
    local_rank: int


@dataclass(frozen=True)
class Hosts:
    """This process starts one :class:`Node` on each host and waits for them."""

    slots: OrderedDict[str, list[int]]
    launcher: str
    given_slots: bool  # whether the user counted slots, so that each host runs as many ranks


def decide(options: Options, environment: Mapping[str, str]) -> Node | Rank | Hosts:
    """Return what to do.

    Raises:
        ConfigError: the options do not fit each other, the host file or what Slurm or MPI say.
    """
    task = None if options.standalone else scheduler.find_task(environment)
    path = options.hostfile or (DEEPSPEED_HOSTFILE if options.as_deepspeed and not options.standalone else None)
    pool = hosts.fetch_hostfile(path)
    if options.hostfile is not None and pool is None:
        raise ConfigError(f"there is no host file {options.hostfile!r}: give --hostfile the path of one.")
    by_hand = options.nodes[1] > 1 or options.node_rank is not None or bool(options.rdzv_endpoint)
    if task is not None and (pool is not None or not by_hand or task.one_per_node):
        return of_task(options, task, pool)
    if pool is not None:
        return of_hostfile(options, pool)
    if options.include or options.exclude:
        return of_local_filter(options, environment)
    if options.launcher == "slurm":
        return of_slurm_launcher(options, environment)
    if options.launcher in ("mpi", "openmpi", "mpich", "impi"):
        raise ConfigError(f"--launcher {options.launcher} starts the hosts of a host file: give --hostfile.")
    if not by_hand:
        refuse_rest_of_allocation(options, environment)
    return of_options(options, environment)


def of_options(options: Options, environment: Mapping[str, str]) -> Node:
    """One node as torchrun's options say."""
    nodes = options.nodes
    backend = options.rdzv_backend or "static"
    if nodes[1] == 1 and (backend != "static" or not options.rdzv_endpoint):  # nobody has to be met
        return Node(options.procs, host=options.master_addr or "127.0.0.1", port=options.master_port)
    host, port = endpoint(options, environment)
    if backend == "static" and options.node_rank is None:
        raise ConfigError(f"there are {nodes[1]} nodes: say with --node-rank which of them this is, from 0.")
    if backend == "static" and host is None:
        raise ConfigError(f"there are {nodes[1]} nodes: say with --master-addr where node 0 is.")
    rank = options.node_rank if backend == "static" else None
    return Node(options.procs, None, nodes, rank, backend, host or "127.0.0.1", port, address=options.local_addr)


def endpoint(options: Options, environment: Mapping[str, str]) -> tuple[str | None, int]:
    """Return address and port where nodes meet, from options or the environment."""
    host, port = options.master_addr or environment.get("MASTER_ADDR"), options.master_port
    if options.rdzv_endpoint:
        host, colon, number = options.rdzv_endpoint.rpartition(":")
        if not colon:
            host, number = options.rdzv_endpoint, str(DEFAULT_PORT)
        if not host or not number.isdecimal():
            raise ConfigError(f"--rdzv-endpoint is {options.rdzv_endpoint!r}: give HOST:PORT.")
        port = int(number)
    if port is None:
        from_environment = environment.get("MASTER_PORT", "")
        port = int(from_environment) if from_environment.isdecimal() else DEFAULT_PORT
    return host.strip("[]") if host else None, port


def of_task(options: Options, task: Task, pool: Mapping[str, int] | None) -> Node | Rank:
    """What one process of a Slurm step or an mpirun is: a node's, if there is one on each node, else a rank."""
    host = options.master_addr or (task.hosts[0] if task.hosts else None)
    if host is None and task.local_size == task.size:
        host = "127.0.0.1"
    if host is None:
        raise ConfigError(
            f"{task.scheduler} has started {task.size} processes on several nodes, but does not tell where the first "
            "is: give --master-addr."
        )
    port = options.master_port or task.port or DEFAULT_PORT
    if task.one_per_node:
        if options.nnodes is not None and options.nodes[1] != task.num_nodes:
            raise ConfigError(
                f"{task.scheduler} has started {task.num_nodes} nodes, but --nnodes is {options.nnodes}: leave it out."
            )
        node = Node(options.procs, None, (task.num_nodes, task.num_nodes), task.node_rank, "static", host, port)
        if task.hosts and task.node_rank is not None:
            node = replace(node, name=task.hosts[task.node_rank])
        if pool is not None and task.node_rank is not None:
            chosen = list(chosen_slots(options, pool).items())
            if len(chosen) != task.num_nodes:
                raise ConfigError(
                    f"the host file leaves {len(chosen)} hosts, but {task.scheduler} has started {task.num_nodes}."
                )
            # Slurm sorts the hosts; where it calls them as the file does, names tell.
            name = node.name if node.name in dict(chosen) else chosen[task.node_rank][0]
            slots = dict(chosen)[name]
            node = replace(node, name=name, slots=tuple(slots), procs=str(len(slots)))
        return node
    for_agents = [name for name in FOR_AGENTS if getattr(options, name) != getattr(Options, name)]
    if for_agents:
        name = for_agents[0].replace("_", "-")
        raise ConfigError(
            f"{task.scheduler} has started {task.size} processes, one for each rank, so --{name} has no meaning: "
            "leave it out, or let it start one process on each node."
        )
    variables = {
        "RANK": task.rank,
        "WORLD_SIZE": task.size,
        "LOCAL_RANK": task.local_rank,
        "LOCAL_WORLD_SIZE": task.local_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    if task.node_rank is not None:
        variables |= {"GROUP_RANK": task.node_rank, "GROUP_WORLD_SIZE": task.num_nodes}
        variables |= {"CROSS_RANK": task.node_rank, "CROSS_SIZE": task.num_nodes}
    return Rank({name: str(value) for name, value in variables.items()}, task.local_rank)


def chosen_slots(options: Options, pool: Mapping[str, int]) -> OrderedDict[str, list[int]]:
    """The hosts and slots of a host file that the options leave."""
    left = hosts.parse_inclusion_exclusion(pool, options.include, options.exclude)
    left = OrderedDict((host, slots) for host, slots in left.items() if slots)
    left = hosts.apply_num_nodes_and_gpus(left, options.num_nodes or options.nodes[1] * (options.nnodes is not None), 0)
    if options.procs is not None and options.procs.isdecimal():
        left = hosts.apply_num_nodes_and_gpus(left, 0, int(options.procs))
    if not left:
        raise ConfigError("no slot of any host is left: see --include and --exclude.")
    return left


def of_hostfile(options: Options, pool: Mapping[str, int]) -> Node | Hosts:
    chosen = chosen_slots(options, pool)
    if options.no_ssh or options.launcher == "torchrun":
        rank = options.node_rank
        if rank is None or rank >= len(chosen):
            raise ConfigError(
                f"nothing is started elsewhere, so --node-rank has to say which of the {len(chosen)} hosts this is: "
                f"0 to {len(chosen) - 1}."
            )
        name, slots = list(chosen.items())[rank]
        host = options.master_addr or next(iter(chosen))
        port = options.master_port or DEFAULT_PORT
        return Node(str(len(slots)), tuple(slots), (len(chosen), len(chosen)), rank, "static", host, port, name)
    (name, slots), *others = chosen.items()
    if not others and options.launcher is None and not options.force_multi and is_here(name):
        return Node(str(len(slots)), tuple(slots), host=options.master_addr or "127.0.0.1", port=options.master_port)
    return Hosts(chosen, options.launcher or "ssh", given_slots=True)


def is_here(host: str) -> bool:
    """Whether a host's name is plainly this machine's."""
    here = socket.gethostname()
    return host in ("localhost", "127.0.0.1", "::1", here, here.partition(".")[0])


def of_local_filter(options: Options, environment: Mapping[str, str]) -> Node:
    """Some of this machine's GPUs, which a filter calls ``localhost``; without a count of them, any may be named."""
    named = hosts.parse_filter(options.include or options.exclude)
    if set(named) - {"localhost", "127.0.0.1"}:
        raise ConfigError("--include and --exclude name hosts of a host file: give --hostfile, or say localhost:0,1.")
    slots = named.get("localhost") or named.get("127.0.0.1") or []
    if options.exclude or not slots:
        count = hosts.count_visible(environment)
        if count is None:
            raise ConfigError(
                "this machine's GPUs could not be counted: name the ones to use, --include localhost:0,1."
            )
        chosen = hosts.parse_inclusion_exclusion({next(iter(named)): count}, options.include, options.exclude)
        slots = next(iter(chosen.values()), [])
    if not slots:
        raise ConfigError("no GPU of this machine is left: see --include and --exclude.")
    return Node(str(len(slots)), tuple(slots), host=options.master_addr or "127.0.0.1", port=options.master_port)


def of_slurm_launcher(options: Options, environment: Mapping[str, str]) -> Hosts:
    count = options.nodes[1] if options.nodes[1] > 1 else scheduler.slurm_nodes(environment)
    return Hosts(OrderedDict((f"node {number}", []) for number in range(count)), "slurm", given_slots=False)


def refuse_rest_of_allocation(options: Options, environment: Mapping[str, str]) -> None:
    """Refuse to leave the other nodes of a Slurm job idle without being asked to."""
    count = scheduler.slurm_nodes(environment)
    if count > 1 and not (options.standalone or options.nnodes or options.num_nodes):
        raise ConfigError(
            f"this Slurm job has {count} nodes, but `shardfold run` runs on one: write `srun --ntasks-per-node=1 "
            "shardfold run ...`, or give --launcher slurm, or --standalone for this node alone."
        )


def script_command(options: Options, script: str, arguments: list[str], local_rank: int | str) -> list[str]:
    """Return the command line of a rank."""
    given = [f"--local_rank={local_rank}"] if options.passes_local_rank else []
    if options.no_python:
        return [script, *given, *arguments]
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    return [*python, *(["-m"] if options.module else []), script, *given, *arguments]


def exported(environment: Mapping[str, str], folders: list[Path]) -> dict[str, str]:
    """Return the variables that all hosts are given: some of this environment, and those of ``.deepspeed_env`` files.

    Args:
        environment: of this process.
        folders: where to look for the file; a later one wins. ``DS_ENV_FILE`` names another file.

    Raises:
        ConfigError: a line of such a file is not ``NAME=VALUE``.
    """
    chosen = {
        name: value
        for name, value in environment.items()
        if (name.startswith(EXPORTED) or name in EXPORTED_NAMES) and name != "TORCHELASTIC_RUN_ID"
    }
    for folder in folders:
        path = folder / environment.get("DS_ENV_FILE", ".deepspeed_env")
        if path.is_file():
            chosen |= hosts.parse_environment_file(hosts.read_lines(path), name=str(path))
    return chosen
