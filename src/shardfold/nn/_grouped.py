"""Products of rows with one of several matrices each: rows of one matrix lie one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold import accelerator

__all__ = ["grouped_linear"]

ALIGN = 16
"""Bytes that strides of what ``F.grouped_mm`` is given are multiples of."""


class _Contiguous(torch.autograd.Function):
    """Gradients have memory of their own behind it, as ``F.grouped_mm`` wants them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0].contiguous()


def grouped_linear(rows: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """The next ``counts[i]`` of ``rows`` times ``weights[i].T``; one kernel, ``F.grouped_mm``, where there is one for
    the dtype and the shapes, else a product after the other.

    Args:
        rows: ``(sum(counts), inputs)``.
        weights: ``(len(counts), outputs, inputs)``; under autocast of any dtype.
        counts: rows of each matrix, 0 for some or all of them: their gradients are zeros.

    Returns:
        ``(sum(counts), outputs)``.
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weights = rows.to(dtype), weights.to(dtype)
    if _is_one_kernel(rows, weights):
        ends = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
        made: Any = _Contiguous.apply(F.grouped_mm(rows.contiguous(), weights.transpose(1, 2), offs=ends))
        return made
    parts = zip(rows.split(list(counts)), weights.unbind(0), strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def _is_one_kernel(rows: Tensor, weights: Tensor) -> bool:
    aligned = all(n * rows.itemsize % ALIGN == 0 for n in weights.shape[1:])
    same = rows.dtype == weights.dtype
    return bool(len(rows)) and same and aligned and accelerator.multiplies_groups(rows.device, rows.dtype)
