"""Bytes over time: a trace and a program, walked together as the engine walks them.

Events of the trace move a position through the program's sections, as the hooks' events move the engine's tracks: what
lies before the marker that an event reaches has been done by then. Each operation says by its operands what begins to
live and what is given back; what forward and backward hold themselves is in the trace. The most of the sum is the peak,
and the operation, or the part of the model, at which it is reached is known with it.

    at rest        params held grads master moments format, by tier     plan.cost.resting_bytes
    gathered       a unit's parameters, from the first of CAST READ FILL ALL_GATHER to FREE
    gradients      the buffer of a unit, from GRADS, or its first gradient, to DROP
    transport      what a reduction needs besides, to its WAIT; payloads of formats
    spare          buffers that wait for the next taker, where the allocator of the device does not do that itself
    tier           a state on its way to its update, from FETCH to STORE
    update         what an update needs besides
    outer          gradients of outer steps, from DIFF to MIX, and their sums, from PUSH to OUTER
    model          activations and temporaries of forward and backward, by the trace
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from shardfold.plan.axes import Mesh
from shardfold.plan.cost import encoded_bytes, fetched_bytes, is_encoded, resting_bytes, summed_bytes
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import DATA_AXES, ITEMSIZE, Layout, Tier
from shardfold.plan.part import Part, of_part
from shardfold.plan.placement import UnitSpec
from shardfold.plan.program import COLLECTIVES, MARKERS, MOVES, REDUCTIONS, ROUND, SUMS, Op, Program
from shardfold.planner.coding import coding_bytes
from shardfold.planner.trace import SMALL, Event, StagePass, Trace

__all__ = ["CPU", "GPU", "Behaviour", "MemoryPlan", "Point", "Setting", "plan_memory", "words_of"]

BLOCK = 256 * 1024  # of the near transport
WORKSPACE = 16 * 1024 * 1024
"""Of cuBLAS beyond what it keeps: on an H200 with PyTorch 2.11, peaks inside of products were 17 to 30 MiB higher than
all tensors."""
CPU_BLOCK = 64 * 1024
DEVICE_BLOCK = 64 * 1024 * 1024


@dataclass(frozen=True)
class Behaviour:
    """How a device and its transport use memory.

    Attributes:
        streams: the device has streams: its allocator keeps what is given back, and collectives run beside.
        transport: ``near`` (ranks read each other's memory), ``gloo`` or ``nccl``.
        workspace: bytes that libraries take while they compute products.
    """

    streams: bool
    transport: str
    workspace: float = 0.0

    def temporary(self, num_bytes: float, ranks: int) -> float:
        """Bytes that a reduction of ``num_bytes`` holds besides, until its WAIT."""
        return {"near": 0.0, "gloo": num_bytes, "nccl": num_bytes / ranks}[self.transport]

    def room(self, ranks: int) -> float:
        """Bytes that the transport keeps for its sums."""
        return ranks * BLOCK if self.transport == "near" else 0.0

    @property
    def block(self) -> int:
        """Elements that one call of an update handles."""
        return DEVICE_BLOCK if self.streams else CPU_BLOCK


CPU = Behaviour(streams=False, transport="near")
GPU = Behaviour(streams=True, transport="nccl", workspace=WORKSPACE)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What one rank's engine binds.

    Attributes:
        layout: bound.
        units: laid out on the mesh.
        program: behind its passes.
        moments: that the optimizer keeps of each element.
        micro_batches: of a step.
        clip: the norm of the gradients is taken.
    """

    layout: Layout
    units: Sequence[UnitSpec]
    mesh: Mesh
    program: Program
    moments: int = 2
    micro_batches: int = 1
    clip: bool = False
    behaviour: Behaviour = CPU

    @cached_property
    def by_name(self) -> Mapping[str, UnitSpec]:
        return {unit.name: unit for unit in self.units}

    @property
    def adopts(self) -> bool:
        """Whether the tensors that autograd makes are kept as gradients, where they have the dtype of these."""
        return self.mesh.size == 1 and not self.behaviour.streams and self.micro_batches == 1

    def resting(self) -> dict[tuple[str, Tier], float]:
        """Bytes at rest by state and tier; gradients that are adopted are not at rest."""
        found = dict(resting_bytes(self.layout, self.units, self.mesh, num_moments=self.moments, padded=True))
        if self.adopts:
            for unit in self.units:
                if not unit.table_or(self.layout).buffered:
                    for segment in unit.segments:
                        dtype = segment.dtype_for("grads", self.layout)
                        size = ITEMSIZE[dtype]
                        if segment.trainable and dtype == segment.dtype:
                            large = sum(s.numel * size for s in segment.slots if s.numel * size > SMALL)
                            found["grads", segment.table_or(self.layout).grads.tier] -= large
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
    walk = _Walk(setting, trace.events, trace.passes)
    points = list(walk.step())
    sums = [op for op in setting.program.last if op.verb in REDUCTIONS and not _all_encoded(op, setting)]
    sums += [op for op in setting.program.outer_send if op.verb == "PUSH" and not _all_encoded(op, setting)]
    ranks = max((prod(setting.mesh[axis] for axis in op.axes) for op in sums), default=0)
    if "tensor" in setting.mesh and setting.mesh["tensor"] > 1:  # layers that ranks share sum what they give
        ranks = max(ranks, setting.mesh["tensor"])
    fixed = {
        "buffers": trace.buffers,
        "batch": trace.batch,
        "transport's room": setting.behaviour.room(ranks),
        "workspace": setting.behaviour.workspace,
    }
    places = (
        np.array([point.engine for point in points], dtype=float),
        np.array([point.event for point in points]),
        np.array([point.at or point.event < 0 for point in points]),
    )
    return MemoryPlan(setting.resting(), points, trace, fixed, places)


def _all_encoded(op: Op, setting: Setting) -> bool:
    """Whether all that a reduction sums travels in a format, so that the transport sums nothing."""
    segments, layout = op.moves(setting.by_name[op.unit]), setting.layout
    if op.verb == "PUSH":
        each = zip(segments, op.each(len(segments)), strict=True)
        return all(FORMATS[one.format].native != s.outer_dtype(layout) for s, one in each)
    return all(is_encoded(one, s, layout) for s, one in zip(segments, op.each(len(segments)), strict=True))


def _held(trace: Trace, event: np.ndarray, level: np.ndarray) -> np.ndarray:
    """What forward and backward hold at points."""
    peaks, levels = trace.levels
    return np.where(level, levels[event], peaks[event])


class _Track:
    """As the engine's: everything before ``position`` has been done."""

    def __init__(self, name: str, ops: Sequence[Op]) -> None:
        self.name, self.ops, self.position = name, ops, 0
        self._markers: dict[tuple[str, str], list[int]] = {}
        for i, op in enumerate(ops):
            if op.verb in MARKERS:
                self._markers.setdefault((op.verb, op.unit), []).append(i)

    def reach(self, verb: str, unit: str) -> Iterator[Op]:
        for i in self._markers.get((verb, unit), ()):
            if i >= self.position:
                yield from self._to(i + 1)
                return

    def ahead(self, verb: str, unit: str) -> bool:
        return any(i >= self.position for i in self._markers.get((verb, unit), ()))

    def at_marker(self, verb: str, unit: str) -> bool:
        return self.position > 0 and self.ops[self.position - 1][:2] == (verb, unit)

    def follow(self, verbs: Sequence[str]) -> Iterator[Op]:
        stop = self.position
        while stop < len(self.ops) and self.ops[stop].verb in verbs:
            stop += 1
        yield from self._to(stop)

    def finish(self) -> Iterator[Op]:
        yield from self._to(len(self.ops))

    def _to(self, stop: int) -> Iterator[Op]:
        start, self.position = self.position, stop
        yield from self.ops[start:stop]


class _Walk:
    """One step of one rank."""

    def __init__(self, setting: Setting, events: Sequence[Event], passes: Sequence[StagePass] = ()) -> None:
        self._setting, self._events, self._passes = setting, events, passes
        self._layout, self._mesh, self._units = setting.layout, setting.mesh, setting.by_name
        self._held: dict[tuple[str, str], float] = {}  # by unit and what it is
        self._terms: dict[str, float] = {}  # by what it is
        self._shown: dict[str, float] | None = None  # of the point before, if nothing has changed since
        self._sum = 0.0
        self._spares: dict[tuple[float, str], int] = {}
        self._taken: dict[tuple[str, str], list[tuple[float, str]]] = {}  # buffers that may be spares
        self._part = ""
        self._sums: dict[str, list[tuple[float, str]]] = {}  # by unit, what decodes its sums
        self._crossing: set[str] = set()  # units whose sums go between nodes
        self._decodes: dict[tuple[str, str], float] = {}  # temporaries of payloads that are under way
        self._split = {
            name: any(segment.table_or(self._layout).comes_and_goes for segment in unit.segments)
            for name, unit in self._units.items()
        }

    # -- a step

    def step(self) -> Iterator[Point]:
        self._part = "round"  # that was behind the step before: what it gave back may be there still
        for section in ROUND:
            for op in self._setting.program.section(section):
                yield from self._do(op, -1, section)
        last, forward = self._setting.micro_batches - 1, "first" if self._setting.program.first else "forward"
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
            for op in self._setting.program.section(section):
                yield from self._do(op, -1, section)

    def _pass(self, forward: str, backward: str, numbers: range, part: Part | None = None) -> Iterator[Point]:
        """Events along the section ``forward``, and from where backward begins along ``backward``; what of them is for
        a ``part`` of the units."""
        program, self._part = self._setting.program, backward
        sections = {name: program.section(name) for name in (forward, backward)}
        tracks = {name: _Track(name, of_part(name, ops, program.backward, part)) for name, ops in sections.items()}
        moves = {name: any(op.verb in (*COLLECTIVES, *MOVES) for op in ops) for name, ops in sections.items()}
        track, local = tracks[forward], not moves[forward]
        if not local and forward in ("first", "forward"):
            for unit in self._setting.units:
                if unit.root:
                    yield from self._all(track.reach("F", unit.name), numbers.start, forward)
        for number in numbers:
            event = self._events[number]
            yield self._point(number, False, track.name, about=event)
            if event.kind == "begin_backward":
                track, local = tracks[backward], not moves[backward]
            if event.kind == "gradient":
                self._accept(event)
            if local:
                if event.kind == "end":
                    self._forget_spares()
                continue
            yield from self._all(self._ops_of(event, track), number, track.name)
            if event.kind == "end":
                self._forget_spares()
            yield self._point(number, True, track.name, about=event)

    def _ops_of(self, event: Event, track: _Track) -> Iterator[Op]:
        """Operations that an event brings about."""
        name, unit = event.unit, self._units.get(event.unit)
        if event.kind in ("enter", "enter_backward") and unit is not None and not unit.root and self._split[name]:
            verb = "F" if event.kind == "enter" else "B"
            if not track.at_marker(verb, name):
                yield from track.reach(verb, name)
        elif event.kind == "begin_backward" and track.name not in ("weights", "last_weights"):
            for root in self._setting.units:
                if root.root:
                    yield from track.reach("B", root.name)
        elif event.kind == "complete" and unit is not None and not unit.root:
            if track.at_marker("B", name) or track.ahead("B", name):
                if not track.at_marker("B", name):
                    yield from track.reach("B", name)
                yield from track.follow(SUMS)
        elif event.kind in ("end_forward", "end"):
            yield from track.finish()

    def _all(self, ops: Iterator[Op], number: int, section: str) -> Iterator[Point]:
        for op in ops:
            yield from self._do(op, number, section)

    def _point(
        self, number: int, at: bool, section: str, more: float = 0.0, what: str = "", op: Op | None = None,
        about: Event | None = None,
    ) -> Point:  # fmt: skip
        if self._shown is None:
            self._shown = {kind: n for kind, n in self._terms.items() if n}
            if spare := sum(ITEMSIZE[dtype] * numel * count for (numel, dtype), count in self._spares.items()):
                self._shown["spare"] = spare
            self._sum = sum(self._shown.values())
        terms = self._shown
        if more:
            terms = {**terms, what: terms.get(what, 0.0) + more}
        return Point(self._sum + more, number, at, section, terms, self._part, op, about)

    def _hold(self, unit: str, what: str, num_bytes: float) -> None:
        """So many bytes live now that are of the unit and of that kind."""
        before = self._held.get((unit, what), 0.0)
        self._held[unit, what] = num_bytes
        self._terms[what] = self._terms.get(what, 0.0) + num_bytes - before
        self._shown = None

    def _let_go(self, unit: str, what: str) -> None:
        """They live no more."""
        if (num_bytes := self._held.pop((unit, what), 0.0)) != 0.0:
            self._terms[what] -= num_bytes
            self._shown = None

    # -- operations

    def _do(self, op: Op, number: int, section: str) -> Iterator[Point]:
        unit = self._units.get(op.unit)
        more, what = 0.0, ""
        if unit is not None:
            if op.verb in ("CAST", "FILL", "ALL_GATHER") and op.target in ("flat", "node"):
                self._gather(op, unit)
            elif op.verb == "GRADS":
                self._buffer(unit)
            elif op.verb in REDUCTIONS:
                self._reduce(op, unit)
            elif op.verb == "FETCH":
                self._fetch(op, unit)
            elif op.verb == "UPDATE":
                more, what = self._update(unit), "update"
            elif op.verb in ("DIFF", "PUSH") and self._layout.outer is not None:
                self._change(op, unit)
            elif op.verb in ("F", "B"):
                self._give_back(unit.name, "payloads")
            elif op.verb == "WAIT":
                self._take(unit.name, "sums", self._sums.pop(unit.name, []))
            coded = self._coded(op, unit)
            if coded:
                more, what = more + coded, "encoding"
        elif op.verb == "NORM":
            more, what = self._norm(), "norm"
        yield self._point(number, True, section, more, what, op)
        if unit is None:
            return
        if op.verb in ("FREE", "RELEASE"):
            self._let_go(unit.name, "gathered")
            self._give_back(unit.name, "payloads")
        elif op.verb == "DROP":
            self._give_back(unit.name, "gradients")
        elif op.verb == "WAIT":
            self._give_back(unit.name, "sums")
            self._give_back(unit.name, "transport")
            if unit.name in self._crossing:
                self._crossing.discard(unit.name)
                self._give_back(unit.name, "sums of a node")
        elif op.verb == "STORE":
            self._let_go(unit.name, f"{op.source} on their way")
        elif op.verb == "OUTER":
            self._give_back(unit.name, "outer sums")
        elif op.verb == "MIX":
            self._give_back(unit.name, "outer gradients")

    def _gather(self, op: Op, unit: UnitSpec) -> None:
        split = [s for s in unit.segments if s.table_or(self._layout).comes_and_goes]
        self._hold(unit.name, "gathered", sum(s.length * ITEMSIZE[s.dtype] for s in split))
        if op.verb == "ALL_GATHER" and op.source != "node":  # of two hops, the first one's payload serves both
            self._take(unit.name, "payloads", [(encoded_bytes(op, self._layout, unit, self._mesh), "int8")])

    def _buffer(self, unit: UnitSpec) -> None:
        if (unit.name, "gradients") not in self._taken:
            flats = [(float(s.length), s.dtype_for("reduce", self._layout)) for s in unit.segments if s.trainable]
            self._take(unit.name, "gradients", flats)

    def _accept(self, event: Event) -> None:
        unit = self._units[event.unit]
        if unit.table_or(self._layout).buffered:
            self._buffer(unit)
        elif self._setting.adopts and event.size > SMALL:
            segment = next(s for s in unit.segments if any(slot.name == event.slot for slot in s.slots))
            if segment.dtype_for("grads", self._layout) == segment.dtype:
                self._hold(unit.name, "gradients", self._held.get((unit.name, "gradients"), 0.0) + event.size)

    def _reduce(self, op: Op, unit: UnitSpec) -> None:
        ranks = prod(self._mesh[axis] for axis in op.axes)
        if encoded_bytes(op, self._layout, unit, self._mesh):
            self._sum_encoded(op, unit, ranks)
        elif op.verb == "REDUCE_SCATTER" and self._setting.behaviour.temporary(1.0, ranks):
            parts = self._setting.behaviour.temporary(1.0, ranks) ** -1
            dtypes = [(s.length / parts, s.dtype_for("reduce", self._layout)) for s in unit.segments if s.trainable]
            self._take(unit.name, "transport", dtypes)
        if self._setting.behaviour.streams and (summed := summed_bytes(op, self._layout, unit, self._mesh)):
            self._hold(unit.name, "grads on their way", summed)

    def _sum_encoded(self, op: Op, unit: UnitSpec, ranks: int) -> None:
        """What is sent and what comes, of each segment, and between two hops what the first has summed."""
        segments, slices = op.moves(unit), self._slices(op)
        payloads, sums = list[tuple[float, str]](), list[tuple[float, str]]()
        for segment, one in zip(segments, op.each(len(segments)), strict=True):
            if is_encoded(one, segment, self._layout):
                payloads += [(FORMATS[one.format].nbytes(segment.length) / slices, "int8")] * 2
                sums.append((2 * segment.length / slices / ranks, "fp32"))  # what decodes has a sum, and what is added
        self._sums[unit.name] = sums
        if op.target == "node":
            here = self._mesh[DATA_AXES[1]]
            self._take(unit.name, "sums of a node", [(segment.length / here, "fp32") for segment in segments])
        if op.source == "node":
            self._crossing.add(unit.name)
        self._take(unit.name, "transport", payloads)

    def _coded(self, op: Op, unit: UnitSpec) -> float:
        """Temporaries of formats: what encodes at a collective, what decodes where it is waited for."""
        if op.verb in ("F", "B", "WAIT"):
            return self._decodes.pop((op.unit, "grads" if op.verb == "WAIT" else "flat"), 0.0)
        if op.verb != "ALL_GATHER" and op.verb not in REDUCTIONS:
            return 0.0
        gathers, segments = op.verb == "ALL_GATHER", op.moves(unit)
        ranks, encodes, decodes = prod(self._mesh[axis] for axis in op.axes), 0.0, 0.0
        for segment, one in zip(segments, op.each(len(segments)), strict=True):
            if is_encoded(one, segment, self._layout):
                length = segment.length // self._slices(op)
                here, there = (length // ranks, length)[:: 1 if gathers else -1]
                dtype = segment.dtype if gathers else segment.dtype_for("reduce", self._layout)
                if op.target == "node" and not gathers:  # what goes to each rank is in as many parts as there are nodes
                    nodes = self._mesh[DATA_AXES[0]]
                    part = here // ranks // nodes
                    encodes = max(encodes, coding_bytes(one.format, dtype, part, decodes=False, parts=nodes))
                else:
                    encodes = max(encodes, coding_bytes(one.format, dtype, here, decodes=False))
                becomes = dtype if gathers else "fp32"
                decodes = max(decodes, coding_bytes(one.format, becomes, there, decodes=True))
        if decodes:
            self._decodes[op.unit, "flat" if gathers else "grads"] = decodes
        return encodes

    def _slices(self, op: Op) -> int:
        """Of so many slices of what lies between two hops a rank has one."""
        return self._mesh[DATA_AXES[1]] if op.source == "node" else 1

    def _fetch(self, op: Op, unit: UnitSpec) -> None:
        if unit.table_or(self._layout).updates_on is Tier.DEVICE:
            num_bytes = fetched_bytes(op, self._layout, unit, self._mesh, self._setting.moments)
            self._hold(unit.name, f"{op.source} on their way", num_bytes)

    def _change(self, op: Op, unit: UnitSpec) -> None:
        """The outer gradients of a unit, which stay until they are taken in, or the sums of this group's part."""
        parts = 1 if op.verb == "DIFF" else prod(self._mesh[axis] for axis in op.axes)
        shards = [
            (s.length / s.table_or(self._layout).master.parts(self._mesh) / parts, s.outer_dtype(self._layout))
            for s in unit.segments
            if s.trainable
        ]
        self._take(unit.name, "outer gradients" if op.verb == "DIFF" else "outer sums", shards)
        if op.verb == "PUSH":
            kept = self._setting.behaviour.temporary(1.0, parts) * parts
            self._take(unit.name, "transport", [(numel * kept, dtype) for numel, dtype in shards])

    def _update(self, unit: UnitSpec) -> float:
        """A block of the gradients in the dtype of the master; all of a shard's, where one call updates it all."""
        if unit.table_or(self._layout).updates_on is not Tier.DEVICE:
            return 0.0
        most = 0.0
        for s in unit.segments:
            if s.trainable:
                table, dtype = s.table_or(self._layout), s.dtype_for("master", self._layout)
                shard = s.length / table.master.parts(self._mesh)
                copies = table.params is not None and "master" not in table.aliases(own=s.own)
                at_once = not copies and s.dtype_for("grads", self._layout) == dtype
                adopted = self._setting.adopts and at_once and not self._setting.clip and not copies
                block = shard if at_once else min(shard, self._setting.behaviour.block)
                most = max(most, 0.0 if adopted else block * ITEMSIZE[dtype])
        return most

    def _norm(self) -> float:
        """A row of sums of the largest shard's gradients."""
        numels = [s.length / s.table_or(self._layout).master.parts(self._mesh) for u in self._setting.units
                  for s in u.segments if s.trainable]  # fmt: skip
        return max(numels, default=0.0) / 4096 * 16

    # -- buffers for a short while

    def _take(self, unit: str, what: str, flats: Sequence[tuple[float, str]]) -> None:
        flats = [(numel, dtype) for numel, dtype in flats if numel]
        if not flats:
            return
        self._taken[unit, what] = list(flats)
        for flat in flats:
            if self._spares.get(flat):
                self._spares[flat] -= 1
        self._hold(unit, what, sum(numel * ITEMSIZE[dtype] for numel, dtype in flats))

    def _give_back(self, unit: str, what: str) -> None:
        for flat in self._taken.pop((unit, what), ()):
            if not self._setting.behaviour.streams and self._spares.get(flat, 0) < 2:
                self._spares[flat] = self._spares.get(flat, 0) + 1
        self._let_go(unit, what)

    def _forget_spares(self) -> None:
        self._spares.clear()
        self._shown = None


def words_of(event: Event) -> str:
    """What runs until an event, in words."""
    return _WORDS[event.kind].format(event.unit)


_WORDS = {
    "begin": "before the model", "enter": "before {}", "leave": "in {}", "end_forward": "behind the last unit",
    "begin_backward": "the loss", "sent": "behind the last unit of the stage",
    "inputs": "between the parts of a backward", "end": "the end", "enter_backward": "before the backward of {}",
    "gradient": "the backward of {}", "complete": "the backward of {}",
}  # fmt: skip
