"""The stages of a rank on paper: each runs on what the stages around it would send, in the order of actions.

A forward and a backward of one micro-batch, whole or in its two parts, are traced for each stage; an order says which
of them follow each other on a rank, and what is kept of micro-batches of each stage in between. The events of all of
them, one behind the other, are what the program's walk goes along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.flow import TensorOrigin
from shardfold.parallel.pipeline.stage_order import Action, choose_order, make_order
from shardfold.parallel.pipeline.stages import Borders, StageDone, StageForward, Stages
from shardfold.plan.walk import Part
from shardfold.planner.division import Division
from shardfold.planner.trace import Event, Lane, StagePass, Trace

__all__ = [
    "Stage",
    "actions_of",
    "bases_of",
    "in_order",
    "lanes_of",
    "places_of",
    "spans_of",
    "stages_of",
    "usual_count",
]

EACH = 4
"""Micro-batches of a step for each rank, where nobody says how many samples it has."""
STEADY = {"1f1b": 1, "zb-h1": 2}
"""Orders that repeat what they do behind so many micro-batches for each rank, and two more: no pass of a longer one has
more of others."""


@lru_cache(maxsize=128)
def actions_of(order: str, ranks: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """What each rank does with so many micro-batches.

    Raises:
        ConfigError: there is no such order of that many.
    """
    return tuple(tuple(row) for row in make_order(choose_order(order), ranks, count))


@lru_cache(maxsize=128)
def places_of(order: str, ranks: int) -> tuple[int, ...]:
    """The rank of each stage.

    Raises:
        ConfigError: the order has backwards of batches before.
    """
    choice = choose_order(order)
    before = choice.rows if choice.rows is not None else actions_of(order, ranks, ranks)
    if any(action.batch < 0 for row in before for action in row):
        raise ConfigError(
            f"a plan follows orders whose micro-batches end in their step; {str(choice)!r} has backwards of steps "
            "before, and keeps weights for them."
        )
    return tuple(choice.places(ranks))


def usual_count(order: str, ranks: int) -> int:
    """Micro-batches of a step, where nobody says how many samples it has; those of an order of the user's own."""
    return choose_order(order).batches or EACH * ranks


def lanes_of(actions: Sequence[Action]) -> list[Lane]:
    """How micro-batches go through the stages of a rank: of each stage, whether backwards are whole or in parts."""
    split = {(stage, batch) for verb, stage, batch in actions if verb == "W"}
    return sorted({Lane(stage, (stage, batch) in split) for _, stage, batch in actions})


def stages_of(
    model: nn.Module,
    division: Division,
    device: torch.device,
    begins: Sequence[str] | None = None,
    own: Sequence[int] | None = None,
) -> Stages:
    """The stages of a model; ``begins``: as ``Parallel(stages=)`` takes them; ``own``: those that are here, None: those
    of the rank.

    Raises:
        ConfigError: the order has backwards of batches before.
        ModelError: the model cannot be cut.
    """
    places = places_of(division.order, division.pipeline)
    here = [stage for stage, place in enumerate(places) if place == division.stage]
    return Stages(model, len(places), here if own is None else own, begins, device, places)


