"""WHICH way to train: all layouts, tiers, modes and micro-batches that fit, ranked, and why the others do not.

For each layout, tier and way to prefetch the program is walked once for a step of one micro-batch and once for one of
several; modes of activations whose traces have the same events share these walks. What forward and backward hold at
each point, and what they compute before it, is a line over the samples of a micro-batch, so that the peaks and the
seconds of all micro-batches follow together, as rows of numbers. Where what rests takes more than the device has,
nothing is walked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from shardfold.errors import ConfigError, ModelError
from shardfold.plan.layout import Precision, Tier
from shardfold.plan.passes import Overlap
from shardfold.plan.sizes import human
from shardfold.planner.division import UNDIVIDED, Division
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import CPU, GPU, MemoryPlan, Setting, plan_memory
from shardfold.planner.seconds import Schedule, Seconds, Way, Work, row_seconds, schedule_of
from shardfold.planner.setting import LINE, Subject
from shardfold.planner.trace import Trace

__all__ = ["LAYOUTS", "Candidate", "Found", "Refused", "Search", "search", "search_divisions"]

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz", "offload", "infinity")
MODES = ("keep", "select", "recompute")
STAGES = {"ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3, "offload": 2, "infinity": 3}
"""What DeepSpeed calls them."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A way to train.

    Attributes:
        layout: name of a preset.
        mode: of activations.
        micro_batch: samples on each rank at a time.
        accumulate: micro-batches of a step.
        precision: policy.
        prefetch: units gathered ahead.
        division: how ranks share the model besides its states.
    """

    layout: str
    mode: str = "keep"
    micro_batch: int = 1
    accumulate: int = 1
    precision: str = "bf16"
    prefetch: int = 1
    division: Division = UNDIVIDED

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of :class:`shardfold.Engine`."""
        axes, more = self.division.axes, dict[str, Any]()
        if axes:
            more["mesh"] = axes
        if "tensor" in axes:
            more |= {"tensor": self.division.plan, "sequence_parallel": self.division.sequence_parallel}
        return {
            "layout": self.layout, "precision": self.precision, "activations": self.mode,
            "accumulate": self.accumulate, "overlap": Overlap(prefetch=self.prefetch), **more,
        }  # fmt: skip

    @property
    def train(self) -> dict[str, Any]:
        """Settings of ``shardfold train``; activations are none of its."""
        return {
            "layout": self.layout, "precision": self.precision, "micro_batch": self.micro_batch,
            "accumulate": self.accumulate, **self.division.axes,
        }  # fmt: skip

    @property
    def deepspeed(self) -> dict[str, Any]:
        """A DeepSpeed config, as far as it has words for this.

        Raises:
            ConfigError: it has none for the layout, or for axes.
        """
        if self.division.axes:
            raise ConfigError(f"a DeepSpeed config has no words for {self.division}: give Engine(...) the axes.")
        if self.layout not in STAGES:
            raise ConfigError(f"DeepSpeed has no stage that is {self.layout}: take zero3, or give Engine the layout.")
        zero: dict[str, Any] = {"stage": STAGES[self.layout]}
        if self.layout in ("offload", "infinity"):
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.layout == "infinity":
            zero["offload_param"] = {"device": "cpu"}
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch, "gradient_accumulation_steps": self.accumulate,
            "zero_optimization": zero,
        }  # fmt: skip
        if self.precision in ("bf16", "fp16"):
            found[self.precision] = {"enabled": True}
        return found

    def __str__(self) -> str:
        axes = f"{self.division}, " if self.division.axes else ""
        return f"{self.layout}, {axes}{self.mode}, micro-batch {self.micro_batch} x {self.accumulate}"


@dataclass(frozen=True)
class Found:
    """A candidate that fits.

    Attributes:
        peak: bytes of each device.
        host: bytes of host memory for each rank.
        seconds: of a step.
        samples: per second, of all ranks.
    """

    candidate: Candidate
    peak: float
    host: float
    seconds: Seconds
    samples: float


@dataclass(frozen=True)
class Refused:
    """What does not fit, and why, in a sentence."""

    layout: str
    mode: str
    why: str
    division: Division = UNDIVIDED


