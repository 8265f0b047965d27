"""Boards: what the ranks of one host tell each other in memory that all of them map.

A *board* belongs to one group: its first rank makes pages without a file name (``memfd_create``), and the others map
them too (``/proc/<process>/fd``, which the kernel opens for whoever may read that process's memory, as the copying of
data by ``process_vm_readv`` takes anyway). What there is to tell, each rank writes into places of its own. See
``_near`` for what is told.

``[Note: no waking is missed]`` Ranks may be more than cores, so who waits sleeps. For each collective the board has a
*bell*, the word that sleepers sleep on, which holds the number of what is complete:

    who arrives    writes its entry; fence; if the entries of all are there: writes the number into the bell, wakes
    who waits      reads the bell; if the entries of all are there: goes on; sleeps while the bell is what it has read

Of the last to arrive, one has its fence behind the writes of all others, so it sees all and rings. It writes the bell
before it wakes, and the kernel compares the bell with what the sleeper has read before it lets it sleep. Several that
ring write the same number. If the one that is to ring is killed before, sleepers see all entries at their next look.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from shardfold.comm import _futex
from shardfold.comm.transport import Waiter
from shardfold.torch_internals import profiler_is_on

__all__ = [
    "WORD",
    "Board",
    "Door",
    "Mark",
    "Neighbour",
    "Pages",
    "look_until",
    "noted",
    "possible",
    "profiled",
    "read",
    "wait_for",
]

WORD = 8

SPIN = 5e-5
"""Seconds for which a rank that has a core to itself looks before it sleeps: waking it takes as long."""
FIRST, CROWDED, MOST = 2e-3, 1e-2, 5e-2
"""Seconds of sleep until a rank looks whether the others are still there, and asks them to carry on (where ranks share
cores: each may just be waiting for its turn); then twice as many each time, and no more than that."""


class _Vector(ctypes.Structure):
    """``struct iovec``"""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _find_call() -> Any:
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    vectors = [ctypes.c_void_p, ctypes.c_ulong] * 2
    takes = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_int, *vectors, ctypes.c_ulong, use_errno=True)
    with suppress(AttributeError):  # of a C library that is older
        return takes(("process_vm_readv", ctypes.CDLL(None)))
    return None


_readv = _find_call()


def possible() -> bool:
    """Whether this system can read another process's memory, and share some with it."""
    return _readv is not None and _futex.possible() and hasattr(os, "memfd_create")


