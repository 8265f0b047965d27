"""The near transport: ranks of one host read each other's memory.

A Gloo collective between two processes of one host goes through sockets: each byte is copied into the kernel and out of
it, in segments, by threads that take the cores from the computation. Linux can copy straight from another process's
memory into one's own (``process_vm_readv``, "cross memory attach"; MPI libraries do the same for large messages). A
gather then moves each byte once, a reduce-scatter adds while a block is in cache and needs no temporary, and the sum is
in rank order, bit for bit what the Gloo transport gives.

``[Note: who may read when]`` Collectives on a group are numbered on every rank alike. For each number a rank has
entries on the group's *board*, pages that all its ranks map:

    ready    the number, once this rank's data of that collective is in place
    address  where it lies
    done     the number, once this rank has read what it needs of the others

A rank reads from another when that one is ready, and changes or frees its own buffer when all others are done. Nobody
sends. Who waits goes on with what else it has begun, and then sleeps until the last rank has come (ranks may be more
than cores, so who waits takes none); now and then it looks whether the others are still there. It is done in slices,
like waiting for a Gloo collective, so that ranks that never meet are found in the same way. A process that is gone
shows as one that cannot be read, and is done with all that it read; an engine that was closed says so on its board. So
a rank may leave as soon as a pass is over for it, while others still look. What its own thread does not wait for yet, a
second thread of the process carries on with when another rank that waits for it knocks, so that no rank depends on what
another does meanwhile; where ranks have cores to spare, it does so by itself.

It is used on the CPU where every rank of the group can read every other: Linux on x86-64 (whose stores become visible
in order), one host, one network and process namespace, no rule of the kernel against it. ``SHARDFOLD_NEAR=0`` switches
it off. Else, the socket transport carries the group.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from time import sleep
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfold.comm._boards import WORD, Door, Mark, Pages, look_until, noted, possible, profiled, wait_for
from shardfold.comm._neighbours import Group, neighbours
from shardfold.comm._words import Words
from shardfold.comm.transport import Pending, Transport, Waiter, sum_into
from shardfold.torch_internals import storage_key, when_groups_end

__all__ = ["NearTransport"]

BLOCK = 256 * 1024
"""Bytes that are summed at a time: with the others' they fit a core's cache."""

AT_ONCE = 512 * 1024
"""Bytes of all ranks' together that each rank sums by itself: reading them takes less than a second meeting."""

PAUSE = 2e-3
"""Seconds between the deeds of the thread that carries on, where it has a core of its own."""

_Phase = tuple[int, Callable[[int], None]]


class _Reading(Pending):
    """A collective in one or two phases, in each of which this rank reads from the others.

    Args:
        group: of it.
        phases: number and deed of each, done when the others have posted that number; a deed may post the next.
        read: what the others read from this rank; kept until they have.
        resident: it stays as it is until :meth:`NearTransport.fence`.
        at_once: what this rank reads is ready, whatever the others have posted.
    """

    def __init__(
        self, group: Group, phases: Sequence[_Phase], read: Any, *, resident: bool = False, at_once: bool = False
    ) -> None:
        super().__init__([])
        self._read: Any = read
        self.group, self._phases, self._resident = group, list(phases), resident
        self._first, self._last = phases[0][0], phases[-1][0]
        self.mark = None if at_once else group.all_ready(self._first, self._first)
        self._lock = threading.Lock()
        self._inference = torch.is_inference_mode_enabled()
        self._failure: Exception | None = None

    @property
    def left(self) -> int:
        """Deeds that this rank has still to do; -1: one has failed."""
        return len(self._phases) if self._failure is None else -1

    def advance(self, *, patient: bool = False) -> bool:
        """Goes as far as the others allow; whether this rank has read all. Not ``patient``: False, too, while another
        thread is at it.

        A deed that failed fails for whoever asks next, too: it may have summed in place, so it is not done again.
        """
        if not self._lock.acquire(blocking=patient):
            return False
        try:
            if self._failure is not None:
                raise self._failure
            while self._phases and (self.mark is None or self.mark.is_completed()):
                number, deed = self._phases[0]
                self._do(deed, number)
                self.group.done(number)
                del self._phases[0]
                self.mark = self.group.all_ready(self._phases[0][0], self._first) if self._phases else None
            return not self._phases
        finally:
            self._lock.release()

    def _do(self, deed: Callable[[int], None], number: int) -> None:
        """In the mode in which it was begun, on whichever thread: what is made under ``torch.inference_mode`` cannot be
        written without it."""
        try:
            if torch.is_inference_mode_enabled() == self._inference:
                deed(number)
            else:
                with torch.inference_mode(self._inference):
                    deed(number)
        except Exception as error:
            self._failure = error
            raise

    def note(self) -> None:
        """A profiler is to see what this reads and sums, as ``near:gather`` and ``near:reduce``."""
        for i, (number, deed) in enumerate(self._phases):
            self._phases[i] = number, noted("near:gather" if "read" in deed.__name__ else "near:reduce", deed)

    def done(self) -> bool:
        try:
            return self.advance()
        except RuntimeError:  # a process has ended, which waiting is to raise
            return False

    def wait(self, waiter: Waiter) -> None:
        wait_for(_Arrival(self), waiter)
        if not self._resident:
            self.settle(waiter)

    def settle(self, waiter: Waiter) -> None:
        """Returns when no other rank reads from this one any more."""
        if self._read is not None:
            wait_for(_Arrival(self), waiter)
            wait_for(self.group.all_done(self._last, self._first), waiter)
            self._read = None


