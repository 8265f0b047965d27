"""Bytes over time: a trace and a program, walked together as the engine walks them.

Events of the trace move a position through the program's sections, as the hooks' events move the engine's tracks: what
lies before the marker that an event reaches has been done by then. Each operation says by its operands what begins to
live and what is given back; what forward and backward hold themselves is in the trace. The most of the sum is the peak,
and the operation, or the part of the model, at which it is reached is known with it.

    at rest        states by tier                                         plan.cost.resting_bytes
    in a step      what operations hold                                   plan.lifetimes
    model          activations and temporaries of forward and backward    the trace
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardfold.plan.bind import Bound
from shardfold.plan.cost import regions_in, resting_bytes
from shardfold.plan.layout import ITEMSIZE, Tier
from shardfold.plan.lifetimes import CPU, Behaviour, Lifetimes, room_bytes
from shardfold.plan.placement import SegmentSpec
from shardfold.plan.program import BESIDE, ROUND, Op
from shardfold.plan.walk import Part, Walk, of_part
from shardfold.planner.live import coding_bytes
from shardfold.planner.trace import SMALL, Event, StagePass, Trace
from shardfold.tiers._slabs import pinned_bytes

__all__ = ["MemoryPlan", "Point", "Setting", "plan_memory", "words_of"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one rank runs.

    Attributes:
        bound: the table, the units, the mesh and the program.
        micro_batches: of a step.
        clip: the norm of the gradients is taken.
        kept: bytes that the optimizer keeps of a segment, where it is no number of moments of each element.
        beside: bytes of a second model at rest, by tier.
    """

    bound: Bound
    micro_batches: int = 1
    clip: bool = False
    behaviour: Behaviour = CPU
    kept: Callable[[SegmentSpec], float] | None = None
    beside: Mapping[Tier, float] = field(default_factory=dict)

    @property
    def adopts(self) -> bool:
        """Whether the tensors that autograd makes are kept as gradients, where they have the dtype of these."""
        return self.bound.mesh.size == 1 and not self.behaviour.streams and self.micro_batches == 1

    def resting(self) -> dict[tuple[str, Tier], float]:
        """Bytes at rest by state and tier; gradients that are adopted are not at rest. ``slabs``: what is pinned
        besides states in host memory, as slabs of it are powers of 2; ``second model``: all of one that is not
        trained."""
        bound = self.bound
        moments, kept = bound.num_moments, self.kept
        found = dict(resting_bytes(bound.layout, bound.units, bound.mesh, num_moments=moments, padded=True, kept=kept))
        if self.adopts:
            for unit in bound.units:
                if not unit.table_or(bound.layout).buffered:
                    for segment in unit.segments:
                        dtype = segment.dtype_for("grads", bound.layout)
                        size = ITEMSIZE[dtype]
                        if segment.trainable and dtype == segment.dtype:
                            large = sum(s.numel * size for s in segment.slots if s.numel * size > SMALL)
                            found["grads", segment.table_or(bound.layout).grads.tier] -= large
        found |= {("second model", tier): nbytes for tier, nbytes in self.beside.items() if nbytes}
        if self.behaviour.streams:
            there = regions_in(Tier.HOST, bound.layout, bound.units, bound.mesh, bound.num_moments).values()
            regions = [nbytes for each in there for nbytes in each]
            if besides := pinned_bytes(regions) - sum(regions):
                found["slabs", Tier.HOST] = besides
        return found


class Point(NamedTuple):
    """A moment of a step.

    Attributes:
        engine: bytes of the engine's that live then, on the device, besides those at rest.
        event: number of the trace's event before which, or at which, it is; -1: in the optimizer's step.
        at: whether it is at the event; else the most before it counts.
        section: of the program.
        terms: of ``engine``.
        part: the kind of the micro-batch, ``backward`` or ``last``, or ``step``, or ``round`` of outer steps.
        op: the operation, where it is one.
        about: the event, where it is one.
    """

    engine: float
    event: int
    at: bool
    section: str
    terms: Mapping[str, float]
    part: str = ""
    op: Op | None = None
    about: Event | None = None

    @property
    def where(self) -> str:
        """Section and operation, or part of the model."""
        if self.op is not None or self.about is None:
            return f"{self.section}: {self.op}"
        return f"{self.section}: {(self.about.unit or self.about.kind) if self.at else words_of(self.about)}"


