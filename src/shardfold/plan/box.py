"""Boxes of tensors: which elements two of them share, and where these lie in each.

A rank may have a block of a parameter instead of all of it (its columns, in tensor parallelism). Elements of a box are
counted in its own row-major order. What two boxes share is consecutive in both only row by row:

    4 x 6 tensor     one: rows 0-1, columns 0-3    other: rows 1-3, columns 2-5     shared: (1, 2) (1, 3)
    . . . . . .                                                                      6, 7 of one
    . . . . . .                                                                      0, 1 of the other
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Box", "Extent", "shared"]


class Box(NamedTuple):
    """A block of a tensor: ``starts`` and ``sizes`` on each dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What the tensor is indexed with to have the block."""
        return tuple(slice(at, at + size) for at, size in zip(self.starts, self.sizes, strict=True))

    def meets(self, other: Box) -> bool:
        """Whether they share an element."""
        return self.numel > 0 < other.numel and all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        )


class Extent(NamedTuple):
    """Consecutive elements: ``[one, one + numel)`` of one box are ``[other, other + numel)`` of the other."""

    one: int
    other: int
    numel: int


def shared(one: Box, within: tuple[int, int], other: Box, of: tuple[int, int]) -> Iterator[Extent]:
    """The elements that two boxes of a tensor share, in rising order, as long runs as there are.

    Args:
        one, other: boxes of one tensor.
        within: elements ``[start, stop)`` of ``one`` that count.
        of: elements ``[start, stop)`` of ``other`` that count.
    """
    if not one.meets(other):
        return
    dims = range(len(one.sizes))
    lows = [max(a, b) for a, b in zip(one.starts, other.starts, strict=True)]
    sizes = [min(one.starts[d] + one.sizes[d], other.starts[d] + other.sizes[d]) - lows[d] for d in dims]
    # Trailing dimensions that both have all of, and one more, are consecutive in both: a row.
    tail = len(sizes)
    while tail > 0 and one.sizes[tail - 1] == other.sizes[tail - 1] == sizes[tail - 1]:
        tail -= 1
    lead = max(tail - 1, 0)
    row, rows = prod(sizes[lead:]), prod(sizes[:lead])

    def beginnings(box: Box) -> Callable[[int], int]:
        """Where the row of a number begins in a box."""
        strides = [prod(box.sizes[d + 1 :]) for d in dims]
        base = sum((lows[d] - box.starts[d]) * strides[d] for d in dims)
        steps = [(sizes[d], strides[d]) for d in range(lead - 1, -1, -1)]

        def begins(number: int) -> int:
            at = base
            for size, stride in steps:
                number, index = divmod(number, size)
                at += index * stride
            return at

        return begins

    in_one, in_other = beginnings(one), beginnings(other)
    first = max(
        bisect_right(range(rows), within[0] - row, key=in_one), bisect_right(range(rows), of[0] - row, key=in_other)
    )
    for number in range(first, rows):
        a, b = in_one(number), in_other(number)
        skip, end = max(0, within[0] - a, of[0] - b), min(row, within[1] - a, of[1] - b)
        if a >= within[1] or b >= of[1]:
            return
        if skip < end:
            yield Extent(a + skip, b + skip, end - skip)
