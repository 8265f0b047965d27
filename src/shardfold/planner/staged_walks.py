"""The walks of a model that is cut into stages: of each stage one, and an order that puts its passes after each other.

A stage's forward, its backward or the two parts of it, and its last backward take what the clocks of ``seconds`` say.
The order is gone through with these: a pass begins when its rank is free and what it needs has come from the neighbour;
what crosses a border between ranks takes its bytes by the rate of the link. All sizes of a micro-batch with the same
number of micro-batches in a step are gone through together, as rows of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardfold.parallel.pipeline.stage_order import Action, choose_order
from shardfold.plan.bind import Bound
from shardfold.plan.checks import human
from shardfold.plan.layout import Tier
from shardfold.plan.program import Op
from shardfold.planner.candidate import Candidate
from shardfold.planner.division import Division
from shardfold.planner.memory import MemoryPlan
from shardfold.planner.moved import MOVED
from shardfold.planner.seconds import Seconds, Work, part_seconds
from shardfold.planner.setting import LINE, Subject
from shardfold.planner.staged import Span, actions_of, lanes_of, places_of, spans_of, usual_count
from shardfold.planner.trace import Lane, Trace
from shardfold.planner.walks import SizeRows, Walks

__all__ = ["PassTimes", "StagedWalks", "ends_of"]

LONG = 6
"""Micro-batches for each stage behind which an order goes on in the same way."""


class PassTimes(NamedTuple):
    """Seconds of one stage, for each size of a micro-batch.

    Attributes:
        takes: by verb of an action.
        more: that its last backward takes more than others, as gradients are reduced with it.
        send: of what goes to the next stage.
        back: of what goes to the stage before.
    """

    takes: Mapping[str, np.ndarray]
    more: np.ndarray
    send: np.ndarray
    back: np.ndarray

    def of(self, rows: np.ndarray) -> PassTimes:
        """Those of some sizes."""
        takes = {verb: each[rows] for verb, each in self.takes.items()}
        return PassTimes(takes, self.more[rows], self.send[rows], self.back[rows])


class _RankTimes(NamedTuple):
    """Seconds of a rank.

    Attributes:
        stages: of each of its stages.
        update: of the optimizer's step.
    """

    stages: Mapping[int, PassTimes]
    update: np.ndarray


class StagedWalks(Walks):
    """Of the stages of one model, each of which is on a rank that is planned for."""

    def __init__(self, ranks: Sequence[Subject], *given: Any, **more: Any) -> None:
        super().__init__(ranks, *given, **more)
        every = {number: one for rank in ranks for number, one in rank.stages.items()}
        for number, one in every.items():
            one.borders = every[0].borders
            one.others = [every[1]] if number > 1 else ()
        self._rank_of = {number: rank for rank in ranks for number in rank.stages}
        #: Micro-batches of an order of the user's own, which has no others; 0: there may be any number.
        self._only = choose_order(self._division.order).batches
        self._usual = usual_count(self._division.order, self._division.pipeline)

    def _divided(self, count: int) -> Division:
        return replace(self._division, stage=0, micro_batches=count)

    def _bound(self, plain: Candidate) -> Bound:
        rank = self._ranks[0]
        return self._walk(rank, plain, rank.in_order(self._precision, plain.mode, LINE[0], self._usual), 2)[0].bound

    def _rows(self, plain: Candidate) -> SizeRows | str:
        """In host memory there are states only, which :meth:`resting_too_much` looks at."""
        if plain.mode in MOVED:
            return f"an axis of pipeline does not go with activations={plain.mode!r}."
        batch, samples = self._batch, np.arange(1, self.limit + 1)
        counts = np.full_like(samples, self._usual)
        if batch is not None:
            counts = -(-batch // (samples * self.readers))
        if self._only and not (counts == self._only).any():
            return f"the order has {self._only} micro-batches, which no size of one makes of {batch} samples a step."
        if self._only:
            samples, counts = (each[counts == self._only] for each in (samples, counts))
        peaks, host, least, most = np.zeros(len(samples)), 0.0, "", 0.0
        times, traces = list[_RankTimes](), list[Trace]()
        for rank in self._ranks:
            for lane in self._lanes(rank, counts):
                few, more = (rank.alone(self._precision, plain.mode, n, lane) for n in LINE)
                if few.structure != more.structure:
                    return "its forward does other things with 4 samples than with 2: give a micro-batch."
                traces.append(few)
            for count in map(int, np.unique(counts)):
                mine = counts == count
                peaks[mine] = np.maximum(peaks[mine], self._peaks(rank, plain, count, samples[mine]))
            alone = self._plan(rank, plain, int(counts[0]), int(samples[0]))
            if alone.peak > most:
                most, at = alone.peak, f"{rank.staged}, {alone.top.where}"
                least = f"{_samples(int(samples[0]))} at {human(most)} of {human(self._budget)}, {at}."
            host = max(host, alone.tiers.get(Tier.HOST, 0.0))
            times.append(self._times(rank, plain, samples, counts))
        if not (peaks <= self._budget).any():
            return least
        step = self._steps(times, counts)
        return SizeRows(samples, counts, peaks, np.full(len(samples), host), step, traces, (times, samples))

    def seconds(self, candidate: Candidate) -> Seconds:
        """Of a step of one candidate, whether it fits or not."""
        samples, counts = np.array([candidate.micro_batch]), np.array([candidate.accumulate])
        times = [self._times(rank, candidate, samples, counts) for rank in self._ranks]
        step = float(self._steps(times, counts)[0])
        return self._seconds(candidate, (times, samples), 0, candidate.micro_batch, candidate.accumulate, step)

    def _lanes(self, rank: Subject, counts: np.ndarray) -> dict[Lane, int]:
        """Those of a rank, each with a number of micro-batches that go through it."""
        division, found = self._division, dict[Lane, int]()
        for count in (self._usual, *map(int, np.unique(counts))):
            row = actions_of(division.order, division.pipeline, count)[rank.division.stage]
            found = dict.fromkeys(lanes_of(row), count) | found
        return found

    # -- bytes

    def _peaks(self, rank: Subject, plain: Candidate, count: int, samples: np.ndarray) -> np.ndarray:
        """The most bytes of a rank, by samples of a micro-batch."""
        few, more = (rank.in_order(self._precision, plain.mode, n, count) for n in LINE)
        found = self._walk(rank, plain, few, 2)[1].line(few, more, LINE).at(samples)
        if samples[0] == 1:
            found[0] = self._plan(rank, plain, count, 1).peak
        return found

    def _plan(self, rank: Subject, plain: Candidate, count: int, samples: int) -> MemoryPlan:
        return self._walk(rank, plain, rank.in_order(self._precision, plain.mode, samples, count), 2)[1]

    # -- seconds

    def _times(self, rank: Subject, plain: Candidate, samples: np.ndarray, counts: np.ndarray) -> _RankTimes:
        """Of each pass of the stages of a rank, by samples of a micro-batch."""
        found: dict[int, PassTimes] = {}
        update = np.zeros(len(samples))
        for lane, count in self._lanes(rank, counts).items():
            one, update = self._lane_times(rank, plain, samples, lane, count)
            before = found.get(lane.stage)
            takes = {**before.takes, **one.takes} if before is not None else one.takes
            found[lane.stage] = one._replace(takes=takes)
        return _RankTimes(found, update)

    def _lane_times(
        self, rank: Subject, plain: Candidate, samples: np.ndarray, lane: Lane, count: int
    ) -> tuple[PassTimes, np.ndarray]:
        """Of the passes of a lane, and of the step of its rank."""
        few, more = (rank.alone(self._precision, plain.mode, n, lane) for n in LINE)
        at, device = (samples - LINE[0]) / (LINE[1] - LINE[0]), self._device
        if (key := (plain.mode, samples.tobytes(), lane)) not in self._works:
            self._works[key] = Work(device, few, more, at, self._ways)
        work, spans = self._works[key], spans_of(few)
        setting, plan, _ = self._walk(rank, plain, rank.in_order(self._precision, plain.mode, LINE[0], count), 2)
        known = dict[Op, float]()

        def seconds(span: Span, *sections: str) -> np.ndarray:
            ops = _ops_of(plan, lane, span.begin, sections)
            return part_seconds(setting, ops, span.begin, span.end, device, work, known)

        def crossing(verb: str) -> np.ndarray:
            size, other = spans[verb].gives, spans_of(more)[verb].gives
            link = self._ways["pipeline"].link
            return np.maximum(size + (other - size) * at, 0.0) / link.rate + link.latency

        usual, last = ("weights", "last_weights") if lane.split else ("backward", "last")
        sections = {"F": ("forward",), "I": ("quiet",)}
        takes = {verb: seconds(span, *sections.get(verb, (usual, last))) for verb, span in spans.items()}
        final = spans["W" if lane.split else "B"]
        more_of_last = seconds(final, last, usual) - takes["W" if lane.split else "B"]
        step = [(0, point.op) for point in plan.points if point.op is not None and point.event < 0]
        update = part_seconds(setting, step, 0, 0, device, work, known)
        return PassTimes(takes, more_of_last, crossing("F"), crossing("I" if lane.split else "B")), update

    def _steps(self, times: Sequence[_RankTimes], counts: np.ndarray) -> np.ndarray:
        """Seconds of a step, by samples of a micro-batch."""
        found = np.zeros(len(counts))
        stages = {number: one for rank in times for number, one in rank.stages.items()}
        for count in map(int, np.unique(counts)):
            mine = counts == count
            own = [stages[number].of(mine) for number in sorted(stages)]
            ends = ends_of(self._division.order, self._division.pipeline, own, count)
            each = [
                end + sum(one.more[mine] for one in rank.stages.values()) + rank.update[mine]
                for end, rank in zip(ends, times, strict=True)
            ]
            found[mine] = np.max(each, axis=0)
        return found

    def _seconds(self, plain: Candidate, parts: Any, i: int, size: int, count: int, step: float) -> Seconds:
        """As the mean of the ranks."""
        times, samples = parts
        at, ranks = (size - LINE[0]) / (LINE[1] - LINE[0]), len(times)
        lanes = {
            lane.stage: lane for mode, size, lane in self._works if (mode, size) == (plain.mode, samples.tobytes())
        }
        pairs = [
            [self._rank_of[stage].alone(self._precision, plain.mode, n, lanes[stage]) for n in LINE]
            for stage in sorted(lanes)
        ]

        def mean(of: str) -> float:
            values = [(getattr(few, of), getattr(more, of)) for few, more in pairs]
            return count * sum(a + (b - a) * at for a, b in values) / ranks

        works = [self._works[plain.mode, samples.tobytes(), lane] for lane in lanes.values()]
        compute = count * sum(float(work.until[-1][i]) for work in works) / ranks
        update = sum(float(each.update[i]) for each in times) / ranks
        tokens = count * (pairs[0][0].tokens + (pairs[0][1].tokens - pairs[0][0].tokens) * at)
        return Seconds(step, compute, step - compute - update, update, mean("flops"), mean("attention"), tokens)


def _samples(number: int) -> str:
    return "one sample peaks" if number == 1 else f"{number} samples peak"


def _ops_of(plan: MemoryPlan, lane: Lane, begin: int, sections: Sequence[str]) -> list[tuple[int, Op]]:
    """Operations of a pass of a lane in the first of some sections that it has, each behind how many events of the
    trace of one micro-batch, of which ``begin`` come before the pass."""
    for section in sections:
        spans = [(one.begin, one.end) for one in plan.trace.passes if (one.section, one.lane) == (section, lane)]
        if spans:
            break
    else:
        return []
    first, end = spans[min(1, len(spans) - 1)]  # the second: the first one may do more
    done, found = begin, list[tuple[int, Op]]()
    for point in plan.points:
        if first <= point.event < end:
            if point.op is not None:
                found.append((done, point.op))
            elif not point.at:
                done += 1
    return found


def ends_of(order: str, ranks: int, times: Sequence[PassTimes], count: int) -> list[np.ndarray]:
    """When each rank has done its last backward of ``count`` micro-batches, by samples of a micro-batch.

    Args:
        order: as an engine takes it.
        ranks: that have stages.
        times: of each stage.
        count: micro-batches of a step.
    """
    if count < (LONG + 1) * ranks or choose_order(order).rows is not None:
        return _Line(order, ranks, times, count).ends
    short = LONG * ranks + count % ranks
    first, then = (_Line(order, ranks, times, short + more).ends for more in (0, ranks))
    rounds = (count - short) // ranks
    return [a + (b - a) * rounds for a, b in zip(first, then, strict=True)]


class _Line:
    """An order gone through, for many sizes at once."""

    def __init__(self, order: str, ranks: int, times: Sequence[PassTimes], count: int) -> None:
        self._times = times
        self._places = places_of(order, ranks)
        self._rows = actions_of(order, ranks, count)
        self._done: dict[Action, np.ndarray] = {}

    @cached_property
    def ends(self) -> list[np.ndarray]:
        """When each rank is done."""
        free = [np.zeros_like(self._times[0].send) for _ in self._rows]
        at, left = [0] * len(self._rows), sum(map(len, self._rows))
        while left:
            for rank, actions in enumerate(self._rows):
                while at[rank] < len(actions) and (begin := self._ready(actions[at[rank]])) is not None:
                    action = actions[at[rank]]
                    took = self._times[action.stage].takes[action.verb]
                    free[rank] = self._done[action] = np.maximum(free[rank], begin) + took
                    at[rank] += 1
                    left -= 1
        return free

    def _ready(self, action: Action) -> np.ndarray | float | None:
        """When what it needs has come; None: that is not known yet."""
        verb, stage, batch = action
        forward = verb == "F"
        other = stage - 1 if forward else stage + 1
        if verb == "W" or not 0 <= other < len(self._times):  # what it needs this rank itself has done
            return 0.0
        done = self._done.get(Action(verb, other, batch))
        if done is None and not forward:
            done = self._done.get(Action("I" if verb == "B" else "B", other, batch))
        if done is None or self._places[other] == self._places[stage]:
            return done
        return done + (self._times[other].send if forward else self._times[other].back)