class Line(NamedTuple):
    """The most bytes at once as samples of a micro-batch grow: the largest of these lines.

    Attributes:
        slopes: bytes for each sample.
        starts: bytes of none.
    """

    slopes: np.ndarray
    starts: np.ndarray

    def at(self, samples: np.ndarray) -> np.ndarray:
        """The bytes of so many."""
        return (self.starts[:, None] + self.slopes[:, None] * samples[None, :]).max(axis=0)

    def largest(self, budget: float) -> float:
        """The most samples within the budget, as a number that need not be whole; inf: however many."""
        room = budget - self.starts
        if (room < 0).any():
            return 0.0
        grows = self.slopes > 0
        return float((room[grows] / self.slopes[grows]).min()) if grows.any() else float("inf")


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank over a step.

    Attributes:
        resting: at rest, by state and tier.
        points: in order.
        trace: of the model.
        fixed: bytes of buffers, of the batch, of the transport and of libraries.
        places: of the points: bytes of the engine's, event, and whether its level counts.
    """

    resting: Mapping[tuple[str, Tier], float]
    points: Sequence[Point]
    trace: Trace
    fixed: Mapping[str, float]
    places: tuple[np.ndarray, np.ndarray, np.ndarray]

    def of(self, trace: Trace) -> MemoryPlan:
        """The same walk, with what another micro-batch of the same events holds."""
        return replace(self, trace=trace, fixed={**self.fixed, "batch": trace.batch})

    @property
    def zeros(self) -> str:
        """Why the model ran on zeros with memory; empty: it ran without."""
        return self.trace.zeros

    @cached_property
    def base(self) -> float:
        """Bytes of the device that are there all the time."""
        return sum(n for (_, tier), n in self.resting.items() if tier is Tier.DEVICE) + sum(self.fixed.values())

    @property
    def rest(self) -> float:
        """Those of them that are at rest, between steps: states, buffers, the transport's room. A micro-batch and what
        libraries take while they compute come on top in a step."""
        return self.base - sum(self.fixed.get(name, 0.0) for name in ("batch", "workspace"))

    def total(self, point: Point) -> float:
        """Bytes of the device at a point."""
        return self.base + point.engine + self.model(point)

    def model(self, point: Point) -> float:
        """What forward and backward hold at it."""
        if point.event < 0:
            return self.trace.events[-1].level
        event = self.trace.events[point.event]
        return event.level if point.at else event.peak

    @cached_property
    def totals(self) -> np.ndarray:
        """Bytes of the device at each point."""
        engine, event, level = self.places
        return self.base + engine + _held(self.trace, event, level)

    @cached_property
    def top(self) -> Point:
        """Where the most bytes of the device live."""
        return self.points[int(self.totals.argmax())]

    def line(self, few: Trace, more: Trace, samples: tuple[int, int]) -> Line:
        """The peak by samples of a micro-batch, through traces of two numbers of them."""
        engine, event, level = self.places
        counts, *tops = few.tops_with(more)
        first, before = (counts.cumsum() - counts)[event[~level]], counts[event[~level]]
        which = np.repeat(first - before.cumsum() + before, before) + np.arange(before.sum())
        low, high = (
            np.concatenate((trace.levels[1][event[level]], values[which])) + trace.batch
            for trace, values in zip((few, more), tops, strict=True)
        )
        engine = np.concatenate((engine[level], np.repeat(engine[~level], before)))
        slopes = (high - low) / (samples[1] - samples[0])
        starts = self.base - self.trace.batch + engine + low - samples[0] * slopes
        order = np.lexsort((-starts, -slopes))  # of lines that are never the largest, none is needed
        slopes, starts = slopes[order], starts[order]
        most = np.concatenate(([-np.inf], np.maximum.accumulate(starts)[:-1]))
        return Line(slopes[starts > most], starts[starts > most])

    @property
    def peak(self) -> float:
        """The most bytes of the device at once."""
        return self.total(self.top)

    @property
    def tiers(self) -> dict[Tier, float]:
        """Bytes in slower tiers: states at rest, and the most of activations."""
        found = dict(self.trace.away)
        for (_, tier), n in self.resting.items():
            if tier is not Tier.DEVICE:
                found[tier] = found.get(tier, 0.0) + n
        return found

    @property
    def terms(self) -> dict[str, float]:
        """What the peak is made of, on the device."""
        found = {state: n for (state, tier), n in self.resting.items() if tier is Tier.DEVICE}
        found |= {name: n for name, n in self.fixed.items() if n}
        found |= {name: n for name, n in self.top.terms.items() if n}
        held = self.model(self.top)
        number = self.top.event
        before = 0.0 if number < 0 else self.trace.events[max(number - 1, 0)].level
        found["activations"] = min(held, before) if number >= 0 else held
        found["temporaries"] = held - found["activations"]
        return {name: n for name, n in found.items() if n}


def plan_memory(setting: Setting, trace: Trace) -> MemoryPlan:
    """Bytes over a step of ``trace`` under a setting."""
    points = list(_Step(setting, trace.joined(setting.bound.units).events, trace.passes).points())
    fixed = {
        "buffers": trace.buffers,
        "batch": trace.batch,
        "transport's room": room_bytes(setting.bound, setting.behaviour),
        "workspace": setting.behaviour.workspace,
    }
    places = (
        np.array([point.engine for point in points], dtype=float),
        np.array([point.event for point in points]),
        np.array([point.at or point.event < 0 for point in points]),
    )
    return MemoryPlan(setting.resting(), points, trace, fixed, places)


def _held(trace: Trace, event: np.ndarray, level: np.ndarray) -> np.ndarray:
    """What forward and backward hold at points."""
    peaks, levels = trace.levels
    return np.where(level, levels[event], peaks[event])


class _Step:
    """One step of one rank: events of a trace along the program, as hooks move the engine."""

    def __init__(self, setting: Setting, events: Sequence[Event], passes: Sequence[StagePass] = ()) -> None:
        self._setting, self._events, self._passes = setting, events, passes
        self._layout, self._units, self._part = setting.bound.layout, setting.bound.by_name, ""
        self._lifetimes = Lifetimes(
            setting.bound, setting.behaviour, clip=setting.clip, adopts=setting.adopts, coding=coding_bytes
        )
        self._split = {
            name: any(segment.comes_and_goes(self._layout) for segment in unit.segments)
            for name, unit in self._units.items()
        }

    # -- a step

    def points(self) -> Iterator[Point]:
        self._part = "round"  # that was behind the step before: what it gave back may be there still
        for section in ROUND:
            for op in self._setting.bound.program.section(section):
                yield from self._do(op, -1, section)
        last, forward = self._setting.micro_batches - 1, "first" if self._setting.bound.program.first else "forward"
        begun: set[int] = set()
        for section, begin, end, lane, part in self._passes:  # of stages
            if section == "forward" and lane.stage not in begun:
                section = forward
                begun.add(lane.stage)
            yield from self._pass(section, section, range(begin, end), part)
        for number in () if self._passes else range(min(last, 1), -1, -1):
            back = "last" if number == 0 else "backward"
            yield from self._pass(forward, back, range(len(self._events)))
            forward = "forward"
        self._part = "step"
        for section in ("arrive", "step", "beside", "behind"):
            for op in self._setting.bound.program.section(section):
                yield from self._do(op, -1, section)

    def _pass(self, forward: str, backward: str, numbers: range, part: Part | None = None) -> Iterator[Point]:
        """Events along the section ``forward``, and from where backward begins along ``backward``; what of them is for
        a ``part`` of the units."""
        program, self._part = self._setting.bound.program, backward
        sections = {name: program.section(name) for name in (forward, backward)}
        walks = {
            name: Walk(of_part(name, ops, program.backward, part), waits=self._setting.bound.waits)
            for name, ops in sections.items()
        }
        moves = {name: any(op.verb in BESIDE for op in ops) for name, ops in sections.items()}
        section, walk = forward, walks[forward]
        if moves[forward] and forward in ("first", "forward"):
            yield from self._roots("F", walk, numbers.start, forward)
        for number in numbers:
            event = self._events[number]
            yield self._point(number, False, section, about=event)
            if event.kind == "begin_backward":
                section, walk = backward, walks[backward]
            if event.kind == "gradient":
                self._accept(event)
            if moves[section]:
                if event.kind == "begin_backward" and section not in ("weights", "last_weights"):
                    yield from self._roots("B", walk, number, section)
                yield from self._all(walk, self._due(event, walk), number, section)
            if event.kind == "end":
                self._lifetimes.forget_spares()
            if moves[section]:
                yield self._point(number, True, section, about=event)

    def _due(self, event: Event, walk: Walk) -> range:
        """Numbers of the operations that an event brings about."""
        name, unit = event.unit, self._units.get(event.unit)
        if event.kind in ("enter", "enter_backward") and unit is not None and not unit.root and self._split[name]:
            verb = "F" if event.kind == "enter" else "B"
            if not walk.at_marker(verb, name):
                return walk.reach(verb, name)
        elif event.kind == "complete" and unit is not None:
            return walk.complete(name)
        elif event.kind in ("end_forward", "end"):
            return walk.rest()
        return range(walk.position, walk.position)

    def _roots(self, verb: str, walk: Walk, number: int, section: str) -> Iterator[Point]:
        """What is held through a pass is there before the others."""
        for unit in self._setting.bound.units:
            if unit.root:
                yield from self._all(walk, walk.reach(verb, unit.name), number, section)

    def _all(self, walk: Walk, due: range, number: int, section: str) -> Iterator[Point]:
        for i in due:
            yield from self._do(walk.ops[i], number, section)
        walk.move_to(due.stop)

    def _point(
        self,
        number: int,
        at: bool,
        section: str,
        more: float = 0.0,
        what: str = "",
        op: Op | None = None,
        about: Event | None = None,
    ) -> Point:
        terms = self._lifetimes.terms
        if more:
            terms = {**terms, what: terms.get(what, 0.0) + more}
        return Point(self._lifetimes.total + more, number, at, section, terms, self._part, op, about)

    def _do(self, op: Op, number: int, section: str) -> Iterator[Point]:
        more, what = self._lifetimes.begin(op)
        yield self._point(number, True, section, more, what, op)
        self._lifetimes.end(op)

    def _accept(self, event: Event) -> None:
        unit = self._units[event.unit]
        if unit.table_or(self._layout).buffered:
            self._lifetimes.buffer(unit)
        elif self._setting.adopts and event.size > SMALL:
            segment = next(s for s in unit.segments if any(slot.name == event.slot for slot in s.slots))
            if segment.dtype_for("grads", self._layout) == segment.dtype:
                self._lifetimes.hold(unit.name, "gradients", self._lifetimes.held(unit.name, "gradients") + event.size)


def words_of(event: Event) -> str:
    """What runs until an event, in words."""
    return _WORDS[event.kind].format(event.unit)


_WORDS = {
    "begin": "before the model",
    "enter": "before {}",
    "leave": "in {}",
    "end_forward": "behind the last unit",
    "begin_backward": "the loss",
    "sent": "behind the last unit of the stage",
    "inputs": "between the parts of a backward",
    "end": "the end",
    "enter_backward": "before the backward of {}",
    "gradient": "the backward of {}",
    "complete": "the backward of {}",
}
