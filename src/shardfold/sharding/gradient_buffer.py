"""Gradients on their way: the flat that a unit's gradients are copied into, as they arrive, and sent from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from shardfold.sharding.segment import Segment
from shardfold.torch_internals import foreach_copy_, foreach_mul_, foreach_zero_

__all__ = ["GradientBuffer"]

SMALL = 16 * 1024
"""Gradients of at most so many bytes are copied together: a call of its own costs as much as copying this."""
BATCH = 64 * 1024
"""So many bytes of small gradients wait at most."""


class GradientBuffer:
    """Gradients of one or more passes, in one flat per trainable segment of a unit, as they are sent.

    The memory of slots that are not touched, and of the padding, is undefined until :meth:`complete` zeroes it.

    Args:
        segments: of the unit.
        flats: one for each.
        adopt: nothing is sent, so the tensors that autograd made are kept as they are where that gives the same
            (``Segment.adopted``), and copied only when something else than the update reads the flat.

    Attributes:
        flats: by segment.
        views: by segment and slot, each with its parameter's shape.
        touched: which of them hold anything since :meth:`clear`.
    """

    def __init__(self, segments: Sequence[Segment], flats: Sequence[Tensor], *, adopt: bool = False) -> None:
        self.flats = list(flats)
        self._adopted = [segment.adopted if adopt else None for segment in segments]
        self._slots = [segment.spec.slots for segment in segments]
        parts = [segment.parts_of(flat) for segment, flat in zip(segments, flats, strict=True)]
        self.views = [views for views, _ in parts]
        self.touched = [[False] * len(row) for row in self.views]
        self._pads = [pad for _, pads in parts for pad in pads]
        self._waiting: tuple[list[Tensor], list[Tensor]] = [], []  # views, and the small gradients that go there
        self._waiting_slots: list[int] = []
        self._waiting_segment, self._waiting_bytes, self._scale = 0, 0, 1.0

    def add(self, segment: int, slot: int, grad: Tensor, scale: float) -> None:
        """Adds ``scale * grad``; the first gradient of a slot replaces what was there."""
        view, touched = self.views[segment][slot], self.touched[segment]
        adopted = self._adopted[segment]
        if touched[slot]:
            self.flush()
            if adopted and slot in adopted:
                view.copy_(adopted.pop(slot))
            if _is_rounded(scale, view.dtype):
                view.add_(grad.float(), alpha=scale)
            else:
                view.add_(grad, alpha=scale)
            return
        touched[slot] = True
        size = grad.nbytes
        if size > SMALL:
            if view.dtype != grad.dtype:  # cast first: the product would be rounded to the gradient's dtype
                view.copy_(grad).mul_(scale)
            elif adopted is not None and scale == 1.0 and grad.is_contiguous() and not grad.requires_grad:
                adopted[slot] = grad
            else:
                torch.mul(grad, _factor(scale), out=view)
            return
        if scale != self._scale or segment != self._waiting_segment:
            self.flush()
        self._waiting[0].append(view)
        self._waiting[1].append(grad)
        self._waiting_slots.append(slot)
        self._waiting_bytes += size
        self._scale, self._waiting_segment = scale, segment
        if self._waiting_bytes >= BATCH:
            self.flush()

    def put(self, segment: int, slot: int, values: Tensor) -> None:
        """From now on ``values`` are the gradient of a slot; they are taken as they are."""
        self.flush()
        if adopted := self._adopted[segment]:
            adopted.pop(slot, None)
        self.views[segment][slot].copy_(values)
        self.touched[segment][slot] = True

    def drop(self, segment: int, slot: int) -> None:
        """Forgets the gradient of a slot."""
        self.flush()
        if adopted := self._adopted[segment]:
            adopted.pop(slot, None)
        self.touched[segment][slot] = False

    def flush(self) -> None:
        """From now on all that was added, and not adopted, is in ``views``."""
        views, grads = self._waiting
        if views:
            foreach_copy_(views, grads)
            if self._scale != 1.0:
                rounded = _is_rounded(self._scale, views[0].dtype)
                foreach_mul_(self._joined(views), _factor(self._scale) if rounded else self._scale)
            self._drop_waiting()

    def _joined(self, views: list[Tensor]) -> list[Tensor]:
        """The views of what waits, or, where they are neighbours, as most are, all of them as one, with the padding
        between them: a product of its own takes five times as long as a small gradient's share of one."""
        first, last = min(self._waiting_slots), max(self._waiting_slots)
        if last - first + 1 != len(views):
            return views
        slots = self._slots[self._waiting_segment]
        return [self.flats[self._waiting_segment][slots[first].offset : slots[last].offset + slots[last].numel]]

    def complete(self) -> None:
        """Zeroes what no gradient reached: on this rank those parameters contribute nothing to the sum."""
        self.flush()
        zero = [
            view
            for row, touched in zip(self.views, self.touched, strict=True)
            if not all(touched)
            for view, was in zip(row, touched, strict=True)
            if not was
        ]
        if self._pads or zero:  # as one call: each would cost as much as the gradient of a small parameter
            foreach_zero_(self._pads + zero)

    def clear(self) -> None:
        """Forgets all gradients; the memory stays."""
        for touched in self.touched:
            touched[:] = [False] * len(touched)
        for adopted in self._adopted:
            if adopted:
                adopted.clear()
        self._drop_waiting()

    def _drop_waiting(self) -> None:
        self._waiting[0].clear()
        self._waiting[1].clear()
        self._waiting_slots.clear()
        self._waiting_bytes = 0


@lru_cache
def _factor(scale: float) -> Tensor:
    """The number as a 0-d tensor, with which a multiplication takes half as long and gives the same bits. (Not for
    gradients of no dimension, as then both would count for the dtype of the result.)"""
    return torch.tensor(scale, dtype=torch.float64, device="cpu")


@lru_cache
def _is_rounded(scale: float, dtype: torch.dtype) -> bool:
    """Whether PyTorch would take another number for ``scale`` in some products in a 16-bit dtype, which makes all of
    them too large or too small: 1/3 by 0.2 % in bf16."""
    return dtype.itemsize == 2 and float(torch.tensor(scale, dtype=dtype)) != scale
