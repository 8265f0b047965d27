"""Saved tensors that stay on the device in fewer bits.

    packed   what has two values, 0 and another one, is kept as bits: masks of dropout, of ``where`` and of
             ``masked_fill``; exactly. The rest stays as it is (the masks of Gist, Jain et al., ISCA 2018, section 4)
    int8     that, and each other floating-point tensor as 8-bit numbers with one scale for each block of its memory
             (ActNN, arXiv 2104.14129, section 4, has such blocks, with random rounding)

An 8-bit value is off by at most 1 / 127 of the largest of its block, and keeps its sign; only zeros are zero. So the
backward of ReLU lets through what it would, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BLOCK", "EncodedRegion", "EncodedTier"]

BLOCK = 128
"""Elements that share a scale."""

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GLANCE = 512
"""Elements by which most tensors of several values are told before all are looked at."""


class EncodedTier:
    """Memory of the device for values in fewer bits.

    Args:
        mode: ``"packed"`` or ``"int8"``.
    """

    def __init__(self, mode: str) -> None:
        self._rounds = mode == "int8"

    def takes(self, tensor: Tensor) -> bool:
        """Whether the values are kept in fewer bits."""
        if tensor.dtype is torch.bool:
            return True
        return tensor.dtype in FLOATS and (self._rounds or _second(tensor) is not None)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> EncodedRegion:
        """Room for a tensor."""
        return EncodedRegion(dtype)


class EncodedRegion:
    """One tensor in fewer bits, 1-D.

    Attributes:
        dtype: of the values.
        nbytes: of what is kept.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.nbytes = dtype, 0
        self._decode: Callable[[], Tensor] = lambda: torch.empty(0)

    def store(self, values: Tensor) -> None:
        """Takes ``values``, 1-D."""
        numel, dtype = len(values), self.dtype
        second = values.new_ones(()) if dtype is torch.bool else _second(values)
        if second is not None:
            bits = _bits(values != 0)
            self.nbytes = bits.nbytes
            self._decode = lambda: _two_values(bits, numel, second)
            return
        numbers, scales = _rounded(values)
        self.nbytes = numbers.nbytes + scales.nbytes
        self._decode = lambda: (numbers * scales.unsqueeze(1)).view(-1)[:numel].to(dtype)

    def get(self) -> Tensor:
        """The values, anew."""
        return self._decode()

    def drop(self) -> None:
        """They are not needed any more."""
        self._decode, self.nbytes = (lambda: torch.empty(0)), 0


def _second(tensor: Tensor) -> Tensor | None:
    """The value of a tensor's elements that are not 0, which is one of them; None: there are others.

    Off the CPU nothing is looked at, for which the host would wait: there, masks of dropout are booleans.
    """
    if tensor.device.type != "cpu" or tensor.dtype is torch.bool or not tensor.numel():
        return None
    flat = tensor.detach().reshape(-1)
    some = flat[:GLANCE]
    found = some[some != 0][:1]
    if not len(found):
        return None
    for part in (some, flat):
        zeros = (part == 0) & ~part.signbit()
        if not bool(((part == found) | zeros).all()):
            return None
    return found[0].clone()


def _bits(mask: Tensor) -> Tensor:
    """Eight booleans in each byte."""
    eights = F.pad(mask.view(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    out = torch.zeros(len(eights), dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        out |= eights[:, bit] << bit
    return out


def _two_values(bits: Tensor, numel: int, second: Tensor) -> Tensor:
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    mask = (bits.unsqueeze(1) >> shifts).bitwise_and_(1).view(-1)[:numel].view(torch.bool)
    return mask if second.dtype is torch.bool else torch.where(mask, second, torch.zeros_like(second))


def _rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """``(blocks, elements)`` of 8 bits, and the size of their steps: not by rounding to nearest where that is 0."""
    wide = values if values.dtype is torch.float64 else values.float()
    blocks = F.pad(wide, (0, -len(wide) % BLOCK)).view(-1, BLOCK)
    steps = blocks.abs().amax(1) / 127
    parts = blocks / steps.where(steps != 0, 1).unsqueeze(1)
    near = parts.round()
    return torch.where(near == 0, parts.sign(), near).clamp_(-127, 127).to(torch.int8), steps
