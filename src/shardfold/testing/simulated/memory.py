"""The device's memory: allocations, and an allocator that keeps what is freed by stream, as CUDA's does.

What is freed goes to the pool of the stream that it was allocated on, and may be given out again in the order of that
stream at once. ``record_stream`` delays that until another stream is done. Here each allocation has memory of its own,
so a program that is wrong does not depend on which sizes happen to fit: whoever first uses an allocation has to be
behind the last uses of *everything* that was freed in its pool before it was made.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from shardfold.testing.simulated._dlpack import tensor_over
from shardfold.testing.simulated.arena import Arena
from shardfold.testing.simulated.clocks import Clock, Clocks, merge
from shardfold.testing.simulated.findings import Access
from shardfold.testing.simulated.regions import span
from shardfold.testing.simulated.sites import Site
from shardfold.torch_internals import expired, free_weak, negative_view, weak_storage

__all__ = ["NAME", "Allocation", "Allocator", "contiguous", "elements", "spoil"]

NAME = "sim"
"""The name of the device type."""


Uses = dict[int, tuple[Access, Site]]
"""By stream, the last use of anything that had some memory, and where that was allocated."""


class Unfinished(Protocol):
    """A collective under way."""

    def finish(self) -> None:
        """Returns when it is over."""


class Allocation:
    """One allocation of the device, or one of pinned host memory.

    Attributes:
        memory: uint8, of the host; None for pinned memory, which is its storage's.
        nbytes: its size.
        stream: whose pool it is of.
        site: where it was made.
        uses: those that later ones may have to be ordered behind.
        recorded: streams of ``record_stream``.
        freed: whether its storage has no memory now.
        pending: collectives that use it and may not be over.
        earlier: what was freed in its pool before.
        entered: the streams that were compared with those.
        former: what may be in the same place, for whoever spoils it at the first use.
    """

    def __init__(self, memory: Tensor | None, nbytes: int, stream: int, site: Site) -> None:
        self.memory, self.nbytes, self.stream, self.site = memory, nbytes, stream, site
        self.uses: list[Access] = []
        self.recorded: set[int] = set()
        self.freed = False
        self.pending: list[Unfinished] = []
        self.earlier: Uses = {}
        self.entered: set[int] = set()
        self.former: list[Tensor] = []
        self.weak: Any = 0
        self.kept: Any = None

    def finish(self) -> None:
        """Waits for the collectives that use it."""
        while self.pending:
            self.pending.pop(0).finish()


class _Freed:
    """What an allocation left in its pool."""

    def __init__(self, block: Allocation, owed: list[Access]) -> None:
        self.memory, self.site, self.owed, self.recorded = block.memory, block.site, owed, bool(block.recorded)


def spoil(memory: Tensor) -> None:
    """Every floating-point number in it becomes NaN."""
    memory.fill_(0xFF)


def contiguous(size: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    strides, step = [1] * len(size), 1
    for i in range(len(size) - 1, -1, -1):
        strides[i] = step
        step *= max(int(size[i]), 1)
    return strides


class Allocator:
    """
    Args:
        clocks: of the streams.
        where: gives the caller's site.

    Attributes:
        arena: counts bytes.
    """

    def __init__(self, clocks: Clocks, where: Callable[[], Site]) -> None:
        self._clocks, self._where, self.arena = clocks, where, Arena()
        self._blocks: dict[int, Allocation] = {}  # by address
        self._freed: dict[int, list[_Freed]] = {}  # by stream: not yet taken into account by a new allocation
        self._past: dict[int, Uses] = {}  # by pool: of anything freed there
        # Storages that outlive the interpreter's modules look into what is kept here when they go.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._blocks))
        self._lock = threading.RLock()  # threads that read and write files pin memory meanwhile

    # -- tensors

    def allocate(self, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, stream: int) -> Tensor:
        """A tensor in the pool of ``stream``; its bytes are all ones, which is NaN for floating point.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        size = [int(n) for n in size]
        stride = contiguous(size) if stride is None else [int(n) for n in stride]
        nbytes = max(span(size, stride) * dtype.itemsize, 1)
        with self._lock:
            self.collect()
            self.arena.take(nbytes)
            memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            spoil(memory)
            tensor, kept = tensor_over(memory, size, stride, dtype)
            block = Allocation(memory, memory.numel(), stream, self._where())
            block.kept, block.weak = kept, weak_storage(tensor.untyped_storage())
            self._blocks[memory.data_ptr()] = block
            self._inherit(block)
        return tensor

    def pin(self, tensor: Tensor) -> Tensor:
        """``tensor``, of the host, is pinned memory from now on."""
        storage = tensor.untyped_storage()
        with self._lock:
            self.collect()
            block = Allocation(None, storage.nbytes(), -1, self._where())
            block.weak = weak_storage(storage)
            self._blocks[storage.data_ptr()] = block
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        block = self.find(tensor)
        return block is not None and block.memory is None

    def find(self, tensor: Tensor) -> Allocation | None:
        """The allocation that a tensor lies in; None for one without elements."""
        return self.at(tensor.untyped_storage()) if tensor.numel() else None

    def at(self, storage: torch.UntypedStorage) -> Allocation | None:
        block = self._blocks.get(storage.data_ptr())
        if block is not None and block.memory is None and (storage.device.type == NAME or expired(block.weak)):
            return None  # pinned memory that is gone, in whose place there is something else now
        return block

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor of the CPU, of conjugate or negative numbers where this one stands for them."""
        block = self.find(tensor)
        if block is None or block.memory is None:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        out = torch.empty(0, dtype=tensor.dtype, device="cpu")
        out.set_(block.memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        out = out.conj() if tensor.is_conj() else out
        return negative_view(out) if tensor.is_neg() else out

    # -- freeing

    def collect(self) -> None:
        """Finds the storages that nobody holds any more."""
        with self._lock:
            for address, block in [(a, b) for a, b in self._blocks.items() if expired(b.weak)]:
                free_weak(block.weak)
                del self._blocks[address]
                if not block.freed and block.memory is not None:
                    self.free(block)

    def free(self, block: Allocation) -> None:
        """The host frees it: an allocation of the same pool may have it from now on, in the order of that stream."""
        self.arena.give_back(block.nbytes, block.recorded)
        over: Clock = {}  # the allocator waits for the recorded streams, and so for all that these waited for
        for stream in block.recorded:
            merge(over, self._clocks[stream])
        owed = [use for use in block.uses if over.get(use.stream, 0) < use.time]
        self._freed.setdefault(block.stream, []).append(_Freed(block, owed))
        block.uses, block.recorded, block.freed = [], set(), True

    def refill(self, block: Allocation, stream: int) -> None:
        """A storage that was freed has memory again, of the pool of ``stream``; its values are undefined.

        Raises:
            torch.OutOfMemoryError: there is no room.
        """
        with self._lock:
            self.collect()
            self.arena.take(block.nbytes)
            block.freed, block.stream, block.site = False, stream, self._where()
            self._inherit(block)

    def _inherit(self, block: Allocation) -> None:
        freed = self._freed.pop(block.stream, [])
        past = self._past.setdefault(block.stream, {})
        for each in freed:
            for use in each.owed:
                if use.stream not in past or past[use.stream][0].time < use.time:
                    past[use.stream] = use, each.site
        block.earlier, block.entered = dict(past), set()
        block.former = [each.memory for each in freed if each.memory is not None and not each.recorded]


def elements(size: Sequence[int]) -> int:
    """How many a tensor of that size has."""
    return prod(int(n) for n in size)