@dataclass(frozen=True)
class Search:
    """What was found.

    Attributes:
        found: the fastest first; of each layout, mode and way to prefetch the micro-batches that are powers of two, the
            largest that fits and the fastest.
        refused: what does not fit with any micro-batch.
        looked_at: candidates whose peak and seconds were computed, or whose states alone do not fit.
    """

    found: Sequence[Found]
    refused: Sequence[Refused]
    looked_at: int

    @property
    def best(self) -> Found:
        """The fastest.

        Raises:
            ConfigError: nothing fits.
        """
        if not self.found:
            raise ConfigError("nothing fits: " + " ".join(f"{r.layout}, {r.mode}: {r.why}" for r in self.refused[:4]))
        return self.found[0]


def search(
    subject: Subject,
    where: Cluster,
    *,
    precision: str | Precision = "bf16",
    layouts: Iterable[str] = LAYOUTS,
    modes: Iterable[str] = MODES,
    prefetches: Iterable[int] = (1,),
    batch: int | None = None,
    most: int = 1024,
    host: float = inf,
    moments: int = 2,
) -> Search:
    """All ways to train ``subject`` there.

    Args:
        subject: model and micro-batch.
        where: devices.
        precision: policy.
        layouts: names of presets.
        modes: of activations.
        prefetches: units gathered ahead.
        batch: samples of a step of all ranks; None: one micro-batch of each.
        most: the largest micro-batch that is looked at.
        host: bytes of host memory for each rank.
        moments: that the optimizer keeps of each element.
    """
    if subject.division.pipeline > 1:
        raise ConfigError("a search does not go through stages: give a micro-batch, and plan that.")
    walks = _Walks(subject, where, precision, moments)
    found: list[Found] = []
    refused: list[Refused] = []
    looked_at = 0
    chosen, ahead = list(modes), list(prefetches)
    limit = most if batch is None else min(most, max(1, batch // walks.readers))
    for layout in layouts:
        why = walks.resting_too_much(layout, host)
        for mode in chosen:
            for prefetch in ahead:
                looked_at += limit
                if why:
                    refused.append(Refused(layout, mode, why, subject.division))
                    continue
                each, reason = walks.fitting(layout, mode, prefetch, limit, batch)
                found += each
                if reason:
                    refused.append(Refused(layout, mode, reason, subject.division))
    found.sort(key=lambda each: (-each.samples, each.peak))
    return Search(found, refused, looked_at)


def search_divisions(
    subject: Subject, where: Cluster, divisions: Iterable[Division], *, layouts: Iterable[str] = LAYOUTS,
    modes: Iterable[str] = MODES, **how: Any,
) -> Search:  # fmt: skip
    """The searches of each of some divisions as one; see :func:`search`.

    Args:
        subject: model and micro-batch; its own division does not count.
        where: devices.
        divisions: sizes of axes; those that the model or the devices do not divide by are refused in a sentence.
        layouts: names of presets.
        modes: of activations.
        how: the other arguments of :func:`search`.
    """
    found: list[Found] = []
    refused: list[Refused] = []
    looked_at, names, chosen = 0, list(layouts), list(modes)
    for division in divisions:
        try:
            _ = division.over(where.mesh)
            one = replace(subject, division=replace(division, streams=where.device.streams))
        except (ConfigError, ModelError) as error:
            refused.append(Refused("any", "any", str(error), division))
            continue
        each = search(one, where, layouts=names, modes=chosen, **how)
        found += each.found
        refused += each.refused
        looked_at += each.looked_at
    return Search(sorted(found, key=lambda each: (-each.samples, each.peak)), refused, looked_at)


class _Walks:
    """The program's walks of one model on some devices, each done once."""

    def __init__(self, subject: Subject, where: Cluster, precision: str | Precision, moments: int) -> None:
        self._subject, self._where, self._precision, self._moments = subject, where, precision, moments
        self._mesh = subject.division.over(where.mesh)
        #: That read other samples.
        self.readers = self._mesh.parts(self._mesh.sampling)
        self._ways = {axis: Way(where.link(self._mesh, axis), size) for axis, size in subject.division.axes.items()}
        self._behaviour = GPU if where.device.streams else CPU
        self._budget = where.device.usable
        self._done: dict[Any, tuple[Setting, MemoryPlan, Schedule]] = {}
        self._works: dict[tuple[str, int], Work] = {}

    def resting_too_much(self, layout: str, host: float) -> str:
        """Why nothing can fit, as the states alone do not; empty: they do."""
        tiers = self._subject.resting(layout, self._precision, self._mesh.axes, self._moments)
        if (held := tiers.get(Tier.HOST, 0.0)) > host:
            return f"states need {human(held)} of host memory for each rank, of which there are {human(host)}."
        rest = tiers.get(Tier.DEVICE, 0.0)
        if rest > self._budget and self._behaviour.streams:  # else gradients may take the place of those of autograd
            return f"what rests takes {human(rest)} of {human(self._budget)} already."
        return ""

    def fitting(self, layout: str, mode: str, prefetch: int, limit: int, batch: int | None) -> tuple[list[Found], str]:
        """What fits of all micro-batches up to ``limit``; or why none does."""
        one, few, more = (self._subject.trace(self._precision, mode, n) for n in (1, *LINE))
        if few.structure != more.structure:
            return [], "its forward does other things with 4 samples than with 2: give a micro-batch."
        samples = np.arange(1, limit + 1)
        accumulate = np.ones_like(samples) if batch is None else -(-batch // (samples * self.readers))
        peaks, seconds = np.full(limit, inf), np.full(limit, inf)
        parts = np.zeros((2, limit))
        least, host = "", 0.0
        for several in (False, True):
            mine = (accumulate > 1) == several
            if not mine.any():
                continue
            setting, plan, schedule = self._walk(layout, prefetch, several, few)
            if not several and plan.base > self._budget:
                return [], f"what rests takes {human(plan.base)} of {human(self._budget)} already."
            host = plan.tiers.get(Tier.HOST, 0.0)
            peaks[mine] = plan.line(few, more, LINE).at(samples[mine])
            if mine[0]:
                alone = self._walk(layout, prefetch, several, one)[1]
                peaks[0] = alone.peak
                least = f"one sample peaks at {human(alone.peak)} of {human(self._budget)}, {alone.top.where}."
            rows = row_seconds(setting, schedule, self._where.device, self._work(mode, limit, few, more), accumulate)
            seconds[mine], parts[:, mine] = rows.step[mine], np.stack((rows.compute, rows.update))[:, mine]
        fits = np.flatnonzero(peaks <= self._budget)
        if not len(fits):
            return [], least
        rate = samples * accumulate * self.readers / seconds
        fastest = int(fits[rate[fits].argmax()]) + 1
        sizes = sorted({n for n in (*_sizes(int(fits[-1]) + 1), fastest) if peaks[n - 1] <= self._budget})
        return [
            Found(
                Candidate(
                    layout=layout, mode=mode, micro_batch=n, accumulate=int(accumulate[n - 1]),
                    precision=str(self._precision), prefetch=prefetch, division=self._subject.division,
                ),
                float(peaks[n - 1]), host,
                self._seconds(few, more, n, int(accumulate[n - 1]), float(seconds[n - 1]), parts[:, n - 1]),
                float(rate[n - 1]),
            )
            for n in sizes
        ], ""  # fmt: skip

    def _seconds(self, few: Trace, more: Trace, n: int, accumulate: int, step: float, parts: np.ndarray) -> Seconds:
        compute, update = map(float, parts)
        at = (n - LINE[0]) / (LINE[1] - LINE[0])

        def all_of(a: float, b: float) -> float:
            return accumulate * (a + (b - a) * at)

        return Seconds(
            step, compute, step - compute - update, update, all_of(few.flops, more.flops),
            all_of(few.attention, more.attention), all_of(few.tokens, more.tokens),
        )  # fmt: skip

    def _work(self, mode: str, limit: int, few: Trace, more: Trace) -> Work:
        if (mode, limit) not in self._works:
            at = (np.arange(1, limit + 1) - LINE[0]) / (LINE[1] - LINE[0])
            self._works[mode, limit] = Work(self._where.device, few, more, at, self._ways)
        return self._works[mode, limit]

    def _walk(self, layout: str, prefetch: int, several: bool, trace: Trace) -> tuple[Setting, MemoryPlan, Schedule]:
        """The program is walked once for one micro-batch a step, and once for several, however many samples."""
        key = layout, prefetch, several, trace.structure
        if key not in self._done:
            setting = self._subject.setting(
                trace, layout=layout, precision=self._precision, mesh=self._mesh.axes,
                overlap=Overlap(prefetch=prefetch), micro_batches=1 + several, moments=self._moments, clip=True,
                behaviour=self._behaviour,
            )  # fmt: skip
            plan = plan_memory(setting, trace)
            self._done[key] = setting, plan, schedule_of(plan.points)
        setting, plan, schedule = self._done[key]
        return setting, plan.of(trace), schedule


def _sizes(most: int) -> list[int]:
    """Powers of two, and the largest."""
    return [*(2**n for n in range(most.bit_length()) if 2**n < most), most]
