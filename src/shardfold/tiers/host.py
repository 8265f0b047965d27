"""Host memory for what autograd saves: a copy goes out beside the computation, and comes back when it is asked for.

On CUDA copies are pinned and travel on a stream of their own; memory on either side is given back in the order of that
stream. On the CPU the copy is what it would be there, so that the same bytes are counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["HostCopy", "HostStore"]


class HostStore:
    """Copies of one device's tensors in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def put(self, flat: Tensor) -> HostCopy:
        """A copy of a contiguous tensor, which may be given back at once."""
        return HostCopy(self, flat)

    def close(self) -> None:
        """Nothing is held here."""


class HostCopy:
    """One copy. ``host``: on CUDA complete when the CUDA event ``event`` is."""

    def __init__(self, store: HostStore, flat: Tensor) -> None:
        self._store = store
        self._back: Tensor | None = None
        self.event: Any = None
        side = store.side
        if side is None:
            self.host = flat.clone()
            return
        self.host = torch.empty_like(flat, device="cpu", pin_memory=True)
        side.wait_stream(torch.cuda.current_stream(store.device))
        with torch.cuda.stream(side):
            self.host.copy_(flat, non_blocking=True)
            self.event = side.record_event()
        flat.record_stream(side)

    def fetch(self) -> None:
        """Begins to bring it back."""
        side = self._store.side
        if side is None:
            self._back = self.host
        elif self._back is None:
            with torch.cuda.stream(side):
                self._back = self.host.to(self._store.device, non_blocking=True)
                self.event = side.record_event()

    def get(self) -> Tensor:
        """The tensor, on the device."""
        self.fetch()
        back, self._back = self._back, None
        assert back is not None
        if self._store.side is not None and self.event is not None:
            compute = torch.cuda.current_stream(self._store.device)
            compute.wait_event(self.event)
            back.record_stream(compute)
        return back
