"""What every rank has to have alike of a model's units, as texts that ranks compare before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable

from shardfold.comm.agreement import Claim
from shardfold.plan.axes import Mesh
from shardfold.plan.placement import Box, SegmentSpec, Slot, UnitSpec

__all__ = ["PARTS", "SLICES", "UNEQUAL", "parts", "slices"]

PARTS = "the model's parameters, the units or the optimizer's groups"

SLICES = "the slices of parameters"
HINT = (
    "ranks that differ on axes of data have the same slice of a parameter, and only ranks along an axis of role "
    "tensor or expert, as in parallel={'tensor': 2}, may have others"
)

UNEQUAL = (
    "; the shape of a slice is here that of the whole, in which dim= takes the parts of all ranks to be equal: where "
    "they are not, mark_slice() takes whole= and start= in place of dim="
)


def parts(units: Iterable[UnitSpec | None]) -> list[str]:
    """A text for each parameter, in order, equal on ranks that have the same; of a slice all but which one it is."""
    return [
        f"{slot.name!r} of shape {slot.whole}{_which(slot) if not segment.distinct else ''} and dtype {segment.dtype} "
        f"in {unit.name}{_more(segment)}"
        for unit in units
        if unit is not None
        for segment in unit.segments
        for slot in segment.slots
    ]


def slices(units: Iterable[UnitSpec | None], mesh: Mesh) -> Claim:
    """Which slice this rank has of each parameter that it has a slice of: the same on ranks that differ on axes of data
    only."""
    texts = [
        f"{slot.name!r} of shape {slot.whole}{_which(slot)}"
        for unit in units
        if unit is not None
        for segment in unit.segments
        for slot in segment.slots
        if slot.box is not None and not set(segment.distinct) & {*mesh.reading}  # those exchange what they read
    ]
    return Claim(texts, (*mesh.rare, *mesh.reading), HINT)


def _which(slot: Slot) -> str:
    """Which box of the whole parameter lies here, in words; empty: all of it."""
    return "" if slot.box is None else f" in {_ranges(slot.box)}"


def _ranges(box: Box) -> str:
    """As an index of Python's: ``[4:8, 0:6]``."""
    return f"[{', '.join(f'{at}:{at + size}' for at, size in zip(box.starts, box.sizes, strict=True))}]"


def _more(segment: SegmentSpec) -> str:
    """What else its parameters have to share."""
    more = f", group {segment.group}" if segment.trainable else ", frozen"
    more += ", in its own dtype" if segment.own else ""
    more += f", as {segment.codes}" if segment.codes else ""
    more += f", distinct on {'+'.join(segment.distinct)}" if segment.distinct else ""
    return more + (f", under {'; '.join(segment.table.told())}" if segment.table is not None else "")
