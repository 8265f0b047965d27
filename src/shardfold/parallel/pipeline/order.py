"""In which order ranks run the forwards and backwards of their stages, and what they send between them.

An order is data: for each place along the stages a list of actions. :func:`make_order` makes the lists of forwards and
backwards, :func:`lower` puts between them what crosses the borders; the engine does the result, line by line.

    gpipe           all forwards, then all backwards (arXiv 1811.06965)
    1f1b            a backward as soon as there is one: a stage keeps at most as many micro-batches as stages follow it
                    (PipeDream-flush, arXiv 2006.09503)
    interleaved     the same with several stages on each rank, which shortens the bubble (arXiv 2104.04473)
    looped-bfs      several stages on each rank, all micro-batches of one before the next (arXiv 2211.05953)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardfold.errors import ConfigError, did_you_mean

__all__ = ["Action", "Choice", "choose_order", "forwards", "lower", "make_order"]

ORDERS = ("gpipe", "1f1b", "interleaved", "looped-bfs")
LOOPED = ("interleaved", "looped-bfs")


class Action(NamedTuple):
    """What a rank does for one stage and one micro-batch.

    Attributes:
        verb: ``F`` or ``B``; or, before and behind these, ``RECV_F``, ``SEND_F``, ``RECV_B``, ``SEND_B``: activations
            and gradients that come, and that go.
    """

    verb: str
    stage: int
    batch: int

    def __str__(self) -> str:
        return f"{self.verb} stage {self.stage} batch {self.batch}"


class Choice(NamedTuple):
    """An order by name, and how many stages each rank has."""

    name: str
    chunks: int

    def __str__(self) -> str:
        return self.name + (f":{self.chunks}" if self.chunks > 1 else "")


def choose_order(given: Any) -> Choice:
    """What ``pipeline=`` says: a name; of those with several stages on a rank followed by how many, as in
    ``"interleaved:2"``.

    Raises:
        ConfigError: it is no order.
    """
    name, _, count = given.partition(":") if isinstance(given, str) else (given, "", "")
    if name not in ORDERS:
        raise ConfigError(f"pipeline={given!r} is no order.{did_you_mean(str(name), ORDERS)}")
    if name not in LOOPED:
        if count:
            raise ConfigError(f"pipeline={given!r}: {name} has one stage on each rank: leave {':' + count!r} out.")
        return Choice(name, 1)
    if count and not (count.isdecimal() and int(count) > 1):
        raise ConfigError(f"pipeline={given!r}: behind {name}: comes how many stages each rank has, 2 or more.")
    return Choice(name, int(count or 2))


def make_order(choice: Choice, ranks: int, batches: int) -> list[list[Action]]:
    """Forwards and backwards by place; stage s is at the place s % ranks.

    Raises:
        ConfigError: there is no such order of that many micro-batches.
    """
    if choice.name == "interleaved":
        return _interleaved(ranks, choice.chunks, batches)
    found: list[list[Action]] = []
    for place in range(ranks):
        stages = [chunk * ranks + place for chunk in range(choice.chunks)]
        if choice.name == "1f1b":
            pairs = [(place, i) for i in range(batches)]
            found.append(_alternate(pairs, pairs, min(batches, ranks - place - 1)))
        else:
            fronts = [Action("F", stage, i) for stage in stages for i in range(batches)]
            found.append(fronts + [Action("B", stage, i) for stage in stages[::-1] for i in range(batches)])
    return found


def _interleaved(ranks: int, chunks: int, batches: int) -> list[list[Action]]:
    if batches % ranks:
        raise ConfigError(
            f"pipeline='interleaved:{chunks}' runs micro-batches in groups of as many as there are ranks along the "
            f"axis, {ranks}, which {batches} do not divide into: change accumulate=, or take 'looped-bfs:{chunks}'."
        )
    group = ranks * chunks
    numbers = [(k % group // ranks, k // group * ranks + k % ranks) for k in range(batches * chunks)]
    found: list[list[Action]] = []
    for place in range(ranks):
        onward = [(chunk * ranks + place, batch) for chunk, batch in numbers]
        back = [((chunks - 1 - chunk) * ranks + place, batch) for chunk, batch in numbers]
        ahead = min(len(onward), (ranks - place - 1) * 2 + (chunks - 1) * ranks)
        found.append(_alternate(onward, back, ahead))
    return found


def _alternate(onward: Sequence[tuple[int, int]], back: Sequence[tuple[int, int]], ahead: int) -> list[Action]:
    """So many forwards ``ahead``, then one forward and one backward in turn, then the rest of the backwards."""
    actions = [Action("F", *each) for each in onward[:ahead]]
    for i, each in enumerate(back):
        actions += [Action("F", *one) for one in onward[ahead + i : ahead + i + 1]]
        actions.append(Action("B", *each))
    return actions


def forwards(order: Sequence[Sequence[Action]]) -> list[list[Action]]:
    """The same without backwards."""
    return [[action for action in actions if action.verb == "F"] for actions in order]


def lower(actions: Sequence[Action], ranks: int, stages: int) -> list[Action]:
    """One place's forwards and backwards with what it receives before each and sends behind it; stages on one rank
    hand it over."""
    found: list[Action] = []
    for action in actions:
        _, stage, batch = action
        before, behind = (stage - 1, stage + 1) if action.verb == "F" else (stage + 1, stage - 1)
        for verb, other, where in (("RECV", before, 0), ("SEND", behind, 1)):
            if where:
                found.append(action)
            if 0 <= other < stages and (other - stage) % ranks:
                found.append(Action(f"{verb}_{action.verb}", stage, batch))
    return found
