"""What each process of a run is at, in one file of the run folder, and which of them live.

``run.status`` is text: record 0 is the launcher's, record ``rank + 1`` a rank's, each 1 KiB of JSON that its process
writes in place. So nothing is renamed, no rank waits for another, a full disk takes a last word, and a folder can be
moved while it is written. Each process holds a lock on its record (an open file description's, ``F_OFD_SETLK``), which
the system takes back when the process ends, however it ends: what the file says last is believed only of those who
live. Ages count by a clock that goes on in sleep and that nobody sets, together with the number of the boot; a file
that another machine writes is as old as its time of change.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import stat
import struct
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardfold.tiers.limit import boot_id

__all__ = [
    "ENDS",
    "LAUNCHER",
    "PHASES",
    "STATUS",
    "OwnRecord",
    "Record",
    "boot_of_this_machine",
    "note_end",
    "read_records",
]

STATUS = "run.status"
SIZE = 1024
ENDS = ("done", "stopped", "failed")
PHASES = ("starting", "training", "saving", "evaluating", *ENDS)
LAUNCHER = -1
"""The rank that a launcher has in its record."""
MOST_WORDS = 600
MOST_READ = 16 * 1024 * 1024
TRIES = 3  # of reading what is being written

_LOCK = "hhqqi0q"  # struct flock of Linux: type, whence, start, length, process
_SETLK, _GETLK = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)
_WAIT = getattr(fcntl, "F_OFD_SETLKW", 0)


@dataclass(frozen=True)
class Record:
    """What a process has said of itself last.

    Attributes:
        rank: among ``ranks``; ``LAUNCHER``: of a launcher.
        phase: what it is at, one of ``PHASES``.
        step, steps: optimizer steps done, and of the whole run; 0: none, not known.
        host, pid: where it runs.
        boot, at: which boot of that machine, and seconds since it began, when this was said.
        promise: seconds from then within which it says something again; 0: nobody knows.
        clock: when it was said, in seconds since 1970 by the machine's clock.
        words: the last ones of what failed.
        about: of a launcher, the rank that failed.
        follows: whether another rank's end is why it failed.
        began: when the process made its record, by the same clock as ``clock``.
        lives: whether the process lives; None: this system, or the file's, does not tell.
    """

    rank: int
    ranks: int
    phase: str
    step: int = 0
    steps: int = 0
    host: str = ""
    pid: int = 0
    boot: str = ""
    at: float = 0.0
    promise: float = 0.0
    clock: float = 0.0
    words: str = ""
    about: int = LAUNCHER
    follows: bool = False
    began: float = 0.0
    lives: bool | None = None

    def age(self, changed: float) -> float:
        """Seconds since it was said; ``changed``: when the file was written to last."""
        here = self.boot == boot_of_this_machine() and self.boot
        return max(0.0, _since_boot() - self.at if here else time.time() - max(changed, self.clock))


class OwnRecord:
    """The record of this process in a run folder, and its lock, until :meth:`close` or the end of the process.

    Raises:
        OSError: there is no such folder, or it cannot be written to.
        BlockingIOError: another process has this record: the folder is that of a run that goes on.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._said: dict[str, Any] = {
            "rank": rank,
            "ranks": ranks,
            "host": socket.gethostname(),
            "boot": boot_of_this_machine(),
            "began": time.time(),
        }
        self._file = os.open(folder / STATUS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._place = (rank - LAUNCHER) * SIZE
        try:
            self._lock()
        except OSError:
            os.close(self._file)
            raise
        if rank == 0:
            self._forget_earlier(ranks)
        self._ends = weakref.finalize(self, os.close, self._file)
        _own.add(self)

    def _lock(self) -> None:
        if _SETLK is None:
            return
        try:
            fcntl.fcntl(self._file, _SETLK, _lock(fcntl.F_WRLCK, self._place))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise BlockingIOError(error.errno, "another process writes this run") from None
            # else a file system without locks

    def _forget_earlier(self, ranks: int) -> None:
        """What an earlier attempt in this folder left, which may have had more ranks, and whose launcher said how it
        ended."""
        with suppress(OSError):
            size, whole = os.fstat(self._file).st_size, (ranks - LAUNCHER) * SIZE
            if size and not _is_locked(self._file, 0):
                os.pwrite(self._file, _padded({}), 0)
            if size > whole:  # else others may be making it longer right now
                os.truncate(self._file, whole)

    def move_to(self, rank: int, ranks: int) -> None:
        """From now on it is the record of another rank: of a lower one, which is gone or about to move too."""
        before, place = self._place, (rank - LAUNCHER) * SIZE
        if place != before:
            with suppress(OSError):
                if _SETLK is not None:
                    fcntl.fcntl(self._file, _WAIT, _lock(fcntl.F_WRLCK, place))
                os.pwrite(self._file, _padded({}), before)
                if _SETLK is not None:
                    fcntl.fcntl(self._file, _SETLK, _lock(fcntl.F_UNLCK, before))
        self._place = place
        if rank == 0:
            self._forget_earlier(ranks)
        self.write(rank=rank, ranks=ranks)

    def write(self, **said: Any) -> None:
        """Say what is new: fields of :class:`Record`. What does not reach the disk is lost in silence."""
        self._said.update(said, pid=os.getpid(), at=_since_boot(), clock=time.time())
        if self._ends.alive:
            with suppress(OSError):
                os.pwrite(self._file, _padded(self._said), self._place)

    def close(self) -> None:
        """Give the lock back."""
        self._ends()


_own: weakref.WeakSet[OwnRecord] = weakref.WeakSet()
# A process that is forked off has the file too; its parent's lock must not outlive the parent in it.
os.register_at_fork(after_in_child=lambda: [each.close() for each in list(_own)])


def note_end(folder: Path, phase: str, rank: int, words: str) -> None:
    """A launcher says in a run folder how a rank ended, and so the run; nothing where there is no such folder."""
    said = {"rank": LAUNCHER, "ranks": 0, "phase": phase, "about": rank, "words": words, "clock": time.time()}
    with suppress(OSError):
        file = os.open(folder / STATUS, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(file, _padded({**said, "boot": boot_of_this_machine(), "at": _since_boot()}), 0)
        finally:
            os.close(file)


def read_records(folder: Path) -> tuple[list[Record], float]:
    """The records of a run folder, and when the file was written to last, in seconds since 1970.

    A record that is not as a process writes it is left out, as is a file that is none (a pipe, a link), and what a rank
    of an earlier attempt said last: it lives no more, and was done before rank 0 of this one came.
    """
    try:
        file = os.open(folder / STATUS, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return [], 0.0
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            return [], 0.0
        records = [_record(file, place) for place in range(0, min(found.st_size, MOST_READ), SIZE)]
        there = [each for each in records if each is not None]
        began = next((each.began for each in there if each.rank == 0), 0.0)
        return [each for each in there if each.rank <= 0 or each.lives or each.clock >= began], found.st_mtime
    except OSError:
        return [], 0.0
    finally:
        os.close(file)


def _record(file: int, place: int) -> Record | None:
    for _ in range(TRIES):
        try:
            said = json.loads(os.pread(file, SIZE, place))
        except (ValueError, RecursionError):
            continue
        if not isinstance(said, Mapping) or not said:
            return None
        kinds = {each.name: type(each.default) for each in fields(Record)} | {"rank": int, "ranks": int, "phase": str}
        kinds.pop("lives")
        taken = {name: said[name] for name in kinds if name in said}
        right = all(
            isinstance(value, kinds[name] | int if kinds[name] is float else kinds[name])
            for name, value in taken.items()
        )
        right = right and all(_is_finite(taken[name]) for name in taken if kinds[name] is float)
        right = right and {"rank", "ranks", "phase"} <= set(taken) and taken["phase"] in PHASES
        if not right or taken["rank"] != place // SIZE + LAUNCHER:
            return None
        return Record(**taken, lives=_is_locked(file, place))
    return None


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _is_locked(file: int, place: int) -> bool | None:
    if _GETLK is None:
        return None
    try:
        answer = fcntl.fcntl(file, _GETLK, _lock(fcntl.F_WRLCK, place))
    except OSError as error:
        return None if error.errno in (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP) else False
    return struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK


def _lock(kind: int, place: int) -> bytes:
    return struct.pack(_LOCK, kind, os.SEEK_SET, place, SIZE, 0)


def _padded(said: Mapping[str, Any]) -> bytes:
    words, most = str(said.get("words", "")), MOST_WORDS
    while len(text := json.dumps({**said, **({"words": words[-most:]} if words and most else {})}).encode()) >= SIZE:
        if not most:
            return b"{}".ljust(SIZE - 1) + b"\n"
        said, most = {**said, "words": ""}, most // 2
    return text.ljust(SIZE - 1) + b"\n"


def boot_of_this_machine() -> str:
    """As :func:`boot_id`; "" where the system has no name for it."""
    with suppress(OSError):
        return boot_id()
    return ""


def _since_boot() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
