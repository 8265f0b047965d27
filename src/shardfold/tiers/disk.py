"""A file for what autograd saves: one thread writes it behind the computation and reads ahead of backward.

The file has no name, so it is gone with the process, whatever ends it. Places in it are used again by what has the same
size, which activations of equal units have.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

from shardfold.tiers.host import HostCopy, HostStore

__all__ = ["DiskCopy", "DiskStore"]

PENDING = 256 * 1024 * 1024
"""Bytes that may wait in host memory to be written."""


class DiskStore:
    """Copies of one device's tensors in a file.

    Args:
        device: whose tensors they are.
        folder: where the file is; None: the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, device: torch.device, folder: str | None) -> None:
        self.host = HostStore(device)
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="shardfold-activations")
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  # lives as long as the store
        self._where = folder or tempfile.gettempdir()
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._lock = Lock()
        self._pending: deque[tuple[Future[None], int]] = deque()

    def put(self, flat: Tensor) -> DiskCopy:
        """A copy of a contiguous tensor, which may be given back at once.

        Raises:
            OSError: what was put earlier could not be written.
        """
        copy = DiskCopy(self, flat)
        self._pending.append((copy.written, copy.nbytes))
        while self._pending and (
            self._pending[0][0].done() or sum(num_bytes for _, num_bytes in self._pending) > PENDING
        ):
            written, _ = self._pending.popleft()
            if not written.cancelled():
                written.result()
        return copy

    def take(self, nbytes: int) -> int:
        """A place for so many bytes."""
        with self._lock:
            if places := self._free.get(nbytes):
                return places.pop()
            place, self._end = self._end, self._end + -(-nbytes // 4096) * 4096
            return place

    def leave(self, place: int, nbytes: int) -> None:
        """The place may be taken again."""
        with self._lock:
            self._free.setdefault(nbytes, []).append(place)

    def write(self, flat: Tensor, place: int) -> None:
        data = flat.view(torch.uint8).numpy().data
        try:
            while data:
                done = os.pwrite(self._file.fileno(), data, place)
                data, place = data[done:], place + done
        except OSError as error:
            raise OSError(
                error.errno, f"activations could not be written to {self._where}: {os.strerror(error.errno or 0)}"
            ) from error

    def read(self, flat: Tensor, place: int) -> None:
        data = flat.view(torch.uint8).numpy().data
        while data:
            done = os.preadv(self._file.fileno(), [data], place)
            if not done:
                raise OSError(f"the file of activations in {self._where} has lost its end.")
            data, place = data[done:], place + done

    def close(self) -> None:
        """Ends the thread and gives the file's space back; what was put is lost."""
        self.threads.shutdown(cancel_futures=True)
        self._pending.clear()
        self._file.close()


class DiskCopy:
    """One copy: in host memory until it is written."""

    def __init__(self, store: DiskStore, flat: Tensor) -> None:
        self._store, self.nbytes = store, flat.nbytes
        self._shape, self._dtype = flat.shape, flat.dtype
        self._place = store.take(self.nbytes)
        self._waiting: HostCopy | None = store.host.put(flat)
        self._coming: Future[Tensor] | None = None
        self.written: Future[None] = store.threads.submit(self._write)

    def _write(self) -> None:
        assert self._waiting is not None
        if self._waiting.event is not None:
            self._waiting.event.synchronize()
        self._store.write(self._waiting.host.view(-1), self._place)
        self._waiting = None

    def _read(self) -> Tensor:
        self.written.result()
        cuda = self._store.host.side is not None
        flat = torch.empty(self._shape, dtype=self._dtype, pin_memory=cuda)
        self._store.read(flat.view(-1), self._place)
        return flat

    def fetch(self) -> None:
        """Begins to read it, or leaves it where it is, if it is not written yet."""
        if self._coming is None and not self.written.cancel():
            self._coming = self._store.threads.submit(self._read)

    def get(self) -> Tensor:
        """The tensor, on the device.

        Raises:
            OSError: it could not be written or read.
        """
        self.fetch()
        if self._coming is None:
            assert self._waiting is not None
            return self._waiting.get()
        flat, self._coming = self._coming.result(), None
        return flat.to(self._store.host.device, non_blocking=True)

    def __del__(self) -> None:
        self._store.leave(self._place, self.nbytes)
