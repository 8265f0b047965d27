"""Boards: what the ranks of one host tell each other in memory that all of them map.

A *board* belongs to one group: its first rank makes pages without a file name (``memfd_create``), and the others map
them too (``/proc/<process>/fd``, which the kernel opens for whoever may read that process's memory, as the copying of
data by ``process_vm_readv`` takes anyway). What there is to tell, each rank writes into places of its own. See ``_near``
for what is told.

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
import json
import mmap
import os
import platform
import secrets
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol

import torch

from shardfold.comm import _futex
from shardfold.comm.cores import allowed, share
from shardfold.comm.transport import Waiter
from shardfold.torch_internals import profiler_is_on

__all__ = [
    "DONE",
    "READY",
    "SLOTS",
    "WORD",
    "Door",
    "Group",
    "Mark",
    "Neighbours",
    "look_until",
    "neighbours",
    "noted",
    "possible",
    "profiled",
    "wait_for",
]

SLOTS = 1024
"""Entries of a board: so many collectives of one group may be under way."""

WORD = 8
READY, DONE = 0, 1
BELLS, ROWS = 2, 3  # of a slot: a bell for READY and one for DONE; then a row each for READY, DONE and addresses

SPIN = 5e-5
"""Seconds for which a rank that has a core to itself looks before it sleeps: waking it takes as long."""
FIRST, MOST = 2e-3, 2e-2
"""Seconds of sleep until a rank looks whether the others are still there, and asks them to carry on; then twice as many
each time, and no more than that."""


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

    def listen(self, seconds: float | None) -> None:
        """Returns when somebody has knocked since the last time, or so many seconds are over."""
        _futex.sleep_while(self.pages.address, 0, seconds)
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


class Neighbours(NamedTuple):
    """What :func:`neighbours` has found.

    Attributes:
        groups: those all of whose ranks can read each other; None in place of the others.
        cores: how many this rank has to itself.
    """

    groups: list[Group | None]
    cores: float


_probe = ctypes.c_int64(secrets.randbits(62))  # which others read to see that this process is there


def neighbours(
    groups: Sequence[tuple[int, Sequence[int]]],
    door: Door | None,
    exchange: Callable[[str, str], list[str]],
    waiter: Waiter,
    progress: Callable[[], bool],
) -> Neighbours:
    """The groups all of whose ranks can read each other. All ranks call it.

    Args:
        groups: this rank's place in each, and their ranks.
        door: of this process; None: this rank sends.
        exchange: ``exchange(key, text)`` gives every rank's text.
        waiter, progress: see :class:`Group`.
    """
    place = _place() if door is not None else None
    mine: dict[str, Any] = {}
    made: dict[int, Pages] = {}
    if door is not None and place is not None:
        made = {i: Pages(_size(len(ranks))) for i, (me, ranks) in enumerate(groups) if me == 0}
        mine = {
            "place": place,
            "process": os.getpid(),
            "probe": ctypes.addressof(_probe),
            "token": _probe.value,
            "door": door.pages.file,
            "boards": [made[i].file if i in made else None for i in range(len(groups))],
            "cores": allowed(),
        }
    said = [json.loads(text) for text in exchange("near/boards", json.dumps(mine))]
    users = [entry["cores"] for entry in said if mine and entry and entry["place"] == place]
    found = {other: one for other, entry in enumerate(said) if mine and entry and (one := _found(mine, entry))}
    boards = {i: board for i, (_, ranks) in enumerate(groups) if (board := _board(i, ranks, found, said, made))}
    heard = exchange("near/seen", json.dumps([sorted(found), sorted(boards)]))
    seen: list[tuple[set[int], set[int]]] = [(set(ranks), set(theirs)) for ranks, theirs in map(json.loads, heard)]
    for board in made.values():
        board.close_file()  # all have opened it, and only they may
    cores = share(allowed(), users) if users else 1.0
    kept: list[Group | None] = [
        Group([found[r] for r in ranks], me, boards[i], waiter, progress, spins=cores >= 1)
        if all(set(ranks) <= seen[r][0] and i in seen[r][1] for r in ranks)
        else None
        for i, (me, ranks) in enumerate(groups)
    ]
    return Neighbours(kept, cores)


def _size(ranks: int) -> int:
    """Bytes of a group's board: for each rank whether it has closed its engine, then the slots."""
    return (ranks + SLOTS * (BELLS + ROWS * ranks)) * WORD


