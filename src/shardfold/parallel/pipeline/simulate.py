"""An order gone through without a model: whether it ends, when each rank does what, and what it keeps meanwhile.

Each action begins as soon as its rank is free and what it needs is there; messages take no time, or ``Times.send``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.action import Action

__all__ = ["SLOTS", "Timeline", "Times", "batches_before", "batches_of", "check", "most", "timeline"]


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long actions take: a number for all stages, or one for each.

    Attributes:
        forward: of a forward.
        inputs: of the gradients of inputs.
        weights: of the gradients of weights; a whole backward takes as long as both.
        send: from a rank to another.
    """

    forward: float | Sequence[float] = 1.0
    inputs: float | Sequence[float] = 1.0
    weights: float | Sequence[float] = 1.0
    send: float = 0.0

    def of(self, action: Action) -> float:
        parts = {"F": (self.forward,), "I": (self.inputs,), "W": (self.weights,), "B": (self.inputs, self.weights)}
        return sum(part if isinstance(part, (int, float)) else part[action.stage] for part in parts[action.verb])


SLOTS = Times()
"""A forward, and each part of a backward, takes one slot."""


class Timeline(NamedTuple):
    """When each rank does what.

    Attributes:
        rows: by rank the actions with the time at which each begins.
        end: when the last is done.
        kept: by rank, the most micro-batches of stages whose forward has run and whose backward is not done, its part
            for weights included.
        busy: by rank how long it does something.
        times: of the actions.
    """

    rows: list[list[tuple[float, Action]]]
    end: float
    kept: list[int]
    busy: list[float]
    times: Times = SLOTS

    @property
    def bubble(self) -> float:
        """The part of the time of all ranks, from the first action to the last, in which they wait."""
        return 1 - sum(self.busy) / (self.end * len(self.rows)) if self.end else 0.0

    @property
    def waits(self) -> list[float]:
        """By rank, how long it waits between its own first action and its own last: without what it costs that ranks
        begin one after the other, as where the step of one may begin before another's is over."""
        found: list[float] = []
        for row, busy in zip(self.rows, self.busy, strict=True):
            last = row[-1][0] + self.times.of(row[-1][1]) if row else 0.0
            found.append(last - (row[0][0] if row else 0.0) - busy)
        return found

    @property
    def shares(self) -> list[float]:
        """By rank, the part of the time from the beginning of the batch until its own last action in which it waits."""
        ends = [row[-1][0] + self.times.of(row[-1][1]) if row else 0.0 for row in self.rows]
        return [1 - busy / end if end else 0.0 for busy, end in zip(self.busy, ends, strict=True)]


def batches_of(order: Sequence[Sequence[Action]]) -> int:
    """How many micro-batches a batch has."""
    return 1 + max((action.batch for actions in order for action in actions), default=-1)


