"""What fits: the peak of each layout and each mode of activations, and the largest micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf
from typing import Any

from shardfold.plan import presets
from shardfold.plan.axes import Axis
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.lifetimes import GPU, Behaviour
from shardfold.plan.program_passes import Overlap
from shardfold.plan.sizes import human
from shardfold.planner.candidate import Candidate
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import MemoryPlan, plan_memory
from shardfold.planner.moved import MOVED
from shardfold.planner.seconds import Seconds, plan_seconds, ways_of
from shardfold.planner.setting import LINE, Subject
from shardfold.planner.staged_walks import StagedWalks

__all__ = ["Option", "largest_micro_batch", "largest_of", "option", "options"]


@dataclass(frozen=True)
class Option:
    """One way to train, and what it needs.

    Attributes:
        layout: its name.
        mode: of activations.
        micro_batch: samples on each rank at a time.
        plan: bytes over a step.
        largest: the largest micro-batch that fits on the device and with the host's memory; 0: none does.
        budget: bytes of the device.
        host: bytes of host memory for each rank; inf: not known.
        stage: those whose rank it is of, which needs the most, in words; empty: there is one.
        seconds: of a step; None: the device's rates were not given.
        loss: as of a trace.
    """

    layout: str
    mode: str
    micro_batch: int
    plan: MemoryPlan
    largest: int
    budget: float
    host: float = inf
    stage: str = ""
    seconds: Seconds | None = None
    loss: str = ""

    @property
    def fits(self) -> bool:
        return self.plan.peak <= self.budget and self.plan.tiers.get(Tier.HOST, 0.0) <= self.host

    @property
    def why(self) -> str:
        """Why it does not fit, in a sentence; empty where it does."""
        if self.fits:
            return ""
        if (held := self.plan.tiers.get(Tier.HOST, 0.0)) > self.host:
            what = "states and activations" if Tier.HOST in self.plan.trace.away else "states"
            return f"{what} need {human(held)} of host memory for each rank, of which there are {human(self.host)}."
        if self.plan.rest > self.budget:
            return f"what rests takes {human(self.plan.rest)} of {human(self.budget)} already."
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
    where: Cluster | None = None,
) -> Option:
    """What one way to train needs; ``where``: devices whose rates say how long it takes."""
    trace = subject.trace(precision, mode, micro_batch)
    setting = subject.setting(
        trace,
        layout=layout,
        precision=precision,
        mesh=mesh,
        overlap=overlap,
        micro_batches=micro_batches,
        moments=moments,
        clip=clip,
        behaviour=behaviour,
    )
    plan = plan_memory(setting, trace)
    largest = largest_micro_batch(subject, plan, precision=precision, mode=mode, budget=budget, host=host)
    seconds = None
    if where is not None and subject.division.pipeline == 1:  # a stage by itself has no step
        ways = ways_of(where, setting.bound.mesh, subject.division.axes)
        seconds = plan_seconds(setting, plan, where.device, ways)
    return Option(
        name or str(layout), mode, micro_batch, plan, largest, budget, host, subject.staged, seconds, trace.loss
    )


def options(
    subjects: Sequence[Subject],
    layouts: Mapping[str, Layout],
    modes: Iterable[str],
    *,
    micro_batch: int | None,
    tick: Callable[[str], None] = lambda doing: None,
    **how: Any,
) -> list[Option]:
    """All of these, the first layouts first; of the stages of ``subjects`` that which needs the most.

    Args:
        subjects: one, or one for each stage.
        layouts: tables by name.
        modes: of activations.
        micro_batch: samples; None: of each the most that fit on all stages, or one where none does.
        tick: called with what is looked at next.
        how: the other arguments of :func:`option`.
    """
    chosen, found = list(modes), list[Option]()
    walks = _staged_walks(subjects, **how)

    def each(name: str, mode: str, samples: int) -> list[Option]:
        return [
            option(subject, layout=layouts[name], mode=mode, name=name, micro_batch=samples, **how)
            for subject in subjects
        ]

    for name in layouts:
        for mode in chosen:
            tick(f"{name}, {mode}")
            every = each(name, mode, micro_batch or LINE[0])
            largest = min(one.largest for one in every)
            if micro_batch is None:
                every = each(name, mode, max(largest, 1))
            most = max(every, key=lambda one: one.plan.peak)
            one = replace(most, largest=largest, loss=next((one.loss for one in every if one.loss), ""))
            found.append(one if walks is None else replace(one, seconds=_staged_seconds(walks, one, **how)))
    return found


def _staged_walks(
    subjects: Sequence[Subject],
    *,
    precision: str | Precision = "bf16",
    moments: int = 2,
    where: Cluster | None = None,
    **_: object,
) -> StagedWalks | None:
    """Of the ranks that have stages; None: there are none, or no rates."""
    if where is None or subjects[0].division.pipeline == 1:
        return None
    return StagedWalks(subjects[0], where, precision, moments, subjects)


def _staged_seconds(
    walks: StagedWalks, option: Option, *, precision: str | Precision = "bf16", micro_batches: int = 1, **_: object
) -> Seconds:
    """Of a step through all stages."""
    one = Candidate(layout=option.layout, mode=option.mode, precision=str(precision))
    return walks.seconds(replace(one, micro_batch=option.micro_batch, accumulate=micro_batches))


def largest_of(
    subjects: Sequence[Subject],
    *,
    layout: str | Layout,
    mode: str = "keep",
    precision: str | Precision = "bf16",
    mesh: Mapping[str, int] | Sequence[Axis],
    micro_batches: int = 1,
    budget: float,
    behaviour: Behaviour = GPU,
    clip: bool = True,
) -> Option:
    """The largest micro-batch that fits, which is ``largest`` of what is returned; that is of one sample if none does.

    Args:
        subjects: one, or one for each stage.
        layout: a preset's name or a table.
        mode: of activations.
        precision: policy.
        mesh: of all ranks.
        micro_batches: of a step.
        budget: bytes of each rank's device.
        behaviour: of the device.
        clip: the norm of the gradients is taken.
    """
    table = presets.named(layout)
    (found,) = options(
        subjects,
        {str(layout) if isinstance(layout, str) else "layout": table},
        [mode],
        micro_batch=None,
        precision=precision,
        mesh=mesh,
        micro_batches=micro_batches,
        budget=budget,
        behaviour=behaviour,
        clip=clip,
    )
    return found


def largest_micro_batch(
    subject: Subject, plan: MemoryPlan, *, precision: str | Precision, mode: str, budget: float, host: float = inf
) -> int:
    """The most samples with which no point of the plan has more bytes than ``budget``, nor host memory more than
    ``host``: what forward and backward hold at each is a line over the number of samples, and what the engine holds
    does not depend on it."""
    few, more = subject.line(precision, mode)
    most = plan.line(few, more, LINE).largest(budget)
    room = host - (plan.tiers.get(Tier.HOST, 0.0) - plan.trace.away.get(Tier.HOST, 0.0))  # beside states
    if room < 0:
        return 0
    if room < inf and 1 <= most < inf and mode in MOVED:
        held = subject.trace(precision, mode, floor(most)).away.get(Tier.HOST, 0.0)
        most *= min(1.0, room / held) if held else 1.0  # of fewer samples no larger part is moved
    return 0 if most == inf else floor(most)