def _found(mine: Mapping[str, Any], entry: Mapping[str, Any]) -> Neighbour | None:
    if entry["place"] != mine["place"] or not _of_this_user(entry["process"]):
        return None
    try:
        own = entry["process"] == mine["process"]
        door = None if own else Door(Pages.of(entry["process"], entry["door"], mmap.PAGESIZE))
    except (OSError, ValueError):
        return None
    one = Neighbour(entry["process"], entry["probe"], entry["token"], door)
    return one if one.is_there() else None


def _board(
    i: int, ranks: Sequence[int], found: Mapping[int, Neighbour], said: Sequence[Any], made: Mapping[int, Pages]
) -> Pages | None:
    """Of the ``i``-th group, which its first rank has made."""
    if i in made or ranks[0] not in found:
        return made.get(i)
    with suppress(OSError, ValueError):
        return Pages.of(said[ranks[0]]["process"], said[ranks[0]]["boards"][i], _size(len(ranks)))
    return None


def _of_this_user(process: int) -> bool:
    """Whether a process runs under the same user: one with more rights could read others' too, and is not to."""
    try:
        return os.stat(f"/proc/{int(process)}").st_uid == os.geteuid()
    except OSError:
        return False


def _place() -> str | None:
    """What ranks of one host have in common, and containers or simulated hosts on it do not; None: it does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])
    except OSError:
        return None


class Group:
    """The ranks of one group, and their board.

    Args:
        members: of the group, in its order; ``me`` is this one's place.
        pages: the board.
        waiter: waits for a mark.
        progress: goes on with what this rank has begun and does not wait for yet; whether anything went on.
        spins: who waits may look for a while before it sleeps.
    """

    def __init__(
        self,
        members: Sequence[Neighbour],
        me: int,
        pages: Pages,
        waiter: Waiter,
        progress: Callable[[], bool],
        *,
        spins: bool,
    ) -> None:
        self.members, self.me, self.size = members, me, len(members)
        self.others = [i for i in range(self.size) if i != me]
        self.closed = False  # nothing more is read
        self.pages, self.progress, self.spins = pages, progress, spins
        self._waiter = waiter
        self._numbers = 0
        self._process = os.getpid()
        self._row = struct.Struct(f"{self.size}q")

    def number(self) -> int:
        """Of the next collective."""
        self._numbers += 1
        return self._numbers

    def post(self, number: int, address: int) -> None:
        """This rank's data of that collective is ready and lies there."""
        if number > SLOTS:  # first all others must be done with what stands in this place
            wait_for(Mark(self, number - SLOTS, DONE), self._waiter)
        self.pages.cells[self.row(2, number) + self.me] = address
        self._arrive(READY, number)

    def done(self, number: int) -> None:
        """This rank has read what it needs."""
        self._arrive(DONE, number)

    def _arrive(self, what: int, number: int) -> None:
        """[Note: no waking is missed]"""
        self.pages.cells[self.row(what, number) + self.me] = number
        _futex.fence()
        if self.all_arrived(what, number):
            bell = self.bell(what, number)
            self.pages.cells[bell] = number
            _futex.wake(self.pages.address + bell * WORD)

    def bell(self, what: int, number: int) -> int:
        """The place of its word."""
        return self.size + number % SLOTS * (BELLS + ROWS * self.size) + what

    def row(self, what: int, number: int) -> int:
        """The place of the first rank's word; after READY and DONE there is one of addresses."""
        return self.size + number % SLOTS * (BELLS + ROWS * self.size) + BELLS + what * self.size

    def entries(self, what: int, number: int) -> tuple[int, ...]:
        """What each rank has written there."""
        return self._row.unpack_from(self.pages.bytes, self.row(what, number) * WORD)

    def all_arrived(self, what: int, number: int) -> bool:
        return min(self.entries(what, number)) >= number

    def addresses(self, number: int) -> tuple[int, ...]:
        """Where each rank's data lies, once they are ready."""
        return self.entries(2, number)

    def read(self, other: int, address: int, into: int, num_bytes: int) -> None:
        """Copies bytes of another rank's memory.

        Raises:
            RuntimeError: its process has ended.
        """
        try:
            read(self.members[other].process, address, into, num_bytes)
        except OSError as error:
            raise self.ended(other, f"ended ({error.strerror})") from error

    def close(self) -> None:
        """This rank reads and gives nothing more."""
        self.closed = True
        if os.getpid() == self._process:  # a fork's copy of an engine is not the engine
            self.pages.cells[self.me] = 1

    def has_closed(self, other: int) -> bool:
        """Whether another rank has closed its engine."""
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
    """That all ranks are ready with a collective, or done with it.

    Args:
        group: whose.
        number: of the collective, or of a part of it.
        what: ``READY`` or ``DONE``.
        begun: who is ready with this number can be asked to carry on; None: ``number``.
    """

    def __init__(self, group: Group, number: int, what: int, begun: int | None = None) -> None:
        self.group, self._number, self._what = group, number, what
        self._begun = number if begun is None else begun
        self._over = False  # those who have not done it have ended

    @property
    def mark(self) -> Mark:
        return self

    def is_completed(self) -> bool:
        return self._over or self.group.all_arrived(self._what, self._number)

    def sleep(self, seconds: float, *, spins: bool) -> None:
        """Returns when it is so, after so many seconds, or earlier."""
        bell = self.group.bell(self._what, self._number)
        seen = self.group.pages.cells[bell]
        if self.is_completed():
            return
        if spins:
            end = perf_counter() + SPIN
            while perf_counter() < end:
                if self.is_completed():
                    return
        _futex.sleep_while(self.group.pages.address + bell * WORD, seen, seconds)

    def look(self) -> None:
        """Looks whether those who have not come are still there, and asks them to carry on with what they have begun.

        Raises:
            RuntimeError: one has closed its engine or (unless this is that all are done) its process has ended.
        """
        group, gone = self.group, 0
        begun = group.entries(READY, self._begun)
        missing = [r for r, entry in enumerate(group.entries(self._what, self._number)) if entry < self._number]
        for other in missing:
            member = group.members[other]
            if member.door is None:  # this rank itself
                continue
            if (is_there := member.is_there()) and not group.has_closed(other):
                if begun[other] >= self._begun:
                    member.door.knock()
            # A rank closes its engine after all else that it writes, so only a second look sees its last word.
            elif group.entries(self._what, self._number)[other] < self._number:
                if is_there or self._what == READY:
                    raise group.ended(other, "closed its engine" if is_there else "ended")
                gone += 1
        self._over = 0 < gone == len(missing)  # who has ended reads no more

    def wait(self, timeout: timedelta) -> None:
        """Returns when it is so.

        Raises:
            RuntimeError: "timed out"; or as :meth:`look`.
        """
        look_until(self, timeout)


def wait_for(work: Any, waiter: Waiter) -> None:
    """Waits where it takes waiting."""
    if not work.is_completed():
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
    deadline, pause, first = 0.0, FIRST, True
    while not work.is_completed():
        mark = work.mark
        if mark is None or mark.group.progress():
            continue
        now = monotonic()
        deadline = deadline or now + timeout.total_seconds()
        if now >= deadline:
            raise RuntimeError("timed out")
        mark.sleep(min(pause, deadline - now), spins=first and mark.group.spins)
        if monotonic() - now >= pause:
            mark.look()
            pause, first = min(2 * pause, MOST), False
