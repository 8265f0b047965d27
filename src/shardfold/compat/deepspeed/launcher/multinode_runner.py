"""``deepspeed.launcher.multinode_runner``: the command lines by which launchers start ranks on several hosts.

They are made, and the caller runs them; ``shardfold run --launcher`` has its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import pairwise
from shlex import quote, split
from typing import Any

from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shardfold.compat.deepspeed.launcher.constants import PDSH_MAX_FAN_OUT
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.compat.deepspeed.utils.numa import get_numactl_cmd

__all__ = [
    "IMPIRunner",
    "MPICHRunner",
    "MVAPICHRunner",
    "MultiNodeRunner",
    "OpenMPIRunner",
    "PDSHRunner",
    "SlurmRunner",
]

PLAIN = re.compile(r"[\w@%+=:,./-]*")


class MultiNodeRunner(ABC):
    """Makes the command line of a launcher.

    Args:
        args: of the command line, as ``launcher.runner.parse_args`` gives them.
        world_info_base64: hosts and slots, as ``launcher.runner.encode_world_info`` gives them.

    Attributes:
        exports: environment variables for the ranks.

    Raises:
        ValueError: the launcher cannot do what the arguments ask for.
    """

    title = ""
    program = ""

    def __init__(self, args: argparse.Namespace, world_info_base64: str) -> None:
        self.args = args
        self.validate_args()
        self.user_arguments = self.parse_user_args()
        self.user_script = args.user_script
        self.world_info_base64 = world_info_base64
        self.exports: dict[str, str] = {}

    @abstractmethod
    def get_cmd(self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]) -> Any:
        """The words of the command.

        Args:
            environment: in which it is to run; may be added to.
            active_resources: ``{host: slots}``
        """

    @property
    def name(self) -> str:
        """What ``--launcher`` calls it."""
        return self.title or type(self).__name__

    def backend_exists(self) -> Any:
        """Where the launcher's program is; None if it is not installed."""
        return shutil.which(self.program)

    def add_export(self, key: str, var: str) -> None:
        """Hands an environment variable to the ranks; a value that a shell would read is put in quotes."""
        value = var.strip()
        self.exports[key.strip()] = value if PLAIN.fullmatch(value) else f'"{value}"'

    def parse_user_args(self) -> list[str]:
        """The script's own arguments."""
        return self.args.user_args

    def validate_args(self) -> None:  # noqa: B027, most can do all
        """Raises where the launcher cannot do what the arguments ask for."""

    @classmethod  # noqa: B027, most can do all
    def validate_active_resources(cls, active_resources: Mapping[str, Sequence[int]]) -> None:
        """Raises where the launcher cannot use these hosts and slots alone."""

    def _python(self) -> list[str]:
        """How the script is started."""
        if self.args.no_python:
            return []
        return [sys.executable, "-u", *(["-m"] if self.args.module else [])]


class PDSHRunner(MultiNodeRunner):
    """``pdsh`` starts ``deepspeed.launcher.launch`` on each host."""

    title = program = "pdsh"

    def parse_user_args(self) -> list[str]:
        """Those with blanks in quotes."""
        return ['"{}"'.format(arg.replace('"', '\\"')) if " " in arg else arg for arg in self.args.user_args]

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]
    ) -> tuple[list[str], list[str], MutableMapping[str, str]]:
        """The command, the one that ends what it has started, and the environment."""
        args = self.args
        environment["PDSH_RCMD_TYPE"] = "ssh"
        if args.ssh_port is not None:
            before = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{before} -p {args.ssh_port}".strip()
        hosts = ",".join(active_resources)
        logger.info(f"Running on the following workers: {hosts}")
        pdsh = ["pdsh", "-S", "-f", str(PDSH_MAX_FAN_OUT), "-w", hosts, *split(args.launcher_args)]
        exports = "".join(f"export {key}={value}; " for key, value in self.exports.items())
        start = [
            exports,
            f"cd {quote(os.path.abspath('.'))};",
            sys.executable,
            "-u",
            "-m",
            "deepspeed.launcher.launch",
            f"--world_info={self.world_info_base64}",
            "--node_rank=%n",
            f"--master_addr={args.master_addr}",
            f"--master_port={args.master_port}",
        ]
        kill = [*pdsh, "pkill -f ", "\\ ".join(start[2:6])]
        if args.venv_script is not None:
            start = [f"source {quote(args.venv_script)};", *start]
        start += [f"--{name}" for name in ("no_python", "module", "no_local_rank") if getattr(args, name)]
        if args.save_pid:
            start += ["--save_pid", str(os.getpid())]
        if args.enable_each_rank_log:
            start.append(f"--enable_each_rank_log={args.enable_each_rank_log}")
        return [*pdsh, *start, self.user_script, *self.user_arguments], kill, environment


