"""HOW MUCH may stay: one mode per unit, so that the bytes on the device stay in a budget and the time is the least.

Between forward and backward, bytes come and go like a stack: what a unit keeps stays until its backward has passed,
and by then what later units kept is gone. So the most that is there at once is

    max( all that is kept,
         at each unit: what it and all earlier ones keep + what its own backward brings back meanwhile )

A knapsack whose items are added in the order of forward finds the plan of least time: of two ways to come to a unit,
the one that keeps more and takes longer is dropped (a Pareto front), so the answer is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

__all__ = ["Item", "ModeOption", "choose", "peak", "smallest"]

FRONT = 4000
"""Partial plans that are followed at once; more are thinned by bytes, evenly."""


class ModeOption(NamedTuple):
    """A mode of a unit.

    Attributes:
        mode: its name.
        kept: bytes on the device from the unit's forward to its backward.
        back: bytes beside these while its backward runs (and, of what is moved out, its forward).
        moved: those of them that come back one unit ahead, while the one behind runs backward.
        ms: milliseconds that it takes.
    """

    mode: str
    kept: int
    back: int
    moved: int
    ms: float


class Item(NamedTuple):
    """A unit, in the order of forward; ``fixed`` bytes stay beside it from its forward to its backward anyway."""

    name: str
    fixed: int
    options: tuple[ModeOption, ...]


class _Partial(NamedTuple):
    """A plan for the first units: ``ahead`` is ``moved`` of the last of them that moves anything."""

    kept: int
    ms: float
    ahead: int
    before: _Partial | None
    option: ModeOption | None


def peak(items: Sequence[Item], plan: Sequence[ModeOption], after: int = 0, *, repeated: bool = False) -> int:
    """The most bytes on the device at once under a plan.

    Args:
        items: in the order of forward.
        plan: an option of each.
        after: bytes that stay from behind the last unit until backward has begun.
        repeated: units run several times before their backward, so that nothing of them is known to be gone in time.
    """
    kept = ahead = most = 0
    for item, option in zip(items, plan, strict=True):
        kept += item.fixed + option.kept
        most = max(most, kept + option.back + ahead)
        ahead = option.moved or ahead
    if repeated:
        kept += after
        most = kept + max((o.back for o in plan), default=0) + max((o.moved for o in plan), default=0)
        return most
    return max(most, kept + after)


def choose(items: Sequence[Item], budget: int, after: int = 0, *, repeated: bool = False) -> list[ModeOption] | None:
    """The plan that takes the least time of those whose :func:`peak` is in the budget; None if there is none."""
    if not repeated:
        return _fill(items, budget, after)
    plans: list[list[ModeOption]] = []
    every = [option for item in items for option in item.options]
    for back, moved in product({o.back for o in every}, {o.moved for o in every}):
        left = [
            (item, [o for o in item.options if o.back <= back and o.moved <= moved]) for item in items
        ]  # kept is all that counts beside the largest of each
        bare = [item._replace(options=tuple(o._replace(back=0, moved=0) for o in options)) for item, options in left]
        if all(options for _, options in left) and (found := _fill(bare, budget - back - moved, after)) is not None:
            modes = [{o.mode: o for o in options} for _, options in left]
            plans.append([known[o.mode] for known, o in zip(modes, found, strict=True)])
    return min(plans, key=lambda plan: sum(o.ms for o in plan), default=[] if not items and after <= budget else None)


def smallest(items: Sequence[Item], after: int = 0, *, repeated: bool = False) -> list[ModeOption]:
    """The plan whose peak is the least."""
    high = peak(items, [item.options[0] for item in items], after, repeated=repeated)
    low = -1  # nothing keeps that
    while high - low > 1:
        middle = (low + high) // 2
        found = choose(items, middle, after, repeated=repeated)
        low, high = (middle, high) if found is None else (low, peak(items, found, after, repeated=repeated))
    found = choose(items, high, after, repeated=repeated)
    assert found is not None
    return found


def _fill(items: Sequence[Item], budget: int, after: int) -> list[ModeOption] | None:
    front = [_Partial(0, 0.0, 0, None, None)]
    for item in items:
        made: list[_Partial] = []
        for partial in front:
            for option in item.options:
                kept = partial.kept + item.fixed + option.kept
                if kept + option.back + partial.ahead <= budget:
                    ahead = option.moved or partial.ahead
                    made.append(_Partial(kept, partial.ms + option.ms, ahead, partial, option))
        front = _best(made, budget)
    fits = [partial for partial in front if partial.kept + after <= budget]
    if not fits:
        return None
    chosen: Any = min(fits, key=lambda partial: (partial.ms, partial.kept))
    plan: list[ModeOption] = []
    while chosen.option is not None:
        plan.append(chosen.option)
        chosen = chosen.before
    return plan[::-1]


def _best(made: list[_Partial], budget: int) -> list[_Partial]:
    """Those that no other beats in bytes kept, bytes ahead and time at once."""
    fastest: dict[int, float] = {}  # by ``ahead``, of those that keep less
    front: list[_Partial] = []
    for partial in sorted(made, key=lambda p: (p.kept, p.ms, p.ahead)):
        if all(ahead > partial.ahead or ms > partial.ms for ahead, ms in fastest.items()):
            fastest[partial.ahead] = partial.ms
            front.append(partial)
    if len(front) <= FRONT:
        return front
    step = budget // FRONT + 1  # the one that keeps the least of each step: what comes later fits behind it too
    return list({(p.kept // step, p.ahead): p for p in reversed(front)}.values())[::-1]
