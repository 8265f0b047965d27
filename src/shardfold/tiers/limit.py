"""How much the processes here may have: of memory the machine's, or what a control group leaves them of it, and for how
long such a group has kept this one from computing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

__all__ = ["Throttling", "control_groups", "is_doomed", "memory_limit", "number_in", "process_state", "switched"]

UNLIMITED = 2**60  # control groups write their lack of a limit as a number above this


def control_groups(proc: Path, mounted: Path, pid: str = "self", controller: str = "memory") -> list[Path]:
    """Return the folders of a process's control groups for memory, or what else they control, the innermost first, of
    either version."""
    try:
        lines = (proc / pid / "cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controllers
        innermost = root / path.lstrip("/")
        folders += [folder for folder in (innermost, *innermost.parents) if folder == root or root in folder.parents]
    return folders


def number_in(path: Path, key: str = "", unit: str = "") -> int | None:
    """Return a file's number, or that of its line ``key NUMBER``, with the unit if it has one."""
    try:
        match = re.search(rf"^{re.escape(key)}\s*(\d+){unit}$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) if match else None


def memory_limit(proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that processes here may hold: the machine's memory, or less if a control group says so.

    0 where the system tells neither.
    """
    total = number_in(proc / "meminfo", "MemTotal:", " kB")
    limits = [total * 1024] if total is not None else []
    for folder in control_groups(proc, mounted):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = number_in(folder / name)
            if limit is not None and limit < UNLIMITED:
                limits.append(limit)
    return min(limits, default=0)


class Throttling:
    """For how long this process was kept from computing, as a control group had used up what it may in a period."""

    def __init__(self, proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup")) -> None:
        files = [folder / "cpu.stat" for folder in control_groups(proc, mounted, controller="cpu")]
        keys = ("throttled_usec", 1e-6), ("throttled_time", 1e-9)
        told = [(file, key, unit) for file in files for key, unit in keys]
        self._told = [each for each in told if number_in(*each[:2]) is not None]

    def seconds(self) -> float:
        """So far: of all threads and processes of a group together."""
        return sum((number_in(file, key) or 0) * unit for file, key, unit in self._told)


def boot_id() -> str:
    """What tells this start of this machine from all others.

    Raises:
        OSError: the system has no name for it.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_state(pid: int, proc: Path = Path("/proc")) -> str:
    """Return the letter that Linux has for what a process does (``T``: it is stopped); "" if it is gone or that is not
    told here."""
    try:
        # Its name stands in brackets in front of it, and may have any of them itself.
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def is_doomed(pid: int, proc: Path = Path("/proc")) -> bool:
    """Whether a process does not move, as one in a frozen container, and ends by a SIGKILL as soon as it does."""
    if process_state(pid, proc) != "D":
        return False
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return False
    waiting = re.findall(r"^(?:SigPnd|ShdPnd):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(mask, 16) >> (signal.SIGKILL - 1) & 1 for mask in waiting)


def switched(pid: int, proc: Path = Path("/proc")) -> int:
    """Return how often a process's first thread gave its core up or lost it; 0 if it is gone or that is not told."""
    names = ("voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:")
    return sum(number_in(proc / str(pid) / "status", name) or 0 for name in names)
