"""Real launchers on this machine: network namespaces as hosts, on each of them an ssh daemon or Slurm's daemons."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from shardfold.launch.namespaces import Namespaces, why_not

__all__ = ["Cluster", "Slurm", "Sshd", "lacks"]

_Cluster = TypeVar("_Cluster", bound="Cluster")
READY = 60.0
"""Seconds in which daemons are there."""


def lacks(*programs: str) -> str:
    """What is missing here for a cluster with these programs, in a sentence; empty: nothing."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    absent = [program for program in programs if shutil.which(program, path=path) is None]
    return f"{', '.join(absent)} is not installed here" if absent else why_not()


def program(name: str) -> str:
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    assert found is not None, name
    return found


class Cluster:
    """Hosts ``sf0``, ``sf1``, ...: network namespaces, in which commands run with a host's name of their own, and each
    knows the others' names.

    Args:
        folder: for files of the daemons; an empty one.
        hosts: how many.
        addresses: of the names; None: host ``i`` has that of namespace ``i``.
    """

    def __init__(self, folder: Path, hosts: int = 2, addresses: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.spaces = Namespaces(hosts)
        self.names = [f"sf{host}" for host in range(hosts)]
        self.place(addresses or {name: Namespaces.address(host) for host, name in enumerate(self.names)})
        self._started: list[subprocess.Popen[str]] = []

    def place(self, addresses: Mapping[str, str]) -> None:
        """Names have these addresses, for commands that are begun from now on."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def words(self, host: int, *words: str, name: str | None = None) -> list[str]:
        """The command line that runs another one on a host."""
        known = self.folder / "hosts"
        begin = 'mount --bind "$1" /etc/hosts; hostname "$2"; shift 2; exec "$@"'
        own = ["unshare", "-u", "sh", "-c", begin, "sh", str(known), name or self.names[host]]
        return ["ip", "netns", "exec", self.spaces.spaces[host], *own, *words]

    def begin(self, host: int, *words: str, name: str | None = None, **variables: str) -> subprocess.Popen[str]:
        """A command on a host; what is left of it is killed with the cluster."""
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **variables}
        begun = subprocess.Popen(
            self.words(host, *words, name=name),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(begun)
        return begun

    def do(self, host: int, *words: str, timeout: float = 150, **variables: str) -> subprocess.CompletedProcess[str]:
        """A command on a host, to its end."""
        begun = self.begin(host, *words, **variables)
        out, error = begun.communicate(timeout=timeout)
        return subprocess.CompletedProcess(words, begun.returncode, out, error)

    def daemon(self, host: int, *words: str) -> subprocess.Popen[str]:
        """As :meth:`begin`, and what it writes goes into a file."""
        with open(self.folder / f"{Path(words[0]).name}-{host}.log", "w") as log:
            own = self.words(host, *words)
            begun = subprocess.Popen(
                own, stdin=subprocess.DEVNULL, stdout=log, stderr=log, text=True, start_new_session=True
            )
        self._started.append(begun)
        return begun

    def within(self, host: int) -> list[int]:
        """Numbers of the processes on a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.spaces.spaces[host]], capture_output=True, text=True, check=True
        )
        return [int(each) for each in found.stdout.split()]

    def __enter__(self: _Cluster) -> _Cluster:
        try:
            self.prepare()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Begins daemons, and waits for them."""

    def close(self) -> None:
        """Nothing of it runs any more."""
        for host in range(self.spaces.nodes):
            for pid in self.within(host):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for each in self._started:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.communicate()
        self.spaces.close()


def waited(there: Callable[[], object], what: str, seconds: float = READY) -> None:
    """Until something is so; each look is short."""
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, f"{what} within {seconds:g} s"
        time.sleep(0.1)


class Sshd(Cluster):
    """A cluster with an ssh daemon on each host; :attr:`ssh` is the command that reaches them by name."""

    def prepare(self) -> None:
        folder = self.folder
        key, own = folder / "key", folder / "host_key"
        for path in (key, own):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
        (folder / "authorized").write_text(Path(f"{key}.pub").read_text())
        (folder / "sshd_config").write_text(
            f"Port 2222\nHostKey {own}\nAuthorizedKeysFile {folder}/authorized\nPasswordAuthentication no\nUsePAM no\n"
            "StrictModes no\nPermitRootLogin prohibit-password\nPidFile none\nUseDNS no\n"
        )
        entries = [f"Host {name}\n  HostName {Namespaces.address(host)}" for host, name in enumerate(self.names)]
        (folder / "ssh_config").write_text(
            "\n".join(entries) + f"\nHost *\n  Port 2222\n  User root\n  IdentityFile {key}\n"
            "  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"
        )
        self.ssh = f"ssh -F {folder}/ssh_config"
        Path("/run/sshd").mkdir(exist_ok=True)
        for host in range(len(self.names)):
            self.daemon(host, program("sshd"), "-D", "-e", "-f", f"{folder}/sshd_config")
        for name in self.names:
            waited(lambda name=name: not self.do(0, *self.ssh.split(), name, "true").returncode, f"ssh reaches {name}")

    def end_sessions(self, host: int) -> None:
        """Kills what serves the connections to a host, as a crash of its daemon would."""
        for pid in self.within(host):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                if words.startswith(b"sshd: ") and b"[listener]" not in words:
                    os.kill(pid, signal.SIGKILL)


class Slurm(Cluster):
    """A cluster whose hosts are Slurm's nodes; the controller is on the first one."""

    def prepare(self) -> None:
        folder = self.folder
        (folder / "munge").mkdir()
        (folder / "munge").chmod(0o700)
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o600)
        for name in ("state", *self.names):
            (folder / name).mkdir()
        socket = f"{folder}/munge.socket"
        (folder / "slurm.conf").write_text(
            f"""
ClusterName=sf
SlurmctldHost=sf0({Namespaces.address(0)})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={socket}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/linear
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=10
MailProg=/bin/true
NodeName=sf[0-{len(self.names) - 1}] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # of which nothing is used
        os.environ["SLURM_CONF"] = f"{folder}/slurm.conf"
        inside = [f"--{name}={folder}/munge/{name}" for name in ("pid-file", "log-file", "seed-file")]
        munged = [program("munged"), "-F", "--force", f"--socket={socket}", f"--key-file={folder}/munge/key", *inside]
        self.daemon(0, *munged)
        waited(Path(socket).exists, "munged listens")
        self.daemon(0, program("slurmctld"), "-D", "-c")
        for host, name in enumerate(self.names):
            self.daemon(host, program("slurmd"), "-D", "-N", name)
        waited(lambda: self.states() == {"idle"}, "all nodes of Slurm are idle")

    def states(self) -> set[str]:
        """Of the nodes."""
        return set(self.do(0, "sinfo", "-h", "-N", "-o", "%t").stdout.split())

    def state(self, job: str) -> str:
        """Of a job: ``RUNNING``, ``COMPLETED``, ..."""
        said = self.do(0, "scontrol", "show", "job", job).stdout
        return said.partition("JobState=")[2].partition(" ")[0]

    def batch(self, script: str, *words: str) -> str:
        """The number of a new batch job, whose output is in ``job-NUMBER``."""
        path = self.folder / "batch.sh"
        path.write_text(script)
        made = self.do(
            0, "sbatch", "--parsable", f"--output={self.folder}/job-%j", "--open-mode=append", *words, str(path)
        )
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def output(self, job: str) -> str:
        path = self.folder / f"job-{job}"
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        os.environ.pop("SLURM_CONF", None)
        super().close()