def batches_before(actions: Sequence[Action], batches: int) -> int:
    """How many batches ago the oldest began that these actions are of; 0: all are of one batch."""
    return max((-(action.batch // batches) for action in actions), default=0)


def timeline(order: Sequence[Sequence[Action]], stages: int, times: Times = SLOTS) -> Timeline:
    """Of one batch; where actions are of batches before, of one that has these before it, when all ranks begin it.

    Raises:
        ConfigError: ranks wait for each other for ever.
    """
    batches = batches_of(order)
    before: set[Action] = set()
    line = Timeline([], 0.0, [], [])
    for number in range(max((batches_before(actions, batches) for actions in order), default=0) + 1):
        now = [[action for action in actions if action.batch >= -number * batches] for actions in order]
        line = _timeline(now, stages, times, before)
        done = [action for actions in now for action in actions]
        before = {action._replace(batch=action.batch - batches) for action in (*before, *done)}
    return line._replace(kept=[most(actions) for actions in order])


def _timeline(order: Sequence[Sequence[Action]], stages: int, times: Times, before: Collection[Action]) -> Timeline:
    place = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    done: dict[Action, float] = dict.fromkeys(before, 0.0)
    rows: list[list[tuple[float, Action]]] = [[] for _ in order]
    at, free, busy = [0] * len(order), [0.0] * len(order), [0.0] * len(order)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(order):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                begin: float | None = free[rank]
                for needs in _needs(action, stages):
                    ready = next((done[each] for each in needs if each in done), None)
                    if ready is None:
                        begin = None
                        break
                    begin = max(begin, ready + times.send * (place[needs[0].stage] != rank))
                if begin is None:
                    break
                took = times.of(action)
                rows[rank].append((begin, action))
                free[rank] = done[action] = begin + took
                busy[rank] += took
                at[rank] += 1
                moved = True
    if any(i < len(actions) for actions, i in zip(order, at, strict=True)):
        raise ConfigError(
            f"Parallel(pipeline=...) is given an order that never ends: {_stuck(order, at, done, stages)}."
        )
    return Timeline(rows, max(free, default=0.0), [], busy, times)


def _stuck(order: Sequence[Sequence[Action]], at: Sequence[int], done: Mapping[Action, float], stages: int) -> str:
    said: list[str] = []
    for rank, actions in enumerate(order):
        if at[rank] < len(actions):
            action = actions[at[rank]]
            missing = next(needs[0] for needs in _needs(action, stages) if not any(each in done for each in needs))
            said.append(f"rank {rank} waits in {action.short} for {missing.short}")
    return ", ".join(said)


def _needs(action: Action, stages: int) -> list[tuple[Action, ...]]:
    """What it waits for: of each tuple, one."""
    verb, stage, batch = action
    if verb == "F":
        return [(Action("F", stage - 1, batch),)] if stage else []
    if verb == "W":
        return [(Action("I", stage, batch),)]
    found: list[tuple[Action, ...]] = [(Action("F", stage, batch),)]
    if stage < stages - 1:
        found.append((Action("B", stage + 1, batch), Action("I", stage + 1, batch)))
    return found


def most(actions: Sequence[Action], size: Callable[[int], int] = lambda stage: 1) -> int:
    """What a rank keeps at most of forwards whose backward is not done, if that of a stage has ``size(stage)``."""
    batches = batches_of([actions])
    now = sum(-(each.batch // batches) * size(each.stage) for each in actions if each.batch < 0 and each.verb in "BW")
    found = now
    for action in actions:
        now += {"F": 1, "I": 0}.get(action.verb, -1) * size(action.stage)
        found = max(found, now)
    return found


def check(order: Sequence[Sequence[Action]], ranks: int, batches: int, *, trains: bool = True) -> list[int]:
    """The rank of each stage of an order that can run.

    Raises:
        ConfigError: it cannot; the sentence names rank and action.
    """

    def refuse(said: str) -> ConfigError:
        return ConfigError(f"Parallel(pipeline=...) is given an order in which {said}.")

    if len(order) != ranks:
        raise refuse(
            f"{len(order)} rank{'s have' if len(order) != 1 else ' has'} a line, where the axis has {ranks}: give "
            f"parallel= {len(order)} ranks of pipeline, or the order {ranks} lines"
        )
    place: dict[int, int] = {}
    seen: set[Action] = set()
    has = batches_of(order)
    if has != batches:
        raise refuse(
            f"there are {has} micro-batches, where accumulate= gives {batches}: give accumulate={has}, or an "
            f"order of {batches}"
        )
    for rank, actions in enumerate(order):
        for action in actions:
            other = place.setdefault(action.stage, rank)
            if other != rank:
                raise refuse(f"rank {rank} has {action.short}, whose stage rank {other} has")
            if action.verb == "F" and action.batch < 0:
                raise refuse(f"rank {rank} has {action.short}, a forward of a batch before: backwards may be later")
            if action.verb in "IW" and action.batch < 0:
                raise refuse(f"rank {rank} has {action.short}, a part of a backward of a batch before: give it whole")
            if (one := action._replace(batch=action.batch % batches)) in seen:
                raise refuse(f"rank {rank} has {action.short} twice")
            seen.add(one)
    if not place or sorted(place) != list(range(len(place))):
        absent = next(stage for stage in range(len(place) + 1) if stage not in place)
        raise refuse(f"no rank has stage {absent}")
    counts = [sum(each == rank for each in place.values()) for rank in range(ranks)]
    if len(set(counts)) > 1:
        raise refuse(
            f"rank {counts.index(min(counts))} has {min(counts)} stages and rank {counts.index(max(counts))} "
            f"has {max(counts)}: give all as many"
        )
    places = [place[stage] for stage in range(len(place))]
    for stage, (here, there) in enumerate(pairwise(places)):
        if (there - here) % ranks not in (0, 1, ranks - 1):
            raise refuse(
                f"stage {stage} is on rank {here} and stage {stage + 1} on rank {there}: stages that follow "
                "each other are on one rank or on neighbours"
            )
    for stage, rank in enumerate(places):
        for batch in range(batches):
            _check_one(seen, rank, stage, batch, refuse, trains=trains)
    _ = timeline(order, len(places))
    return places


def _check_one(
    seen: set[Action], rank: int, stage: int, batch: int, refuse: Callable[[str], ConfigError], *, trains: bool
) -> None:
    has = {verb for verb in "FBIW" if Action(verb, stage, batch) in seen}
    if "F" not in has:
        raise refuse(f"rank {rank} lacks {stage}F{batch}")
    if has not in ({"F", "B"}, {"F", "I", "W"}) if trains else has != {"F"}:
        if "B" in has and len(has) > 2:
            raise refuse(f"rank {rank} has {stage}B{batch} and a part of it, {stage}{min(has - {'F', 'B'})}{batch}")
        lacks = "W" if "I" in has else "I" if "W" in has else "B"
        raise refuse(f"rank {rank} lacks {stage}{lacks}{batch}")
