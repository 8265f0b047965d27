"""How a rank died: its signal or status, its memory, and whether the kernel's out-of-memory killer was at work."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from shardfold.launch.process import how
from shardfold.tiers.limit import control_groups, number_in

__all__ = ["Death", "OomWatch", "because", "resident"]

GB = 10**9


@dataclass(frozen=True)
class Death:
    """The first rank that failed.

    Attributes:
        rank: among ``world_size``; -1 if the launcher of a node ended, and not by a rank's fault.
        host: name of its node.
        returncode: its exit status, or the negative number of the signal that killed it; of a launcher that is not
            heard of any more 0.
        resident, limit: bytes that it held when last seen, and that there were; 0 if unknown.
        oom: which witness says that the kernel killed for want of memory at this time; "" if none does.
        at: when, in seconds since 1970 by the clock of its host.
        follows: whether its engine said that another rank's end made it fail.
        why: what its engine said made it fail, without a full stop; "" if nothing.
        steps: updates that its engine had done; None: unknown.
    """

    rank: int
    world_size: int
    host: str
    returncode: int
    resident: int = 0
    limit: int = 0
    oom: str = ""
    at: float = 0.0
    follows: bool = False
    why: str = ""
    steps: int | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Death:
        return cls(**json.loads(text))

    def sentence(self, then: str) -> str:
        """What is said of it: what its engine knows of the cause, rank, host, how it ended, and what was done
        ``then``."""
        if self.rank < 0:
            ended = how(self.returncode) if self.returncode else "does not answer any more"
            return f"Error: the launcher on host {self.host} {ended}{then}."
        cause = how(self.returncode).removeprefix("was ")
        if self.oom:
            cause += f", kernel OOM ({self.oom})"
        if self.returncode < 0 and self.resident:
            cause += f", RSS {self.resident / GB:.1f}"
            cause += f" of {self.limit / GB:.1f} GB" if self.limit else " GB"
        return f"Error: {because(self.why)}rank {self.rank} on host {self.host}: {cause}{then}."


def because(why: str) -> str:
    """A cause, in front of what came of it."""
    return f"{why}; so " if why else ""


def host_name() -> str:
    return socket.gethostname()


def resident(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the bytes of memory that a process holds, 0 if it is gone or that is not told here."""
    return (number_in(proc / str(pid) / "status", "VmRSS:", " kB") or 0) * 1024


class OomWatch:
    """Notices that the kernel's out-of-memory killer was at work since this was made."""

    def __init__(self, proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> None:
        self.proc, self.mounted = proc, mounted
        self.before = self._counts()

    def _counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for folder in control_groups(self.proc, self.mounted)[:1]:  # an outer group counts other jobs' too
            for name in ("memory.events", "memory.oom_control"):
                count = number_in(folder / name, "oom_kill")
                if count is not None:
                    counts[f"cgroup {name}"] = count
        count = number_in(self.proc / "vmstat", "oom_kill")
        if count is not None:
            counts["/proc/vmstat"] = count
        return counts

    def witness(self, pid: int) -> str:
        """Return what says that the kernel killed process ``pid`` for want of memory, or another one lately; or ""."""
        if killed_by_kernel(pid):
            return "kernel log"
        now = self._counts()
        for name, count in now.items():
            if count > self.before.get(name, count):
                self.before = now
                return name
        return ""


def killed_by_kernel(pid: int) -> bool:
    """Return whether the kernel's log, if it may be read, tells that it killed this process for want of memory."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return re.search(rf"Killed process {pid}\b", log) is not None
