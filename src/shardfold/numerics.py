"""Norms and clipping over shards, as ``torch.nn.utils.clip_grad_norm_`` would take them of the whole model."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["clip_coefficient", "square_sum"]

_ROW = 4096


def square_sum(flats: Iterable[Tensor], device: torch.device) -> Tensor:
    """The sum of squares of all elements, a 0-d fp64 tensor.

    Squares are summed in fp32 (of fp64 in fp64) over rows of 4096 elements, and rows in fp64: the error does not grow
    with the size.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for flat in flats:
        dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
        whole = flat.numel() // _ROW * _ROW
        for part in (flat[:whole].view(-1, _ROW), flat[whole:].view(1, -1)):
            if part.numel():
                norms = torch.linalg.vector_norm(part, dim=1, dtype=dtype)
                total += norms.double().square().sum()
    return total


def clip_coefficient(norm: Tensor, limit: float) -> Tensor:
    """What gradients of this norm are multiplied by so that it is at most ``limit``: a 0-d tensor in (0, 1]."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)
