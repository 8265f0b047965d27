"""The walks of a model that is cut into stages: of each stage one, and an order that puts its passes after each other.

A stage's forward, its backward, and its last backward take what the clocks of ``seconds`` say. The order is gone
through with these: a pass begins when its rank is free and what it needs has come from the neighbour; what crosses a
border takes its bytes by the rate of the link. All sizes of a micro-batch with the same number of micro-batches in a
step are gone through together, as rows of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import Any, NamedTuple

import numpy as np

from shardfold.parallel.pipeline.order import Action, choose_order, make_order
from shardfold.plan.auto_wire import AutoWire
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.passes import Overlap
from shardfold.plan.program import Op
from shardfold.plan.sizes import human
from shardfold.planner.candidate import Candidate, Found, sizes_to_show
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import CPU, GPU, MemoryPlan, Setting, plan_memory
from shardfold.planner.seconds import Seconds, Way, Work, part_seconds
from shardfold.planner.setting import LINE, Subject
from shardfold.planner.staged import in_order, sent_at
from shardfold.planner.trace import Trace
from shardfold.planner.walks import too_much_at_rest, wires_of

__all__ = ["EACH", "PassTimes", "StagedWalks", "ends_of"]

EACH = 4
"""Micro-batches of a step for each stage, where nobody says how many samples it has."""
LONG = 6
"""Micro-batches for each stage behind which an order goes on in the same way."""


class PassTimes(NamedTuple):
    """Seconds of one stage, for each size of a micro-batch.

    Attributes:
        forward: of a forward.
        backward: of a backward.
        last: of the last one, with which gradients are reduced.
        update: of the optimizer's step.
        send: of what goes to the next stage.
        back: of what goes to the stage before.
    """

    forward: np.ndarray
    backward: np.ndarray
    last: np.ndarray
    update: np.ndarray
    send: np.ndarray
    back: np.ndarray

    def of(self, rows: np.ndarray) -> PassTimes:
        """Those of some sizes."""
        return PassTimes(*(each[rows] for each in self))


class StagedWalks:
    """Of the stages of one model on some devices, each done once.

    Args:
        subject: model and micro-batch.
        where: devices.
        precision: policy.
        moments: that the optimizer keeps of each element.

    Attributes:
        readers: ranks that read other samples.
    """

    def __init__(self, subject: Subject, where: Cluster, precision: str | Precision, moments: int) -> None:
        division = subject.division
        self._where, self._precision, self._moments, self._division = where, precision, moments, division
        self._mesh = division.over(where.mesh)
        self.readers = self._mesh.parts(self._mesh.sampling)
        self._stages = [
            subject if stage == division.stage else replace(subject, division=replace(division, stage=stage))
            for stage in range(division.pipeline)
        ]
        for number, stage in enumerate(self._stages):
            stage.others = self._stages[1:number][:1]
        self._ways = {axis: Way(where.link(self._mesh, axis), size) for axis, size in division.axes.items()}
        self._behaviour = GPU if where.device.streams else CPU
        self._budget = where.device.usable
        self._done: dict[Any, tuple[Setting, MemoryPlan]] = {}
        self._works: dict[tuple[int, str, int], Work] = {}

    def resting_too_much(self, layout: Layout, host: float) -> str:
        """Why nothing can fit, as what rests of a stage alone does not; empty: it does."""
        budget = self._budget if self._behaviour.streams else inf
        for stage in self._stages:
            tiers: Mapping[Tier, float] = stage.resting(layout, self._precision, self._mesh.axes, self._moments)
            if why := too_much_at_rest(tiers, host, budget):
                return f"of stage {stage.division.stage} {why}"
        return ""

    def wires(self, plain: Candidate, mode: str, auto: AutoWire) -> list[dict[str, str]]:
        """Wires that a layout may have, as arguments of a candidate; its own first."""
        stage = self._stages[0]
        setting = self._walk(stage, plain, in_order(stage.alone(self._precision, mode, LINE[0]), stage.division))[0]
        return wires_of(plain.table, setting.program, setting.mesh, auto)

    def fitting(self, plain: Candidate, limit: int, batch: int | None) -> tuple[list[Found], str]:
        """What fits of all micro-batches up to ``limit`` of a candidate that has one sample; or why none does."""
        samples = np.arange(1, limit + 1)
        counts = np.full_like(samples, EACH * self._division.pipeline)
        if batch is not None:
            counts = -(-batch // (samples * self.readers))
        peaks, host, least, most, zeros = np.zeros(limit), 0.0, "", 0.0, ""
        times: list[PassTimes] = []
        for stage in self._stages:
            few, more = (stage.alone(self._precision, plain.mode, n) for n in LINE)
            if few.structure != more.structure:
                return [], "its forward does other things with 4 samples than with 2: give a micro-batch."
            zeros = zeros or few.zeros
            for count in map(int, np.unique(counts)):
                mine = counts == count
                peaks[mine] = np.maximum(peaks[mine], self._peaks(stage, plain, count, samples[mine]))
            alone = self._plan(stage, plain, int(counts[0]), 1)
            if alone.peak > most:
                most, at = alone.peak, f"stage {stage.division.stage}, {alone.top.where}"
                least = f"one sample peaks at {human(most)} of {human(self._budget)}, {at}."
            host = max(host, alone.tiers.get(Tier.HOST, 0.0))
            times.append(self._times(stage, plain, limit, few, more))
        fits = np.flatnonzero(peaks <= self._budget)
        if not len(fits):
            return [], least
        step = self._steps(times, counts)
        totals = samples * counts * self.readers
        rate = (totals if batch is None else batch) / step  # of what was asked for: more makes no step faster
        fastest = int(fits[rate[fits].argmax()]) + 1
        sizes = sorted({n for n in (*sizes_to_show(int(fits[-1]) + 1), fastest) if peaks[n - 1] <= self._budget})
        return [
            Found(
                replace(
                    plain, micro_batch=n, accumulate=(count := int(counts[n - 1])),
                    division=replace(self._division, stage=0, micro_batches=count),
                ),
                float(peaks[n - 1]), host, self._seconds(plain, times, n, count, float(step[n - 1])),
                float(rate[n - 1]), int(totals[n - 1]), zeros,
            )
            for n in sizes
        ], ""  # fmt: skip

    # -- bytes

    def _peaks(self, stage: Subject, plain: Candidate, count: int, samples: np.ndarray) -> np.ndarray:
        """The most bytes of the rank of a stage, by samples of a micro-batch."""
        few, more = (self._ordered(stage, plain.mode, count, n) for n in LINE)
        found = self._walk(stage, plain, few)[1].of(few).line(few, more, LINE).at(samples)
        if samples[0] == 1:
            found[0] = self._plan(stage, plain, count, 1).peak
        return found

    def _plan(self, stage: Subject, plain: Candidate, count: int, samples: int) -> MemoryPlan:
        trace = self._ordered(stage, plain.mode, count, samples)
        return self._walk(stage, plain, trace)[1].of(trace)

    def _ordered(self, stage: Subject, mode: str, count: int, samples: int) -> Trace:
        return in_order(
            stage.alone(self._precision, mode, samples), replace(stage.division, micro_batches=count)
        )  # fmt: skip

    def _walk(self, stage: Subject, plain: Candidate, trace: Trace) -> tuple[Setting, MemoryPlan]:
        """The program of a stage is walked once for orders that have passes of the same kinds."""
        key = stage.division.stage, plain.table, plain.prefetch, trace.structure, trace.passes
        if key not in self._done:
            setting = stage.setting(
                trace, layout=plain.table, precision=self._precision, mesh=self._mesh.axes,
                overlap=Overlap(prefetch=plain.prefetch), micro_batches=2, moments=self._moments, clip=True,
                behaviour=self._behaviour,
            )  # fmt: skip
            self._done[key] = setting, plan_memory(setting, trace)
        return self._done[key]

    # -- seconds

    def _times(self, stage: Subject, plain: Candidate, limit: int, few: Trace, more: Trace) -> PassTimes:
        """Of each pass of a stage, by samples of a micro-batch."""
        number, device = stage.division.stage, self._where.device
        at = (np.arange(1, limit + 1) - LINE[0]) / (LINE[1] - LINE[0])
        if (key := (number, plain.mode, limit)) not in self._works:
            self._works[key] = Work(device, few, more, at, self._ways)
        work, cut = self._works[key], sent_at(few)
        setting, plan = self._walk(
            stage, plain, self._ordered(stage, plain.mode, EACH * self._division.pipeline, LINE[0])
        )
        ops, known = _ops_of_parts(plan, cut), dict[Op, float]()
        found = {
            part: part_seconds(setting, each, begin, end, device, work, known)
            for part, begin, end in (("forward", 0, cut), ("backward", cut, len(few.events)),
                                     ("last", cut, len(few.events)), ("step", 0, 0))
            for each in (ops.get(part, []),)
        }  # fmt: skip
        link = self._ways["pipeline"].link

        def crossing(event: int) -> np.ndarray:
            size, other = few.events[event].size, more.events[event].size
            return np.maximum(size + (other - size) * at, 0.0) / link.rate + link.latency

        return PassTimes(
            found["forward"], found["backward"], found["last"], found["step"], crossing(cut - 1), crossing(-1)
        )

    def _steps(self, times: Sequence[PassTimes], counts: np.ndarray) -> np.ndarray:
        """Seconds of a step, by samples of a micro-batch."""
        found = np.zeros(len(counts))
        for count in map(int, np.unique(counts)):
            mine = counts == count
            own = [each.of(mine) for each in times]
            ends = ends_of(self._division.order, own, count)
            each = [end + one.last - one.backward + one.update for end, one in zip(ends, own, strict=True)]
            found[mine] = np.max(each, axis=0)
        return found

    def _seconds(self, plain: Candidate, times: Sequence[PassTimes], n: int, count: int, step: float) -> Seconds:
        """Of a step, as the mean of the ranks."""
        at = (n - LINE[0]) / (LINE[1] - LINE[0])
        pairs = [[stage.alone(self._precision, plain.mode, m) for m in LINE] for stage in self._stages]
        ranks = len(pairs)

        def mean(of: str) -> float:
            values = [(getattr(few, of), getattr(more, of)) for few, more in pairs]
            return count * sum(a + (b - a) * at for a, b in values) / ranks

        works = [self._works[number, plain.mode, len(times[0].forward)] for number in range(ranks)]
        compute = count * sum(float(work.until[-1][n - 1]) for work in works) / ranks
        update = sum(float(each.update[n - 1]) for each in times) / ranks
        tokens = count * (pairs[0][0].tokens + (pairs[0][1].tokens - pairs[0][0].tokens) * at)
        return Seconds(step, compute, step - compute - update, update, mean("flops"), mean("attention"), tokens)


def _ops_of_parts(plan: MemoryPlan, cut: int) -> dict[str, list[tuple[int, Op]]]:
    """Of a pass of each kind its operations, each behind how many events of the trace of one micro-batch."""
    found: dict[str, list[tuple[int, Op]]] = {"step": []}
    for section in ("forward", "backward", "last"):
        spans = [(begin, end) for name, begin, end in plan.trace.passes if name == section]
        begin, end = spans[min(1, len(spans) - 1)] if spans else (0, 0)  # the second: the first one may do more
        done, ops = cut if section != "forward" else 0, found.setdefault(section, [])
        for point in plan.points:
            if begin <= point.event < end:
                if point.op is not None:
                    ops.append((done, point.op))
                elif not point.at:
                    done += 1
    found["step"] = [(0, point.op) for point in plan.points if point.op is not None and point.event < 0]
    return found


def ends_of(order: str, times: Sequence[PassTimes], count: int) -> list[np.ndarray]:
    """When each rank has done its last backward of ``count`` micro-batches, by samples of a micro-batch."""
    ranks = len(times)
    if count <= LONG * ranks:
        return _Line(order, times, count).ends
    first, then = (_Line(order, times, LONG * ranks + more).ends for more in (0, ranks))
    rest = (count - LONG * ranks) / ranks
    return [a + (b - a) * rest for a, b in zip(first, then, strict=True)]


class _Line:
    """An order gone through, for many sizes at once."""

    def __init__(self, order: str, times: Sequence[PassTimes], count: int) -> None:
        self._times = times
        self._rows = make_order(choose_order(order), len(times), count)
        self._done: dict[Action, np.ndarray] = {}

    @cached_property
    def ends(self) -> list[np.ndarray]:
        """When each rank is done."""
        free = [np.zeros_like(each.forward) for each in self._times]
        at, left = [0] * len(self._rows), sum(map(len, self._rows))
        while left:
            for rank, actions in enumerate(self._rows):
                while at[rank] < len(actions) and (begin := self._ready(actions[at[rank]])) is not None:
                    action, own = actions[at[rank]], self._times[rank]
                    took = own.forward if action.verb == "F" else own.backward
                    free[rank] = self._done[action] = np.maximum(free[rank], begin) + took
                    at[rank] += 1
                    left -= 1
        return free

    def _ready(self, action: Action) -> np.ndarray | None:
        """When what it needs has come; None: that is not known yet."""
        verb, stage, batch = action
        if verb == "F" and not stage:
            return np.zeros_like(self._times[0].forward)
        if verb == "B" and stage == len(self._times) - 1:
            return self._done.get(Action("F", stage, batch))
        other = stage - 1 if verb == "F" else stage + 1
        done = self._done.get(Action(verb, other, batch))
        sent = self._times[other].send if verb == "F" else self._times[other].back
        return None if done is None else done + sent
