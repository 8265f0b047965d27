"""WHICH units keep the optimizer's states on the device, where a table lets a part of them rest in a slower tier.

The host updates while the device computes nothing, but for the units whose gradients are there early and whose
parameters are needed late: their copies hide behind the backward of the others, and behind the forward of the next
step. For the units that forward runs first neither does: backward gives their gradients last, so the copy down is
waited for by itself, and the next forward needs their parameters first. So those stay, the root before all, whose
gradients are complete when backward is over (DeepSpeed's "twin-flow" takes parameters in any order; SuperOffload, arXiv
2509.21271, retains the last buckets of backward for the same reason).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardfold.plan.layout import ITEMSIZE, Layout
from shardfold.plan.placement import UnitSpec

__all__ = ["staying", "with_staying"]


def with_staying(units: Sequence[UnitSpec], layout: Layout, near: Callable[[Layout], Layout]) -> list[UnitSpec]:
    """The units under a bound ``layout``, those that stay with tables of their own: what ``near`` gives for each."""
    stay = staying(units, layout)

    def changed(unit: UnitSpec) -> UnitSpec:
        return replace(unit, segments=tuple(replace(s, table=near(s.table_or(layout))) for s in unit.segments))

    return [changed(unit) if unit.name in stay else unit for unit in units]


def staying(units: Sequence[UnitSpec], layout: Layout) -> set[str]:
    """Names of the units, which are in the order of their forward, whose states stay: as many as fit into what
    ``layout.share`` leaves, roots first, then in that order."""
    sizes = {unit.name: _num_bytes(unit, layout) for unit in units}
    moved = sum(sizes.values())
    least = layout.share * moved
    found: set[str] = set()
    for unit in sorted(units, key=lambda unit: not unit.root):
        if sizes[unit.name] and moved - sizes[unit.name] >= least:
            found.add(unit.name)
            moved -= sizes[unit.name]
    return found


def _num_bytes(unit: UnitSpec, layout: Layout) -> int:
    """In proportion to its optimizer's states."""
    return sum(s.length * ITEMSIZE[s.dtype_for("master", layout)] for s in unit.segments if s.trainable)
