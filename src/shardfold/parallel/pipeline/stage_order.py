"""In which order ranks run the forwards and backwards of their stages, and what they send between them.

An order is data: for each place along the stages a list of actions, which prints and parses (``text``), is gone through
without a model (``simulate``) and drawn (``picture``). :func:`make_order` makes the lists of forwards and backwards,
:func:`lower` puts between them what crosses the borders; the engine does the result, line by line.

    gpipe           all forwards, then all backwards (arXiv 1811.06965)
    1f1b            a backward as soon as there is one: a stage keeps at most as many micro-batches as stages follow it
                    (PipeDream-flush, arXiv 2006.09503)
    interleaved     the same with several stages on each rank, which shortens the bubble (arXiv 2104.04473)
    looped-bfs      several stages on each rank, all micro-batches of one before the next (arXiv 2211.05953)
    zb-h1           1f1b with backwards in two parts: of inputs, which a neighbour waits for, and of weights, for which
                    nobody does (arXiv 2401.10241)
    interleaved-zb  the same with several stages on each rank
    zbv, v-half, v-min, dualpipev       see ``vshape``
    pipedream, 2bw  backwards of batches before: see ``ahead``
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from shardfold.errors import ConfigError, did_you_mean
from shardfold.parallel.pipeline._inturn import in_turn
from shardfold.parallel.pipeline._order_text import parse, render
from shardfold.parallel.pipeline._vshape import V_SHAPED, v_place, v_shaped
from shardfold.parallel.pipeline.action import Action
from shardfold.parallel.pipeline.ahead import AHEAD, ahead
from shardfold.parallel.pipeline.simulate import batches_before, check

__all__ = ["ORDERS", "Action", "OrderChoice", "choose_order", "forwards", "lower", "make_order"]

LOOPED = ("interleaved", "looped-bfs", "interleaved-zb")
ORDERS = ("gpipe", "1f1b", "zb-h1", *LOOPED, *V_SHAPED, *AHEAD)


class OrderChoice(NamedTuple):
    """An order by name, and how many stages each rank has.

    Attributes:
        rows: an order of the user's own, for so many micro-batches as it has; None: one of those above.
    """

    name: str
    chunks: int
    rows: tuple[tuple[Action, ...], ...] | None = None

    def __str__(self) -> str:
        return self.name + (f":{self.chunks}" if self.chunks > 1 and self.name in LOOPED else "")

    @property
    def told(self) -> str:
        """All of it, as ranks compare it."""
        return str(self) if self.rows is None else render(self.rows)

    def places(self, ranks: int) -> list[int]:
        """The place of each stage.

        Raises:
            ConfigError: an order of the user's own is none for so many ranks.
        """
        if self.rows is not None:
            return check(self.rows, ranks, self.batches)
        if self.name in V_SHAPED:
            return [v_place(stage, ranks) for stage in range(2 * ranks)]
        return [stage % ranks for stage in range(self.chunks * ranks)]

    def versions(self, ranks: int, batches: int) -> list[int]:
        """How many versions of its weights, behind the present one, each rank keeps for micro-batches under way."""
        return [batches_before(actions, batches) for actions in make_order(self, ranks, batches)]

    @property
    def batches(self) -> int:
        """Those of an order of the user's own."""
        return 1 + max((action.batch for row in self.rows or () for action in row), default=-1)


def choose_order(given: Any, option: str = "") -> OrderChoice:
    """What ``Parallel(pipeline=)`` says, or an ``option`` of a command: a name; of those with several stages on a rank
    followed by how many, as in ``"interleaved:2"``; or an order of the user's own: its text, or the path of a file that
    has it.

    Raises:
        ConfigError: it is no order.
    """
    shown = str(given) if isinstance(given, PathLike) else given
    said = f"{option} {shown}" if option else f"Parallel(pipeline={shown!r})"
    if isinstance(given, PathLike):
        try:
            return _own(Path(given).read_text(encoding="utf-8"), Path(given).name)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{said} cannot be read as the text of an order: {error}.") from error
    if isinstance(given, str) and "\n" in given:
        return _own(given, "own")
    name, _, count = given.partition(":") if isinstance(given, str) else (given, "", "")
    if name not in ORDERS:
        raise ConfigError(
            f"{said} is not an order.{did_you_mean(str(name), ORDERS)} An order of your own is a "
            "text with a line for each rank, or the pathlib.Path of a file that has it."
        )
    if name not in LOOPED:
        if count:
            has = "two stages" if name in V_SHAPED else "one stage"
            raise ConfigError(f"{said}: {name} has {has} on each rank: leave {':' + count!r} out.")
        return OrderChoice(name, 2 if name in V_SHAPED else 1)
    if count and not (count.isdecimal() and int(count) > 1):
        raise ConfigError(f"{said}: after {name}: give how many stages each rank has, 2 or more.")
    return OrderChoice(name, int(count or 2))


def _own(text: str, name: str) -> OrderChoice:
    rows = tuple(map(tuple, parse(text)))
    if not rows:
        raise ConfigError("Parallel(pipeline=...) is given the text of an order that has no line of actions.")
    chunks = max(len({action.stage for action in row}) for row in rows)
    choice = OrderChoice(name, chunks, rows)
    _ = choice.places(len(rows))
    return choice


def make_order(choice: OrderChoice, ranks: int, batches: int) -> list[list[Action]]:
    """Forwards and backwards by place.

    Raises:
        ConfigError: there is no such order of that many micro-batches.
    """
    name, chunks, rows = choice
    if rows is not None:
        _ = check(rows, ranks, batches)
        return [list(row) for row in rows]
    if name in V_SHAPED:
        return v_shaped(name, ranks, batches)
    if name in AHEAD:
        return ahead(name, ranks, batches)
    found: list[list[Action]] = []
    for place in range(ranks):
        if name in ("1f1b", "interleaved", "zb-h1", "interleaved-zb"):
            found.append(in_turn(ranks, chunks, batches, place, split=name in ("zb-h1", "interleaved-zb")))
        else:
            found.append(_all_forwards_first([chunk * ranks + place for chunk in range(chunks)], batches))
    return found


def _all_forwards_first(stages: Sequence[int], batches: int) -> list[Action]:
    back = range(batches) if len(stages) == 1 else range(batches)[::-1]  # of several, what was done last comes first
    fronts = [Action("F", stage, i) for stage in stages for i in range(batches)]
    return fronts + [Action("B", stage, i) for stage in stages[::-1] for i in back]


def forwards(choice: OrderChoice, ranks: int, batches: int) -> list[list[Action]]:
    """An order of forwards alone, of any number of micro-batches."""
    places = choice.places(ranks)
    return [
        [Action("F", stage, i) for stage, place in enumerate(places) if place == here for i in range(batches)]
        for here in range(ranks)
    ]


def lower(actions: Sequence[Action], places: Sequence[int]) -> list[Action]:
    """One place's forwards and backwards with what it receives before each and sends behind it; stages on one rank
    hand it over. ``places``: of the stages."""
    found: list[Action] = []
    for action in actions:
        _, stage, batch = action
        what = action.sends
        before, behind = (stage - 1, stage + 1) if what == "F" else (stage + 1, stage - 1)
        for verb, other, where in (("RECV", before, 0), ("SEND", behind, 1)):
            if where:
                found.append(action)
            if what and 0 <= other < len(places) and places[other] != places[stage]:
                found.append(Action(f"{verb}_{what}", stage, batch))
    return found