def read(process: int, address: int, into: int, num_bytes: int) -> None:
    """Copies memory of another process to the address ``into``; other threads run meanwhile.

    Raises:
        OSError: that process is gone, or may not be read.
    """
    done = 0
    while done < num_bytes:
        ours, theirs = _Vector(into + done, num_bytes - done), _Vector(address + done, num_bytes - done)
        copied = _readv(process, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
        if copied <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += copied


class Pages:
    """Memory that other processes map too.

    Args:
        size: bytes.
        file: an open file of them; None: they are made.

    Attributes:
        cells: its words.
        address: where it lies in this process.
        file: until :meth:`close_file`, for the others to open.
    """

    def __init__(self, size: int, file: int | None = None) -> None:
        self.file: int | None = file
        if file is None:
            self.file = file = os.memfd_create("shardfold", os.MFD_CLOEXEC)
            os.ftruncate(file, size)
        self.bytes = mmap.mmap(file, size)
        self.cells = memoryview(self.bytes).cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    @classmethod
    def of(cls, process: int, file: int, size: int) -> Pages:
        """Those that another process has made.

        Raises:
            OSError, ValueError: they are not there, or smaller.
        """
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(size, opened)
        finally:
            os.close(opened)

    def close_file(self) -> None:
        """Nobody opens it any more."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


class Door:
    """Where others knock who wait for what this process could do for them.

    Args:
        pages: of the process whose it is.
    """

    def __init__(self, pages: Pages) -> None:
        self.pages = pages

    def knock(self) -> None:
        self.pages.cells[0] = 1
        _futex.wake(self.pages.address)

    def listen(self) -> None:
        """Returns when somebody has knocked since the last time."""
        _futex.sleep_while(self.pages.address, 0, None)
        self.pages.cells[0] = 0
        _futex.fence()  # what a knock is for was written before it


class Neighbour(NamedTuple):
    """A rank whose memory this process can read.

    Attributes:
        process: its id.
        probe: the address of a word of its own.
        token: what stands there as long as it is that process.
        door: where to knock; None: this rank itself.
    """

    process: int
    probe: int
    token: int
    door: Door | None

    def is_there(self) -> bool:
        """Whether its process has not ended."""
        word = ctypes.c_int64()
        try:
            read(self.process, self.probe, ctypes.addressof(word), WORD)
        except OSError:
            return False
        return word.value == self.token


class Board:
    """Entries of the ranks of a group, in slots that are used again and again.

    Args:
        members: of the group, in its order; ``me`` is this one's place.
        pages: that all of them map. They begin with a word for each rank, which tells that its engine was closed.
        start: byte at which the slots begin.
        slots: how many numbers may be under way.
        kinds: how many times ranks arrive at each number.
        room: bytes of each rank's own beside a number.
        progress: goes on with what this rank has begun and does not wait for yet; whether anything went on.
        spins: who waits may look for a while before it sleeps.
    """

    def __init__(
        self,
        members: Sequence[Neighbour],
        me: int,
        pages: Pages,
        start: int,
        slots: int,
        *,
        kinds: int,
        room: int,
        progress: Callable[[], bool],
        spins: bool,
    ) -> None:
        self.members, self.me, self.size = members, me, len(members)
        self.pages, self.progress, self.spins = pages, progress, spins
        self._start, self._slots, self._kinds, self._room = start, slots, kinds, room
        self._width = self.bytes_of(self.size, 1, kinds, room)
        self._row = struct.Struct(f"{self.size}q")

    @staticmethod
    def bytes_of(ranks: int, slots: int, kinds: int, room: int) -> int:
        """Of the slots: in each a bell for every kind of arrival, an entry of every rank, and the rooms."""
        return slots * (kinds * (1 + ranks) * WORD + ranks * room)

    def bell(self, number: int, kind: int) -> int:
        """The byte at which it lies in the pages."""
        return self._start + number % self._slots * self._width + kind * WORD

    def _entries(self, number: int, kind: int) -> int:
        return self.bell(number, 0) + (self._kinds + kind * self.size) * WORD

    def rooms(self, number: int) -> tuple[int, int]:
        """Bytes of the pages from which on and up to which all ranks' rooms lie, in their order."""
        begin = self.bell(number, 0) + self._kinds * (1 + self.size) * WORD
        return begin, begin + self.size * self._room

    def entries(self, number: int, kind: int) -> tuple[int, ...]:
        """Of each rank the last number at which it has arrived there."""
        return self._row.unpack_from(self.pages.bytes, self._entries(number, kind))

    def all_arrived(self, number: int, kind: int) -> bool:
        return min(self.entries(number, kind)) >= number

    def arrive(self, number: int, kind: int) -> None:
        """This rank has come so far. [Note: no waking is missed]"""
        self.pages.cells[self._entries(number, kind) // WORD + self.me] = number
        _futex.fence()
        if self.all_arrived(number, kind):
            bell = self.bell(number, kind)
            self.pages.cells[bell // WORD] = number
            _futex.wake(self.pages.address + bell)

    def sleep(self, number: int, kind: int, seconds: float) -> None:
        """Returns when all have arrived, after so many seconds, or earlier. [Note: no waking is missed]"""
        bell = self.bell(number, kind)
        seen = self.pages.cells[bell // WORD]
        if not self.all_arrived(number, kind):
            _futex.sleep_while(self.pages.address + bell, seen, seconds)

    def close(self) -> None:
        """This rank's engine is closed: after all else that it writes."""
        self.pages.cells[self.me] = 1

    def has_closed(self, other: int) -> bool:
        return bool(self.pages.cells[other])

    def ended(self, other: int, why: str) -> RuntimeError:
        return RuntimeError(f"process {self.members[other].process}, a rank on this host, has {why}")


class Awaited(Protocol):
    """Waited for like a ``torch.distributed`` work."""

    def is_completed(self) -> bool: ...

    @property
    def mark(self) -> Mark | None:
        """What it takes next; None: it takes nothing more of others."""
        ...


class Mark:
    """That all ranks have arrived at a number.

    Args:
        board: whose.
        number, kind: at which.
        begun: who has arrived there for the first time with this number can be asked to carry on; None: nobody can.
        ends: who has ended is as good as there.
    """

    def __init__(self, board: Board, number: int, kind: int, *, begun: int | None, ends: bool = False) -> None:
        self.board, self._number, self._kind = board, number, kind
        self._begun, self._ends = begun, ends
        self._over = False  # those who have not come have ended

    @property
    def mark(self) -> Mark:
        return self

    def is_completed(self) -> bool:
        return self._over or self.board.all_arrived(self._number, self._kind)

    def sleep(self, seconds: float, *, spins: bool) -> None:
        """Returns when it is so, after so many seconds, or earlier."""
        if spins:
            end = perf_counter() + SPIN
            while perf_counter() < end:
                if self.is_completed():
                    return
        self.board.sleep(self._number, self._kind, seconds)

    def look(self) -> None:
        """Looks whether those who have not come are still there, and asks them to carry on with what they have begun.

        Raises:
            RuntimeError: one has closed its engine, or its process has ended.
        """
        board, gone = self.board, 0
        begun = None if self._begun is None else board.entries(self._begun, 0)
        missing = [r for r, entry in enumerate(board.entries(self._number, self._kind)) if entry < self._number]
        for other in missing:
            member = board.members[other]
            if member.door is None:  # this rank itself
                continue
            if (is_there := member.is_there()) and not board.has_closed(other):
                if begun is not None and self._begun is not None and begun[other] >= self._begun:
                    member.door.knock()
            # A rank closes its engine after all else that it writes, so only a second look sees its last word.
            elif board.entries(self._number, self._kind)[other] < self._number:
                if is_there or not self._ends:
                    raise board.ended(other, "closed its engine" if is_there else "ended")
                gone += 1
        self._over = 0 < gone == len(missing)

    def wait(self, timeout: timedelta) -> None:
        """Returns when it is so.

        Raises:
            RuntimeError: "timed out"; or as :meth:`look`.
        """
        look_until(self, timeout)


def wait_for(work: Any, waiter: Waiter) -> None:
    """Waits where it takes waiting; that a process has ended or closed its engine is raised by the waiter, as it likes
    to say it."""
    try:
        if work.is_completed():
            return
    except RuntimeError:
        pass
    waiter(work)


def profiled() -> bool:
    """Whether a profiler is on."""
    return profiler_is_on()


def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which a profiler sees under that name."""

    def recorded(*args: Any) -> Any:
        with torch.profiler.record_function(name):
            return call(*args)

    return recorded


def look_until(work: Awaited, timeout: timedelta) -> None:
    """Waits for what no other process sends; a profiler sees it as ``near:wait``.

    Raises:
        RuntimeError: "timed out"; or as :meth:`Mark.look`.
    """
    (noted("near:wait", _look_until) if profiled() else _look_until)(work, timeout)


def _look_until(work: Awaited, timeout: timedelta) -> None:
    deadline, pause, first = 0.0, 0.0, True
    while not work.is_completed():
        mark = work.mark
        if mark is None or mark.board.progress():
            continue
        now = monotonic()
        deadline = deadline or now + timeout.total_seconds()
        if now >= deadline:
            raise RuntimeError("timed out")
        pause = pause or (FIRST if mark.board.spins else CROWDED)
        mark.sleep(min(pause, deadline - now), spins=first and mark.board.spins)
        if monotonic() - now >= pause:
            mark.look()
            pause, first = min(2 * pause, MOST), False
