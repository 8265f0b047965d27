"""WHICH way to train: all layouts, wires, modes and micro-batches that fit, ranked, and why the others do not.

For each layout, tier and way to prefetch the program is walked once for a step of one micro-batch and once for one of
several; modes of activations whose traces have the same events share these walks. What forward and backward hold at
each point, and what they compute before it, is a line over the samples of a micro-batch, so that the peaks and the
seconds of all micro-batches follow together, as rows of numbers. Where what rests takes more than the device has,
nothing is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardfold.errors import ConfigError, ModelError
from shardfold.plan.auto_wire import AutoWire
from shardfold.plan.layout import Precision
from shardfold.plan.search import Searched, search
from shardfold.planner.candidate import ANY, Candidate, FittingCandidate, Refused
from shardfold.planner.division import Division
from shardfold.planner.hardware import Cluster
from shardfold.planner.setting import Subject
from shardfold.planner.staged_walks import StagedWalks
from shardfold.planner.walks import Walks, WholeWalks

__all__ = ["BY_NODES", "LAYOUTS", "Ranking", "layouts_for", "rank"]

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz", "offload", "infinity")
BY_NODES = ("hsdp", "hpz")
"""Those that treat ranks of a node otherwise than ranks of others: on one node they are ``zero3``."""
MODES = ("keep", "select", "recompute")


def layouts_for(where: Cluster) -> tuple[str, ...]:
    """Layouts that differ on these devices."""
    return LAYOUTS if where.nodes > 1 else tuple(name for name in LAYOUTS if name not in BY_NODES)


@dataclass(frozen=True)
class Ranking:
    """What was found.

    Attributes:
        found: the fastest first; of each layout, mode and way to prefetch the micro-batches that are powers of two, the
            largest that fits and the fastest.
        refused: what does not fit with any micro-batch.
        looked_at: candidates whose peak and seconds were computed, or whose states alone do not fit.
    """

    found: Sequence[FittingCandidate]
    refused: Sequence[Refused]
    looked_at: int

    @property
    def best(self) -> FittingCandidate:
        """The fastest.

        Raises:
            ConfigError: nothing fits.
        """
        if not self.found:
            if [r.layout for r in self.refused] == [ANY]:
                raise ConfigError(self.refused[0].why)  # nothing was planned that could fit
            raise ConfigError("nothing fits: " + " ".join(f"{r.named}: {r.why}" for r in self.refused[:4]))
        return self.found[0]


def rank(
    subject: Subject,
    where: Cluster,
    divisions: Iterable[Division] | None = None,
    *,
    precision: str | Precision = "bf16",
    layouts: Iterable[str] = LAYOUTS,
    modes: Iterable[str] = MODES,
    prefetches: Iterable[int] = (1,),
    wire: AutoWire | None = None,
    copies: str = "",
    exact: bool = False,
    moments: int = 2,
    tick: Callable[[str], None] = lambda doing: None,
    **limits: Any,
) -> Ranking:
    """All ways to train ``subject`` there.

    Args:
        subject: model and micro-batch.
        where: devices.
        divisions: sizes of axes, in place of the subject's own; those that the model or the devices do not divide by
            are refused in a sentence. None: its own.
        precision: policy.
        layouts: names of presets.
        modes: of activations.
        prefetches: units gathered ahead.
        wire: the wires that may be taken besides those of the layouts; None: none.
        copies, exact: as of a :class:`Candidate`, of each.
        moments: that the optimizer keeps of each element.
        tick: called with what is looked at next.
        limits: ``batch``, ``most`` and ``host``, as of :class:`~shardfold.planner.walks.Walks`.
    """
    names, chosen, ahead = list(layouts), list(modes), list(prefetches)
    planned, looked_at = list[FittingCandidate | Refused](), 0

    def space(walks: Walks, division: Division, said: str) -> Iterator[Candidate]:
        for layout in names:
            same: dict[str, Any] = {"precision": str(precision), "copies": copies, "exact": exact}
            plain = Candidate(layout=layout, mode=chosen[0], division=division, **same)
            wired = wire is not None and not walks.resting_too_much(plain.table)
            for wires in walks.wires(plain, wire) if wire is not None and wired else [{}]:
                for mode in chosen:
                    tick(f"{said}{layout}, {mode}")
                    yield from (replace(plain, mode=mode, prefetch=units, **wires) for units in ahead)

    for division in [subject.division] if divisions is None else divisions:
        said, one = "", subject
        try:
            if divisions is not None:
                _ = division.over(where.mesh)
                said = f"{str(division) or 'data alone'}: "
                one = replace(subject, division=replace(division, streams=where.device.streams))
            kind = StagedWalks if division.pipeline > 1 else WholeWalks
            walks = kind(one.ranks, where, precision, moments, **limits)
            planned += search(space(walks, one.division, said), walks.plan).planned
            looked_at += walks.looked_at
        except (ConfigError, ModelError) as error:
            if divisions is None:
                raise
            planned.append(Refused(ANY, ANY, str(error), division))
    looked = Searched(planned)
    found = [each for each in looked.fitting if isinstance(each, FittingCandidate)]
    return Ranking(found, [each for each in looked.others if isinstance(each, Refused)], looked_at)
