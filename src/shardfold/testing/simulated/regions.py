"""Which bytes of an allocation a tensor has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ByteRange", "region_of", "span"]


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last one, both included."""
    return 0 if 0 in size else sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1


class ByteRange(NamedTuple):
    """Bytes ``[start, stop)``, all of them or some.

    Attributes:
        start, stop: as above.
        elements: sizes, strides and bytes of the elements that lie apart; None: there is nothing between them.
    """

    start: int
    stop: int
    elements: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    def overlaps(self, other: ByteRange) -> bool:
        """Whether both have a byte."""
        if not (self.start < other.stop and other.start < self.stop):
            return False
        if self.elements is None and other.elements is None:
            return True
        first = min(self.start, other.start)
        bytes_of = torch.zeros(max(self.stop, other.stop) - first, dtype=torch.bool, device="cpu")
        self._in(bytes_of, first).fill_(True)
        return bool(other._in(bytes_of, first).any())

    def covers(self, other: ByteRange) -> bool:
        """Whether it is known to have all of the other's."""
        if self.elements is not None:
            return self == other
        return self.start <= other.start and other.stop <= self.stop

    def _in(self, bytes_of: Tensor, first: int) -> Tensor:
        if self.elements is None:
            return bytes_of[self.start - first : self.stop - first]
        size, stride, itemsize = self.elements
        return bytes_of.as_strided((*size, itemsize), (*(n * itemsize for n in stride), 1), self.start - first)


def region_of(tensor: Tensor) -> ByteRange:
    """Of a tensor that has elements, within its storage."""
    size, stride, itemsize = tuple(tensor.shape), tensor.stride(), tensor.itemsize
    start, extent = int(tensor.storage_offset()) * itemsize, span(size, stride)
    elements = None if extent == tensor.numel() else (size, stride, itemsize)
    return ByteRange(start, start + extent * itemsize, elements)
