"""Memory over time as numbers that a page can compute with: by ranks, samples and length, without another walk.

What a rank holds at each point of a step is a number of bytes and another divided by the ranks; of one rank the program
has no collectives, so it has points of its own. What forward and backward hold grows with samples and with tokens: it
is taken from traces of two numbers of samples and two lengths, and lies on the surface through these four. Between them
it is exact where operations need memory by tokens, as attention without a matrix of scores does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.planner.memory import MemoryPlan, words_of
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.planner.trace import Trace

__all__ = ["Activity", "Points", "Surface", "activity_of", "surface_of"]

RANKS = 2, 64
"""By which what is divided is found."""


class Points(NamedTuple):
    """Points of a step, in order.

    Attributes:
        event: number of the event at each.
        level: 1: what lives at the event counts; 0: the most before it.
        whole: bytes of the engine's.
        divided: bytes of them that the ranks divide.
        rest: bytes at rest: whole, and divided.
        workspace: bytes that libraries take in a step besides.
        host: those of host memory.
    """

    event: list[int]
    level: list[int]
    whole: list[float]
    divided: list[float]
    rest: tuple[float, float]
    workspace: float
    host: tuple[float, float]


class Activity(NamedTuple):
    """What forward and backward hold, by event: the four numbers of ``a + b samples + c length + d samples length``.

    Attributes:
        peak: the most before each event.
        level: what lives at it.
        batch: bytes of the inputs.
        names: what each event is.
    """

    peak: list[list[float]]
    level: list[list[float]]
    batch: list[float]
    names: list[str]


@dataclass(frozen=True)
class Surface:
    """Peaks of one layout under one mode of activations.

    Attributes:
        one: points of one rank.
        many: of several.
        activity: of the model.
    """

    one: Points
    many: Points
    activity: Activity


def activity_of(
    subject: Subject, shorter: Subject | None, precision: str | Precision, mode: str, length: int
) -> Activity:
    """What a model's forward and backward hold.

    Args:
        subject: with samples of ``length``.
        shorter: the same with half of it; None: its samples have no length.
        precision: policy.
        mode: of activations.
        length: of a sample.
    """
    few, more = subject.line(precision, mode)
    if shorter is None:
        others = few, more
    else:
        others = shorter.line(precision, mode)
    half = length / 2 if length else 1.0

    def through(pick: Any) -> list[list[float]]:
        short_few, short_more, long_few, long_more = (np.asarray(pick(t), dtype=float) for t in (*others, few, more))
        by_sample = [(b - a) / (LINE[1] - LINE[0]) for a, b in ((short_few, short_more), (long_few, long_more))]
        at_none = [a - LINE[0] * s for a, s in zip((short_few, long_few), by_sample, strict=True)]
        d, c = ((y - x) / half if length else x * 0 for x, y in (by_sample, at_none))
        found = at_none[1] - c * length, by_sample[1] - d * length, c, d
        return [np.atleast_1d(each).tolist() for each in found]

    names = [words_of(event) for event in few.events]
    batch = [each[0] for each in through(lambda t: t.batch)]
    return Activity(through(lambda t: t.levels[0]), through(lambda t: t.levels[1]), batch, names)


def surface_of(
    subject: Subject,
    layout: str | Layout,
    activity: Activity,
    precision: str | Precision,
    mode: str,
    *,
    moments: int = 2,
    clip: bool = True,
) -> Surface:
    """The surface of a layout; its ranks are those of data."""
    trace = subject.trace(precision, mode, LINE[0])

    def plan(ranks: int) -> MemoryPlan:
        mesh = subject.division.over({"inter": 1, "intra": ranks * subject.division.ranks})
        rank = PlannedRank(mesh=mesh.axes, precision=precision, moments=moments, clip=clip)
        return rank.walk(subject, layout, trace)[1]

    one, few, more = (plan(ranks) for ranks in (1, *RANKS))
    return Surface(_points(one, None, trace), _points(few, more, trace), activity)


def _points(few: MemoryPlan, more: MemoryPlan | None, trace: Trace) -> Points:
    """Points of several ranks, through walks of two numbers of them; of points at one event those that may be the
    highest."""

    def through(a: Any, b: Any) -> tuple[Any, Any]:
        if more is None:
            return a, a * 0
        divided = (a - b) / (1 / RANKS[0] - 1 / RANKS[1])
        return a - divided / RANKS[0], divided

    other = more or few
    whole, divided = through(few.places[0], other.places[0])
    rest = through(few.rest, other.rest)
    host = through(*(plan.tiers.get(Tier.HOST, 0.0) for plan in (few, other)))
    last = len(trace.events) - 1
    kept: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    for n, event in enumerate(few.places[1].tolist()):
        key = (event if event >= 0 else last, bool(few.places[2][n]))
        mine = kept.setdefault(key, [])
        new = float(whole[n]), float(divided[n])
        if not any(a >= new[0] and a + b / 2 >= new[0] + new[1] / 2 for a, b in mine):
            mine[:] = [p for p in mine if not (new[0] >= p[0] and sum(new) >= sum(p))] + [new]
    rows = [(at, int(level), a, b) for (at, level), mine in sorted(kept.items()) for a, b in mine]
    return Points(
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        [row[3] for row in rows],
        (float(rest[0]), float(rest[1])),
        few.fixed.get("workspace", 0.0),
        (float(host[0]), float(host[1])),
    )
