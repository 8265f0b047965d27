"""WHERE each element lies: offsets, padding, owners and ranges. Index arithmetic only.

Parameters that move together form a unit; within it, those of equal dtype, trainability and hyper-parameters form a
segment. A segment is a flat vector in which every parameter has a fixed, aligned slot, padded at its end so that
every shard is one contiguous range of equal length:

    |<------------------------------ length ----------------------------->|
    | slot 0 |pad| slot 1 ........ |pad| slot 2 |          tail            |
    |<-- shard 0 -->|<-- shard 1 -->|<-- shard 2 -->|<---- shard 3 ------->|

All states of a segment share these offsets, so a shard of ``master`` and a shard of ``grads`` match element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from shardfold.plan.box import Box
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import Axes, Layout, Sizes

__all__ = [
    "ALIGN_BYTES",
    "SegmentSpec",
    "Slot",
    "SlotRange",
    "UnitSpec",
    "enclosing",
    "pack",
    "shard_index",
    "shard_range",
]

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
    a pipeline that have it, where there are several.
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

    def dtype_for(self, what: str, layout: Layout) -> str:
        """The dtype of ``grads``, ``master``, ``moments``, or for ``reduce`` of the buffer that feeds it, of this
        segment under a bound ``layout``."""
        table = self.table_or(layout)
        return self.dtype if self.own else table.buffer if what == "reduce" else getattr(table, what).dtype

    def format_for(self, what: str, layout: Layout) -> str:
        """As what ``gather``, ``reduce`` or ``grads`` of this segment travel under a bound ``layout``; ``grads``: sums
        that are summed on, as they rest; ``buffer``: what gradients wait in until they travel; ``held``: what forward
        has held, which was rounded to blocks when it came, and is not once more."""
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