class _Arrival(NamedTuple):
    """That this rank has read what a collective brings; waited for like a ``torch.distributed`` work."""

    reading: _Reading

    @property
    def mark(self) -> Mark | None:
        return self.reading.mark

    def is_completed(self) -> bool:
        return self.reading.advance(patient=True)

    def wait(self, timeout: timedelta) -> None:
        """Returns when it is so.

        Raises:
            RuntimeError: "timed out"; or another process has ended or closed its engine.
        """
        look_until(self, timeout)


class _Adder:
    """Sums what several ranks have, with a room for a block of each."""

    def __init__(self) -> None:
        self._lock, self._block = threading.Lock(), torch.empty(0)

    @property
    def room(self) -> Tensor:
        return self._block

    def sum(self, near: Group, number: int, full: Tensor, start: int, out: Tensor, add: bool) -> None:
        """Sums the ranks' ``full[start : start + len(out)]`` in rank order, block by block."""
        with self._lock, torch.no_grad():
            step = BLOCK // full.itemsize
            if self._block.dtype != full.dtype or self._block.numel() < near.size * step:
                with torch.inference_mode(False):  # it serves those without it, too
                    self._block = torch.empty(near.size * step, dtype=full.dtype)
            rooms = self._block.view(-1, step)[: near.size]
            addresses = near.addresses(number)
            # With three ranks and more a partial sum would overwrite this rank's own row where that is ``out`` itself.
            aside = near.size > 2 and storage_key(out.untyped_storage()) == storage_key(full.untyped_storage())
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


class _Residents:
    """What others read where it rests, from one fence of all ranks to the next.

    Where the others' lies is known from an earlier gather of the same tensor, because all ranks make theirs together.
    So a rank need not wait for them where (1) some gather since the last fence has shown that all are past it, and (2)
    this is the first gather of it since: none has changed it in between. ``[Note: reading at once]``
    """

    def __init__(self) -> None:
        self._readings: list[tuple[Tensor, _Reading]] = []
        self._where: dict[tuple[Group, int], tuple[weakref.ref[Tensor], Sequence[int]]] = {}  # by id: addresses
        self._past: set[Group] = set()  # groups whose ranks are all past the last fence
        self._read: set[int] = set()  # ids of what was gathered since

    def addresses(self, group: Group, resident: Tensor) -> Sequence[int] | None:
        """Where the others' lies, if it is ready on all ranks; asked once for each gather."""
        first = id(resident) not in self._read
        self._read.add(id(resident))
        made, addresses = self._where.get((group, id(resident)), (None, None))
        return addresses if first and group in self._past and made is not None and made() is resident else None

    def found(self, group: Group, resident: Tensor, addresses: Sequence[int]) -> None:
        """All ranks have come to a gather of it."""
        self._where[group, id(resident)] = weakref.ref(resident), addresses
        self._past.add(group)

    def add(self, resident: Tensor, reading: _Reading) -> None:
        self._readings.append((resident, reading))

    def fence(self, waiter: Waiter, resident: Tensor | None) -> None:
        """See :meth:`Transport.fence`."""
        for tensor, reading in self._readings:
            if resident is None or tensor is resident:
                reading.settle(waiter)
        if resident is None:
            self._readings.clear()
            self._past.clear()
            self._read.clear()