class _Pooled(MultiNodeRunner):
    """One that is told of all hosts in the file.

    Args:
        resource_pool: ``{host: number of slots}``
    """

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64)
        self.resource_pool = resource_pool

    @property
    def _ranks(self) -> int:
        return sum(self.resource_pool.values())


class _MPI(_Pooled):
    """MPI's ``mpirun``, which starts ranks on all of the hosts."""

    program = "mpirun"

    def validate_args(self) -> None:
        if self.args.include or self.args.exclude:
            raise ValueError(
                f"{self.name} backend does not support worker include/exclusion: use all hosts of the file."
            )
        if self.args.num_nodes != -1 or self.args.num_gpus != -1:
            raise ValueError(f"{self.name} backend does not support limiting num nodes/gpus: shorten the host file.")

    def _per_host(self) -> int:
        """Ranks of each host."""
        counts = set(self.resource_pool.values())
        if len(counts) != 1:
            raise ValueError(
                f"{self.name} requires same number of devices per node; the host file says {sorted(counts)}."
            )
        return counts.pop()

    def _world(self) -> list[str]:
        """What the ranks have to know of each other, and the hosts."""
        said = {
            "MASTER_ADDR": self.args.master_addr,
            "MASTER_PORT": self.args.master_port,
            "WORLD_SIZE": self._ranks,
            "LOCAL_SIZE": self._per_host(),
        }
        return [word for key, value in said.items() for word in ("-genv", key, str(value))]

    def _hosts(self) -> list[str]:
        return ["-hosts", ",".join(self.resource_pool)]


class OpenMPIRunner(_MPI):
    """Open MPI."""

    title, program = "openmpi", "ompi_info"

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        self.add_export("UCX_TLS", "tcp")

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]
    ) -> list[str]:
        given = split(self.args.launcher_args)
        chosen = any(a in ("-mca", "--mca") and b == "btl_tcp_if_include" for a, b in pairwise(given))
        network = [] if chosen else ["--mca", "btl_tcp_if_include", "eth0"]
        exports = [word for key, value in self.exports.items() for word in ("-x", f"{key}={value}")]
        return [
            "mpirun",
            "-n",
            str(self._ranks),
            "-hostfile",
            str(self.args.hostfile),
            "--mca",
            "btl",
            "^openib",
            *network,
            *given,
            *exports,
            *self._python(),
            self.user_script,
            *self.user_arguments,
        ]


class MPICHRunner(_MPI):
    """MPICH; its ranks become DeepSpeed's by ``deepspeed.comm``, which reads MPI's variables."""

    title = "mpich"

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]
    ) -> list[str]:
        exports = [word for key, value in self.exports.items() for word in ("-genv", f"{key}={value}")]
        return [
            "mpirun",
            "-n",
            str(self._ranks),
            "-ppn",
            str(self._per_host()),
            *split(self.args.launcher_args),
            *exports,
            *self._world(),
            *self._hosts(),
            *self._python(),
            self.user_script,
            *self.user_arguments,
        ]