class Stage:
    """A stage of a rank, which a listener runs.

    Args:
        stages: of the model that runs.
        number: of the stage.
        borders: what crosses them.
    """

    def __init__(self, stages: Stages, number: int, borders: Borders) -> None:
        self._stages, self._number, self._borders = stages, number, borders
        stages.attach()

    @property
    def last(self) -> bool:
        """Whether it has the loss."""
        return self._number == self._stages.count - 1

    @property
    def handed(self) -> bool:
        """Whether what it receives is of a stage on the same rank, which keeps it."""
        places = self._stages.places
        return self._number > 0 and places[self._number - 1] == places[self._number]

    def receive(self) -> dict[TensorOrigin, Tensor]:
        """What comes over the border before it."""
        borders, received = self._borders, dict[TensorOrigin, Tensor]()
        for origin in borders.crossing[self._number - 1] if self._number else []:
            made = borders.trace.made(origin)
            received[origin] = torch.empty(made.shape, dtype=made.dtype).requires_grad_(made.requires_grad)
        return received

    def forward(
        self, received: Mapping[TensorOrigin, Tensor], compute: Callable[[], Tensor]
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The loss where it has it, and what it sends."""
        run, loss = StageForward(self._number, self._borders, received), None
        with self._stages.running(run):
            try:
                loss = compute()
            except StageDone:
                if self.last:
                    raise
        return loss if self.last else None, [] if self.last else run.sent()


class Span(NamedTuple):
    """A forward, a backward or a part of one in a trace of one micro-batch.

    Attributes:
        begin: its first event.
        end: the one behind its last.
        keeps: bytes that stay behind it of the micro-batch, until its next.
        gives: bytes that go to another stage.
    """

    begin: int
    end: int
    keeps: float
    gives: float


def spans_of(trace: Trace) -> dict[str, Span]:
    """The spans of a stage's trace, by verb of an action: ``F`` and ``B``, or ``F``, ``I`` and ``W``."""
    events = trace.events
    sent = next(n for n, event in enumerate(events) if event.kind == "sent")
    found = {"F": Span(0, sent + 1, events[sent].level, events[sent].size)}
    parts = next((n for n, event in enumerate(events) if event.kind == "inputs"), None)
    if parts is None:
        return found | {"B": Span(sent + 1, len(events), 0.0, events[-1].size)}
    return found | {
        "I": Span(sent + 1, parts, events[parts].level, events[parts - 1].size),
        "W": Span(parts, len(events), 0.0, 0.0),
    }


def bases_of(
    order: Sequence[Sequence[Action]], places: Sequence[int], here: int, spans: Mapping[Lane, Mapping[str, Span]]
) -> list[float]:
    """Bytes of other micro-batches, and of what is on its way, in each action of a rank.

    Args:
        order: what each rank does.
        places: the rank of each stage.
        here: the rank.
        spans: of each lane of its stages.

    What a stage gives to one on the same rank is kept by who gives it; what goes to another rank is a gradient that
    waits until the next one goes, or activations, which the micro-batch keeps anyway. What comes from a rank comes in
    the order in which that sends it: what is not needed yet waits here.
    """
    lanes = {(stage, batch): Lane(stage, False) for _, stage, batch in order[here]}
    lanes |= {(stage, batch): Lane(stage, True) for verb, stage, batch in order[here] if verb == "W"}
    coming = _coming(order, places, here)
    kept: dict[tuple[int, int], float] = {}
    aside: dict[tuple[str, int, int], float] = {}
    waits, found = 0.0, list[float]()
    for verb, stage, batch in order[here]:
        own = spans[lanes[stage, batch]]
        if verb != "W":
            source = stage - 1 if verb == "F" else stage + 1
            what = ("F" if verb == "F" else "B", stage, batch)
            if 0 <= source < len(places) and places[source] != here:
                queue = coming[places[source]]
                while what not in aside:
                    first = queue.popleft()
                    aside[first] = _size(spans, lanes, first)
            aside.pop(what, None)
        found.append(sum(kept.values()) - kept.get((stage, batch), 0.0) + sum(aside.values()) + waits)
        kept[stage, batch] = own[verb].keeps
        if verb in "BI" and stage:
            if places[stage - 1] == here:
                aside["B", stage - 1, batch] = own[verb].gives
            else:
                waits = own[verb].gives
    return found


def _coming(
    order: Sequence[Sequence[Action]], places: Sequence[int], here: int
) -> dict[int, deque[tuple[str, int, int]]]:
    """What each rank sends here, in its order: activations or gradients for a stage and a micro-batch."""
    found: dict[int, deque[tuple[str, int, int]]] = {}
    for place, actions in enumerate(order):
        for action in actions:
            target = action.stage + (1 if action.verb == "F" else -1)
            if place != here and action.sends and 0 <= target < len(places) and places[target] == here:
                found.setdefault(place, deque()).append((action.sends, target, action.batch))
    return found


def _size(
    spans: Mapping[Lane, Mapping[str, Span]], lanes: Mapping[tuple[int, int], Lane], what: tuple[str, int, int]
) -> float:
    """Bytes of activations that come for a stage, which are as many as its gradients that go back, or of gradients."""
    kind, stage, batch = what
    own = spans[lanes[stage, batch]]
    if kind == "B":
        return own["F"].gives
    return own["I" if "I" in own else "B"].gives


class _Action(NamedTuple):
    """An action on a rank.

    Attributes:
        verb: of it.
        one: the pass, whose events are those of its lane's trace.
        base: bytes of what is kept of other micro-batches then.
        begun: how many passes of other kinds there were before it: forwards and backwards of each stage.
    """

    verb: str
    one: StagePass
    base: float
    begun: int


def in_order(trace_of: Callable[[Lane], Trace], division: Division, parts: Mapping[int, Part]) -> Trace:
    """The trace of all micro-batches of a step on one rank, from those of one in each lane: of passes that are alike,
    in which what is kept of others differs only, the first two, the last, and that in which the most is kept.

    Args:
        trace_of: gives the trace of a lane.
        division: how ranks share the model.
        parts: of the rank's units, by stage; empty: it has one stage.

    Raises:
        ConfigError: there is no such order of that many micro-batches.
    """
    count, ranks, here = division.micro_batches, division.pipeline, division.stage
    order = actions_of(division.order, ranks, count)
    if division.order in STEADY:
        order = actions_of(division.order, ranks, min(count, STEADY[division.order] * ranks + 2))
    traces = {lane: trace_of(lane) for lane in lanes_of(order[here])}
    spans = {lane: spans_of(trace) for lane, trace in traces.items()}
    bases = bases_of(order, places_of(division.order, ranks), here, spans)
    events: list[Event] = []
    passes: list[StagePass] = []
    for action in _telling(_passes(order[here], bases, parts)):
        lane, begin = action.one.lane, len(events)
        span = spans[lane][action.verb]
        events += _raised(traces[lane].events[span.begin : span.end], action.base)
        passes.append(action.one._replace(begin=begin, end=len(events)))
    first = next(iter(traces.values()))
    return replace(
        first,
        events=tuple(events),
        passes=tuple(passes),
        batch=first.batch * count,
        loss=next((trace.loss for trace in traces.values() if trace.loss), ""),
        touched=frozenset[str]().union(*(trace.touched for trace in traces.values())),
    )


def _passes(actions: Sequence[Action], bases: Sequence[float], parts: Mapping[int, Part]) -> list[_Action]:
    lasts = {action.stage: action for action in actions if action.verb in "BW"}
    final = [action for action in actions if action.verb in "BW"][-1]
    split = {(stage, batch) for verb, stage, batch in actions if verb == "W"}
    begun: set[tuple[int, bool]] = set()
    found: list[_Action] = []
    for action, base in zip(actions, bases, strict=True):
        verb, stage, batch = action
        last = verb in "BW" and action == lasts[stage]
        section = {
            "F": "forward",
            "I": "quiet",
            "B": "last" if last else "backward",
            "W": "last_weights" if last else "weights",
        }[verb]
        part = parts.get(stage)
        if part is not None and last:
            part = part._replace(last=True, final=action == final)
        one = StagePass(section, 0, 0, Lane(stage, (stage, batch) in split), part)
        found.append(_Action(verb, one, base, len(begun)))
        begun |= {(stage, verb == "F")} if verb != "I" else set()
    return found


def _telling(passes: Sequence[_Action]) -> list[_Action]:
    """Those in which a peak may lie: buffers of a stage's gradients are there from its first backward on, and what its
    first forward gathers for the step from that on."""
    alike: dict[tuple[StagePass, int], list[int]] = {}
    for number, one in enumerate(passes):
        alike.setdefault((one.one, one.begun), []).append(number)
    keep: set[int] = set()
    for numbers in alike.values():
        keep |= {*numbers[:2], numbers[-1], max(numbers, key=lambda n: passes[n].base)}
    return [passes[number] for number in sorted(keep)]


def _raised(events: Sequence[Event], by: float) -> list[Event]:
    return [event._replace(peak=event.peak + by, level=event.level + by) for event in events]
