"""What fits: the peak of each layout and each mode of activations, and the largest micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf

from shardfold.plan.axes import Axis
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.passes import Overlap
from shardfold.plan.sizes import human
from shardfold.planner.memory import GPU, Behaviour, MemoryPlan, plan_memory
from shardfold.planner.setting import LINE, Subject

__all__ = ["Option", "largest_micro_batch", "option", "options"]


@dataclass(frozen=True)
class Option:
    """One way to train, and what it needs.

    Attributes:
        layout: its name.
        mode: of activations.
        micro_batch: samples on each rank at a time.
        plan: bytes over a step.
        largest: the largest micro-batch that fits; 0: none does.
        budget: bytes of the device.
        host: bytes of host memory for each rank; inf: not known.
        stage: whose rank it is of, which needs the most; None: there is one.
    """

    layout: str
    mode: str
    micro_batch: int
    plan: MemoryPlan
    largest: int
    budget: float
    host: float = inf
    stage: int | None = None

    @property
    def fits(self) -> bool:
        return self.plan.peak <= self.budget and self.plan.tiers.get(Tier.HOST, 0.0) <= self.host

    @property
    def why(self) -> str:
        """Why it does not fit, in a sentence; empty where it does."""
        if self.fits:
            return ""
        if (held := self.plan.tiers.get(Tier.HOST, 0.0)) > self.host:
            return f"states need {human(held)} of host memory for each rank, of which there are {human(self.host)}."
        if self.plan.base > self.budget:
            return f"what rests takes {human(self.plan.base)} of {human(self.budget)} already."
        least = f"at most {self.largest} fit" if self.largest else "not even one sample fits"
        return f"{self.micro_batch} samples peak at {human(self.plan.peak)} of {human(self.budget)}; {least}."


def option(
    subject: Subject,
    *,
    layout: str | Layout,
    mode: str = "keep",
    precision: str | Precision = "bf16",
    mesh: Mapping[str, int] | Sequence[Axis],
    micro_batch: int,
    micro_batches: int = 1,
    budget: float,
    host: float = inf,
    behaviour: Behaviour = GPU,
    overlap: Overlap | None = None,
    moments: int = 2,
    clip: bool = True,
    name: str = "",
) -> Option:
    """What one way to train needs."""
    trace = subject.trace(precision, mode, micro_batch)
    setting = subject.setting(
        trace, layout=layout, precision=precision, mesh=mesh, overlap=overlap, micro_batches=micro_batches,
        moments=moments, clip=clip, behaviour=behaviour,
    )  # fmt: skip
    plan = plan_memory(setting, trace)
    largest = largest_micro_batch(subject, plan, precision=precision, mode=mode, budget=budget)
    stage = subject.division.stage if subject.division.pipeline > 1 else None
    return Option(name or str(layout), mode, micro_batch, plan, largest, budget, host, stage)


def options(
    subjects: Sequence[Subject], layouts: Mapping[str, Layout], modes: Iterable[str], **how: object
) -> list[Option]:
    """All of these, the first layouts first; of the stages of ``subjects`` that which needs the most."""
    chosen, found = list(modes), list[Option]()
    for name, table in layouts.items():
        for mode in chosen:
            each = [
                option(subject, layout=table, mode=mode, name=name, **how)  # pyright: ignore[reportArgumentType]
                for subject in subjects
            ]
            most = max(each, key=lambda one: one.plan.peak)
            found.append(replace(most, largest=min(one.largest for one in each)))
    return found


def largest_micro_batch(
    subject: Subject, plan: MemoryPlan, *, precision: str | Precision, mode: str, budget: float
) -> int:
    """The most samples with which no point of the plan has more bytes than ``budget``: what forward and backward hold
    at each is a line over the number of samples, and what the engine holds does not depend on it."""
    few, more = (subject.trace(precision, mode, n) for n in LINE)
    most = plan.line(few, more, LINE).largest(budget)
    return 0 if most == inf else floor(most)
