"""One stage of a pipeline on paper: its pieces run on what the stages around it would send, in the order of actions.

A forward and a backward of one micro-batch are traced; an order says which of them follow each other on a rank, and
what is kept of micro-batches in between. The events of all of them, one behind the other, are what the program's walk
goes along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.order import choose_order, make_order
from shardfold.parallel.pipeline.stages import Borders, Run, StageDone, Stages
from shardfold.parallel.pipeline.trace import Origin
from shardfold.planner.division import Division
from shardfold.planner.trace import Event, Trace

__all__ = ["Stage", "in_order", "sent_at", "stages_of"]

STEADY = 2
"""Micro-batches behind those that a rank keeps at most, with which an order of one forward and one backward repeats."""


def stages_of(
    model: nn.Module, division: Division, device: torch.device, begins: Sequence[str] | None = None
) -> Stages:  # fmt: skip
    """The stages of a model, one of which is here; ``begins``: as ``Engine(stages=)`` takes them.

    Raises:
        ConfigError: the order has several stages on a rank, or backwards in parts, or of batches before.
        ModelError: the model cannot be cut.
    """
    choice = choose_order(division.order)
    rows = make_order(choice, division.pipeline, division.micro_batches)
    if choice.chunks > 1 or any(action.verb not in "FB" or action.batch < 0 for row in rows for action in row):
        raise ConfigError(
            f"a plan follows pipeline='gpipe' and '1f1b', and orders of your own of whole backwards with one stage on "
            f"each rank; {str(choice)!r} is not one."
        )
    places = choice.places(division.pipeline)
    return Stages(model, division.pipeline, [division.stage], begins, device, places)


class Stage:
    """The stage of a rank, which a listener runs.

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

    def forward(self, compute: Callable[[], Tensor]) -> tuple[list[Tensor], Tensor | None, list[Tensor]]:
        """What it received, the loss where it has it, and what it sends."""
        borders = self._borders
        crossing = borders.crossing[self._number - 1] if self._number else []
        received: dict[Origin, Tensor] = {}
        for origin in crossing:
            made = borders.trace.made(origin)
            received[origin] = torch.empty(made.shape, dtype=made.dtype).requires_grad_(made.requires_grad)
        run, loss = Run(self._number, borders, received), None
        with self._stages.running(run):
            try:
                loss = compute()
            except StageDone:
                if self.last:
                    raise
        return list(received.values()), loss if self.last else None, [] if self.last else run.sent()


class _Pass(NamedTuple):
    """A forward or a backward of one micro-batch on a rank.

    Attributes:
        forward: which of them it is.
        section: of the program.
        base: bytes of what is kept of other micro-batches then.
    """

    forward: bool
    section: str
    base: float


def in_order(trace: Trace, division: Division) -> Trace:
    """The trace of all micro-batches of a step on one rank, from that of one: of passes that are alike, in which what
    is kept of others differs only, the first two, the last, and that in which the most is kept."""
    count = division.micro_batches
    if division.order == "1f1b":  # goes on in the same way
        count = min(count, division.pipeline + STEADY)
    actions = make_order(choose_order(division.order), division.pipeline, count)[division.stage]
    cut = sent_at(trace)
    there, back = trace.events[:cut], trace.events[cut:]
    kept, gone = there[-1].level, back[-1].size
    passes: list[_Pass] = []
    alive, waits = 0, 0.0
    final = max(n for n, action in enumerate(actions) if action.verb == "B")
    for number, action in enumerate(actions):
        forward = action.verb == "F"
        section = "forward" if forward else "last" if number == final else "backward"
        passes.append(_Pass(forward, section, (alive if forward else alive - 1) * kept + waits))
        alive += 1 if forward else -1
        waits = waits if forward else gone  # gradients are on their way until others are
    events: list[Event] = []
    spans: list[tuple[str, int, int]] = []
    for one in _telling(passes):
        begin = len(events)
        events += _raised(there if one.forward else back, one.base)
        spans.append((one.section, begin, len(events)))
    return replace(trace, events=tuple(events), passes=tuple(spans), batch=trace.batch * division.micro_batches)


def sent_at(trace: Trace) -> int:
    """The first event of the backward of a stage's trace of one micro-batch."""
    return next(n for n, event in enumerate(trace.events) if event.kind == "sent") + 1


def _telling(passes: Sequence[_Pass]) -> list[_Pass]:
    """Those in which a peak may lie: buffers of gradients are there from the first backward on."""
    begun = next(n for n, one in enumerate(passes) if not one.forward)
    alike: dict[tuple[str, bool], list[int]] = {}
    for number, one in enumerate(passes):
        alike.setdefault((one.section, number > begun), []).append(number)
    keep: set[int] = set()
    for numbers in alike.values():
        keep |= {*numbers[:2], numbers[-1], max(numbers, key=lambda n: passes[n].base)}
    return [passes[number] for number in sorted(keep)]


def _raised(events: Sequence[Event], by: float) -> list[Event]:
    return [event._replace(peak=event.peak + by, level=event.level + by) for event in events]
