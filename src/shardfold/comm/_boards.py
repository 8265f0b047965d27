"""Boards: what the ranks of one host tell each other by reading each other's memory.

``process_vm_readv`` (Linux, "cross memory attach") copies from another process's memory straight into one's own, and
needs no more than the right to do so. What a rank has to tell, it writes down in pages of its own, its board; the
others look there. See ``near`` for what is told.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch

from shardfold.comm.transport import Waiter
from shardfold.torch_internals import profiler_is_on

__all__ = [
    "DONE",
    "READY",
    "SLOTS",
    "WORD",
    "Group",
    "Mark",
    "give_back",
    "look_until",
    "neighbours",
    "noted",
    "possible",
    "profiled",
    "wait_for",
]

SLOTS = 1024
"""Entries of a board: so many collectives of one group may be under way."""

READY, ADDRESS, DONE, WIDTH = 0, 1, 2, 3
WORD = 8
AREA = (SLOTS * WIDTH + 1) * WORD  # the last word tells that the engine was closed

AT_ONCE, SHORT, LONG = 20, 2e-5, 1e-4  # so many looks with no pause; then pauses, in seconds

_engines = count(1)
_boards: list[mmap.mmap] = []  # that no engine uses: they stay, because other processes may still look at them


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
    """Whether this system can read another process's memory."""
    return _readv is not None


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


class Neighbour(NamedTuple):
    """A rank whose memory this process can read.

    Attributes:
        process: its id.
        board: the address of the group's part of its board.
        base: what its numbers begin with, so that what an earlier engine left there is not taken for this one's.
    """

    process: int
    board: int
    base: int


