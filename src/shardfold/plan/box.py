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

from shardfold.errors import LayoutError

__all__ = ["Box", "Extent", "shared"]


class Box(NamedTuple):
    """A block of a tensor: ``starts`` and ``sizes`` on each dimension.

    ``stacked``: ``(dim, count, length)`` of a tensor that is several along ``dim``, one behind the other, of that
    length each, as of queries, keys and values in one matrix. The box is then of the tensor with two dimensions, count
    and length, in place of that one: the same part of each. Elements are in one order either way.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    stacked: tuple[int, ...] = ()

    @staticmethod
    def of(shape: Sequence[int]) -> Box:
        """All of a tensor of this shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What the tensor is indexed with to have the block, where it is not stacked; else see :meth:`view`."""
        return tuple(slice(at, at + size) for at, size in zip(self.starts, self.sizes, strict=True))

    def view(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole that :attr:`slices` index: ``shape``, or with two dimensions in place of one."""
        if not self.stacked:
            return tuple(shape)
        dim, count, length = self.stacked
        return (*shape[:dim], count, length, *shape[dim + 1 :])

    def indices(self, dim: int) -> list[int]:
        """Where the rows along a dimension of the block, which counts those of a stacked one through, are in the
        tensor."""
        if not self.stacked:
            return list(range(self.starts[dim], self.starts[dim] + self.sizes[dim]))
        stacked, _, length = self.stacked
        if dim != stacked:
            own = dim + (dim > stacked)
            return list(range(self.starts[own], self.starts[own] + self.sizes[own]))
        start, size = self.starts[dim + 1], self.sizes[dim + 1]
        parts, rows = range(self.starts[dim], self.starts[dim] + self.sizes[dim]), range(start, start + size)
        return [part * length + row for part in parts for row in rows]

    def seen(self, other: Box) -> Box:
        """This box as one of the tensor as ``other`` sees it.

        Raises:
            LayoutError: it begins or ends inside of another part than it ends or begins in.
        """
        if self.stacked == other.stacked or not other.stacked:
            return self
        dim, _, length = other.stacked
        start, size = self.starts[dim], self.sizes[dim]
        if not self.stacked and start % length == 0 and size % length == 0:
            first, within, parts, rows = start // length, 0, size // length, length
        elif not self.stacked and start % length + size <= length:
            first, within, parts, rows = start // length, start % length, 1, size
        else:
            raise LayoutError(
                f"rows {start} to {start + size} are no part of matrices of {length} rows each, one behind the other: "
                "read what was written by one plan of tensor by another on one rank of tensor."
            )
        starts = (*self.starts[:dim], first, within, *self.starts[dim + 1 :])
        return Box(starts, (*self.sizes[:dim], parts, rows, *self.sizes[dim + 1 :]), other.stacked)

    def meets(self, other: Box) -> bool:
        """Whether they share an element."""
        if self.stacked != other.stacked:
            return self.seen(other).meets(other.seen(self)) if other.stacked else other.meets(self)
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
    one, other = one.seen(other), other.seen(one)
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
