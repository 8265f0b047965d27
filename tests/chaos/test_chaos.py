"""A rank, its launcher or its disk is struck at any moment: who failed is named and no survivor, nobody waits longer
than the patience, nothing is left, and whoever goes on comes to what a run without a fault comes to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shardfold.testing import Ranks
from tests.chaos.case import Case, kept, of_number
from tests.chaos.cover import pairs, pairwise

PART, MOST = 10, 240
FEW = [
    "layout=zero3 ranks=3 fault=kill moment=backward part=0.3 victim=second",
    "layout=zero2 ranks=2 fault=stop moment=step part=0.3 victim=last launcher=train",
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted by what Linux tells of them")


def judged(cases: list[Case], place: str) -> list[str]:
    """On a warm process: what is not as it has to be, case by case."""
    from tests.chaos.judge import Judge

    judge = Judge(Path(place))
    return [str(verdict) for case in cases if (verdict := judge.run(case)).wrong]


def hold(ranks: Ranks, cases: list[Case], place: Path) -> None:
    (wrong,) = ranks.run(judged, cases, str(place), world_size=1, distributed=False, timeout=100.0 * len(cases))
    again = [f'python -m tests.chaos.case "{case}"' for case in cases if any(str(case) in each for each in wrong)]
    assert not wrong, "\n".join([*wrong, *again])


def test_some_cases_hold(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [*map(Case.read, FEW), *kept()], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, MOST, PART))
def test_choices_that_meet_hold(ranks: Ranks, tmp_path: Path, first: int) -> None:
    """Each choice meets each other one."""
    hold(ranks, list(pairwise()[first : first + PART]), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 2000, 2 * PART))
def test_drawn_cases_hold(ranks: Ranks, tmp_path: Path, first: int) -> None:
    """Cases drawn by numbers; another two thousand on each day of ``SHARDFOLD_DAY``."""
    day = int(os.environ.get("SHARDFOLD_DAY", "0"))
    hold(ranks, [of_number(2000 * day + first + number) for number in range(2 * PART)], tmp_path)


def test_a_line_is_the_case_that_it_was_written_from() -> None:
    for number in range(200):
        assert Case.read(str(of_number(number))) == of_number(number)


def test_each_choice_meets_each_other_one() -> None:
    """All pairs that drawn cases have."""
    assert len(pairwise()) <= MOST
    assert set().union(*map(pairs, pairwise())) >= set().union(*(pairs(of_number(number)) for number in range(2000)))
