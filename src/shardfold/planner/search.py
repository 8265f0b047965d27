"""WHICH way to train: all layouts, wires, modes and micro-batches that fit, ranked, and why the others do not.

For each layout, tier and way to prefetch the program is walked once for a step of one micro-batch and once for one of
several; modes of activations whose traces have the same events share these walks. What forward and backward hold at
each point, and what they compute before it, is a line over the samples of a micro-batch, so that the peaks and the
seconds of all micro-batches follow together, as rows of numbers. Where what rests takes more than the device has,
nothing is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from shardfold.errors import ConfigError, LayoutError, ModelError
from shardfold.plan.auto_wire import AutoWire
from shardfold.plan.layout import Precision
from shardfold.planner.candidate import ANY, Candidate, FittingCandidate, Refused
from shardfold.planner.division import Division
from shardfold.planner.hardware import Cluster
from shardfold.planner.setting import Subject
from shardfold.planner.staged_walks import StagedWalks
from shardfold.planner.walks import Walks

__all__ = ["BY_NODES", "LAYOUTS", "Search", "layouts_for", "search", "search_divisions"]

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz", "offload", "infinity")
BY_NODES = ("hsdp", "hpz")
"""Those that treat ranks of a node otherwise than ranks of others: on one node they are ``zero3``."""
MODES = ("keep", "select", "recompute")


def layouts_for(where: Cluster) -> tuple[str, ...]:
    """Layouts that differ on these devices."""
    return LAYOUTS if where.nodes > 1 else tuple(name for name in LAYOUTS if name not in BY_NODES)


@dataclass(frozen=True)
class Search:
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


def search(
    subject: Subject,
    where: Cluster,
    *,
    precision: str | Precision = "bf16",
    layouts: Iterable[str] = LAYOUTS,
    modes: Iterable[str] = MODES,
    prefetches: Iterable[int] = (1,),
    wire: AutoWire | None = None,
    batch: int | None = None,
    most: int = 1024,
    host: float = inf,
    moments: int = 2,
    tick: Callable[[str], None] = lambda doing: None,
) -> Search:
    """All ways to train ``subject`` there.

    Args:
        subject: model and micro-batch.
        where: devices.
        precision: policy.
        layouts: names of presets.
        modes: of activations.
        prefetches: units gathered ahead.
        wire: the wires that may be taken besides those of the layouts; None: none.
        batch: samples of a step of all ranks; None: one micro-batch of each, or through stages four for each stage.
        most: the largest micro-batch that is looked at.
        host: bytes of host memory for each rank.
        moments: that the optimizer keeps of each element.
        tick: called with what is looked at next.
    """
    kind = StagedWalks if subject.division.pipeline > 1 else Walks
    walks = kind(subject, where, precision, moments)
    found: list[FittingCandidate] = []
    refused: list[Refused] = []
    looked_at = 0
    chosen, ahead = list(modes), list(prefetches)
    limit = most if batch is None else min(most, max(1, batch // walks.readers))
    for layout in layouts:
        plain = Candidate(layout=layout, precision=str(precision), division=subject.division)
        why = walks.resting_too_much(plain.table, host)
        for wires in walks.wires(plain, chosen[0], wire) if wire is not None and not why else [{}]:
            for mode in chosen:
                tick(f"{layout}, {mode}")
                for prefetch in ahead:
                    looked_at += limit
                    one = replace(plain, mode=mode, prefetch=prefetch, **wires)
                    try:
                        each, reason = ([], why) if why else walks.fitting(one, limit, batch, host)
                    except LayoutError:
                        if not wires:
                            raise
                        continue  # the layout takes no such wire in this precision
                    found += each
                    if reason:
                        refused.append(Refused(layout, mode, reason, subject.division, one.wired))
    found.sort(key=lambda each: (-each.samples, each.peak))
    return Search(found, refused, looked_at)


def search_divisions(
    subject: Subject,
    where: Cluster,
    divisions: Iterable[Division],
    *,
    layouts: Iterable[str] = LAYOUTS,
    modes: Iterable[str] = MODES,
    tick: Callable[[str], None] = lambda doing: None,
    **how: Any,
) -> Search:
    """The searches of each of some divisions as one; see :func:`search`.

    Args:
        subject: model and micro-batch; its own division does not count.
        where: devices.
        divisions: sizes of axes; those that the model or the devices do not divide by are refused in a sentence.
        layouts: names of presets.
        modes: of activations.
        tick: called with what is looked at next.
        how: the other arguments of :func:`search`.
    """
    found: list[FittingCandidate] = []
    refused: list[Refused] = []
    looked_at, names, chosen = 0, list(layouts), list(modes)
    for division in divisions:
        try:
            _ = division.over(where.mesh)
            one = replace(subject, division=replace(division, streams=where.device.streams))
            each = search(one, where, layouts=names, modes=chosen, tick=_within(division, tick), **how)
        except (ConfigError, ModelError) as error:
            refused.append(Refused(ANY, ANY, str(error), division))
            continue
        found += each.found
        refused += each.refused
        looked_at += each.looked_at
    return Search(sorted(found, key=lambda each: (-each.samples, each.peak)), refused, looked_at)


def _within(division: Division, tick: Callable[[str], None]) -> Callable[[str], None]:
    return lambda doing: tick(f"{str(division) or 'data alone'}: {doing}")
