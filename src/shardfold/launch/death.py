"""How a rank died: its signal or status, its memory, and whether the kernel's out-of-memory killer was at work."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shardfold.launch.process import how
from shardfold.tiers.limit import control_groups, number_in

__all__ = ["Death", "OomWatch", "others_told", "resident", "told"]

GB = 10**9
RECENT = 5.0
"""Seconds for which a count may have risen before a process is gone: one that holds much takes a while to end."""
FIRST_NAMESPACE = 0xEFFFFFFC
"""Of process numbers: the kernel's log has those of it."""
COUNTS = ("memory.events.local", "memory.events", "memory.oom_control")
"""Of a control group: in which file the kernel counts those whom it killed, of whatever version."""


@dataclass(frozen=True)
class Death:
    """The first rank that failed.

    Attributes:
        rank: among ``world_size``; -1 if the launcher of a node ended, and not by a rank's fault.
        host: name of its node.
        returncode: its exit status, or the negative number of the signal that killed it; of a launcher that is not
            heard of any more 0.
        resident, limit: bytes that it held when last seen, and that there were; 0 if unknown.
        oom: which witness says that the kernel killed it for want of memory; "" if none does.
        at: when, in seconds since 1970 by the clock of its host.
        follows: whether its engine said that another rank's end made it fail.
        why: what its engine said made it fail, or of one that ended with status 0 that of another, without a full stop;
            "" if nothing; of a launcher that ends its own ranks, why it does.
        steps: updates that its engine had done; None: unknown.
        lost: of one that the others were to go on without, why they cannot.
        has_lost: whether ``why`` is that, of another one.
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
    lost: str = ""
    has_lost: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Death:
        return cls(**json.loads(text))

    @property
    def order(self) -> tuple[int, float]:
        """Of several the first is the cause: who failed by itself, else who ended well while others needed it; of those
        that the others cannot go on without the last one."""
        left = self.rank >= 0 and not self.returncode
        return 2 if self.follows else int(left), -self.at if self.lost else self.at

    def sentence(self, then: str) -> str:
        """What is said of it: what its engine knows of the cause, rank, host, how it ended, and what was done
        ``then``."""
        then = f", and {self.lost}{then}" if self.lost else then
        if self.rank < 0:
            ended = how(self.returncode) if self.returncode else "does not answer any more"
            return f"Error: {self.why or f'the launcher on host {self.host} {ended}'}{then}."
        front, cause = told(self.returncode, self.why)
        cause = cause.removeprefix("was ")
        if self.oom:
            cause += f", kernel OOM ({self.oom})"
        if self.returncode < 0 and self.resident:
            cause += f", RSS {self.resident / GB:.1f}"
            cause += f" of {self.limit / GB:.1f} GB" if self.limit else " GB"
        return f"Error: {front}rank {self.rank} on host {self.host}: {cause}{then}."


def told(returncode: int, why: str) -> tuple[str, str]:
    """What a sentence says in front of a rank that is the cause, and behind it: how it ended, and why, as far as that
    is known; of one that ended with status 0, what others say that they missed it for."""
    if returncode:
        return f"{why}; so " if why else "", how(returncode)
    return "", "ended with status 0 while others still trained" + (f" ({why})" if why else "")


def others_told(others: int, killed: Mapping[int, int], ended: str = "") -> str:
    """What a sentence says of the ranks that are not the cause.

    Args:
        others: how many.
        killed: those of them that something else had ended before they could be, by rank, with how they ended.
        ended: what is said of those that were ended, if not how many.
    """
    left = others - len(killed)
    ways = {how(each) for each in killed.values()}
    way = ways.pop().removeprefix("was ") if len(ways) == 1 else "killed by signals"
    who = f"rank{'s' * (len(killed) > 1)} {', '.join(map(str, sorted(killed)))} {'were' if len(killed) > 1 else 'was'}"
    rest = ended or (f"the other {left} ranks were ended" if left > 1 else "the other rank was ended")
    return f"; {who} {way} too" * bool(killed) + f"; {rest}" * (left > 0)


def host_name() -> str:
    return socket.gethostname()


def resident(pid: int, proc: Path = Path("/proc")) -> int:
    """Return the bytes of memory that a process holds, 0 if it is gone or that is not told here."""
    return (number_in(proc / str(pid) / "status", "VmRSS:", " kB") or 0) * 1024


@dataclass(frozen=True)
class _Look:
    """What the kernel counted while a process was there.

    Attributes:
        at: the time, of the monotonic clock.
        file, in_group: of its control group, and how many were killed in that; None: it has none that counts.
        on_machine: how many were killed anywhere; None: unknown.
        available: bytes of memory that were left; 0 if unknown.
    """

    at: float
    file: Path | None
    in_group: int | None
    on_machine: int | None
    available: int


class OomWatch:
    """Notices that the kernel's out-of-memory killer ends a process, and no other one.

    The kernel's log names the process. Where it may not be read, the control group of the process tells, in which the
    kernel counts each kill. Where neither is there, the count of the machine does if the process held as much memory as
    was left: those of other jobs are counted there, too, and then it is said of nobody.
    """

    def __init__(
        self, proc: Path = Path("/proc"), mounted: Path = Path("/sys/fs/cgroup"), log: Path = Path("/dev/kmsg")
    ) -> None:
        self.proc, self.mounted = proc, mounted
        self._log = self._opened(log)
        self._named = set[int]()
        self._looks: dict[int, deque[_Look]] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Note the counts while these processes are there; to be called again and again."""
        if self._log is not None:
            return
        now, machine = time.monotonic(), number_in(self.proc / "vmstat", "oom_kill")
        available = (number_in(self.proc / "meminfo", "MemAvailable:", " kB") or 0) * 1024
        for pid in pids:
            if resident(pid, self.proc):
                looks = self._looks.setdefault(pid, deque())
                looks.append(_Look(now, *self._in_group(pid), machine, available))
                while looks[0].at < now - RECENT:
                    looks.popleft()

    def witness(self, pid: int, held: int) -> str:
        """Return what says that the kernel killed a process, which has ended by SIGKILL, for want of memory; or "".

        Args:
            pid: its number.
            held: bytes of memory that it held when last seen.
        """
        if self._log is not None and self._read_log():
            return "kernel log" if pid in self._named else ""
        looks = self._looks.get(pid)
        if not looks:
            return ""
        last = looks[-1]
        if last.file is not None:
            first = next(look for look in looks if look.file == last.file)
            rose = (number_in(last.file, "oom_kill") or 0) > (first.in_group or 0)
            return f"cgroup {last.file.name}" if rose else ""
        rose = (number_in(self.proc / "vmstat", "oom_kill") or 0) > (looks[0].on_machine or 0)
        return "/proc/vmstat" if rose and held >= min(look.available for look in looks) else ""

    def _in_group(self, pid: int) -> tuple[Path | None, int | None]:
        for folder in control_groups(self.proc, self.mounted, str(pid))[:1]:
            for name in COUNTS:
                if (count := number_in(folder / name, "oom_kill")) is not None:
                    return folder / name, count
        return None, None

    def _opened(self, log: Path) -> int | None:
        """The kernel's log from now on; None: it may not be read, or has other numbers for processes."""
        try:
            if (self.proc / "self/ns/pid").stat().st_ino != FIRST_NAMESPACE:
                return None
            opened = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        weakref.finalize(self, os.close, opened)
        os.lseek(opened, 0, os.SEEK_END)
        return opened

    def _read_log(self) -> bool:
        """Note whom the kernel says that it has killed; whether nothing of that is lost."""
        assert self._log is not None
        try:
            with suppress(BlockingIOError):
                while told := os.read(self._log, 1 << 16):
                    self._named.update(int(number) for number in re.findall(rb"Killed process (\d+)\b", told))
        except OSError:  # what was older is overwritten
            return False
        return True
