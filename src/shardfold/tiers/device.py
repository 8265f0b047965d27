"""The device store: gives a flat its memory, takes it back, and keeps the streams of a GPU in order.

A flat is one tensor for its whole life: parameters are views of it, so its memory comes and goes by resizing its
storage, and saved activations find the refilled values (FSDP2 does the same with its all-gather outputs).

On CUDA all gathered memory is allocated on one side stream, so that the caching allocator reuses a block only in that
stream's order. ``take_back`` makes the side stream wait for the computation that last read the flat; ``give`` and the
collective that fills it run on the side stream; waiting for that collective makes the computation wait, never the host.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from shardfold.tiers.pages import exact, huge, keep, let_go, vacate

__all__ = ["DeviceStore"]

_NOTHING = nullcontext()


class DeviceStore:
    """Memory of one device. ``debug`` fills a flat with NaN instead of freeing it, so that stale reads show."""

    def __init__(self, device: torch.device, *, debug: bool = False) -> None:
        self.device = device
        self.debug = debug
        self._spare: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def side(self) -> AbstractContextManager[object]:
        """What runs inside is queued beside the computation (CUDA); on the CPU it runs as it is."""
        return _NOTHING if self._side is None else torch.cuda.stream(self._side)

    def after_compute(self) -> None:
        """The side stream waits for everything computed so far."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat for a short while, whose memory is really gone when it is; ``(numel,)``."""
        if spares := self._spare.get((numel, dtype)):
            return spares.pop()
        with exact() if self._side is None else _NOTHING:
            flat = torch.empty(numel, dtype=dtype, device=self.device)
        self._prefer_huge(flat)
        return flat

    def recycle(self, flat: Tensor) -> None:
        """``flat`` from :meth:`empty` is no longer needed: two of each kind (a unit's gradients and what arrives for
        them) wait for the next taker, because fresh pages cost more than what is written to them, and because Gloo
        keeps the buffers of its last collective alive anyway. CUDA's allocator does this by itself."""
        spares = self._spare.setdefault((flat.numel(), flat.dtype), [])
        if self._side is None and len(spares) < 2:
            spares.append(flat)

    def close(self) -> None:
        """No flat of this store will be needed any more."""
        self._spare.clear()
        let_go(self)

    def forget_spares(self) -> None:
        """At the end of a pass: what waits for a taker is given back."""
        self._spare.clear()

    def give(self, flat: Tensor) -> None:
        """Gives ``flat`` its memory; its values are undefined."""
        storage = flat.untyped_storage()
        size = flat.numel() * flat.itemsize
        if storage.size() != size:
            with self.side() if self._side is not None else exact():
                storage.resize_(size)
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
            return
        self.after_compute()
        with self.side():
            flat.untyped_storage().resize_(0)
