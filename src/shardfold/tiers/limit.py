"""How much memory the processes here may hold: the machine's, or what a control group leaves them of it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["control_groups", "memory_limit", "number_in"]

UNLIMITED = 2**60  # control groups write their lack of a limit as a number above this


def control_groups(proc: Path, mounted: Path) -> list[Path]:
    """Return the folders of this process's control groups for memory, the innermost first, of either version."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
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
