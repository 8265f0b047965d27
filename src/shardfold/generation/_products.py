"""Products of some rows with a matrix that stays where it is, as each forward of texts under way has them.

MKL, by which PyTorch multiplies, reads a matrix for a few rows at less than half of the memory's rate on CPUs without
AVX-512. The same product with the matrix in front does not, nor, of large matrices, that of oneDNN, which PyTorch has
too: of 16,384 x 448 numbers and 8 rows MKL takes 13 ms, the matrix in front 5; of 64 rows 27 ms, oneDNN 9 (two threads
of an AMD EPYC, each matrix read from memory). For one row MKL is as fast as they are. Which one it is depends on the
shapes alone, so the same forward gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["multiplies", "product"]

FEW = 16
"""Rows from which on the result of the product with the matrix in front takes too long to be turned."""
LARGE = 4 * 1024 * 1024
"""Numbers of a matrix that are worth what a call of oneDNN takes."""
PLAIN = (Tensor, nn.Parameter)


def _find_onednn() -> Callable[..., Tensor] | None:
    if torch.backends.cpu.get_cpu_capability() != "AVX2" or not torch.backends.mkldnn.is_available():
        return None
    of_library: Any = torch.ops.mkldnn
    return getattr(of_library, "_linear_pointwise", None)


_onednn = _find_onednn()


def multiplies() -> bool:
    """Whether :func:`product` has other ways than PyTorch's own on this machine."""
    return _onednn is not None


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """``rows @ weight.t()``, without gradients.

    Args:
        rows: ``(rows, inputs)``.
        weight: ``(outputs, inputs)``.
    """
    if (
        _onednn is None
        or rows.dtype != torch.float32
        or weight.dtype != torch.float32
        or rows.device.type != "cpu"
        or type(weight) not in PLAIN
        or torch.is_autocast_enabled("cpu")
        or len(rows) < 2
    ):
        return F.linear(rows, weight)
    if len(rows) < FEW:
        return torch.mm(weight, rows.t()).t().contiguous()
    return _onednn(rows, weight, None, "none", [], "") if weight.numel() >= LARGE else F.linear(rows, weight)
