"""A file: one thread writes it behind the computation and reads ahead of who needs it.

The file has no name, so it is gone with the process, whatever ends it. Places in it are used again by what has the same
size, which activations of equal units have.

``[Note: what cannot be written]`` Values stay in host memory until they are in the file. Where a write fails they stay
there for good, so that nothing is lost: they are given from there, and the next values of their region are written
again. Who stores next hears of it. After a failure each ``store`` waits for its own write, until one succeeds: so all
that could not be written is known at once, and nothing of it comes to light when the cause is gone.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from threading import RLock

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.tiers.host import HostRegion, HostTier

__all__ = ["DiskRegion", "DiskTier"]

PENDING = 256 * 1024 * 1024
"""Bytes that may wait in host memory to be written."""


class DiskTier:
    """A file for values of one device.

    Args:
        device: whose tensors they are.
        folder: where the file is; None: the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, device: torch.device, folder: str | None = None) -> None:
        self.host = HostTier(device)
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="shardfold-disk")
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # lives as long as the tier
        self._where = folder or tempfile.gettempdir()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._lock = RLock()  # a region may be collected, and leave its place, while another takes one
        self._pending: deque[_Write] = deque()
        self._refused: set[int] = set()  # places that the file has not taken: each write is waited for meanwhile

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False) -> DiskRegion:
        region = DiskRegion(self, shape, dtype)
        if zero:  # the place may have been another's
            region.store(torch.zeros(tuple(shape), dtype=dtype))
        return region

    def begin(self, source: HostRegion, place: int) -> _Write:
        """Begins to write what is in host memory."""
        write = _Write(self, source, place)
        self._pending.append(write)
        return write

    def look(self) -> None:
        """Looks at the writes that are over, and waits for some where too much waits to be written.

        Raises:
            OSError: something could not be written; see [Note: what cannot be written].
        """
        problem: BaseException | None = None
        while self._pending and (
            self._refused or self._pending[0].future.done() or sum(write.nbytes for write in self._pending) > PENDING
        ):
            write = self._pending.popleft()
            if not write.future.cancelled():
                error = write.future.exception()
                (self._refused.discard if error is None else self._refused.add)(write.place)
                problem = problem or error
        if problem is not None:
            raise problem

    def take(self, nbytes: int) -> int:
        """A place for so many bytes."""
        with self._lock:
            if places := self._free.get(nbytes):
                return places.pop()
            place, self._end = self._end, self._end + -(-nbytes // 4096) * 4096
            return place

    def leave(self, place: int, nbytes: int) -> None:
        """The place may be taken again: whoever does writes there behind all that was begun before."""
        self._refused.discard(place)
        with self._lock:
            self._free.setdefault(nbytes, []).append(place)

    def write(self, flat: Tensor, place: int) -> None:
        data = flat.view(torch.uint8).numpy().data
        try:
            while data:
                done = os.pwrite(self._file.fileno(), data, place)
                data, place = data[done:], place + done
        except OSError as error:
            raise self._problem(flat, place, "written to", error) from error

    def read(self, flat: Tensor, place: int) -> None:
        data = flat.view(torch.uint8).numpy().data
        try:
            while data:
                done = os.preadv(self._file.fileno(), [data], place)
                if not done:
                    raise OSError(errno.ENODATA, "the file has lost its end")
                data, place = data[done:], place + done
        except OSError as error:
            raise self._problem(flat, place, "read from", error) from error

    def _problem(self, flat: Tensor, place: int, done: str, error: OSError) -> OSError:
        """Of a read or write that failed at that byte: how much, where and why."""
        said = f"{flat.nbytes:,} bytes of values could not be {done} a file in {self._where} (at byte {place:,})"
        return OSError(error.errno, f"{said}: {error.strerror or os.strerror(error.errno or 0)}")

    def close(self) -> None:
        """Ends the thread and gives the file's space back; what was stored is lost."""
        self.threads.shutdown(cancel_futures=True)
        self._pending.clear()
        self._file.close()


class _Write:
    """Values on their way into the file: in host memory (``source``) until they are there, or for good if the write
    failed, or was cancelled because they were asked for before it began."""

    def __init__(self, tier: DiskTier, source: HostRegion, place: int) -> None:
        self.source: HostRegion | None = source
        self.nbytes = source.nbytes
        self._tier, self.place = tier, place
        self.future: Future[None] = tier.threads.submit(self._run)

    def _run(self) -> None:
        assert self.source is not None
        self._tier.write(self.source.values().view(-1), self.place)
        self.source = None


class DiskRegion:
    """See :class:`shardfold.tiers.tier.Region`."""

    tier = "disk"
    resting = None

    def __init__(self, owner: DiskTier, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._owner, self._shape, self.dtype = owner, tuple(shape), dtype
        self.nbytes = prod(self._shape) * dtype.itemsize
        self._place = owner.take(self.nbytes)
        self._write: _Write | None = None
        self._coming: Future[Tensor] | HostRegion | None = None
        self._into: Tensor | None = None

    def store(self, values: Tensor) -> None:
        self._stop()
        source = self._owner.host.allocate(self._shape, self.dtype)
        source.store(values)
        self._write = self._owner.begin(source, self._place)
        self._owner.look()

    def add(self, values: Tensor) -> None:
        self.store(self.values().clone().view(self._shape).add_(values.to("cpu").view(self._shape)))

    def flush(self) -> None:
        """Waits until what was stored is in the file.

        Raises:
            OSError: it could not be written.
        """
        if self._write is not None and not self._write.future.cancelled():
            self._write.future.result()

    def _unwritten(self) -> HostRegion | None:
        """Where the values are, if they are not written yet: they stay there."""
        write = self._write
        return write.source if write is not None and (write.future.cancel() or write.future.done()) else None

    def fetch(self, into: Tensor | None = None) -> None:
        if self._coming is not None:
            return
        near = self._unwritten()
        if near is not None:
            near.fetch(into)
            self._coming = near
            return
        apart = self._owner.host.side is not None  # the device: a file is read into memory of the host
        self._into = into if apart else None
        self._coming = self._owner.threads.submit(self._read, None if apart else into)

    def _read(self, into: Tensor | None) -> Tensor:
        if into is None:
            into = accelerator.host_memory(self._shape, self.dtype, self._owner.host.device)
        near = self._unwritten()  # its write ran before, in this thread, and may have failed
        if near is not None:
            return into.copy_(near.resting)
        self._owner.read(into.view(-1), self._place)
        return into

    def _read_part(self, first: int, count: int) -> Tensor:
        near = self._unwritten()
        if near is not None:
            return near.values(slice(first, first + count)).clone()
        flat = torch.empty(count, dtype=self.dtype)
        self._owner.read(flat, self._place + first * self.dtype.itemsize)
        return flat

    def get(self) -> Tensor:
        self.fetch()
        coming, into = self._coming, self._into
        self._coming = self._into = None
        assert coming is not None
        if isinstance(coming, HostRegion):
            return coming.get()
        values = coming.result()
        if into is not None:
            return into.copy_(values, non_blocking=True)
        return values.to(self._owner.host.device, non_blocking=True)

    def values(self, part: slice = slice(None)) -> Tensor:
        near = self._unwritten()
        if near is not None:
            return near.values(part)
        first, stop, _ = part.indices(prod(self._shape))
        return self._owner.threads.submit(self._read_part, first, max(0, stop - first)).result()

    def _stop(self) -> None:
        """Nothing of this region comes to the device any more: memory that it was to go to is another's."""
        coming, self._coming, self._into = self._coming, None, None
        if isinstance(coming, Future) and not coming.cancel():
            coming.exception()

    def drop(self) -> None:
        if self.nbytes:
            self._stop()
            self._owner.leave(self._place, self.nbytes)
        self.nbytes = 0

    def __del__(self) -> None:
        self.drop()
