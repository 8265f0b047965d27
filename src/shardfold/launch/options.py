"""The options of ``shardfold run``: one table, and what of it contradicts itself. No torch.

Each has torchrun's or DeepSpeed's name, and both where both have it. A name may be written with ``-`` or with ``_``.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from shardfold.errors import ConfigError, did_you_mean
from shardfold.plan.patience import MOST

__all__ = ["LAUNCHERS", "REFUSED", "Options", "option_fields"]

HOW_MANY = "How many processes"
HOSTS = "Several hosts"
MEETING = "Where the hosts meet"
FAILURES = "Failures and signals"
OUTPUT = "Output"
SCRIPT = "The script"

LAUNCHERS = ("ssh", "pdsh", "slurm", "mpi", "openmpi", "mpich", "impi", "torchrun")
BACKENDS = ("static", "c10d", "etcd", "etcd-v2")


def option(text: str, panel: str, default: Any = None, *, names: str = "", metavar: str = "", env: str = "") -> Any:
    """A field that is an option; ``names`` are further names for it, ``env`` is torchrun's variable for it."""
    return field(
        default=default, metadata={"help": text, "panel": panel, "names": names, "metavar": metavar, "env": env}
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for. None and "" stand for what was not.

    Raises:
        ConfigError: two options contradict each other, or one asks for what there is not.
    """

    nproc_per_node: str | None = option(
        "Processes on each node: a number, auto, gpu or cpu (one for each). Default: one for each GPU, else 1.",
        HOW_MANY,
        metavar="N",
        env="NPROC_PER_NODE",
    )
    num_gpus: int | None = option(
        "The same in DeepSpeed's words; of a host file, the first N slots of each host.",
        HOW_MANY,
        names="--num-accelerators",
        metavar="N",
    )
    nnodes: str | None = option(
        "Nodes: a number, or MIN:MAX to go on with fewer or more.", HOW_MANY, metavar="N|MIN:MAX", env="NNODES"
    )
    num_nodes: int | None = option(
        "The same in DeepSpeed's words; the first N hosts of a host file.", HOW_MANY, metavar="N"
    )
    node_rank: int | None = option("Which of the nodes this is, from 0.", HOW_MANY, metavar="N", env="NODE_RANK")

    hostfile: str | None = option(
        "File of lines `worker-0 slots=4`: start on these hosts.", HOSTS, names="-H", metavar="FILE"
    )
    include: str = option("Only these hosts and slots: worker-0@worker-1:0,2.", HOSTS, "", names="-i", metavar="HOSTS")
    exclude: str = option("All but these hosts and slots.", HOSTS, "", names="-e", metavar="HOSTS")
    launcher: str | None = option(
        "Start the other hosts by ssh (default; pdsh means this too), slurm (srun), mpi, openmpi, mpich or impi "
        "(mpirun); torchrun: each host is started by hand.",
        HOSTS,
        metavar="NAME",
    )
    launcher_args: str = option("More options of ssh, srun or mpirun, quoted as one word.", HOSTS, "", metavar="ARGS")
    no_ssh: bool = option("Start nothing elsewhere: every host runs this command with its --node-rank.", HOSTS, False)
    no_ssh_check: bool = option("Do not look at each host first (reachable, same versions, port free).", HOSTS, False)
    force_multi: bool = option("Use ssh even if the only host is this one.", HOSTS, False)
    ssh: str = option("The command that is ssh.", HOSTS, "ssh", metavar="COMMAND")
    ssh_port: int | None = option("Port of the hosts' ssh.", HOSTS, metavar="PORT")
    venv_script: str | None = option(
        "Script to source on each host first, such as venv/bin/activate.", HOSTS, metavar="FILE"
    )

    standalone: bool = option("This machine alone, whatever Slurm or MPI say.", MEETING, False, env="STANDALONE")
    master_addr: str | None = option("Address of node 0.", MEETING, metavar="HOST", env="MASTER_ADDR")
    master_port: int | None = option(
        "Its port. Not given: a free one, or what all nodes agree on.", MEETING, metavar="PORT", env="MASTER_PORT"
    )
    rdzv_backend: str | None = option(
        "static (nodes have ranks), c10d (nodes may come and go) or etcd-v2.",
        MEETING,
        metavar="NAME",
        env="RDZV_BACKEND",
    )
    rdzv_endpoint: str = option("Where the backend is.", MEETING, "", metavar="HOST:PORT", env="RDZV_ENDPOINT")
    rdzv_id: str = option("Name of the job, equal on all nodes.", MEETING, "none", metavar="NAME", env="RDZV_ID")
    rdzv_conf: str = option(
        "More of the backend: join_timeout=600,...", MEETING, "", metavar="K=V,...", env="RDZV_CONF"
    )
    local_addr: str | None = option(
        "Address of this node, as others see it.", MEETING, metavar="HOST", env="LOCAL_ADDR"
    )

    max_restarts: int = option(
        "Start all ranks again up to N times when one dies.", FAILURES, 0, metavar="N", env="MAX_RESTARTS"
    )
    spares: int = option(
        "More processes on each node that wait, ready, to take the place of ranks that are killed (docs/elastic.md).",
        FAILURES,
        0,
        metavar="N",
    )
    replace: int = option(
        "Start up to N processes on each node in the place of ranks that are killed, which join the others "
        "(docs/elastic.md).",
        FAILURES,
        0,
        metavar="N",
    )
    monitor_interval: float = option(
        "Seconds between two looks at the ranks.", FAILURES, 0.1, metavar="S", env="MONITOR_INTERVAL"
    )
    patience: float = option(
        "Seconds without a sign of life until a host, a connection or a stopped process is given up; every other limit "
        "on waiting follows (docs/launch.md).",
        FAILURES,
        10.0,
        metavar="S",
    )
    shutdown_timeout: float | None = option(
        "Seconds that a rank has between a forwarded signal and SIGKILL: 30, after another rank's death 5.",
        FAILURES,
        metavar="S",
        env="SHUTDOWN_TIMEOUT",
    )
    notice: float | None = option(
        "Seconds that engines have to leave by themselves (engine.leaving) behind SIGTERM or SIGUSR1, or once the file "
        "of --notice-file is there; only then the signal is forwarded.",
        FAILURES,
        metavar="S",
    )
    notice_file: str | None = option("A file whose coming is notice, with --notice.", FAILURES, metavar="FILE")
    signals_to_handle: str = option(
        "Signals to forward to the ranks.",
        FAILURES,
        "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        metavar="NAMES",
        env="SIGNALS_TO_HANDLE",
    )
    save_pid: bool = option("Write this process's id to /tmp/PID.deepspeed while it runs.", FAILURES, False)

    log_dir: str | None = option("Folder for the files of -r and -t.", OUTPUT, metavar="DIR", env="LOG_DIR")
    redirects: str = option(
        "Streams that go to files: 1 stdout, 2 stderr, 3 both; 0:3,1:2 differs by local rank.",
        OUTPUT,
        "0",
        names="-r",
        metavar="STREAMS",
        env="REDIRECTS",
    )
    tee: str = option(
        "Streams that go to files and to the terminal, each line with its rank.",
        OUTPUT,
        "0",
        names="-t",
        metavar="STREAMS",
        env="TEE",
    )
    local_ranks_filter: str = option(
        "Local ranks whose output is shown: 0,2.", OUTPUT, "", metavar="RANKS", env="LOCAL_RANKS_FILTER"
    )
    enable_each_rank_log: str = option(
        "Folder for one file per rank instead, TIME_rankN.log.", OUTPUT, "", metavar="DIR"
    )
    role: str = option("Name of these ranks, in the labels of lines.", OUTPUT, "default", metavar="NAME", env="ROLE")
    log_level: str = option("error: say nothing but errors.", OUTPUT, "info", metavar="LEVEL")
    quiet: bool = option("The same as --log-level error.", OUTPUT, False, names="-q")

    module: bool = option("The script is a module: python -m SCRIPT.", SCRIPT, False, names="-m", env="MODULE")
    no_python: bool = option("The script is a program: no python before it.", SCRIPT, False, env="NO_PYTHON")
    as_deepspeed: bool = option(
        "`import deepspeed` means shardfold.compat.deepspeed in the script and all that it starts; the script is given "
        "--local_rank=N, as DeepSpeed's launcher does.",
        SCRIPT,
        False,
    )
    elastic: bool = option(
        "With --as-deepspeed: ranks go on without one that is killed, in a script of the transformers Trainer, or "
        "of Lightning.",
        SCRIPT,
        False,
    )
    no_local_rank: bool = option("With --as-deepspeed: no --local_rank=N for the script.", SCRIPT, False)
    virtual_local_rank: bool = option(
        "Each rank sees its own GPU only, as device 0.", SCRIPT, False, env="VIRTUAL_LOCAL_RANK"
    )
    bind_cores_to_rank: bool = option("Give each rank its own cores, and as many threads.", SCRIPT, False)
    bind_core_list: str | None = option("The cores to share out: 0,2-4 (default: all).", SCRIPT, metavar="CORES")

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_hosts()
        self._check_meeting()
        if self.elastic and not self.as_deepspeed:
            raise ConfigError(
                "--elastic is for scripts of the Trainer and of Lightning, with --as-deepspeed: give that too. A loop "
                "of your own goes on without a rank by shardfold.ElasticRun, without an option here."
            )
        if self.elastic and (self.spares or self.replace):
            raise ConfigError(
                "--spares and --replace with --elastic: a process that comes in would begin the Trainer's loop at its "
                "first step; leave them out."
            )
        if self.no_python and self.module:
            raise ConfigError("--no-python and --module contradict each other: a module is run by Python.")
        if self.bind_core_list is not None and not self.bind_cores_to_rank:
            raise ConfigError("--bind-core-list says which cores --bind-cores-to-rank shares out: give that too.")
        if self.enable_each_rank_log and (self.redirects != "0" or self.tee != "0"):
            raise ConfigError("--enable-each-rank-log writes files of its own: leave out --redirects and --tee.")
        streams(self.redirects, 0, "--redirects")
        streams(self.tee, 0, "--tee")

    def _check_counts(self) -> None:
        if self.nproc_per_node is not None and self.num_gpus is not None and self.nproc_per_node != str(self.num_gpus):
            raise ConfigError(
                f"--nproc-per-node {self.nproc_per_node} and --num-gpus {self.num_gpus} mean the same: give one."
            )
        procs = self.nproc_per_node
        if procs is not None and procs not in ("auto", "gpu", "cpu") and not (procs.isdecimal() and int(procs)):
            raise ConfigError(f"--nproc-per-node is {procs!r}: give a number from 1, or auto, gpu or cpu.")
        least: dict[str, tuple[float | None, float]] = {
            "--num-gpus": (self.num_gpus, 1),
            "--num-nodes": (self.num_nodes, 1),
            "--node-rank": (self.node_rank, 0),
            "--max-restarts": (self.max_restarts, 0),
            "--spares": (self.spares, 0),
            "--replace": (self.replace, 0),
            "--shutdown-timeout": (self.shutdown_timeout, 0),
            "--notice": (self.notice, 0),
            "--master-port": (self.master_port, 0),
            "--ssh-port": (self.ssh_port, 1),
        }
        for name, (value, lowest) in least.items():
            if value is not None and value < lowest:
                raise ConfigError(f"{name} is {value}: give a number from {lowest}.")
        if (self.master_port or 0) > 65535:
            raise ConfigError(f"--master-port is {self.master_port}: ports end at 65535.")
        if not 0 < self.patience <= MOST:
            raise ConfigError(f"--patience is {self.patience:g}: give seconds above 0, such as 10.")
        if self.notice_file is not None and self.notice is None:
            raise ConfigError("--notice-file is looked at with --notice S alone: give the seconds that engines have.")
        if self.monitor_interval <= 0:
            raise ConfigError(f"--monitor-interval is {self.monitor_interval:g}: give seconds above 0.")
        low, high = self.nodes
        if self.num_nodes is not None and self.nnodes is not None and (low, high) != (self.num_nodes, self.num_nodes):
            raise ConfigError(
                f"--nnodes {self.nnodes} and --num-nodes {self.num_nodes} mean the same: give one of them."
            )
        if self.node_rank is not None and self.hostfile is None and self.node_rank >= high:
            raise ConfigError(f"--node-rank is {self.node_rank}, but of {high} nodes the last is {high - 1}.")
        for ranks in self.local_ranks_filter.split(",") if self.local_ranks_filter else []:
            if not ranks.strip().isdecimal():
                raise ConfigError(f"--local-ranks-filter {self.local_ranks_filter!r} is not a list such as 0,2.")

    def _check_hosts(self) -> None:
        if (self.include or self.exclude) and (self.num_gpus is not None or self.num_nodes is not None):
            raise ConfigError(
                "--include and --exclude choose hosts and slots already: leave out --num-nodes and --num-gpus."
            )
        if self.include and self.exclude:
            raise ConfigError("--include and --exclude are mutually exclusive: give one of them.")
        if self.launcher is not None and self.launcher not in LAUNCHERS:
            if self.launcher == "mvapich":
                raise ConfigError("--launcher mvapich is not supported: use its mpirun with --launcher mpich.")
            raise ConfigError(f"--launcher {self.launcher} is unknown.{did_you_mean(self.launcher, LAUNCHERS)}")
        if self.no_ssh and self.launcher not in (None, "torchrun", "ssh", "pdsh"):
            raise ConfigError(
                f"--no-ssh starts nothing elsewhere, but --launcher {self.launcher} does: give one of them."
            )

    def _check_meeting(self) -> None:
        backend = self.rdzv_backend
        if backend is not None and backend not in BACKENDS:
            raise ConfigError(f"--rdzv-backend {backend} is unknown.{did_you_mean(backend, BACKENDS)}")
        low, high = self.nodes
        if self.standalone and (high > 1 or self.hostfile):
            raise ConfigError("--standalone is for this machine alone: leave out --nnodes, --num-nodes and --hostfile.")
        if low != high and self.rdzv_backend in (None, "static"):
            raise ConfigError(
                f"--nnodes {self.nnodes} lets nodes come and go: give --rdzv-backend c10d, --rdzv-endpoint HOST:PORT."
            )
        if backend not in (None, "static"):
            if high > 1 and not self.rdzv_endpoint:
                raise ConfigError(f"--rdzv-backend {backend} needs --rdzv-endpoint HOST:PORT, the same on all nodes.")
            if self.node_rank:
                raise ConfigError(f"--rdzv-backend {backend} ranks the nodes itself: leave out --node-rank.")
        for pair in self.rdzv_conf.split(",") if self.rdzv_conf else []:
            if not re.fullmatch(r"\s*\w+\s*=.*", pair):
                raise ConfigError(
                    f"--rdzv-conf {self.rdzv_conf!r} is not of the form join_timeout=600,...: see {pair!r}."
                )

    @property
    def nodes(self) -> tuple[int, int]:
        """Fewest and most nodes."""
        if self.nnodes is None:
            return (self.num_nodes or 1, self.num_nodes or 1)
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.nnodes)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < low <= high:
            raise ConfigError(f"--nnodes is {self.nnodes!r}: give a number from 1, or MIN:MAX.")
        return low, high

    @property
    def procs(self) -> str | None:
        return str(self.num_gpus) if self.num_gpus is not None else self.nproc_per_node

    @property
    def chatty(self) -> bool:
        return not self.quiet and self.log_level not in ("error", "critical")

    @property
    def passes_local_rank(self) -> bool:
        return self.as_deepspeed and not self.no_local_rank

    def argv(self, *without: str) -> list[str]:
        """The command line that these options are read from, but for the named ones."""
        words: list[str] = []
        for each in option_fields():
            value = getattr(self, each.name)
            if each.name in without or value == each.default:
                continue
            name = "--" + each.name.replace("_", "-")
            words.append(name if value is True else f"{name}={value}")
        return words


REFUSED: dict[str, tuple[bool, str]] = {
    "autotuning": (False, "there is no tuner that starts runs: `shardfold explain` and `bench` compare layouts."),
    "elastic-training": (
        True,
        "give --nnodes MIN:MAX with --rdzv-backend c10d, which needs no settings in the script.",
    ),
    "min-elastic-nodes": (False, "give --nnodes MIN:MAX with --rdzv-backend c10d."),
    "max-elastic-nodes": (False, "give --nnodes MIN:MAX with --rdzv-backend c10d."),
    "numa-binding": (False, "give --bind-cores-to-rank, with --bind-core-list if it matters which cores."),
    "run-path": (True, "leave it out: every script is run by a Python of its own."),
    "start-method": (False, "leave it out: a script is a process of its own, whatever it is."),
    "logs-specs": (False, "give --log-dir with --redirects or --tee."),
    "event-log-handler": (False, "leave it out: events are not recorded."),
    "duplicate-stdout-filters": (False, "give --tee, and filter its files."),
    "duplicate-stderr-filters": (False, "give --tee, and filter its files."),
}
"""Options of torchrun and of DeepSpeed's launcher that are refused: whether each is a flag, and what to do instead."""


def option_fields() -> list[Field[Any]]:
    return [each for each in fields(Options) if each.default is not MISSING]


def streams(text: str, local_rank: int, name: str) -> int:
    """Return which streams of a rank ``text`` names: 1 is standard output, 2 is standard error, 3 both, 0 none.

    Raises:
        ConfigError: the text is not a number from 0 to 3, nor a list such as ``0:1,1:3``.
    """
    if re.fullmatch("[0-3]", text):
        return int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise ConfigError(f"{name} is {text!r}: give 0, 1, 2 or 3, or a list by local rank such as 0:1,1:3.")
    return {int(rank): int(which) for rank, which in (pair.split(":") for pair in text.split(","))}.get(local_rank, 0)
