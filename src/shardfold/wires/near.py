"""The near wire: ranks of one host read each other's memory.

A Gloo collective between two processes of one host goes through sockets: each byte is copied into the kernel and out of
it, in segments, by threads that take the cores from the computation. Linux can copy straight from another process's
memory into one's own (``process_vm_readv``, "cross memory attach"; MPI libraries do the same for large messages). A
gather then moves each byte once, a reduce-scatter adds while a block is in cache and needs no temporary, and the sum is
in rank order, bit for bit what the Gloo wire gives.

``[Note: who may read when]`` Collectives on a group are numbered on every rank alike. For each number a rank keeps one
entry on its *board*, a few pages that the others read the same way:

    ready    the number, once this rank's data of that collective is in place
    address  where it lies
    done     the number, once this rank has read what it needs of the others

A rank reads from another when that one is ready, and changes or frees its own buffer when all others are done. Nobody
sends: waiting is looking at the boards of the others, first at once and then less and less often. It is done in slices,
like waiting for a Gloo collective, so that ranks that never meet are found in the same way; a process that is gone
shows as one that can not be read. What its own thread does not wait for yet, a second thread of the process carries on
with, so that no rank depends on what another does meanwhile.

It is used on the CPU where every rank of the group can read every other: Linux on x86-64 (whose stores become visible
in order), one host, one network and process namespace, no rule of the kernel against it. ``SHARDFOLD_NEAR=0`` switches
it off. Else, the Gloo wire carries the group.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfold.wires.plain import GlooWire, Pending, Waiter, sum_into

__all__ = ["NearWire", "Neighbour", "neighbours"]

BLOCK = 256 * 1024
"""Bytes that are summed at a time: with the others' they fit a core's cache."""

SLOTS = 1024
"""Entries of a board: so many collectives of one group may be under way."""

READY, ADDRESS, DONE, WIDTH = 0, 1, 2, 3
WORD = 8
AREA = SLOTS * WIDTH * WORD

AT_ONCE, SHORT, LONG = 20, 2e-5, 1e-4  # so many looks with no pause; then pauses, in seconds
PAUSE = 2e-3  # seconds between the deeds of the thread that carries on

_engines = count(1)
_boards: list[mmap.mmap] = []  # that no engine uses: they stay, because other processes may still look at them


class _Vector(ctypes.Structure):
    """``struct iovec``"""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _find_call() -> Any:
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if call is not None:
        call.restype = ctypes.c_ssize_t
        call.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_ulong] * 2, ctypes.c_ulong]
    return call


_readv = _find_call()


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
        board: the address of its board.
        base: what its numbers begin with, so that what an earlier engine left there is not taken for this one's.
    """

    process: int
    board: int
    base: int


