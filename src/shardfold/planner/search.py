"""WHICH way to train: all layouts, tiers, modes and micro-batches that fit, ranked, and why the others do not.

For each layout, tier, mode and way to prefetch the program is walked once. What forward and backward hold at each
point is a line over the samples of a micro-batch, so that the largest micro-batch, and the peak of each smaller one,
follow without another walk; seconds are taken of the powers of two and of the largest, as a step is never shorter with
fewer samples at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

from shardfold.errors import ConfigError
from shardfold.plan.layout import Precision, Tier
from shardfold.plan.passes import Overlap
from shardfold.plan.sizes import human
from shardfold.planner.choice import largest_micro_batch
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import CPU, GPU, MemoryPlan, Setting, plan_memory
from shardfold.planner.seconds import Seconds, plan_seconds
from shardfold.planner.setting import LINE, Subject

__all__ = ["LAYOUTS", "Candidate", "Found", "Refused", "Search", "search"]

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
    """

    layout: str
    mode: str = "keep"
    micro_batch: int = 1
    accumulate: int = 1
    precision: str = "bf16"
    prefetch: int = 1

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of :class:`shardfold.Engine`."""
        return {
            "layout": self.layout, "precision": self.precision, "activations": self.mode,
            "accumulate": self.accumulate, "overlap": Overlap(prefetch=self.prefetch),
        }  # fmt: skip

    @property
    def train(self) -> dict[str, Any]:
        """Settings of ``shardfold train``; activations are none of its."""
        return {
            "layout": self.layout, "precision": self.precision, "micro_batch": self.micro_batch,
            "accumulate": self.accumulate,
        }  # fmt: skip

    @property
    def deepspeed(self) -> dict[str, Any]:
        """A DeepSpeed config, as far as it has words for this.

        Raises:
            ConfigError: it has none for the layout.
        """
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
        return f"{self.layout}, {self.mode}, micro-batch {self.micro_batch} x {self.accumulate}"


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


@dataclass(frozen=True)
class Search:
    """What was found.

    Attributes:
        found: the fastest first.
        refused: what does not fit with any micro-batch.
        looked_at: candidates, those that follow from others included.
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
    found: list[Found] = []
    refused: list[Refused] = []
    looked_at = 0
    chosen, ahead = list(modes), list(prefetches)
    for layout in layouts:
        for mode in chosen:
            for prefetch in ahead:
                one = _One(subject, where, layout, mode, str(precision), precision, prefetch, moments, host)
                limit = min(most, inf if batch is None else max(1, batch // where.size))
                fits = min(one.largest, limit)
                looked_at += int(limit)
                if not fits:
                    refused.append(Refused(layout, mode, one.why))
                    continue
                found += [one.found(samples, batch) for samples in _sizes(int(fits))]
    found.sort(key=lambda each: (-each.samples, each.peak))
    return Search(found, refused, looked_at)


def _sizes(most: int) -> Iterator[int]:
    """Powers of two, and the largest."""
    size = 1
    while size < most:
        yield size
        size *= 2
    yield most


class _One:
    """A layout, a mode and a way to prefetch, with all micro-batches."""

    def __init__(
        self, subject: Subject, where: Cluster, layout: str, mode: str, name: str, precision: str | Precision,
        prefetch: int, moments: int, host: float,
    ) -> None:  # fmt: skip
        self._subject, self._where, self._layout, self._mode = subject, where, layout, mode
        self._name, self._precision, self._prefetch, self._moments = name, precision, prefetch, moments
        self._walked: dict[bool, tuple[Setting, MemoryPlan]] = {}
        budget = where.device.usable
        plan = self._plan(LINE[0], 1)[1]
        held = plan.tiers.get(Tier.HOST, 0.0)
        self.largest = largest_micro_batch(subject, plan, precision=precision, mode=mode, budget=budget)
        self.why = ""
        if held > host:
            self.largest = 0
            self.why = f"states need {human(held)} of host memory for each rank, of which there are {human(host)}."
        elif plan.base > budget:
            self.why = f"what rests takes {human(plan.base)} of {human(budget)} already."
        elif not self.largest:
            one = self._plan(1, 1)[1]
            self.why = f"one sample peaks at {human(one.peak)} of {human(budget)}, {one.top.where}."

    def _plan(self, samples: int, micro_batches: int) -> tuple[Setting, MemoryPlan]:
        """The program is walked once for one micro-batch a step, and once for several, however many samples."""
        several, device = micro_batches > 1, self._where.device
        trace = self._subject.trace(self._precision, self._mode, samples)
        if several not in self._walked:
            setting = self._subject.setting(
                trace, layout=self._layout, precision=self._precision, mesh=self._where.mesh,
                overlap=Overlap(prefetch=self._prefetch), micro_batches=min(micro_batches, 2), moments=self._moments,
                clip=True, behaviour=GPU if device.streams else CPU,
            )  # fmt: skip
            self._walked[several] = setting, plan_memory(setting, trace)
        setting, plan = self._walked[several]
        if [event[:2] for event in plan.trace.events] != [event[:2] for event in trace.events]:
            return replace(setting, micro_batches=micro_batches), plan_memory(setting, trace)
        return replace(setting, micro_batches=micro_batches), plan.of(trace)

    def found(self, samples: int, batch: int | None) -> Found:
        """With micro-batches of so many samples."""
        accumulate = 1 if batch is None else max(1, ceil(batch / (samples * self._where.size)))
        setting, plan = self._plan(samples, accumulate)
        seconds = plan_seconds(setting, plan, self._where.device)
        candidate = Candidate(
            layout=self._layout, mode=self._mode, micro_batch=samples, accumulate=accumulate, precision=self._name,
            prefetch=self._prefetch,
        )  # fmt: skip
        rate = samples * accumulate * self._where.size / seconds.step if seconds.step else 0.0
        return Found(candidate, plan.peak, plan.tiers.get(Tier.HOST, 0.0), seconds, rate)
