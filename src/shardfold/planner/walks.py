"""The program walked for many micro-batches at once, each walk done once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import numpy as np

from shardfold.errors import LayoutError, ModelError
from shardfold.plan.auto_wire import PURPOSES, AutoWire, wires
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import DATA_AXES, Layout, Precision, Tier, Wire
from shardfold.plan.lifetimes import CPU, GPU
from shardfold.plan.program import COLLECTIVES, Program
from shardfold.plan.program_passes import Overlap
from shardfold.plan.sizes import human
from shardfold.planner.candidate import Candidate, FittingCandidate, sizes_to_show
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import MemoryPlan, Setting, plan_memory
from shardfold.planner.seconds import Schedule, Seconds, Work, row_seconds, schedule_of, ways_of
from shardfold.planner.setting import LINE, Subject
from shardfold.planner.trace import Trace

__all__ = ["Walks", "too_much_at_rest", "wires_of"]


class Walks:
    """Of one model on some devices, each done once.

    Args:
        subject: model and micro-batch.
        where: devices.
        precision: policy.
        moments: that the optimizer keeps of each element.

    Attributes:
        readers: ranks that read other samples.
    """

    def __init__(self, subject: Subject, where: Cluster, precision: str | Precision, moments: int) -> None:
        self._subject, self._where, self._precision, self._moments = subject, where, precision, moments
        self._mesh = subject.division.over(where.mesh)
        self.readers = self._mesh.parts(self._mesh.sampling)
        self._ways = ways_of(where, self._mesh, subject.division.axes)
        self._behaviour = GPU if where.device.streams else CPU
        self._budget = where.device.usable
        self._done: dict[Any, tuple[Setting, MemoryPlan, Schedule]] = {}
        self._works: dict[tuple[str, int], Work] = {}

    def resting_too_much(self, layout: Layout, host: float) -> str:
        """Why nothing can fit, as what rests alone does not; empty: it does."""
        tiers = self._subject.resting(layout, self._precision, self._mesh.axes, self._moments)
        # where nothing has streams, gradients may take the place of those of autograd
        return too_much_at_rest(tiers, host, self._budget if self._behaviour.streams else inf)

    def wires(self, plain: Candidate, mode: str, auto: AutoWire) -> list[dict[str, str]]:
        """Wires that a layout may have, as arguments of a candidate; its own first."""
        setting = self._walk(plain, False, self._subject.trace(self._precision, mode, LINE[0]))[0]
        return wires_of(plain.table, setting.bound.program, setting.bound.mesh, auto)

    def fitting(
        self, plain: Candidate, limit: int, batch: int | None, room: float = inf
    ) -> tuple[list[FittingCandidate], str]:
        """What fits of all micro-batches up to ``limit`` of a candidate that has one sample, with so many bytes of host
        memory for each rank; or why none does."""
        mode = plain.mode
        few, more = self._subject.line(self._precision, mode)
        one = self._of_one(mode, limit)
        if few.structure != more.structure:
            return [], "its forward does other things with 4 samples than with 2: give a micro-batch."
        samples = np.arange(1, limit + 1)
        accumulate = np.ones_like(samples) if batch is None else -(-batch // (samples * self.readers))
        peaks, seconds = np.full(limit, inf), np.full(limit, inf)
        parts = np.zeros((2, limit))
        least, host = "", np.zeros(limit)
        for several in (False, True):
            mine = (accumulate > 1) == several
            if not mine.any():
                continue
            setting, plan, schedule = self._walk(plain, several, few)
            if not several and plan.rest > self._budget:
                return [], f"what rests takes {human(plan.rest)} of {human(self._budget)} already."
            host = np.full(limit, plan.tiers.get(Tier.HOST, 0.0) - few.away.get(Tier.HOST, 0.0))
            peaks[mine] = plan.line(few, more, LINE).at(samples[mine])
            if mine[0]:
                alone = self._walk(plain, several, one or few)[1]
                peaks[0] = inf if one is None else alone.peak
                lot = "two samples peak" if one is None else "one sample peaks"
                least = f"{lot} at {human(alone.peak)} of {human(self._budget)}, {alone.top.where}."
            rows = row_seconds(setting, schedule, self._where.device, self._work(mode, limit, few, more), accumulate)
            seconds[mine], parts[:, mine] = rows.step[mine], np.stack((rows.compute, rows.update))[:, mine]
        fits = np.flatnonzero(peaks <= self._budget)
        if len(fits) and mode == "host":
            host += self._away(mode, samples, int(fits[-1]) + 1)
            least = f"one sample needs {human(host[0])} of host memory for each rank, of which there are {human(room)}."
            fits = fits[host[fits] <= room]
        if not len(fits):
            return [], least
        totals = samples * accumulate * self.readers
        rate = (totals if batch is None else batch) / seconds  # of what was asked for: more makes no step faster
        fastest = int(fits[rate[fits].argmax()]) + 1
        sizes = sorted({n for n in (*sizes_to_show(int(fits[-1]) + 1), fastest) if peaks[n - 1] <= self._budget})
        return [
            FittingCandidate(
                replace(plain, micro_batch=n, accumulate=int(accumulate[n - 1])),
                float(peaks[n - 1]),
                float(host[n - 1]),
                self._seconds(few, more, n, int(accumulate[n - 1]), float(seconds[n - 1]), parts[:, n - 1]),
                float(rate[n - 1]),
                int(totals[n - 1]),
                few.zeros,
                few.loss,
            )
            for n in sizes
        ], ""

    def _of_one(self, mode: str, limit: int) -> Trace | None:
        """The trace of one sample; None: the model does not train on so few, as under batch normalization."""
        try:
            return self._subject.trace(self._precision, mode, 1)
        except ModelError:
            if limit == 1:
                raise
            return None

    def _away(self, mode: str, samples: np.ndarray, most: int) -> np.ndarray:
        """Bytes of activations in host memory, by samples, of micro-batches of ``most`` at most: of these it is what a
        trace of theirs has, and of smaller ones, of which less is large enough to be moved, no less than it is."""
        held = self._subject.trace(self._precision, mode, most).away.get(Tier.HOST, 0.0)
        return held * samples / most

    def _seconds(self, few: Trace, more: Trace, n: int, accumulate: int, step: float, parts: np.ndarray) -> Seconds:
        compute, update = map(float, parts)
        at = (n - LINE[0]) / (LINE[1] - LINE[0])

        def all_of(a: float, b: float) -> float:
            return accumulate * (a + (b - a) * at)

        return Seconds(
            step,
            compute,
            step - compute - update,
            update,
            all_of(few.flops, more.flops),
            all_of(few.attention, more.attention),
            all_of(few.tokens, more.tokens),
        )

    def _work(self, mode: str, limit: int, few: Trace, more: Trace) -> Work:
        if (mode, limit) not in self._works:
            at = (np.arange(1, limit + 1) - LINE[0]) / (LINE[1] - LINE[0])
            self._works[mode, limit] = Work(self._where.device, few, more, at, self._ways)
        return self._works[mode, limit]

    def _walk(self, plain: Candidate, several: bool, trace: Trace) -> tuple[Setting, MemoryPlan, Schedule]:
        """The program is walked once for one micro-batch a step, and once for several, however many samples."""
        key = plain.table, plain.prefetch, several, trace.structure
        if key not in self._done:
            setting = self._subject.setting(
                trace,
                layout=plain.table,
                precision=self._precision,
                mesh=self._mesh.axes,
                overlap=Overlap(prefetch=plain.prefetch),
                micro_batches=1 + several,
                moments=self._moments,
                clip=True,
                behaviour=self._behaviour,
            )
            plan = plan_memory(setting, trace)
            self._done[key] = setting, plan, schedule_of(plan.points)
        setting, plan, schedule = self._done[key]
        return setting, plan.of(trace), schedule


def too_much_at_rest(tiers: Mapping[Tier, float], host: float, budget: float) -> str:
    """Why so many bytes at rest by tier do not fit; empty: they do."""
    if (held := tiers.get(Tier.HOST, 0.0)) > host:
        return f"states need {human(held)} of host memory for each rank, of which there are {human(host)}."
    rest = tiers.get(Tier.DEVICE, 0.0)
    return f"what rests takes {human(rest)} of {human(budget)} already." if rest > budget else ""


def wires_of(table: Layout, program: Program, mesh: Mesh, auto: AutoWire) -> list[dict[str, str]]:
    """Wires that a layout may have, as arguments of a candidate; its own first. Two hops need nodes of several ranks,
    and transfers that the program does not make have one wire."""
    sent = {
        op.purpose
        for section in ("forward", "backward", "last", "step")
        for op in program.section(section)
        if op.verb in COLLECTIVES
    }
    hops = (1, 2) if all(mesh.get(axis, 1) > 1 for axis in DATA_AXES) else (1,)
    each: list[list[dict[str, str]]] = []
    for purpose in PURPOSES:
        own = getattr(table, purpose)
        found: list[dict[str, str]] = [{}]
        if purpose in sent:
            others = (option.wire for option in wires(table, purpose, auto))
            found += [
                {purpose: str(wire)}
                for wire in others
                if wire != own and wire.hops in hops and _takes(table, purpose, wire)
            ]
        each.append(found)
    return [gather | reduce for gather, reduce in product(*each)]


def _takes(table: Layout, purpose: str, wire: Wire) -> bool:
    """Whether a layout may have it."""
    try:
        _ = table.replace(**{purpose: wire})
    except LayoutError:
        return False
    return True