def neighbours(
    rank: int, groups: int, exchange: Callable[[str, str], list[str]]
) -> tuple[Mapping[int, Neighbour], Sequence[set[int]], Any]:
    """Who is near: what each rank can be read at, and for each rank those that it can read; and this rank's board.

    Args:
        rank: this one.
        groups: how many groups will be used.
        exchange: ``exchange(key, text)`` gives every rank's text.
    """
    board = _take_board(groups)
    token = secrets.randbits(62)
    mine: dict[str, Any] = {}
    if board is not None:
        cells = (ctypes.c_int64 * (len(board) // WORD)).from_buffer(board)
        cells[-1] = token
        mine = {
            "place": _place(), "process": os.getpid(), "board": ctypes.addressof(cells), "size": len(board),
            "base": next(_engines) << 32, "token": token,
        }  # fmt: skip
        del cells
    said = [json.loads(text) for text in exchange("near/boards", json.dumps(mine))]
    own = {other for other, entry in enumerate(said) if mine and entry and _readable(mine, entry)}
    seen = [set(json.loads(text)) for text in exchange("near/seen", json.dumps(sorted(own)))]
    found = {r: Neighbour(entry["process"], entry["board"], entry["base"]) for r, entry in enumerate(said) if entry}
    return found, seen, board


def _readable(mine: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    if entry["place"] != mine["place"]:
        return False
    word = ctypes.c_int64()
    try:
        read(entry["process"], entry["board"] + entry["size"] - WORD, ctypes.addressof(word), WORD)
    except OSError:
        return False
    return word.value == entry["token"]


def _place() -> str:
    """What ranks of one host have in common, and containers or simulated hosts on it do not."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))])


def _take_board(groups: int) -> mmap.mmap | None:
    if _readv is None or not groups or os.environ.get("SHARDFOLD_NEAR", "1") == "0":
        return None
    size = groups * AREA + WORD
    for i, board in enumerate(_boards):
        if len(board) >= size:
            return _boards.pop(i)
    return mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)


class _Group:
    """The boards of the ranks of one group.

    Args:
        members: of the group, in its order; ``me`` is this one's place.
        offset: bytes from the beginning of a board to this group's part.
        cells: this rank's part.
        waiter: waits for a mark.
    """

    def __init__(self, members: Sequence[Neighbour], me: int, offset: int, cells: Any, waiter: Waiter) -> None:
        self.members, self.me, self.size = members, me, len(members)
        self.others = [i for i in range(self.size) if i != me]
        self._offset, self._cells, self._waiter = offset, cells, waiter
        self._base = members[me].base
        self.closed = False  # nothing more is read
        self._numbers = 0
        self._entry = (ctypes.c_int64 * WIDTH)()
        self._into = ctypes.addressof(self._entry)

    def number(self) -> int:
        """Of the next collective."""
        self._numbers += 1
        return self._numbers

    def post(self, number: int, address: int) -> None:
        """This rank's data of that collective is ready and lies there."""
        if number > SLOTS:  # first all others must be done with what stands in this place
            self._waiter(_Mark(self, number - SLOTS, DONE))
        place = number % SLOTS * WIDTH
        self._cells[place + ADDRESS] = address
        self._cells[place + READY] = self._base + number

    def done(self, number: int) -> None:
        """This rank has read what it needs."""
        self._cells[number % SLOTS * WIDTH + DONE] = self._base + number

    def address(self, other: int, number: int) -> int:
        """Where another's data lies, once it is ready."""
        return self.look(other, number, (ctypes.c_int64 * WIDTH)())[ADDRESS]

    def look(self, other: int, number: int, entry: Any) -> Any:
        """Another's entry, read into ``entry``."""
        address = self.members[other].board + self._offset + number % SLOTS * WIDTH * WORD
        self.read(other, address, ctypes.addressof(entry), WIDTH * WORD)
        return entry

    def read(self, other: int, address: int, into: int, num_bytes: int) -> None:
        process = self.members[other].process
        try:
            read(process, address, into, num_bytes)
        except OSError as error:
            raise RuntimeError(f"process {process}, a rank on this host, has ended ({error.strerror})") from error


class _Mark:
    """That all others are ready with a collective, or done with it: waited for like a ``torch.distributed`` work."""

    def __init__(self, group: _Group, number: int, what: int) -> None:
        self._group, self._number, self._what = group, number, what
        self._missing = list(group.others)
        self._entry = (ctypes.c_int64 * WIDTH)()

    def is_completed(self) -> bool:
        while self._missing:
            other = self._missing[-1]
            said = self._group.look(other, self._number, self._entry)[self._what]
            if said - self._group.members[other].base < self._number:
                return False
            self._missing.pop()
        return True

    def wait(self, timeout: timedelta) -> None:
        """Returns when it is so.

        Raises:
            RuntimeError: "timed out"; or another process has ended.
        """
        _look_until(self.is_completed, timeout)


def _look_until(done: Callable[[], bool], timeout: timedelta) -> None:
    looks, deadline = 0, monotonic() + timeout.total_seconds()
    while not done():
        looks += 1
        if looks > AT_ONCE:  # the other may need this core
            if monotonic() > deadline:
                raise RuntimeError("timed out")
            sleep(SHORT if looks < 10 * AT_ONCE else LONG)


_Phase = tuple[int, Callable[[int], None]]


class _Reading(Pending):
    """A collective in one or two phases, in each of which this rank reads from the others; also the work that is waited
    for until it has.

    Args:
        group: of it.
        phases: number and deed of each, done when the others have posted that number; a deed may post the next.
        read: what the others read from this rank; kept until they have.
        lasting: it the others read stays as it is until :meth:`NearWire.settle`.
    """

    def __init__(self, group: _Group, phases: Sequence[_Phase], read: Tensor, *, lasting: bool) -> None:
        super().__init__([])
        self._read: Tensor | None = read
        self.group, self._phases, self._lasting = group, list(phases), lasting
        self._mark = _Mark(group, phases[0][0], READY)
        self._lock = threading.Lock()
        self._settled = False

    def advance(self) -> bool:
        """Goes as far as the others allow; whether this rank has read all. False while another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._phases and self._mark.is_completed():
                number, deed = self._phases[0]
                deed(number)
                self.group.done(number)
                del self._phases[0]
                what, number = (READY, self._phases[0][0]) if self._phases else (DONE, number)
                self._mark = _Mark(self.group, number, what)
            return not self._phases
        finally:
            self._lock.release()

    def done(self) -> bool:
        return self.advance()

    def arrive(self, waiter: Waiter) -> None:
        if not self.advance():
            waiter(_Arrival(self))

    def wait(self, waiter: Waiter) -> None:
        self.arrive(waiter)
        if not self._lasting:
            self.settle(waiter)

    def settle(self, waiter: Waiter) -> None:
        """Returns when no other rank reads from this one any more."""
        if not self._settled:
            self.arrive(waiter)
            if not self._mark.is_completed():
                waiter(self._mark)
            self._settled, self._read = True, None


class _Arrival(NamedTuple):
    """That this rank has read what a collective brings; waited for like a ``torch.distributed`` work."""

    reading: _Reading

    def is_completed(self) -> bool:
        return self.reading.advance()

    def wait(self, timeout: timedelta) -> None:
        """Returns when it is so.

        Raises:
            RuntimeError: "timed out"; or another process has ended.
        """
        _look_until(self.reading.advance, timeout)


class _Adder:
    """Sums what several ranks have, with a room for a block of each."""

    def __init__(self) -> None:
        self._lock, self._block = threading.Lock(), torch.empty(0)

    def sum(self, near: _Group, number: int, full: Tensor, start: int, out: Tensor, add: bool) -> None:
        """Sums the ranks' ``full[start : start + len(out)]`` in rank order, block by block."""
        with self._lock, torch.no_grad():
            step = BLOCK // full.itemsize
            if self._block.dtype != full.dtype or self._block.numel() < near.size * step:
                self._block = torch.empty(near.size * step, dtype=full.dtype)
            rooms = self._block.view(-1, step)[: near.size]
            addresses = {other: near.address(other, number) for other in near.others}
            # With three ranks and more a partial sum would overwrite this rank's own row where that is ``out`` itself.
            aside = near.size > 2 and out.untyped_storage()._cdata == full.untyped_storage()._cdata
            for a in range(0, out.numel(), step):
                size = min(step, out.numel() - a)
                rows: list[Tensor] = []
                for i in range(near.size):
                    row = rooms[i, :size]
                    if i != near.me:
                        address = addresses[i] + (start + a) * full.itemsize
                        near.read(i, address, row.data_ptr(), size * full.itemsize)
                    elif aside:
                        row.copy_(full[start + a : start + a + size])
                    else:
                        row = full[start + a : start + a + size]
                    rows.append(row)
                sum_into(out[a : a + size], rows, add)


class _Carrier:
    """The thread that goes on with collectives that nobody waits for yet; one per process, while a wire is in use."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._readings: list[_Reading] = []
        self._thread: threading.Thread | None = None
        self._users = self._process = 0

    def join(self) -> None:
        """One wire more is in use."""
        with self._wake:
            if self._process != os.getpid():  # a fork has no threads but the one that called it
                self._process, self._users, self._readings, self._thread = os.getpid(), 0, [], None
            self._users += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="shardfold-near", daemon=True)
                self._thread.start()

    def leave(self) -> None:
        """One wire less. (No waiting: a garbage collection may call this at any moment.)"""
        with self._wake:
            if self._process == os.getpid():
                self._users -= 1
                self._wake.notify()

    def end(self) -> None:
        """The thread has ended when this returns, if no wire is in use."""
        thread = self._thread
        if not self._users and thread is not None and self._process == os.getpid():
            thread.join()

    def take(self, reading: _Reading) -> None:
        with self._wake:
            self._readings.append(reading)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._users and not self._readings:
                    self._wake.wait()
                if not self._users:
                    self._thread = None
                    self._readings.clear()
                    return
            sleep(PAUSE)  # most are waited for at once
            self._advance()

    def _advance(self) -> None:  # by itself, so that the thread holds on to nothing while it waits
        with self._wake:
            readings = list(self._readings)
        over = {id(reading) for reading in readings if self._is_over(reading)}
        with self._wake:
            self._readings = [reading for reading in self._readings if id(reading) not in over]

    @staticmethod
    def _is_over(reading: _Reading) -> bool:
        try:
            return reading.group.closed or reading.advance()
        except RuntimeError:  # a process has ended: whoever waits is told
            return True


_carrier = _Carrier()


def _leave(board: mmap.mmap, groups: Sequence[_Group]) -> None:
    for group in groups:
        group.closed = True
    _boards.append(board)
    _carrier.leave()


class NearWire:
    """Reads from neighbours where a group has only such; else the Gloo wire carries it.

    Args:
        gloo: carries the other groups.
        groups: all groups that this rank is in, with their ranks.
        rank: this one.
        exchange: ``exchange(key, text)`` gives every rank's text.
        waiter: waits for the other ranks to have read what lies where something new shall be written.
    """

    def __init__(
        self,
        gloo: GlooWire,
        groups: Sequence[tuple[Any, Sequence[int]]],
        rank: int,
        exchange: Callable[[str, str], list[str]],
        waiter: Waiter,
    ) -> None:
        self._gloo = gloo
        self._near: dict[int, _Group] = {}
        self._unsettled: list[_Reading] = []
        self._adder = _Adder()
        known, seen, board = neighbours(rank, len(groups), exchange)
        self._leave: Callable[[], object] | None = None
        if board is None:
            return
        cells = (ctypes.c_int64 * (len(board) // WORD)).from_buffer(board)
        for i, (group, ranks) in enumerate(groups):
            if all(set(ranks) - {r} <= seen[r] for r in ranks):
                part = (ctypes.c_int64 * (AREA // WORD)).from_buffer(cells, i * AREA)
                members = [known[r] for r in ranks]
                self._near[id(group)] = _Group(members, list(ranks).index(rank), i * AREA, part, waiter)
        _carrier.join()
        self._leave = weakref.finalize(self, _leave, board, list(self._near.values()))

    def near(self, group: Any) -> bool:
        """Whether a group is carried by reading."""
        return id(group) in self._near

    def all_gather(self, full: Tensor, group: Any, *, lasting: Tensor | None = None) -> Pending:
        near = self._near.get(id(group))
        if near is None or full.is_cuda:
            return self._gloo.all_gather(full, group)
        chunk, number = full.nbytes // near.size, near.number()
        near.post(number, full.data_ptr() + near.me * chunk if lasting is None else lasting.data_ptr())

        def read_chunks(number: int) -> None:
            start = full.data_ptr()
            for other in near.others:
                near.read(other, near.address(other, number), start + other * chunk, chunk)

        reading = self._begin(
            near, [(number, read_chunks)], full if lasting is None else lasting, lasting=lasting is not None
        )
        if lasting is not None:
            self._unsettled.append(reading)
        return reading

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        near = self._near.get(id(group))
        if near is None or full.is_cuda:
            return self._gloo.reduce_scatter(full, out, group, add=add)
        chunk, number, adder = full.numel() // near.size, near.number(), self._adder
        near.post(number, full.data_ptr())

        def sum_chunk(number: int) -> None:
            adder.sum(near, number, full, near.me * chunk, out, add)

        return self._begin(near, [(number, sum_chunk)], full)

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        near = self._near.get(id(group))
        if near is None or tensor.is_cuda:
            return self._gloo.all_reduce(tensor, group)
        chunk = -(-tensor.numel() // near.size)
        bounds = [min(i * chunk, tensor.numel()) for i in range(near.size + 1)]
        first, second, adder = near.number(), near.number(), self._adder
        near.post(first, tensor.data_ptr())

        def sum_own(number: int) -> None:
            start, stop = bounds[near.me], bounds[near.me + 1]
            adder.sum(near, number, tensor, start, tensor[start:stop], False)
            near.post(second, tensor.data_ptr())

        def read_sums(number: int) -> None:
            for other in near.others:
                start, stop = (bound * tensor.itemsize for bound in bounds[other : other + 2])
                near.read(other, near.address(other, number) + start, tensor.data_ptr() + start, stop - start)

        return self._begin(near, [(first, sum_own), (second, read_sums)], tensor)

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        return self._gloo.exchange(sent, to, received, by, group)

    def settle(self, waiter: Waiter) -> None:
        for reading in self._unsettled:
            reading.settle(waiter)
        self._unsettled.clear()

    def close(self) -> None:
        if self._leave is not None:
            self._leave()
            _carrier.end()

    def temporary(self, num_bytes: int, ranks: int) -> int:
        return min(num_bytes, ranks * BLOCK)

    @staticmethod
    def _begin(near: _Group, phases: Sequence[_Phase], read: Tensor, *, lasting: bool = False) -> _Reading:
        reading = _Reading(near, phases, read, lasting=lasting)
        _carrier.take(reading)
        return reading