def neighbours(
    rank: int, groups: Sequence[Sequence[int]], exchange: Callable[[str, str], list[str]], waiter: Waiter
) -> tuple[list[Group | None], mmap.mmap | None]:
    """The groups all of whose ranks can read each other (None in place of the others), and this rank's board.

    Args:
        rank: this one.
        groups: the ranks of each.
        exchange: ``exchange(key, text)`` gives every rank's text.
        waiter: see :class:`Group`.
    """
    place = _place()
    board = _take_board(len(groups)) if place is not None else None
    mine: dict[str, Any] = {}
    cells: Any = None
    if board is not None:
        cells = (ctypes.c_int64 * (len(board) // WORD)).from_buffer(board)
        cells[-1] = token = secrets.randbits(62)
        mine = {
            "place": place,
            "process": os.getpid(),
            "board": ctypes.addressof(cells),
            "size": len(board),
            "base": next(_engines) << 32,
            "token": token,
        }
    said = [json.loads(text) for text in exchange("near/boards", json.dumps(mine))]
    own = [other for other, entry in enumerate(said) if mine and entry and _readable(mine, entry)]
    seen = [set(json.loads(text)) for text in exchange("near/seen", json.dumps(own))]
    found: list[Group | None] = []
    for i, ranks in enumerate(groups):
        if not all(set(ranks) <= seen[r] for r in ranks):
            found.append(None)
            continue
        members = [Neighbour(said[r]["process"], said[r]["board"] + i * AREA, said[r]["base"]) for r in ranks]
        part = (ctypes.c_int64 * (AREA // WORD)).from_buffer(cells, i * AREA)
        found.append(Group(members, list(ranks).index(rank), part, waiter))
    return found, board


def _readable(mine: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    if entry["place"] != mine["place"] or not _of_this_user(entry["process"]):
        return False
    word = ctypes.c_int64()
    try:
        read(entry["process"], entry["board"] + entry["size"] - WORD, ctypes.addressof(word), WORD)
    except OSError:
        return False
    return word.value == entry["token"]


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


def _take_board(groups: int) -> mmap.mmap | None:
    if _readv is None or not groups or os.environ.get("SHARDFOLD_NEAR", "1") == "0":
        return None
    size = groups * AREA + WORD
    for i, board in enumerate(_boards):
        if len(board) >= size:
            return _boards.pop(i)
    # Private, or a forked process that makes an engine of its own would write into the same pages.
    return mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def give_back(board: mmap.mmap) -> None:
    """The board's engine is gone."""
    _boards.append(board)


class Group:
    """The boards of the ranks of one group.

    Args:
        members: of the group, in its order; ``me`` is this one's place.
        cells: this rank's part of its board.
        waiter: waits for a mark.
    """

    def __init__(self, members: Sequence[Neighbour], me: int, cells: Any, waiter: Waiter) -> None:
        self.members, self.me, self.size = members, me, len(members)
        self.others = [i for i in range(self.size) if i != me]
        self.closed = False  # nothing more is read
        self._cells, self._waiter = cells, waiter
        self._base = members[me].base
        self._numbers = 0

    def number(self) -> int:
        """Of the next collective."""
        self._numbers += 1
        return self._numbers

    def post(self, number: int, address: int) -> None:
        """This rank's data of that collective is ready and lies there."""
        if number > SLOTS:  # first all others must be done with what stands in this place
            wait_for(Mark(self, number - SLOTS, DONE), self._waiter)
        place = number % SLOTS * WIDTH
        self._cells[place + ADDRESS] = address
        self._cells[place + READY] = self._base + number

    def done(self, number: int) -> None:
        """This rank has read what it needs."""
        place = number % SLOTS * WIDTH + DONE
        self._cells[place] = max(self._cells[place], self._base + number)  # a later one may have been done before

    def addresses(self, number: int) -> dict[int, int]:
        """Where the others' data lies, once they are ready."""
        mark = Mark(self, number, ADDRESS)
        return {other: mark.look(other) for other in self.others}

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
        self._cells[-1] = self._base

    def ended(self, other: int, why: str) -> RuntimeError:
        return RuntimeError(f"process {self.members[other].process}, a rank on this host, has {why}")


class Mark:
    """That all others are ready with a collective, or done with it: waited for like a ``torch.distributed`` work."""

    def __init__(self, group: Group, number: int, what: int) -> None:
        self._group, self._number, self._what = group, number, what
        self._offset = number % SLOTS * WIDTH * WORD
        self._missing = list(group.others)
        # Looking is what a waiting rank does most, so all that a call needs is made once.
        self._entry = (ctypes.c_int64 * (WIDTH + 1))()
        self._ours = ctypes.byref(_Vector(ctypes.addressof(self._entry), (WIDTH + 1) * WORD))
        self._theirs = (_Vector * 2)()

    def look(self, other: int) -> int:
        """What another's board says."""
        member = self._group.members[other]
        self._theirs[0] = member.board + self._offset, WIDTH * WORD
        self._theirs[1] = member.board + AREA - WORD, WORD
        if _readv(member.process, self._ours, 1, self._theirs, 2, 0) <= 0:
            raise self._group.ended(other, f"ended ({os.strerror(ctypes.get_errno())})")
        return self._entry[self._what]

    def is_completed(self) -> bool:
        while self._missing:
            if not self._is_there(self._missing[-1]):
                return False
            self._missing.pop()
        return True

    def _is_there(self, other: int) -> bool:
        base = self._group.members[other].base
        try:
            if self.look(other) - base >= self._number:
                return True
            # A rank closes its engine after all else that it writes, so only a second look sees its last word.
            if self._entry[WIDTH] != base or self.look(other) - base >= self._number:
                return False
        except RuntimeError:
            if self._what == DONE:  # who has ended reads no more
                return True
            raise
        raise self._group.ended(other, "closed its engine")

    def wait(self, timeout: timedelta) -> None:
        """Returns when it is so.

        Raises:
            RuntimeError: "timed out"; or another has closed its engine or (unless this is that it is done) ended.
        """
        look_until(self.is_completed, timeout)


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


def look_until(done: Callable[[], bool], timeout: timedelta) -> None:
    """Waits for what no other process sends; a profiler sees it as ``near:wait``.

    Raises:
        RuntimeError: "timed out"
    """
    (noted("near:wait", _look_until) if profiled() else _look_until)(done, timeout)


def _look_until(done: Callable[[], bool], timeout: timedelta) -> None:
    looks, deadline = 0, 0.0
    while not done():
        looks += 1
        if looks > AT_ONCE:  # the other may need this core
            now = monotonic()
            deadline = deadline or now + timeout.total_seconds()
            if now > deadline:
                raise RuntimeError("timed out")
            sleep(SHORT if looks < 10 * AT_ONCE else LONG)