class _Carrier:
    """The thread that goes on with collectives that nobody waits for yet; one per process while it is needed."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.RLock()  # a garbage collection may end a transport while it is held
        self._readings: deque[_Reading] = deque()
        self._thread: threading.Thread | None = None
        self._users, self._era, self._process = 0, 0, os.getpid()
        self._door: Door | None = None
        self._eager = False  # a core is there for it
        self._unregister: Callable[[], None] = lambda: None
        self._over = False  # there is no process group any more, whoever still has a transport

    @property
    def door(self) -> Door:
        """Where other ranks knock."""
        if self._process != os.getpid():  # a fork has no threads but the one that called it, and locks as they were
            self._forget()
        if self._door is None:
            self._door = Door(Pages(mmap.PAGESIZE))
        return self._door

    def join(self, cores: float) -> int:
        """One transport more is in use, on a rank with so many cores to itself; what it leaves with."""
        door = self.door
        with self._lock:
            self._users += 1
            self._eager = cores >= 2
            if self._thread is None:
                self._over = False
                self._thread = threading.Thread(target=self._run, args=(door,), name="shardfold-near", daemon=True)
                self._thread.start()
                self._unregister = when_groups_end(self._groups_end)
            return self._era

    def leave(self, era: int) -> None:
        """One transport less. (No waiting: a garbage collection may call this at any moment.)"""
        if self._process == os.getpid():
            with self._lock:
                self._users -= era == self._era
            self.door.knock()

    def end(self) -> None:
        """The thread has ended when this returns, if no transport is in use."""
        thread = self._thread
        if not self._users and thread is not None and self._process == os.getpid():
            thread.join()

    def _groups_end(self) -> None:
        """The thread has ended when this returns."""
        if self._process == os.getpid():
            with self._lock:  # an engine that somebody still has keeps no thread of the groups to come
                self._users, self._era = 0, self._era + 1
                self._over, thread = True, self._thread
            self.door.knock()
            if thread is not None:
                thread.join()

    def take(self, reading: _Reading) -> None:
        with self._lock:
            self._forget_done()
            self._readings.append(reading)
        if self._eager and len(self._readings) == 1:
            self.door.knock()

    def _forget_done(self) -> None:
        while self._readings and (self._readings[0].left <= 0 or self._readings[0].group.closed):
            self._readings.popleft()

    def _run(self, door: Door) -> None:
        while True:
            if self._eager and self._readings:
                sleep(PAUSE)  # most are waited for at once
            else:
                door.listen()
            with self._lock:
                if not self._users or self._over:
                    self._thread = None
                    self._unregister()
                    self._readings.clear()
                    return
            self.advance()

    def advance(self) -> bool:
        """Goes on with each; whether any did."""
        went_on = False
        for reading in list(self._readings):
            left = reading.left
            # Of any kind: here an exception would end what carries all other readings. None is lost: the reading keeps
            # it for whoever waits for it.
            with suppress(Exception):
                if left > 0 and not reading.group.closed:
                    reading.advance()
            went_on |= reading.left != left
        with self._lock:
            self._forget_done()
        return went_on


_carrier = _Carrier()


def _leave(groups: Sequence[Group], process: int, era: int) -> None:
    if os.getpid() != process:  # a fork's copy of an engine is not the engine
        return
    for group in groups:
        group.close()
    _carrier.leave(era)


class NearTransport(Transport):
    """Reads from neighbours where a group has only such; else another transport carries it.

    Args:
        other: carries the other groups, unless :meth:`leave_others` says what does.
        groups: all groups that this rank is in, with their ranks.
        rank: this one.
        exchange: ``exchange(key, text)`` gives every rank's text.
        waiter: waits for the other ranks to have read what lies where something new shall be written.
        talking: groups that small messages go over.
    """

    def __init__(
        self,
        other: Transport,
        groups: Sequence[tuple[Any, Sequence[int]]],
        rank: int,
        exchange: Callable[[str, str], list[str]],
        waiter: Waiter,
        talking: Sequence[tuple[Any, Sequence[int]]] = (),
    ) -> None:
        self._other = other
        self._near: dict[int, Group] = {}
        self._residents = _Residents()
        self._adder = _Adder()
        self._leave: Callable[[], object] | None = None
        every = {id(group): (list(ranks).index(rank), ranks) for group, ranks in (*groups, *talking)}
        door = _carrier.door if possible() and groups and os.environ.get("SHARDFOLD_NEAR", "1") != "0" else None
        found, cores, self.is_everywhere = neighbours(list(every.values()), door, exchange, waiter, _carrier.advance)
        if door is not None:
            self._near = {group: one for group, one in zip(every, found, strict=True) if one is not None}
            era = _carrier.join(cores)
            self._leave = weakref.finalize(self, _leave, list(self._near.values()), os.getpid(), era)
        self.kind = "near" if all(self.near(group) for group, _ in groups) else other.kind

    def leave_others(self, transport: Transport) -> None:
        """That one carries the groups that this one does not; there are some, on some rank."""
        self.kind, self._other = transport.kind, transport

    def near(self, group: Any) -> bool:
        """Whether a group is carried by reading."""
        return id(group) in self._near

    def words(self, group: Any) -> Words | None:
        near = self._near.get(id(group))
        return self._other.words(group) if near is None else near.words

    def all_gather(self, full: Tensor, group: Any, *, resident: Tensor | None = None) -> Pending:
        near = self._near.get(id(group))
        if near is None:
            return self._other.all_gather(full, group, resident=resident)
        chunk, number = full.nbytes // near.size, near.number()
        read = full[near.me * (full.numel() // near.size) :] if resident is None else resident
        near.post(number, read.data_ptr())
        residents = self._residents
        known = residents.addresses(near, resident) if resident is not None else None

        def read_chunks(number: int) -> None:
            start, addresses = full.data_ptr(), known or near.addresses(number)
            for other in near.others:
                near.read(other, addresses[other], start + other * chunk, chunk)
            if resident is not None and known is None:
                residents.found(near, resident, addresses)

        reading = _Reading(
            near, [(number, read_chunks)], read, resident=resident is not None, at_once=known is not None
        )
        if resident is not None:
            residents.add(resident, reading)
        return self._begin(reading)

    def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
        near = self._near.get(id(group))
        if near is None:
            return self._other.reduce_scatter(full, out, group, add=add)
        chunk, number, adder = full.numel() // near.size, near.number(), self._adder
        near.post(number, full.data_ptr())

        def sum_chunk(number: int) -> None:
            adder.sum(near, number, full, near.me * chunk, out, add)

        return self._begin(_Reading(near, [(number, sum_chunk)], full))

    def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
        near = self._near.get(id(group))
        if near is None:
            return self._other.all_reduce(tensor, group)
        if tensor.nbytes * near.size <= AT_ONCE:
            return self._reduce_at_once(tensor, near)
        chunk = -(-tensor.numel() // near.size)
        bounds = [min(i * chunk, tensor.numel()) for i in range(near.size + 1)]
        first, second, adder = near.number(), near.number(), self._adder
        near.post(first, tensor.data_ptr())

        def sum_own(number: int) -> None:
            start, stop = bounds[near.me], bounds[near.me + 1]
            adder.sum(near, number, tensor, start, tensor[start:stop], False)
            near.post(second, tensor.data_ptr())

        def read_sums(number: int) -> None:
            addresses = near.addresses(number)
            for other in near.others:
                start, stop = (bound * tensor.itemsize for bound in bounds[other : other + 2])
                near.read(other, addresses[other] + start, tensor.data_ptr() + start, stop - start)

        return self._begin(_Reading(near, [(first, sum_own), (second, read_sums)], tensor))

    def _reduce_at_once(self, tensor: Tensor, near: Group) -> Pending:
        """Every rank sums all: the same sums in the same order, with one meeting less."""
        given, number, adder = tensor.clone(), near.number(), self._adder
        near.post(number, given.data_ptr())

        def sum_all(number: int) -> None:
            adder.sum(near, number, given, 0, tensor, False)

        return self._begin(_Reading(near, [(number, sum_all)], given))

    def exchange(self, sent: Tensor, to: Sequence[int], received: Tensor, by: Sequence[int], group: Any) -> Pending:
        near = self._near.get(id(group))
        if near is None:
            return self._other.exchange(sent, to, received, by, group)
        size, number = sent.itemsize, near.number()
        starts = [0, *accumulate(to)]
        places = torch.tensor([sent.data_ptr() + start * size for start in starts])  # of what is for each rank
        near.post(number, places.data_ptr())

        def read_parts(number: int) -> None:
            addresses, place = near.addresses(number), torch.empty(1, dtype=torch.int64)
            for other, part in enumerate(received.split(list(by))):
                if other == near.me:
                    part.copy_(sent[starts[other] : starts[other + 1]])
                elif part.numel():
                    near.read(other, addresses[other] + near.me * WORD, place.data_ptr(), WORD)
                    near.read(other, int(place), part.data_ptr(), part.nbytes)

        return self._begin(_Reading(near, [(number, read_parts)], (sent, places)))

    def fence(self, waiter: Waiter, resident: Tensor | None = None) -> None:
        self._residents.fence(waiter, resident)
        self._other.fence(waiter, resident)

    def sever(self) -> None:
        self._other.sever()

    def close(self) -> None:
        self._other.close()
        if self._leave is not None:
            self._leave()
            _carrier.end()

    @property
    def room(self) -> Tensor:
        """What blocks of other ranks are read into to be summed; of no elements before the first sum."""
        return self._adder.room

    @staticmethod
    def _begin(reading: _Reading) -> _Reading:
        if profiled():
            reading.note()
        _carrier.take(reading)
        return reading
