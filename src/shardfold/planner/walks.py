"""The program walked for many micro-batches at once, each walk done once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any, NamedTuple

import numpy as np

from shardfold.errors import LayoutError, ModelError
from shardfold.plan.auto_wire import PURPOSES, AutoWire, wires
from shardfold.plan.bind import Bound
from shardfold.plan.checks import human
from shardfold.plan.layout import DATA_AXES, Layout, Precision, Tier
from shardfold.plan.program import COLLECTIVES
from shardfold.plan.rewrites import Overlap
from shardfold.planner.candidate import Candidate, FittingCandidate, Refused, sizes_to_show
from shardfold.planner.division import Division
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import MemoryPlan, Setting
from shardfold.planner.seconds import Schedule, Seconds, Work, row_seconds, schedule_of, ways_of
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.planner.trace import Trace

__all__ = ["SizeRows", "Walks", "WholeWalks"]


class SizeRows(NamedTuple):
    """What steps with micro-batches of many sizes need.

    Attributes:
        samples: of a micro-batch.
        counts: micro-batches of a step.
        peaks: bytes of the device that needs the most; inf: it does not fit for another reason.
        host: bytes of host memory.
        seconds: of a step.
        traces: of one of the sizes.
        parts: what seconds of one of the sizes are made of.
    """

    samples: np.ndarray
    counts: np.ndarray
    peaks: np.ndarray
    host: np.ndarray
    seconds: np.ndarray
    traces: Sequence[Trace]
    parts: Any


class Walks(ABC):
    """Of one model on some devices, each done once.

    Args:
        ranks: model and micro-batch as each rank has them, where these differ.
        where: devices.
        precision: policy.
        moments: that the optimizer keeps of each element.
        batch: samples of a step of all ranks; None: as many as are usual.
        most: the largest micro-batch that is looked at.
        host: bytes of host memory for each rank.

    Attributes:
        readers: ranks that read other samples.
        limit: the largest micro-batch that is looked at.
        looked_at: candidates that were planned, with each micro-batch.
    """

    def __init__(
        self,
        ranks: Sequence[Subject],
        where: Cluster,
        precision: str | Precision,
        moments: int,
        *,
        batch: int | None = None,
        most: int = 1024,
        host: float = inf,
    ) -> None:
        self._ranks, self._division, self._device = ranks, ranks[0].division, where.device
        self._precision, self._batch, self._host = precision, batch, host
        self._mesh = self._division.over(where.mesh)
        self.readers = self._mesh.parts(self._mesh.sampling)
        self.limit = most if batch is None else min(most, max(1, batch // self.readers))
        self.looked_at = 0
        self._ways = ways_of(where, self._mesh, self._division.axes)
        self._budget = where.device.usable
        self._rank = PlannedRank.on(where, self._division, precision=precision, moments=moments)
        self._done: dict[Any, tuple[Setting, MemoryPlan, Schedule]] = {}
        self._works: dict[Any, Work] = {}

    def resting_too_much(self, layout: Layout) -> str:
        """Why nothing can fit, as what rests alone does not; empty: it does."""
        # where nothing has streams, gradients may take the place of those of autograd
        budget = self._budget if self._device.streams else inf
        for rank in self._ranks:
            of = f"of {rank.staged} " if rank.staged else ""
            tiers = rank.resting(layout, self._precision, self._mesh.axes, self._rank.moments)
            if (held := tiers.get(Tier.HOST, 0.0)) > self._host:
                room = f"of host memory for each rank, of which there are {human(self._host)}."
                return f"{of}states need {human(held)} {room}"
            if (rest := tiers.get(Tier.DEVICE, 0.0)) > budget:
                return f"{of}what rests takes {human(rest)} of {human(budget)} already."
        return ""

    def wires(self, plain: Candidate, auto: AutoWire) -> list[dict[str, str]]:
        """Wires that a layout may have, as arguments of a candidate; its own first. Two hops need nodes of several
        ranks, and transfers that the program does not make have one wire."""
        bound = self._bound(plain)
        sections = map(bound.program.section, ("forward", "backward", "last", "step"))
        sent = {op.purpose for section in sections for op in section if op.verb in COLLECTIVES}
        hops = (1, 2) if all(bound.mesh.get(axis, 1) > 1 for axis in DATA_AXES) else (1,)
        each: list[list[dict[str, str]]] = []
        for purpose in PURPOSES:
            others = [option.wire for option in wires(plain.table, purpose, auto)] if purpose in sent else []
            own = getattr(plain.table, purpose)
            each.append([{}, *({purpose: str(wire)} for wire in others if wire != own and wire.hops in hops)])
        return [gather | reduce for gather, reduce in product(*each)]

    def plan(self, plain: Candidate) -> list[FittingCandidate] | list[Refused]:
        """What fits of all micro-batches of a candidate that has one sample; or why none does. Nothing, where the
        layout takes no such wires in this precision."""
        try:
            rows = self.resting_too_much(plain.table) or self._rows(plain)
        except LayoutError:
            if not plain.wires:
                raise
            return []
        self.looked_at += self.limit
        if isinstance(rows, str):
            return [Refused(plain.layout, plain.mode, rows, self._division, plain.wired)]
        samples, counts, peaks, host, seconds, traces, parts = rows
        fits = np.flatnonzero(peaks <= self._budget)
        totals = samples * counts * self.readers
        rate = (totals if self._batch is None else self._batch) / seconds  # of what was asked for: more is no faster
        fastest = int(samples[fits[rate[fits].argmax()]])
        wanted = {*sizes_to_show(int(samples[fits[-1]])), fastest}
        return [
            FittingCandidate(
                replace(plain, micro_batch=size, accumulate=count, division=self._divided(count)),
                float(peaks[i]),
                float(host[i]),
                self._seconds(plain, parts, i, size, count, float(seconds[i])),
                float(rate[i]),
                int(totals[i]),
                next((trace.zeros for trace in traces if trace.zeros), ""),
                next((trace.loss for trace in traces if trace.loss), ""),
            )
            for i, size, count in ((int(i), int(samples[i]), int(counts[i])) for i in fits)
            if size in wanted
        ]

    def _divided(self, count: int) -> Division:
        """How ranks share the model in a step of so many micro-batches."""
        return self._division

    @abstractmethod
    def _bound(self, plain: Candidate) -> Bound:
        """What the first rank binds."""

    @abstractmethod
    def _rows(self, plain: Candidate) -> SizeRows | str:
        """What sizes of a micro-batch need, of which one fits; or why none does."""

    @abstractmethod
    def _seconds(self, plain: Candidate, parts: Any, i: int, size: int, count: int, step: float) -> Seconds:
        """Of a step with the ``i``-th size of a micro-batch; ``parts``: those of the rows."""

    def _walk(
        self, rank: Subject, plain: Candidate, trace: Trace, micro_batches: int
    ) -> tuple[Setting, MemoryPlan, Schedule]:
        """The program of a rank is walked once for traces of the same events, however many samples they have."""
        key = rank.division.stage, plain.table, plain.prefetch, micro_batches, trace.structure, trace.passes
        if key not in self._done:
            overlap = Overlap(prefetch=plain.prefetch)
            made = replace(self._rank, overlap=overlap, micro_batches=micro_batches)
            setting, plan = made.walk(rank, plain.table, trace)
            self._done[key] = setting, plan, schedule_of(plan.points)
        setting, plan, schedule = self._done[key]
        return setting, plan.of(trace), schedule


class WholeWalks(Walks):
    """Of a model whose ranks all have the whole of it: once for one micro-batch a step, and once for several."""

    @property
    def _subject(self) -> Subject:
        return self._ranks[0]

    def _bound(self, plain: Candidate) -> Bound:
        trace = self._subject.trace(self._precision, plain.mode, LINE[0])
        return self._walk(self._subject, plain, trace, 1)[0].bound

    def _rows(self, plain: Candidate) -> SizeRows | str:
        mode, limit, budget = plain.mode, self.limit, self._budget
        few, more = self._subject.line(self._precision, mode)
        one = self._of_one(mode)
        if few.structure != more.structure:
            return "its forward does other things with 4 samples than with 2: give a micro-batch."
        samples = np.arange(1, limit + 1)
        counts = np.ones_like(samples) if self._batch is None else -(-self._batch // (samples * self.readers))
        if mode not in self._works:
            self._works[mode] = Work(self._device, few, more, (samples - LINE[0]) / (LINE[1] - LINE[0]), self._ways)
        work = self._works[mode]
        peaks, seconds, parts = np.full(limit, inf), np.full(limit, inf), np.zeros((2, limit))
        least, host = "", np.zeros(limit)
        for several in (False, True):
            mine = (counts > 1) == several
            if not mine.any():
                continue
            setting, plan, schedule = self._walk(self._subject, plain, few, 1 + several)
            if not several and plan.rest > budget:
                return f"what rests takes {human(plan.rest)} of {human(budget)} already."
            host = np.full(limit, plan.tiers.get(Tier.HOST, 0.0) - few.away.get(Tier.HOST, 0.0))
            peaks[mine] = plan.line(few, more, LINE).at(samples[mine])
            if mine[0]:
                alone = self._walk(self._subject, plain, one or few, 1 + several)[1]
                peaks[0] = inf if one is None else alone.peak
                lot = "two samples peak" if one is None else "one sample peaks"
                least = f"{lot} at {human(alone.peak)} of {human(budget)}, {alone.top.where}."
            rows = row_seconds(setting, schedule, self._device, work, counts)
            seconds[mine], parts[:, mine] = rows.step[mine], np.stack((rows.compute, rows.update))[:, mine]
        fits = np.flatnonzero(peaks <= budget)
        if len(fits) and mode == "host":
            # of the largest what its trace has, and of smaller ones, of which less is large enough to be moved, no less
            most = int(fits[-1]) + 1
            host += self._subject.trace(self._precision, mode, most).away.get(Tier.HOST, 0.0) * samples / most
            room = f"of host memory for each rank, of which there are {human(self._host)}."
            least = f"one sample needs {human(host[0])} {room}"
            peaks[host > self._host] = inf
        if not (peaks <= budget).any():
            return least
        return SizeRows(samples, counts, peaks, host, seconds, [few], (few, more, parts))

    def _of_one(self, mode: str) -> Trace | None:
        """The trace of one sample; None: the model does not train on so few, as under batch normalization."""
        try:
            return self._subject.trace(self._precision, mode, 1)
        except ModelError:
            if self.limit == 1:
                raise
            return None

    def _seconds(self, plain: Candidate, parts: Any, i: int, size: int, count: int, step: float) -> Seconds:
        few, more, rows = parts
        compute, update = map(float, rows[:, i])
        at = (size - LINE[0]) / (LINE[1] - LINE[0])
        pairs = [(getattr(few, of), getattr(more, of)) for of in ("flops", "attention", "tokens")]
        flops, attention, tokens = (count * (a + (b - a) * at) for a, b in pairs)
        return Seconds(step, compute, step - compute - update, update, flops, attention, tokens)
