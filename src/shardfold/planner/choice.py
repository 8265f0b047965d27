"""What fits: the peak of each layout and each mode of activations, and the largest micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from shardfold.plan import presets
from shardfold.plan.checks import human
from shardfold.plan.layout import Layout, Tier
from shardfold.planner.candidate import Candidate
from shardfold.planner.memory import MemoryPlan
from shardfold.planner.seconds import Seconds, plan_seconds, ways_of
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.planner.staged_walks import StagedWalks

__all__ = ["Option", "largest_of", "option", "options"]


@dataclass(frozen=True)
class Option:
    """One way to train, and what it needs.

    Attributes:
        layout: its name.
        mode: of activations.
        micro_batch: samples on each rank at a time; None: as the model was given.
        rank: that is planned for.
        plan: bytes over a step.
        largest: the largest micro-batch that fits on the device and with the host's memory; 0: none does, or it was not
            asked for.
        host: bytes of host memory, of the rank that needs the most of it.
        stage: those whose rank it is of, which needs the most, in words; empty: there is one.
        seconds: of a step; None: the device's rates are not known.
        loss: as of a trace.
    """

    layout: str
    mode: str
    micro_batch: int | None
    rank: PlannedRank
    plan: MemoryPlan
    largest: int
    host: float
    stage: str
    seconds: Seconds | None
    loss: str

    @property
    def needed(self) -> float:
        """Bytes of the device's memory, which may be the host's, too."""
        return self.plan.peak + (self.plan.tiers.get(Tier.HOST, 0.0) if self.rank.host is None else 0.0)

    @property
    def cost(self) -> float:
        """Seconds of a step; 0: not known."""
        return self.seconds.step if self.seconds is not None else 0.0

    @property
    def _room(self) -> float:
        return inf if self.rank.host is None else self.rank.host

    @property
    def fits(self) -> bool:
        return self.needed <= self.rank.budget and self.host <= self._room

    @property
    def why(self) -> str:
        """Why it does not fit, in a sentence; empty where it does."""
        budget = human(self.rank.budget)
        if self.fits:
            return ""
        if self.host > self._room:
            what = "states and activations" if Tier.HOST in self.plan.trace.away else "states"
            return (
                f"{what} need {human(self.host)} of host memory for each rank, of which there are {human(self._room)}."
            )
        if self.plan.rest > self.rank.budget:
            return f"what rests takes {human(self.plan.rest)} of {budget} already."
        least = f"at most {self.largest} fit" if self.largest else "not even one sample fits"
        return f"{self.micro_batch} samples peak at {human(self.plan.peak)} of {budget}; {least}."


def option(
    subjects: Sequence[Subject],
    rank: PlannedRank,
    layout: str | Layout,
    mode: str = "keep",
    micro_batch: int | None = None,
    *,
    name: str = "",
    sized: bool = True,
) -> Option:
    """What one way to train needs.

    Args:
        subjects: one, or one for each stage, of which that counts whose rank needs the most.
        rank: that is planned for.
        layout: a preset's name or a table.
        mode: of activations.
        micro_batch: samples; None: as the subjects have.
        name: of the layout.
        sized: the largest micro-batch is asked for.
    """
    each: list[Option] = []
    for subject in subjects:
        setting, plan = rank.plan(subject, layout, mode, micro_batch)
        seconds = None
        if rank.where is not None and subject.division.pipeline == 1:  # a stage by itself has no step
            ways = ways_of(rank.where, setting.bound.mesh, subject.division.axes)
            seconds = plan_seconds(setting, plan, rank.where.device, ways)
        largest, host = rank.largest(subject, plan) if sized else 0, plan.tiers.get(Tier.HOST, 0.0)
        named, stage, loss = name or str(layout), subject.staged, plan.trace.loss
        each.append(Option(named, mode, micro_batch, rank, plan, largest, host, stage, seconds, loss))
    return replace(
        max(each, key=lambda one: one.needed),
        largest=min(one.largest for one in each),
        host=max(one.host for one in each),
        loss=next((one.loss for one in each if one.loss), ""),
    )


def options(
    subjects: Sequence[Subject],
    rank: PlannedRank,
    layouts: Mapping[str, Layout],
    modes: Iterable[str],
    micro_batch: int | None,
    tick: Callable[[str], None] = lambda doing: None,
) -> list[Option]:
    """All of these, the first layouts first.

    Args:
        subjects: one, or one for each stage.
        rank: that is planned for.
        layouts: tables by name.
        modes: of activations.
        micro_batch: samples; None: of each the most that fit on all stages, or one where none does.
        tick: called with what is looked at next.
    """
    walks = None
    if rank.where is not None and subjects[0].division.pipeline > 1:
        walks = StagedWalks(subjects, rank.where, rank.precision, rank.moments)

    each: list[Option] = []
    for name, mode in product(layouts, modes):
        tick(f"{name}, {mode}")
        one = option(subjects, rank, layouts[name], mode, micro_batch or LINE[0], name=name)
        size = micro_batch or max(one.largest, 1)
        if micro_batch is None:
            most = option(subjects, rank, layouts[name], mode, size, name=name, sized=False)
            one = replace(most, largest=one.largest)
        if walks is not None:
            made = Candidate(layout=name, mode=mode, micro_batch=size, accumulate=rank.micro_batches)
            one = replace(one, seconds=walks.seconds(made))
        each.append(one)
    return each


def largest_of(subjects: Sequence[Subject], rank: PlannedRank, layout: str | Layout, mode: str = "keep") -> Option:
    """The largest micro-batch that fits, which is ``largest`` of what is returned; that is of one sample if none does;
    arguments as of :func:`option`."""
    name = layout if isinstance(layout, str) else "layout"
    (found,) = options(subjects, rank, {name: presets.named(layout)}, [mode], None)
    return found