class IMPIRunner(_MPI):
    """Intel MPI; each rank is a part of the command line, with its number."""

    title = "impi"

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]
    ) -> list[str]:
        each, binds = self._per_host(), self.args.bind_cores_to_rank
        words = ["mpirun", "-ppn", str(each), *split(self.args.launcher_args)]
        words += [word for key, value in self.exports.items() for word in ("-genv", key, value)]
        if binds:
            words += ["-genv", "OMP_NUM_THREADS", str(get_numactl_cmd(self.args.bind_core_list, each, 0)[0])]
        words += [*self._world(), "-genv", "I_MPI_PIN", "0", *self._hosts()]
        for rank in range(self._ranks):
            local = rank % each
            numactl = get_numactl_cmd(self.args.bind_core_list, each, local)[1] if binds else []
            words += [*([":"] if rank else []), "-n", "1", "-env", "RANK", str(rank), "-env", "LOCAL_RANK", str(local)]
            words += [*numactl, *self._python(), self.user_script, *self.user_arguments]
        return words


class SlurmRunner(_Pooled):
    """Slurm's ``srun``, which counts ranks and does not choose among a host's slots."""

    title, program = "slurm", "sinfo"

    @classmethod
    def validate_active_resources(cls, active_resources: Mapping[str, Sequence[int]]) -> None:
        """
        Raises:
            ValueError: slots are not the first ones of each host, or not as many on each.
        """
        for host, slots in active_resources.items():
            if list(slots) != list(range(len(slots))):
                raise ValueError(
                    f"slurm backend cannot select specific device ids, and got {list(slots)} on {host}: choose "
                    "hosts, or the first slots of every host."
                )
        counts = {host: len(slots) for host, slots in active_resources.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(f"slurm backend needs the same slot count on every host, and got {counts}.")

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]
    ) -> list[str]:
        self.validate_active_resources(active_resources)
        args = self.args
        words = ["srun", "-n", str(sum(map(len, active_resources.values()))), *split(args.launcher_args)]
        if getattr(args, "slurm_comment", ""):
            words += ["--comment", args.slurm_comment]
        if args.include or args.exclude:
            words += ["--nodelist", ",".join(active_resources), "--nodes", str(len(active_resources))]
        if args.num_nodes > 0:
            words += ["--nodes", str(args.num_nodes)]
        if args.num_gpus > 0:
            words += ["--gpus-per-node", str(args.num_gpus)]
        exports = ",".join(["ALL", *(f"{key}={value}" for key, value in self.exports.items())])
        return [*words, f"--export={exports}", sys.executable, "-u", self.user_script, *self.user_arguments]


class MVAPICHRunner(_MPI):
    """MVAPICH2-GDR."""

    title, program = "mvapich", "mpiname"

    def __init__(self, args: argparse.Namespace, world_info_base64: str, resource_pool: Mapping[str, int]) -> None:
        super().__init__(args, world_info_base64, resource_pool)
        wanted = {
            "SMP_USE_CMA": 0,
            "DEBUG_SHOW_BACKTRACE": 1,
            "SUPPORT_DL": 1,
            "ENABLE_AFFINITY": 0,
            "INTER_ALLGATHER_TUNING": 5,
            "CUDA_USE_NAIVE": 0,
        }
        if get_accelerator().device_name() == "cuda":
            wanted["USE_CUDA"] = 1
        for name, value in wanted.items():
            self.add_export(f"MV2_{name}", str(value))

    def backend_exists(self) -> bool:
        """Whether ``mpiname`` says that it is MVAPICH2-GDR."""
        program = shutil.which(self.program)
        if program is None:
            return False
        return "MVAPICH2-GDR" in subprocess.run([program], capture_output=True, text=True, check=False).stdout

    def get_cmd(
        self, environment: MutableMapping[str, str], active_resources: Mapping[str, Sequence[int]]
    ) -> list[str]:
        """The hosts stand in a file of its own, which stays for the command to read."""
        with tempfile.NamedTemporaryFile("w", prefix="deepspeed-mvapich-", suffix=".hosts", delete=False) as file:
            file.writelines(f"{host}\n" for host in self.resource_pool)
        exports = [word for key, value in self.exports.items() for word in ("-env", f"{key}={value}")]
        return [
            "mpirun",
            "-np",
            str(self._ranks),
            "-ppn",
            str(self._per_host()),
            "--hostfile",
            file.name,
            *split(self.args.launcher_args),
            *exports,
            *self._python(),
            self.user_script,
            *self.user_arguments,
        ]
