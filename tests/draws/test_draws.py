"""Models, options and sequences of calls that are drawn give what plain PyTorch gives, or are refused in a sentence.

What fails here is named by a number; ``python -m tests.draws --only NUMBER`` makes it smaller, and prints a script.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardfold.testing import Ranks
from tests.draws.drawn import make_draw, try_out

QUICK, PARTS = 36, 4
SOAK = 1000


def _run(ranks: Ranks, numbers: Sequence[int]) -> None:
    found = {number: try_out(make_draw(number), ranks) for number in numbers}
    failed = {number: outcome.said for number, outcome in found.items() if outcome.kind == "failed"}
    assert not failed, f"python -m tests.draws --only {next(iter(failed))}: {failed}"
    assert sum(outcome.kind == "ran" for outcome in found.values()) > len(found) / 2


@pytest.mark.parametrize("part", range(PARTS))
def test_draws_are_plain_pytorch(ranks: Ranks, part: int) -> None:
    _run(ranks, range(part, QUICK, PARTS))


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(10_000, 10_000 + SOAK, 100))
def test_many_draws_are_plain_pytorch(ranks: Ranks, first: int) -> None:
    _run(ranks, range(first, first + 100))
