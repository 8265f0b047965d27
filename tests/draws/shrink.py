"""Makes a draw that fails smaller, for as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.draws.drawn import Draw, Outcome

NEEDED = ("seed", "where", "block", "group", "factor", "index", "layout", "on", "weights")
SIMPLE = {"head": "called", "optimizer": "sgd", "given": False, "clip": None, "accumulate": 1, "size": 2}


def shrink(
    draw: Draw, outcome: Outcome, again: Callable[[Draw], Outcome], seconds: float = 120.0
) -> tuple[Draw, Outcome]:
    """The smallest draw that was found in so many seconds, and what became of it."""
    end, shorter = time.monotonic() + seconds, True
    while shorter:
        shorter = False
        for candidate in candidates(draw):
            if time.monotonic() > end:
                return draw, outcome
            found = again(candidate)
            if found.kind == "failed" and found.sign == outcome.sign:
                draw, outcome, shorter = candidate, found, True
                break
    return draw, outcome


def candidates(draw: Draw) -> Iterator[Draw]:
    """Smaller ones, those that leave most out first."""
    count = len(draw.calls)
    size = count // 2
    while size:
        for first in range(count - size, -1, -size):
            yield replace(draw, calls=draw.calls[:first] + draw.calls[first + size :])
        size //= 2
    for i, (_, argument) in enumerate(draw.blocks):
        if len(draw.blocks) > 1:
            yield replace(draw, blocks=draw.blocks[:i] + draw.blocks[i + 1 :])
        for inner in argument if isinstance(argument, tuple) else ():
            yield replace(draw, blocks=(*draw.blocks[:i], inner, *draw.blocks[i + 1 :]))
    for name in draw.options:
        yield replace(draw, options={key: text for key, text in draw.options.items() if key != name})
    for name, value in SIMPLE.items():
        if getattr(draw, name) != value:
            yield replace(draw, **{name: value})
    for i, (name, arguments) in enumerate(draw.calls):
        for key in arguments.keys() - set(NEEDED):
            fewer = {each: value for each, value in arguments.items() if each != key}
            yield replace(draw, calls=(*draw.calls[:i], (name, fewer), *draw.calls[i + 1 :]))
    for i, (kind, _) in enumerate(draw.blocks):
        if kind != "Linear":
            yield replace(draw, blocks=(*draw.blocks[:i], ("Linear", 0), *draw.blocks[i + 1 :]))
