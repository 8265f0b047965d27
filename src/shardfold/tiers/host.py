"""Host memory: values go out beside the computation, and come back when they are asked for.

Where the device has streams, regions are pinned and travel on two streams of their own, one each way, as links do both
at once: what a forward or backward asks for does not wait behind gradients, which wait for what computes them. Memory
on either side is given back in the order of the stream that used it. On the CPU a region is what it would be there, so
that the same bytes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from math import prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.tiers._slabs import Slabs
from shardfold.tiers.pages import exact, huge
from shardfold.tiers.tier import is_same
from shardfold.tiers.waits import Waits

__all__ = ["HostRegion", "HostTier"]

SPARES = 3
"""Tensors of one size and dtype that wait for a taker: a master and two moments."""


class HostTier:
    """Host memory for values of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = accelerator.new_stream(device), accelerator.new_stream(device)
        self.waits = Waits()
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._slabs = Slabs(lambda nbytes: accelerator.host_memory((nbytes,), torch.uint8, device))

    @property
    def pinned(self) -> int:
        """Bytes of pinned memory that were taken for what rests there as long as an engine."""
        return self._slabs.pinned

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host for a short while, ``(numel,)``, for what comes from files and is on its way back there or
        to the device."""
        with suppress(KeyError, IndexError):  # another thread may take the last one
            return self._spare[numel, dtype].pop()
        with exact():
            memory = accelerator.host_memory((numel,), dtype, self.device)
        huge(memory.data_ptr(), memory.nbytes)
        return memory

    def recycle(self, memory: Tensor) -> None:
        """``memory`` from :meth:`empty` is no longer needed: what one unit's update needs of a kind waits for the next
        taker, because fresh pages cost more than what is written to them. The allocators of pinned memory do this by
        themselves."""
        spares = self._spare.setdefault((memory.numel(), memory.dtype), [])
        if self.down is None and len(spares) < SPARES:
            spares.append(memory)

    def forget_spares(self) -> None:
        """What waits for a taker is given back."""
        self._spare.clear()

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False, rests: bool = False
    ) -> HostRegion:
        if self.down is None or not rests or not prod(shape):
            return HostRegion(self, accelerator.host_memory(shape, dtype, self.device, zero=zero))
        memory = self._slabs.take(prod(shape) * dtype.itemsize).view(dtype).view(tuple(shape))
        return HostRegion(self, memory.zero_() if zero else memory)

    def adopt(self, memory: Tensor) -> HostRegion:
        """A region over memory of the host that is there already, with its values."""
        return HostRegion(self, memory)

    def close(self) -> None:
        """Regions keep their memory as long as somebody keeps them."""
        self._slabs.close()


class HostRegion:
    """See :class:`shardfold.tiers.tier.Region`."""

    tier = "host"

    def __init__(self, owner: HostTier, memory: Tensor) -> None:
        self._owner = owner
        self.resting: Tensor = memory
        self.dtype, self.nbytes = memory.dtype, memory.nbytes
        self._back: Tensor | None = None
        self._event: Any = None  # streams: when what was begun last is over
        self._arriving: HostRegion | None = None  # streams: values that are still to be added
        self._waiting = Lock()

    def store(self, values: Tensor) -> None:
        self._back = self._arriving = None
        if is_same(values, self.resting):
            return
        values = values.view_as(self.resting)
        down = self._owner.down
        if down is None or not accelerator.has_streams(values.device):
            self._wait()
            self.resting.copy_(values)
            return
        # It computes the values, and is behind what came back from here before, which it has waited for in get().
        down.wait_stream(accelerator.current_stream(self._owner.device))
        with accelerator.on(down):
            self.resting.copy_(values, non_blocking=True)
            self._event = down.record_event()  # whoever reads the copy waits for this
        values.record_stream(down)  # their memory is not given out before the copy has read it

    def add(self, values: Tensor) -> None:
        """Where there are streams the values arrive beside the region, and are added when somebody asks for the sum, or
        more come: the host waits for no copy that was begun just now."""
        self._wait()
        if self._owner.down is None or not accelerator.has_streams(values.device):
            self.resting.add_(values.view_as(self.resting))
            return
        self._arriving = self._owner.allocate(self.resting.shape, self.dtype)
        self._arriving.store(values)

    def write(self, start: int, values: Tensor) -> None:
        self._back = None
        self.values(slice(start, start + values.numel())).copy_(values)

    def fetch(self, into: Tensor | None = None) -> None:
        up, gone = self._owner.up, self._event
        if self._back is not None:
            return
        if self._arriving is not None:
            self._wait()
        if up is None:
            self._back = self.resting if into is None else into.copy_(self.resting)
            return
        if gone is not None:
            up.wait_event(gone)  # the copy to here
        if into is not None:
            up.wait_stream(accelerator.current_stream(self._owner.device))  # which may still read what was there
            into.record_stream(up)  # its memory is not given out while the copy writes to it
        with accelerator.on(up):
            if into is None:
                self._back = self.resting.to(self._owner.device, non_blocking=True)
            else:
                self._back = into.copy_(self.resting, non_blocking=True)
            self._event = up.record_event()  # the computation waits for this in get()

    def get(self) -> Tensor:
        self.fetch()
        back, self._back = self._back, None
        assert back is not None
        if self._owner.up is not None and self._event is not None:
            compute = accelerator.current_stream(self._owner.device)
            compute.wait_event(self._event)  # the copy, which is under way
            # It is memory of the copies' stream, which may not have it while this one reads.
            back.record_stream(compute)
        return back

    def stop(self) -> None:
        self._back = None

    def values(self, part: slice = slice(None)) -> Tensor:
        self._wait()
        return self.resting.view(-1)[part]

    def _wait(self) -> None:
        if self._event is None and self._arriving is None:
            return
        with self._waiting:  # two threads may read what comes: neither goes on before it is there
            if self._event is not None:
                with self._owner.waits.timed():
                    self._event.synchronize()  # the host reads, or writes, what the copy under way writes or reads
                self._event = None
            if self._arriving is not None:
                self.resting.add_(self._arriving.values().view_as(self.resting))
                self._arriving = None

    def drop(self) -> None:  # who is on the way holds the memory: PyTorch gives back what is pinned behind its copies
        self._back = self._arriving = None
        self.resting = self.resting.new_empty(0)
        self.nbytes = 0
