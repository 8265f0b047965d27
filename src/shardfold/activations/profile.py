"""What the passes that measure say of units: bytes that each mode keeps, and times.

A storage is known by its address, which no other has as long as there is a weak reference to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from shardfold.sharding.autograd import tensors_in

__all__ = ["Bytes", "MeasuredForward", "Saved", "Spot", "covers", "milliseconds", "numel", "size_of", "survey"]

Bytes = dict[int, int]  # by storage


class SpotBytes(NamedTuple):
    """Bytes of a spot under a mode, as of :class:`shardfold.activations._knapsack.Option`."""

    kept: int
    back: int
    moved: int


NOTHING = SpotBytes(0, 0, 0)


@dataclass(eq=False)
class Spot:
    """A module whose mode is planned.

    Attributes:
        name: of the unit, or the module's path.
        kind: its class: times of modules of one class that keep the same bytes are taken together.
        modes: those that may be chosen; the first is in force while bytes are measured.
        smallest: bytes of the smallest tensor that is moved.
        results: operations whose results ``select`` keeps.
        rate: milliseconds per byte, out and back, of a mode that moves, and whether that runs beside the computation.
        mode: in force now.
    """

    name: str
    kind: type
    modes: tuple[str, ...]
    smallest: int
    results: frozenset[Any]
    rate: Callable[[str], tuple[float, float, bool]]
    mode: str = ""
    forward: dict[str, float] = field(default_factory=dict[str, float])  # ms per byte of input, the least
    again: dict[str, float] = field(default_factory=dict[str, float])
    place: int = -1  # in the order of forward; -1: not seen yet
    fixed: int = 0
    inputs: int = 0
    kept: dict[str, SpotBytes] = field(default_factory=dict[str, SpotBytes])
    once: bool = True  # what it saved was asked for by one backward, and no result was changed in place

    @property
    def group(self) -> Any:
        """Spots of one group do the same work, so that the best of their times holds for all."""
        return self.kind, self.modes, self.inputs, tuple(sorted(self.kept.items()))

    @property
    def numbers(self) -> list[float]:
        """What ranks take the largest of."""
        found: list[float] = [self.place, self.fixed, self.inputs]
        for mode in self.modes:
            found += [*self.kept.get(mode, NOTHING), self.forward.get(mode, -1.0), self.again.get(mode, -1.0)]
        return [*found, not self.once]

    def enter(self, mode: str | None = None) -> None:
        """This mode is in force from now on; None: that of measuring bytes."""
        self.mode = mode or self.modes[0]

    def refuse_once(self) -> None:
        """A result was changed in place, or what it saved is there for another backward."""
        self.once = False

    def grow(self, place: int, fixed: int, inputs: int, kept: Mapping[str, SpotBytes]) -> None:
        """A pass says so of it: the largest of each number counts."""
        self.place, self.fixed, self.inputs = max(self.place, place), max(self.fixed, fixed), max(self.inputs, inputs)
        for mode, parts in kept.items():
            self.kept[mode] = SpotBytes(*map(max, self.kept.get(mode, NOTHING), parts))

    def take(self, numbers: Sequence[float]) -> None:
        """Takes the :attr:`numbers` of all ranks."""
        self.place, self.fixed, self.inputs = (int(number) for number in numbers[:3])
        for i, mode in enumerate(self.modes):
            kept, back, moved, forward, again = numbers[3 + 5 * i : 8 + 5 * i]
            self.kept[mode] = SpotBytes(int(kept), int(back), int(moved))
            for times, value in ((self.forward, forward), (self.again, again)):
                if value >= 0:
                    times[mode] = value
        self.once = not numbers[-1]


class MeasuredForward:
    """One forward of a spot, while bytes are measured. ``token`` lives as long as what it saved."""

    def __init__(self, spot: Spot, size: int) -> None:
        self.spot, self.size = spot, size
        self.inputs: Bytes = {}
        self.saved: Bytes = {}
        self.results: Bytes = {}
        self.token: Callable[[], Any] = lambda: None

    @property
    def every(self) -> Bytes:
        return self.inputs | self.saved | self.results


class Saved(NamedTuple):
    """A storage that is saved outside of spots; ``token`` gives None when nothing of that forward is held any more."""

    key: int
    num_bytes: int
    token: Callable[[], Any]

    @property
    def every(self) -> Bytes:
        return {self.key: self.num_bytes}


def survey(events: Sequence[MeasuredForward | Saved]) -> tuple[int, bool]:
    """Tells spots what a pass says of them. A storage that one run alone has is its mode's; one that several have, or
    that what lies between spots saves, stays anyway, from the first of them on.

    Args:
        events: what was saved, in order.

    Returns:
        Bytes that are saved behind the last spot, and whether any spot ran several times.
    """
    events = _without_inputs(events)
    runs = [event for event in events if isinstance(event, MeasuredForward)]
    holders: dict[int, int] = {}
    for event in events:
        for key in event.every:
            holders[key] = holders.get(key, 0) + (1 if isinstance(event, MeasuredForward) else 2)
    met: set[int] = set()
    fixed = 0
    found: dict[Spot, tuple[int, int, dict[str, SpotBytes]]] = {}
    for event in events:
        every = event.every
        fixed += sum(n for key, n in every.items() if holders[key] > 1 and key not in met)
        met |= every.keys()
        if isinstance(event, MeasuredForward):
            before, inputs, kept = found.get(event.spot, (0, 0, {}))
            for mode, parts in _modes(event, {key for key in every if holders[key] == 1}).items():
                old = kept.get(mode, NOTHING)
                kept[mode] = SpotBytes(old.kept + parts.kept, max(old.back, parts.back), max(old.moved, parts.moved))
            found[event.spot] = before + fixed, inputs + event.size, kept
            fixed = 0
    for place, (spot, (before, inputs, kept)) in enumerate(found.items()):
        spot.grow(place, before, inputs, kept)
        if any(run.token() is not None for run in runs if run.spot is spot):  # autograd has not given it back by now
            spot.refuse_once()
    return fixed, len(runs) > len(found)


def size_of(inputs: Any) -> int:
    return max(1, sum(tensor.nbytes for tensor in tensors_in(inputs)))


def numel(shapes: Any) -> int:
    return sum(prod(shape) for _, shape in shapes)


def _without_inputs(events: Sequence[MeasuredForward | Saved]) -> list[MeasuredForward | Saved]:
    """Without what a checkpoint saves as it begins: the inputs of the run that follows."""
    found: list[MeasuredForward | Saved] = []
    for event in events:
        if isinstance(event, MeasuredForward) and event.spot.modes[0] in ("recompute", "select"):
            inputs = set(event.inputs)
            while found and isinstance(last := found[-1], Saved) and last.key in inputs:
                inputs.remove(last.key)
                found.pop()
        found.append(event)
    return found


def covers(known: Sequence[Any], shapes: Sequence[Any]) -> bool:
    """Whether forwards with these inputs take no more than those that were measured."""
    return len(known) >= len(shapes) and all(
        _fits(small, large) for small, large in zip(shapes, known[len(known) - len(shapes) :], strict=True)
    )


def _fits(small: Any, large: Any) -> bool:
    return len(small) == len(large) and all(
        one[0] == other[0]
        and len(one[1]) == len(other[1])
        and all(a <= b for a, b in zip(one[1], other[1], strict=True))
        for one, other in zip(small, large, strict=True)
    )


def _modes(run: MeasuredForward, own: set[int]) -> dict[str, SpotBytes]:
    """What a run keeps, what comes back beside it, and what of that is moved, under each mode."""
    saved, inputs, results = run.saved, run.inputs, run.results

    def size(keys: Any, of: Bytes) -> int:
        return sum(of[key] for key in keys)

    moved = {key for key in own & saved.keys() if saved[key] >= run.spot.smallest}
    found = {
        "keep": SpotBytes(size(own & saved.keys(), saved), 0, 0),
        "recompute": SpotBytes(size(own & inputs.keys(), inputs), size(saved.keys() - inputs.keys(), saved), 0),
        "select": SpotBytes(
            size(own & (inputs.keys() | results.keys()), inputs | results),
            size(saved.keys() - inputs.keys() - results.keys(), saved),
            0,
        ),
    }
    for mode in ("host", "disk"):
        found[mode] = SpotBytes(size(own & saved.keys() - moved, saved), size(moved, saved), size(moved, saved))
    return {mode: found[mode] for mode in run.spot.modes}


def milliseconds(spot: Spot, group: Sequence[Spot], mode: str) -> float:
    """Milliseconds of a spot's forward under a mode, with what it takes to have what backward needs."""

    def least(times: str, mode: str) -> float:
        return min((getattr(s, times)[mode] for s in group if mode in getattr(s, times)), default=0.0)

    plain = least("forward", "keep") or least("forward", spot.modes[0])
    if mode not in ("host", "disk"):
        # What is kept does nothing that others do not: where that seems slower, something else ran meanwhile.
        those = spot.modes if mode == "keep" else (mode,)
        sums = [least("forward", one) + least("again", one) for one in those if least("forward", one)]
        return min(sums, default=plain) * spot.inputs
    out, back, beside = spot.rate(mode)
    moved, forward = spot.kept[mode][2], plain * spot.inputs
    if not beside:
        return forward + (out + back) * moved
    return forward + max(0.0, out * moved - forward) + max(0.0, back * moved - 2 * forward)
