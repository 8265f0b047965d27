"""The device's own memory: regions that are always there, and flats whose memory comes and goes.

A flat is one tensor for its whole life: parameters are views of it, so its memory comes and goes by resizing its
storage, and saved activations find the refilled values (FSDP2 does the same with its all-gather outputs).

Where the device has streams, all gathered memory is allocated on one side stream, so that the caching allocator reuses
a block only in that stream's order. ``take_back`` makes the side stream wait for the computation that last read the
flat; ``give`` and the collective that fills it run on the side stream; waiting for that collective makes the
computation wait, never the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.tiers.pages import ParkedPages, exact, huge, keep, let_go, vacate
from shardfold.tiers.tier import is_same

__all__ = ["DeviceRegion", "DeviceTier"]

_NOTHING = nullcontext()


class DeviceTier:
    """Memory of one device. ``debug`` fills a flat with NaN instead of freeing it, so that stale reads show."""

    def __init__(self, device: torch.device, *, debug: bool = False) -> None:
        self.device = device
        self.debug = debug
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._parked = ParkedPages()
        self._side = accelerator.new_stream(device, urgent=True)  # the computation waits for what is done there

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, *, zero: bool = False, rests: bool = False
    ) -> DeviceRegion:
        make = torch.zeros if zero else torch.empty  # zeros that nobody has written to take no memory of the host
        return DeviceRegion(make(tuple(shape), dtype=dtype, device=self.device))

    def adopt(self, memory: Tensor) -> DeviceRegion:
        """A region over memory of the device that is there already, such as another state's, with its values."""
        return DeviceRegion(memory)

    def side(self) -> AbstractContextManager[object]:
        """What runs inside is queued beside the computation where there are streams; on the CPU it runs as it is."""
        return _NOTHING if self._side is None else accelerator.on(self._side)

    def after_compute(self) -> None:
        """The side stream waits for everything computed so far."""
        if self._side is not None:
            self._side.wait_stream(accelerator.current_stream(self.device))

    def mark(self) -> Callable[[], None]:
        """What lets the computation wait for all that was queued beside it by now, and for nothing later."""
        if self._side is None:
            return lambda: None
        event = self._side.record_event()  # nobody else may say when it is over
        return lambda: accelerator.current_stream(self.device).wait_event(event)  # which came beside it

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat for a short while, whose memory is really gone when it is; ``(numel,)``."""
        with suppress(KeyError, IndexError):  # another thread may take the last one
            return self._spare[numel, dtype].pop()
        self.settle()
        with exact() if self._side is None else _NOTHING:
            flat = torch.empty(numel, dtype=dtype, device=self.device)
        self._prefer_huge(flat)
        return flat

    def recycle(self, flat: Tensor) -> None:
        """``flat`` from :meth:`empty` is no longer needed: two of each kind (a unit's gradients and what arrives for
        them) wait for the next taker, because fresh pages cost more than what is written to them, and because Gloo
        keeps the buffers of its last collective alive anyway. The allocators of other devices do this by themselves."""
        spares = self._spare.setdefault((flat.numel(), flat.dtype), [])
        if self._side is None and len(spares) < 2:
            spares.append(flat)

    def close(self) -> None:
        """No flat of this tier will be needed any more."""
        self.forget_spares()
        let_go(self)

    def forget_spares(self) -> None:
        """At the end of a pass: what waits for a taker is given back."""
        self._spare.clear()
        self.settle()

    def settle(self) -> None:
        """What comes next computes, or takes memory of another size: pages of flats that were taken back wait no
        longer."""
        self._parked.clear()

    def give(self, flat: Tensor) -> None:
        """Gives ``flat`` its memory; its values are undefined."""
        storage = flat.untyped_storage()
        size = flat.numel() * flat.itemsize
        if storage.size() != size:
            with self.side() if self._side is not None else exact():  # the pool of that stream, see above
                storage.resize_(size)
            if not self._parked.hand_over(flat.data_ptr(), size):
                self._prefer_huge(flat)

    def _prefer_huge(self, flat: Tensor) -> None:
        if self.device.type == "cpu":
            huge(flat.data_ptr(), flat.nbytes)

    def vacate(self, flat: Tensor) -> None:
        """``flat`` is all zeros: on the host its pages need not be there until something is written to them."""
        if self.device.type == "cpu":
            vacate(flat.data_ptr(), flat.nbytes)
            keep(self)

    def take_back(self, flat: Tensor) -> None:
        """Frees the memory of ``flat`` once the computation so far has read it."""
        if self.debug:
            if flat.is_floating_point():
                flat.fill_(float("nan"))
                self.after_compute()  # what is gathered into it next is queued on the side stream, behind the fill
            return
        self.after_compute()  # the next that gets this memory, on the side stream, finds it read
        if self.device.type == "cpu" and not flat.is_shared():
            self._parked.park(flat.data_ptr(), flat.nbytes)
        with self.side():  # a free has no order: it says whose memory it is for those who read
            flat.untyped_storage().resize_(0)


class DeviceRegion:
    """See :class:`shardfold.tiers.tier.Region`: nothing has to travel, so nothing is waited for."""

    tier = "device"

    def __init__(self, memory: Tensor) -> None:
        self.resting: Tensor = memory
        self.dtype, self.nbytes = memory.dtype, memory.nbytes
        self._back: Tensor | None = None

    def store(self, values: Tensor) -> None:
        self._back = None
        if not is_same(values, self.resting):
            self.resting.copy_(values.view_as(self.resting))

    def add(self, values: Tensor) -> None:
        self.resting.add_(values.view_as(self.resting))

    def write(self, start: int, values: Tensor) -> None:
        self._back = None
        self.values(slice(start, start + values.numel())).copy_(values)

    def fetch(self, into: Tensor | None = None) -> None:
        if into is not None and self._back is None:
            self._back = into.copy_(self.resting)

    def get(self) -> Tensor:
        back, self._back = self._back, None
        return self.resting if back is None else back

    def stop(self) -> None:
        self._back = None

    def values(self, part: slice = slice(None)) -> Tensor:
        return self.resting.view(-1)[part]

    def drop(self) -> None:
        self._back = None
        self.resting = self.resting.new_empty(0)
        self.nbytes = 0
