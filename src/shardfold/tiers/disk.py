"""Files on drives: threads write them behind the computation and read ahead of who needs it.

Values are cut into chunks, which go to the drives in turn, each through a staging buffer. ``store`` copies them into
buffers and returns; a thread writes each, and gives its buffer back. ``fetch`` has threads read chunks to where they
are wanted. The files have no names, so they are gone with the process, whatever ends it (see ``drive``).

``[Note: memory of a disk]`` All host memory that a tier has is its buffers, whose number is fixed: a share is for what
is read, the others for what is written. Where none is left, a store waits until the drives have taken what was stored
before it; so what is stored never waits in memory beyond them, however large a region, or the sum of all, may be. Reads
have theirs apart, or they would wait for the writes behind them in turn.

``[Note: what cannot be written]`` Values stay in their buffer until they are in the file. Where a write fails they move
to host memory of their own and stay there for good, so that nothing is lost: they are given from there, and the next
values of their region are written again. Who stores next hears of it. After a failure each ``store`` waits for its own
writes, until one succeeds: so all that could not be written is known at once, and nothing of it comes to light when the
cause is gone. Only what a drive does not take makes memory grow.

``[Note: order]`` What happens to a region happens in the order in which it was asked for. A read takes a chunk from
memory where its write is not over, and from the file else. A store takes back the reads and writes of its region that
have not begun, and waits for those that have. A place in a file is free again when the last write to it is over.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from logging import getLogger
from math import prod
from threading import Lock, RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.tiers._drive import Drive, blocks
from shardfold.tiers.limit import memory_limit
from shardfold.tiers.pages import let_go, spare
from shardfold.tiers.staging import BLOCK, Buffer, Staging
from shardfold.tiers.waits import Waits

__all__ = ["DiskRegion", "DiskTier"]

LOG = getLogger("shardfold")

CHUNK = 4 * 1024 * 1024
"""Bytes that are read or written at once: large enough for a drive's full rate, small enough that several threads have
something to do for one region."""

STAGING = 128 * 1024 * 1024
"""Bytes of all buffers of one tier, at most."""
PART = 16
"""Of the memory that processes here may hold, so much less are those of a tier."""


class DiskTier:
    """Files for values of one device.

    Args:
        device: whose tensors they are.
        folders: where the files are, one for each drive; None: the system's folder for temporary files.
        threads: of each drive, that read, and as many that write.
        chunk: bytes that are read or written at once; a multiple of 4096.
        staging: bytes of all buffers, of which each has one chunk; see [Note: memory of a disk]. None: as many as go
            with the memory that there is.
        direct: past the system's page cache where the file systems can; a warning says where they cannot.

    Raises:
        OSError: a folder cannot be written to.
    """

    def __init__(
        self,
        device: torch.device,
        folders: str | Sequence[str] | None = None,
        *,
        threads: int = 2,
        chunk: int = CHUNK,
        staging: int | None = None,
        direct: bool = True,
    ) -> None:
        self.device, self.chunk = device, chunk
        names = (folders,) if isinstance(folders, str) else tuple(folders or (_temporary(),))
        self.drives: list[Drive] = []
        try:
            for name in names:
                self.drives.append(Drive(name, threads=threads, direct=direct))
        except OSError:
            self._close_drives()
            raise
        spare(self)
        streams = accelerator.has_streams(device)
        readers = threads * len(names)
        if staging is None:
            staging = min(STAGING, (memory_limit() or STAGING * PART) // PART)
        count = max(staging // chunk, 2 * readers)
        # With streams a buffer that was read is copied behind the computation, and the next is read meanwhile.
        incoming = max(count // 2, readers) if streams else readers
        self.incoming = Staging(device, incoming, chunk)
        self.outgoing = Staging(device, count - incoming, chunk)
        self.out_stream, self.in_stream = accelerator.new_stream(device), accelerator.new_stream(device)
        self._lock, self._looking = Lock(), Lock()
        self._turn = 0  # the drive of the next chunk
        self.waits = Waits()
        self.pending: deque[_Write] = deque()
        self._refused: set[tuple[int, int]] = set()  # places that a file has not taken

    @property
    def bytes_read(self) -> int:
        """That came from the files, in whole blocks: what the system counts too where I/O is direct."""
        return sum(drive.bytes_read for drive in self.drives)

    @property
    def bytes_written(self) -> int:
        """That went to the files, in whole blocks."""
        return sum(drive.bytes_written for drive in self.drives)

    def reserve(self, *sizes: int) -> None:
        """Takes room for regions of so many bytes each that are allocated later: what does not fit is known now.

        Raises:
            OSError: there is no room for them; says how much is needed, how much is free, and where.
        """
        needed, first = [0] * len(self.drives), self._turn
        for nbytes in sizes:
            for drive, size in self._shares(first, nbytes):
                needed[drive] += blocks(size)
            first += -(-nbytes // self.chunk)
        for drive, size in zip(self.drives, needed, strict=True):
            drive.reserve(size)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False, rests: bool = False
    ) -> DiskRegion:
        return DiskRegion(self, shape, dtype, zero=zero)

    def take(self, nbytes: int) -> Room:
        """Room for so many bytes; whoever has it last leaves it.

        Raises:
            OSError: there is none.
        """
        count = -(-nbytes // self.chunk)
        with self._lock:
            first, self._turn = self._turn, (self._turn + count) % len(self.drives)
        room = Room(self, first)
        for number, size in self._shares(first, nbytes):
            drive = self.drives[number]
            room.parts.append((drive, drive.take(size), size))
        return room

    def _shares(self, first: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """The drives that a region's chunks go to, from the first one on, by their number, and the bytes of each."""
        count = -(-nbytes // self.chunk)
        for turn in range(min(count, len(self.drives))):
            numbers = range(turn, count, len(self.drives))
            lacking = self.chunk * count - nbytes if numbers[-1] == count - 1 else 0
            yield (first + turn) % len(self.drives), len(numbers) * self.chunk - lacking

    @property
    def is_refused(self) -> bool:
        """Whether something that was stored is not in its file: each store waits for its own writes meanwhile."""
        return bool(self._refused)

    def look(self, *, patient: bool) -> BaseException | None:
        """Looks at the writes that are over, ``patient``: waits for all; what the first said that failed."""
        problem: BaseException | None = None
        with self._looking:
            while self.pending and (patient or self._refused or self.pending[0].future.done()):
                write = self.pending.popleft()
                with suppress(CancelledError):  # nobody needs it any more
                    error = write.future.exception()
                    refused = error is not None and write.needed
                    (self._refused.add if refused else self._refused.discard)(write.key)
                    problem = problem or error
        return problem

    def forget(self, room: Room) -> None:
        """Nobody needs what is not written there."""
        if self._refused:
            self._refused.difference_update({(id(d), p + o) for d, p, n in room.parts for o in range(0, n, self.chunk)})

    def close(self) -> None:
        """Ends the threads and gives the files' space back; what was stored is lost."""
        self._close_drives()
        self.pending.clear()
        let_go(self)

    def _close_drives(self) -> None:
        for drive in self.drives:
            drive.close()


def _temporary() -> str:
    """The system's folder for temporary files. One that is named by ``TMPDIR`` and cannot be written to is passed over
    by Python in silence."""
    found, asked = tempfile.gettempdir(), os.environ.get("TMPDIR")
    if asked and not os.path.samefile(found, asked if os.path.isdir(asked) else os.devnull):
        LOG.warning(
            "States and activations on disk are in %s, as TMPDIR names %s, in which no file could be made: name a "
            "folder that can be written to.",
            found,
            asked,
        )
    return found


class Room:
    """Places in files for one region, its chunks in turn. Who uses it holds it: when nobody does, it is left."""

    def __init__(self, tier: DiskTier, first: int) -> None:
        self._chunk = tier.chunk
        self.parts: list[tuple[Drive, int, int]] = []  # drive, place, bytes

    def at(self, number: int) -> tuple[Drive, int]:
        """Where a chunk is."""
        drive, place, _ = self.parts[number % len(self.parts)]
        return drive, place + number // len(self.parts) * self._chunk

    def __del__(self) -> None:
        for drive, place, nbytes in self.parts:
            drive.leave(place, nbytes)


class _Write:
    """A chunk on its way into a file: in its buffer until it is there; in memory of its own for good, if the write
    failed.

    Attributes:
        key: its place.
        needed: whether its region was not given other values since, or dropped.
        future: whether it is over.
    """

    def __init__(self, tier: DiskTier, room: Room, number: int, buffer: Buffer, count: int) -> None:
        self._staging, self._count = tier.outgoing, count
        self._room: Room | None = room
        self._drive, self._place = room.at(number)
        self.key = (id(self._drive), self._place)
        self.needed = True
        self._lock = RLock()  # a destructor may cancel what this thread copies
        self._buffer: Buffer | None = buffer
        self._kept: Tensor | None = None
        self._lost: OSError | None = None
        self.future: Future[None] = self._drive.writers.submit(self._run, buffer)

    def _run(self, buffer: Buffer) -> None:
        try:
            buffer.settle()  # what comes from the device is there
            self._drive.write(buffer.view[: blocks(self._count)], self._place)
        except OSError as error:
            problem = self._drive.problem(self._count, self._place, "written to", error)
            try:
                self._kept = buffer.memory[: self._count].clone()
            except RuntimeError:  # no memory either
                self._lost = problem
            raise problem from error
        finally:
            self._end(buffer)

    def _end(self, buffer: Buffer) -> None:
        with self._lock:
            self._buffer = self._room = None
        self._staging.give_back(buffer)

    def cancel(self) -> bool:
        """Nobody needs it any more. Whether it is over, or never begins."""
        self.needed = False
        buffer = self._buffer
        if self.future.cancel() and buffer is not None:
            self._end(buffer)
        return self.future.done()

    def copy(self, into: int, first: int, count: int) -> bool:
        """Copies a part of the chunk to that address, where the file does not have it; whether that was so.

        Raises:
            OSError: the file does not have it, and neither has anyone else.
        """
        with self._lock:
            buffer, kept = self._buffer, self._kept
            if self._lost is not None:
                raise self._lost
            if buffer is not None:
                buffer.settle()
                source = buffer.address
            elif kept is not None:
                source = kept.data_ptr()
            else:
                return False
            ctypes.memmove(into, source + first, count)
            return True


class _Part(NamedTuple):
    """What is read or written of one chunk: ``nbytes`` from its byte ``first`` on, which are at ``to`` elsewhere."""

    number: int
    first: int
    nbytes: int
    to: int


class _Coming:
    """Values on their way from files into ``back``, on the device or in host memory."""

    def __init__(self, tier: DiskTier, back: Tensor, *, given: bool) -> None:
        self._tier, self.back, self._given = tier, back, given
        self._bytes = back.view(-1).view(torch.uint8)
        self._streams = accelerator.has_streams(back.device)
        self._futures: list[Future[Any]] = []
        self._zeroed: Any = None

    def zero(self) -> None:
        """Zeros, which are nowhere."""
        with accelerator.on(self._tier.in_stream if self._streams else None):
            self.back.zero_()
            self._zeroed = self._tier.in_stream.record_event() if self._streams else None

    def begin(self, room: Room, write: _Write | None, part: _Part) -> None:
        drive, _ = room.at(part.number)
        self._futures.append(drive.readers.submit(self._read, room, write, part))

    def _read(self, room: Room, write: _Write | None, part: _Part) -> Any:
        """In a thread: brings one part; with streams, the event behind its copy."""
        into = None if self._streams else self._bytes.data_ptr() + part.to
        if into is not None and write is not None and write.copy(into, part.first, part.nbytes):
            return None
        buffer = self._tier.incoming.take()
        try:
            begin = self._fill(buffer, room, write, part)
            if into is not None:
                ctypes.memmove(into, buffer.address + begin, part.nbytes)  # not by torch, see store()
                return None
            side = self._tier.in_stream
            with accelerator.on(side):
                there = self._bytes[part.to : part.to + part.nbytes]
                there.copy_(buffer.memory[begin : begin + part.nbytes], non_blocking=True)
                buffer.copied(behind := side.record_event())  # the buffer is not filled again before
            return behind
        finally:
            self._tier.incoming.give_back(buffer)

    def _fill(self, buffer: Buffer, room: Room, write: _Write | None, part: _Part) -> int:
        """Brings the part into the buffer, and says at which byte of it it is."""
        if write is not None and write.copy(buffer.address, part.first, part.nbytes):
            return 0
        drive, place = room.at(part.number)
        low = part.first // BLOCK * BLOCK
        try:
            drive.read(buffer.view[: blocks(part.first + part.nbytes) - low], place + low)
        except OSError as error:
            raise drive.problem(part.nbytes, place, "read from", error) from error
        return part.first - low

    def get(self) -> Tensor:
        """All of it; the host waits for the files, the computation for the copies."""
        with self._tier.waits.timed():
            wait(self._futures)
        events = [future.result() for future in self._futures]
        if self._streams:
            compute = accelerator.current_stream(self.back.device)
            for event in events if self._zeroed is None else [self._zeroed]:
                compute.wait_event(event)
            # It is memory of the copies' stream, which may not have it while this one reads.
            self.back.record_stream(compute)
        return self.back

    def stop(self) -> None:
        """Nothing comes any more: memory that was given is another's from now on. A thread that collects a region waits
        for nothing, as it may be the one that is waited for."""
        begun = [future for future in self._futures if not future.cancel()]
        if self._given and not threading.current_thread().name.startswith("shardfold-disk"):
            wait(begun)


class DiskRegion:
    """See :class:`shardfold.tiers.tier.Region`.

    One that was allocated of zeros has nothing in its file until something is stored.
    """

    tier = "disk"
    resting = None

    def __init__(self, owner: DiskTier, shape: Sequence[int], dtype: torch.dtype, *, zero: bool) -> None:
        self._owner, self._shape, self.dtype = owner, tuple(shape), dtype
        self._zero = zero
        self._coming: _Coming | None = None
        self._copied: Any = None  # streams: behind the copies of what was stored last
        self._writes: list[_Write] = []  # of what was stored last, by chunk
        self._room: Room | None = None
        self.nbytes = prod(self._shape) * dtype.itemsize
        self._room = owner.take(self.nbytes)

    def _parts(self, first: int, stop: int) -> Iterator[_Part]:
        """Of these bytes."""
        chunk = self._owner.chunk
        for number in range(first // chunk, -(-stop // chunk) if first < stop else 0):
            begin = max(first, number * chunk)
            yield _Part(number, begin % chunk, min(stop, (number + 1) * chunk) - begin, begin - first)

    # -- out

    def store(self, values: Tensor) -> None:
        owner, room = self._owner, self._room
        assert room is not None
        problem, patient = owner.look(patient=False), owner.is_refused
        self.stop()
        flat = values.detach().view(-1).view(torch.uint8)
        streams = accelerator.has_streams(flat.device)
        if streams:
            owner.out_stream.wait_stream(accelerator.current_stream(owner.device))  # which computes the values
        earlier, self._writes, self._zero = self._writes, [], False
        begun = [write for write in earlier if not write.cancel()]
        with owner.waits.timed():
            wait([write.future for write in begun])
        for number, _, count, to in self._parts(0, self.nbytes):
            with owner.waits.timed():
                buffer = owner.outgoing.take()  # waits for the drives where none is left
            if streams:
                with accelerator.on(owner.out_stream):
                    buffer.memory[:count].copy_(flat[to : to + count], non_blocking=True)
                    buffer.copied(owner.out_stream.record_event())  # whoever reads the buffer waits for this
            else:
                # Not by torch, whose threads wait for each other where ranks share the cores.
                ctypes.memmove(buffer.address, flat.data_ptr() + to, count)
            write = _Write(owner, room, number, buffer, count)
            owner.pending.append(write)
            self._writes.append(write)
        if streams:
            values.record_stream(owner.out_stream)  # their memory is not given out before the copies have read it
            self._copied = owner.out_stream.record_event()
        if patient:
            own = owner.look(patient=True)
            problem = problem or own
        if problem is not None:
            raise problem

    def add(self, values: Tensor) -> None:
        self.store(self.values().view(self._shape).add_(values.to("cpu").view(self._shape)))

    def write(self, start: int, values: Tensor) -> None:
        size, count = self.dtype.itemsize, values.numel()
        values = values.to("cpu", self.dtype).contiguous().view(-1)
        if self._zero or count == prod(self._shape):
            whole = values
            if count < prod(self._shape):
                whole = torch.zeros(prod(self._shape), dtype=self.dtype)
                whole[start : start + count] = values
            self.store(whole)
            return
        owner, room = self._owner, self._room
        assert room is not None
        problem, patient = owner.look(patient=False), owner.is_refused
        self.stop()
        for number, first, nbytes, to in self._parts(start * size, (start + count) * size):
            low = number * owner.chunk // size
            part = slice(low, min(low + owner.chunk // size, prod(self._shape)))
            chunk = self.values(part)  # what stays beside them
            chunk[first // size : (first + nbytes) // size] = values[to // size : (to + nbytes) // size]
            if not self._writes[number].cancel():
                wait([self._writes[number].future])
            buffer = owner.outgoing.take()
            ctypes.memmove(buffer.address, chunk.data_ptr(), chunk.nbytes)
            self._writes[number] = _Write(owner, room, number, buffer, chunk.nbytes)
            owner.pending.append(self._writes[number])
        if patient:
            own = owner.look(patient=True)
            problem = problem or own
        if problem is not None:
            raise problem

    def flush(self) -> None:
        """Waits until what was stored is in the file.

        Raises:
            OSError: it could not be written.
        """
        for write in self._writes:
            write.future.result()

    # -- back

    def fetch(self, into: Tensor | None = None) -> None:
        if self._coming is not None:
            return
        side = self._owner.in_stream
        if side is not None and into is not None and accelerator.has_streams(into.device):
            side.wait_stream(accelerator.current_stream(self._owner.device))  # which may still read what was there
            into.record_stream(side)  # its memory is not given out while the copies write to it
        with accelerator.on(side):
            back = torch.empty(self._shape, dtype=self.dtype, device=self._owner.device) if into is None else into
        self._coming = self._begin(back, 0, given=into is not None)

    def _begin(self, back: Tensor, first: int, *, given: bool) -> _Coming:
        """Begins to read into ``back`` from that byte on."""
        coming, room = _Coming(self._owner, back, given=given), self._room
        if self._zero:
            coming.zero()
        elif room is not None:
            for part in self._parts(first, first + back.nbytes):
                coming.begin(room, self._writes[part.number] if self._writes else None, part)
        return coming

    def get(self) -> Tensor:
        self.fetch()
        coming, self._coming = self._coming, None
        assert coming is not None
        return coming.get()

    def values(self, part: slice = slice(None)) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()  # what was stored may be written to behind this
            self._copied = None
        first, stop, _ = part.indices(prod(self._shape))
        flat = torch.empty(max(0, stop - first), dtype=self.dtype)
        return self._begin(flat, first * self.dtype.itemsize, given=False).get()

    def stop(self) -> None:
        """What is on its way to memory is not needed."""
        coming, self._coming = self._coming, None
        if coming is not None:
            coming.stop()

    def drop(self) -> None:
        self.stop()
        if self._room is not None:
            self._owner.forget(self._room)
        for write in self._writes:
            write.cancel()
        self._writes, self._room, self.nbytes = [], None, 0

    def __del__(self) -> None:
        self.drop()
