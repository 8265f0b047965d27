"""WHERE each element lies: offsets, padding, owners and ranges. Index arithmetic only.

Parameters that move together form a unit; within it, those of equal dtype, trainability and hyper-parameters form a
segment. A segment is a flat vector in which every parameter has a fixed, aligned slot, padded at its end so that
every shard is one contiguous range of equal length:

    |<------------------------------ length ----------------------------->|
    | slot 0 |pad| slot 1 ........ |pad| slot 2 |          tail            |
    |<-- shard 0 -->|<-- shard 1 -->|<-- shard 2 -->|<---- shard 3 ------->|

All states of a segment share these offsets, so a shard of ``master`` and a shard of ``grads`` match element by element.

A rank may have a *box* of a parameter instead of all of it (its columns, in tensor parallelism). Elements of a box are
counted in its own row-major order. What two boxes share is consecutive in both only row by row:

    4 x 6 tensor     one: rows 0-1, columns 0-3    other: rows 1-3, columns 2-5     shared: (1, 2) (1, 3)
    . . . . . .                                                                      6, 7 of one
    . . . . . .                                                                      0, 1 of the other

DTensor's ``Shard(dim)`` divides as ``torch.chunk`` does: chunks of ``ceil(size / parts)`` rows, of which the last ones
are shorter or empty. Where several dimensions of a mesh divide one dimension of a tensor, the first does, and each next
one divides what is left:

    7 rows on a mesh of 2 x 2, Shard(0) on both     4 | 3     then 2 2 | 2 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from shardfold.errors import LayoutError
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import ITEMSIZE, Axes, Layout, Sizes

__all__ = [
    "ALIGN_BYTES",
    "Box",
    "Extent",
    "SegmentSpec",
    "Slot",
    "SlotRange",
    "UnitSpec",
    "boxes",
    "chunk",
    "chunk_box",
    "enclosing",
    "pack",
    "rest_itemsize",
    "shard_index",
    "shard_range",
    "shared",
]


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


ALIGN_BYTES = 256
"""Every parameter and every shard starts at a multiple of this many bytes of the smallest state."""


class Slot(NamedTuple):
    """A parameter's place in its segment: ``[offset, offset + numel)``.

    Attributes:
        shape: of what ranks have here, which may be a box of a larger parameter.
        larger: the shape of that; empty: this is the whole, and ranks have no others.
        starts: where the box begins in it, on each dimension; empty: at its first element.
        stacked: of the box (see :class:`Box`).
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    larger: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.larger or self.shape

    @property
    def box(self) -> Box | None:
        """What of the whole parameter lies here, which is all of it where other ranks have nothing; None: all of it."""
        if not self.larger:
            return None
        if self.stacked:
            dim, count, _ = self.stacked
            sizes = (*self.shape[:dim], count, self.shape[dim] // count, *self.shape[dim + 1 :])
            return Box(self.starts, sizes, self.stacked)
        return Box(self.starts or (0,) * len(self.shape), self.shape)


class SlotRange(NamedTuple):
    """The part of one slot that lies in one range: elements ``[start, stop)`` of the segment."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True)
class SegmentSpec:
    """Parameters of one unit with equal dtype, trainability and hyper-parameter group, laid out flat.

    ``length`` is in elements and includes all padding; it divides evenly by the ranks that share it. ``own``: every
    state and both transfers are in ``dtype``, whatever the precision policy says. ``table``: the bound layout of its
    part of the model, where that is another than the rest's. ``distinct``: the axes on which each rank has other
    parameters, such as slices of one matrix (see ``axes``). ``places``: of its one parameter, those along the stages of
    a pipeline that have it, where there are several. ``codes``: the format that its values, which are frozen, rest and
    travel in; empty: they do in ``dtype``.
    """

    slots: tuple[Slot, ...]
    length: int
    dtype: str
    trainable: bool = True
    group: int = 0
    own: bool = False
    table: Layout | None = None
    distinct: Axes = ()
    places: tuple[int, ...] = ()
    codes: str = ""

    def comes_and_goes(self, layout: Layout) -> bool:
        """Whether its gathered values have memory of the device only while they are read; of codes they always do."""
        return bool(self.codes) or self.table_or(layout).comes_and_goes

    def value_bytes(self, elements: float) -> float:
        """Bytes of so many elements of ``params`` or ``held``, as they rest."""
        if not self.codes:
            return elements * ITEMSIZE[self.dtype]
        form = FORMATS[self.codes]
        return elements * form.nbytes(form.block) / form.block

    def dtype_for(self, what: str, layout: Layout) -> str:
        """The dtype of ``grads``, ``master``, ``moments``, or for ``reduce`` of the buffer that feeds it, of this
        segment under a bound ``layout``."""
        table = self.table_or(layout)
        return self.dtype if self.own else table.buffer if what == "reduce" else getattr(table, what).dtype

    def format_for(self, what: str, layout: Layout) -> str:
        """As what ``gather``, ``reduce`` or ``grads`` of this segment travel under a bound ``layout``; ``grads``: sums
        that are summed on, as they rest; ``buffer``: what gradients wait in until they travel; ``held``: what forward
        has held, which was rounded to blocks when it came, and is not once more."""
        if self.codes and what in ("gather", "held"):
            return self.codes
        table = self.table_or(layout)
        blocks = FORMATS[table.gather.format].native is None
        formats = {
            "gather": table.gather.format,
            "held": self.dtype if blocks else table.gather.format,
            "reduce": table.reduce.format,
            "grads": table.grads.dtype,
        }
        return self.dtype if self.own else table.buffer if what == "buffer" else formats[what]

    def outer_dtype(self, layout: Layout) -> str:
        """In which dtype outer steps keep and add up what belongs to this segment: at least fp32."""
        return "fp64" if self.dtype_for("master", layout) == "fp64" else "fp32"

    def outer_format(self, layout: Layout) -> str:
        """As what its outer gradients travel; what keeps its own dtype does so here too."""
        table, dtype = self.table_or(layout), self.outer_dtype(layout)
        given = table.outer.format if table.outer is not None else None
        return given if given is not None and not self.own and FORMATS[given].carries(dtype) else dtype

    def table_or(self, layout: Layout) -> Layout:
        """Its bound table; ``layout`` is the rest of the model's."""
        return self.table or layout

    @property
    def numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        return self.length - self.numel

    def pieces(self, start: int, stop: int) -> Iterator[SlotRange]:
        """The parts of slots inside ``[start, stop)``, in order; empty slots have none."""
        for i, slot in enumerate(self.slots):
            a, b = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if a < b:
                yield SlotRange(i, a, b)


@dataclass(frozen=True)
class UnitSpec:
    """Parameters that move together. ``root``: held from the start to the end of a pass. ``inside``: the name of the
    unit in whose forward and backward this one's lie, as of experts in their block, whose gradients are summed over
    other ranks. ``blocks``: of one that is made of several modules, their paths."""

    name: str
    segments: tuple[SegmentSpec, ...]
    root: bool = False
    inside: str = ""
    blocks: tuple[str, ...] = ()

    @property
    def trainable(self) -> bool:
        return any(segment.trainable for segment in self.segments)

    @property
    def coded(self) -> bool:
        """Whether some of its parameters rest as codes."""
        return any(segment.codes for segment in self.segments)

    @property
    def distinct(self) -> Axes:
        """The axes on which some of its parameters are distinct."""
        return tuple(dict.fromkeys(axis for segment in self.segments for axis in segment.distinct))

    def table_or(self, layout: Layout) -> Layout:
        """The bound table that says over which axes its states are split; ``layout`` is the rest of the model's. Tables
        of its segments differ in dtypes only."""
        return next((segment.table for segment in self.segments if segment.table is not None), layout)

    def outer_format(self, layout: Layout) -> str:
        """As what outer gradients of the unit travel, as of :meth:`format`."""
        return _joined(segment.outer_format(layout) for segment in self.segments if segment.trainable)

    def outer_dtype(self, layout: Layout) -> str:
        """In which dtype they are kept, as of :meth:`format`."""
        return _joined(segment.outer_dtype(layout) for segment in self.segments if segment.trainable)

    def format(self, what: str, layout: Layout, *, frozen: bool = False) -> str:
        """As what ``gather``, ``held``, ``reduce``, ``grads`` or ``buffer`` travel under a bound ``layout``, in one
        word: where the segments differ, that of each, joined by ``+``; ``frozen``: also of those that are not
        trained."""
        moved = [segment for segment in self.segments if segment.trainable or frozen]
        return _joined(segment.format_for(what, layout) for segment in moved)


def _joined(formats: Iterable[str]) -> str:
    """Those of segments in one word."""
    each = list(formats)
    return "+".join(each if len(set(each)) > 1 else each[:1])


def enclosing(units: Iterable[UnitSpec]) -> dict[str, str]:
    """By the name of each unit that is inside of another, that one's."""
    return {unit.name: unit.inside for unit in units if unit.inside}


def pack(
    shapes: Mapping[str, Sequence[int]],
    parts: int,
    align: int,
    boxes: Mapping[str, tuple[tuple[int, ...], ...]] | None = None,
) -> tuple[tuple[Slot, ...], int]:
    """Slots for parameters in the given order, and the padded length, both in elements.

    ``boxes``: of those that are a box of a larger one, its shape, where in it they begin, and how it is stacked.

    Each slot starts at a multiple of ``align``; the length is a multiple of ``parts * align`` and never 0. Padding is
    therefore below ``align`` per parameter plus ``parts * align`` (just that for a segment of nothing).
    """
    slots: list[Slot] = []
    end = 0
    for name, shape in shapes.items():
        slots.append(Slot(name, tuple(shape), end, *(boxes or {}).get(name, ())))
        end = _round_up(end + prod(shape), align)
    return tuple(slots), max(_round_up(end, parts * align), parts * align)


def shard_index(over: Axes, mesh: Sizes, coords: Mapping[str, int]) -> int:
    """Which shard belongs to the rank at ``coords``: row-major over the axes of ``over``."""
    index = 0
    for axis in over:
        index = index * mesh[axis] + coords[axis]
    return index


def shard_range(length: int, over: Axes, mesh: Sizes, coords: Mapping[str, int]) -> tuple[int, int]:
    """The half-open range of a flat of ``length`` elements that rests on the rank at ``coords``."""
    size = length // prod(mesh[axis] for axis in over)
    start = size * shard_index(over, mesh, coords)
    return start, start + size


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def rest_itemsize(layout: Layout) -> int:
    """Bytes of the narrowest element that a bound layout keeps: what alignment is counted in."""
    return min(ITEMSIZE[cell.dtype] for cell in layout.cells().values())


# -- what placements of DTensor say


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range that is chunk ``index`` of ``size`` elements."""
    each = -(-size // parts)
    return min(each * index, size), min(each * (index + 1), size)


def chunk_box(shape: Sequence[int], dims: Sequence[int | None], sizes: Sequence[int], place: Sequence[int]) -> Box:
    """The block that a place of a mesh has of a tensor.

    Args:
        shape: of the tensor.
        dims: by dimension of the mesh, that of the tensor which it divides; None: none, all along it have the same.
        sizes: of the mesh.
        place: in the mesh.
    """
    starts, stops = [0] * len(shape), list(shape)
    for dim, parts, index in zip(dims, sizes, place, strict=True):
        if dim is not None:
            start, stop = chunk(stops[dim] - starts[dim], parts, index)
            starts[dim], stops[dim] = starts[dim] + start, starts[dim] + stop
    return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def boxes(shape: Sequence[int], dims: Sequence[int | None], sizes: Sequence[int]) -> list[Box]:
    """The block of each place of a mesh, row by row."""
    return [chunk_box(shape, dims, sizes, place) for place in product(*map(range, sizes))]
