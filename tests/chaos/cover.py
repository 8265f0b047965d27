"""Cases in which each choice meets each other one that it can meet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from typing import Any

from tests.chaos.case import CHOICES, Case, drawn

TRIED = 12
"""Cases with a pair that is missing, of which the one with the most missing pairs is taken."""

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(case: Case) -> set[Pair]:
    """Of the choices that a case is made of."""
    return set(combinations([(name, getattr(case, name)) for name in CHOICES], 2))


@cache
def pairwise(seed: int = 0) -> tuple[Case, ...]:
    """The same for a seed."""
    return tuple(_greedy(random.Random(seed)))


def _greedy(draw: random.Random) -> Iterator[Case]:
    missing = {
        ((one, v), (other, w)) for one, other in combinations(CHOICES, 2) for v in CHOICES[one] for w in CHOICES[other]
    }
    for pair in sorted(missing, key=str):
        if pair not in missing:
            continue
        if drawn(draw.randrange(1 << 30), **dict(pair)) is None:
            continue
        tried = [drawn(draw.randrange(1 << 30), **dict(pair)) for _ in range(TRIED)]
        if fitting := [case for case in tried if case is not None]:
            best = max(fitting, key=lambda case: len(pairs(case) & missing))
            missing -= pairs(best)
            yield best
