"""An order as a picture, and what it costs in slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardfold.parallel.pipeline.order import Action

__all__ = ["Timeline", "drawn", "timeline"]

SLOTS = {"F": 1, "B": 2}
"""A backward takes twice as long as a forward: it makes the gradients of inputs and those of weights."""


class Timeline(NamedTuple):
    """When each place does what, in slots.

    Attributes:
        rows: by place the actions with the slot in which each begins.
        end: how many slots it takes.
        kept: by place, the most micro-batches of stages whose forward has run and whose backward has not.
    """

    rows: list[list[tuple[int, Action]]]
    end: int
    kept: list[int]

    @property
    def bubble(self) -> float:
        """The part of all slots in which a place waits."""
        busy = sum(SLOTS[action.verb] for row in self.rows for _, action in row)
        return 1 - busy / (self.end * len(self.rows)) if self.end else 0.0


def timeline(order: Sequence[Sequence[Action]], stages: int) -> Timeline:
    """Each action begins as soon as its place is free and what it needs is there; messages take no time.

    Raises:
        ValueError: places wait for each other for ever.
    """
    done: dict[Action, int] = {}
    rows: list[list[tuple[int, Action]]] = [[] for _ in order]
    at, free = [0] * len(order), [0] * len(order)
    moved = True
    while moved:
        moved = False
        for place, actions in enumerate(order):
            while at[place] < len(actions):
                action = actions[at[place]]
                needs = _needs(action, stages)
                if any(each not in done for each in needs):
                    break
                begin = max([free[place], *(done[each] for each in needs)])
                rows[place].append((begin, action))
                free[place] = done[action] = begin + SLOTS[action.verb]
                at[place] += 1
                moved = True
    if stuck := [str(actions[i]) for actions, i in zip(order, at, strict=True) if i < len(actions)]:
        raise ValueError(f"the order never ends: {', '.join(stuck)} wait for each other.")
    return Timeline(rows, max(free, default=0), [_most(actions) for actions in order])


def _needs(action: Action, stages: int) -> list[Action]:
    verb, stage, batch = action
    if verb == "F":
        return [Action("F", stage - 1, batch)] if stage else []
    return [Action("F", stage, batch), *([Action("B", stage + 1, batch)] if stage < stages - 1 else [])]


def _most(actions: Sequence[Action]) -> int:
    now = most = 0
    for action in actions:
        now += 1 if action.verb == "F" else -1
        most = max(most, now)
    return most


def drawn(line: Timeline, ranks: int, width: int = 96) -> list[str]:
    """A row for each place: the number of the micro-batch in each slot of a forward, behind the letter of the rank's
    stage where it has several, and behind a dash in those of a backward; dots where it waits. Cut off behind ``width``
    slots."""
    chunks = max((action.stage for row in line.rows for _, action in row), default=0) // ranks + 1
    marks = [[" ." for _ in range(min(line.end, width))] for _ in line.rows]
    for row, found in zip(marks, line.rows, strict=True):
        for begin, action in found:
            letter = "abcdefgh"[action.stage // ranks % 8] if chunks > 1 else " "
            digit = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[action.batch % 36]
            for slot in range(begin, begin + SLOTS[action.verb]):
                if slot < len(row):
                    row[slot] = f"{letter}{digit}" if action.verb == "F" else f"-{digit}"
    more = " ..." * (line.end > width)
    return [f"  {place:>2} |{''.join(row)}{more}" for place, row in enumerate(marks)]
