"""What runs by default, and parts of what does not: by what is written down, and by nobody's name."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Case", "by_default", "part_of"]


@dataclass(frozen=True)
class Case:
    """One case of a test, and its marks."""

    id: str
    layout: Any = None  # its parameter of that name
    product: bool = False
    one_in: int = 1
    soak: bool = False


def by_default(cases: Sequence[Case], needed: Collection[str]) -> list[bool]:
    """Whether each runs where nobody asks for the soak:

    - of a `product`, cases by layouts, those of `zero3`, where every operation is. What other layouts do beside dtypes,
      tiers, axes and orders is in the table of `training/cover.py`;
    - of `sampled(n)` the first of each n cases of a test;
    - in any case what is `needed`: the cases that a fault of `support/mutants.toml` names.
    """
    counts: Counter[str] = Counter()
    chosen: list[bool] = []
    for case in cases:
        test = case.id.partition("[")[0]
        runs = case.layout in (None, "zero3") or not case.product
        chosen.append(not case.soak and (case.id in needed or (runs and counts[test] % case.one_in == 0)))
        counts[test] += runs and not case.soak
    return chosen


def part_of(text: str) -> slice:
    """``K/N``: the K-th of N parts. Neighbours take about as long as each other, so a part is every N-th.

    Raises:
        ArgumentTypeError: it is something else.
    """
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ArgumentTypeError(f"{text} is not K/N, part K of N, as in 3/12")
    return slice(int(part) - 1, None, int(parts))
