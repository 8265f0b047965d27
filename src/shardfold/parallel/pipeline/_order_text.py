"""The text of an order: a line for each rank, with what it does in turn.

    0F0 0F1 0B0 0B1
    1F0 1B0 1F1 1B1

``1F0`` is the forward of stage 1 for micro-batch 0, ``B`` a backward, ``I`` and ``W`` its two parts: the gradients of
inputs, those of weights. ``1B-2`` is the backward of the last micro-batch but one of the batch before. Blanks or commas
are between them, and behind a ``#`` is a remark. What PyTorch's schedules write as CSV is such a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.action import Action

__all__ = ["parse", "render"]

_ONE = re.compile(r"(\d{1,6})([FBIW])(-?\d{1,6})")


def render(rows: Sequence[Sequence[Action]]) -> str:
    """The text of what each rank does."""
    return "".join(" ".join(action.short for action in row) + "\n" for row in rows)


def parse(text: str) -> list[list[Action]]:
    """What each rank does.

    Raises:
        ConfigError: a word is no action.
    """
    rows: list[list[Action]] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words and not line.strip(" ,\t"):
            continue
        if not words:  # a remark
            continue
        row: list[Action] = []
        for word in words:
            found = _ONE.fullmatch(word)
            if found is None:
                raise ConfigError(
                    f"Parallel(pipeline=...) is given an order whose line {number} has {word!r}, which is not an "
                    "action: write stage, one of F, B, I and W, and micro-batch, as in 0F3."
                )
            row.append(Action(found[2], int(found[1]), int(found[3])))
        rows.append(row)
    return rows
