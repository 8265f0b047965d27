"""A rank, its launcher or its disk is struck at any moment: who failed is named and no survivor, nobody waits longer
than the patience, nothing is left, and whoever goes on comes to what a run without a fault comes to."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardfold.launch.namespaces import why_not
from shardfold.testing import Ranks
from tests.chaos import healing, hosts
from tests.chaos.case import Case, kept, of_number
from tests.chaos.cover import pairs, pairwise
from tests.chaos.hosts import HostCase

PART, MOST, DRAWN, HOSTS = 10, 290, 200, 4
FEW = [
    "layout=zero3 ranks=3 fault=kill moment=backward part=0.3 victim=second",
    "layout=zero2 ranks=2 fault=stop moment=step part=0.3 victim=last launcher=train",
]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are counted by what Linux tells of them")


def judged(cases: Sequence[Case], place: str) -> list[str]:
    """On a warm process: what is not as it has to be, case by case."""
    from tests.chaos.hosts import HostCase, HostJudge
    from tests.chaos.judge import Judge

    judge = HostJudge(Path(place)) if any(isinstance(case, HostCase) for case in cases) else Judge(Path(place))
    return [str(verdict) for case in cases if (verdict := judge.run(case)).wrong]


def hold(ranks: Ranks, cases: Sequence[Case], place: Path) -> None:
    cases = [case for case in cases if not case.lacks]
    (wrong,) = ranks.run(judged, cases, str(place), world_size=1, distributed=False, timeout=200.0 * len(cases))
    failed = [case for case in cases if any(str(case) in each for each in wrong)]
    modules = ["hosts" if isinstance(case, HostCase) else "case" for case in failed]
    again = [f'python -m tests.chaos.{module} "{case}"' for module, case in zip(modules, failed, strict=True)]
    assert not wrong, "\n".join([*wrong, *again])


def test_some_cases_hold(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Case.read(line) for line in [*FEW, *kept()]], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, MOST, PART))
def test_choices_that_meet_hold(ranks: Ranks, tmp_path: Path, first: int) -> None:
    """Each choice meets each other one."""
    hold(ranks, list(pairwise()[first : first + PART]), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, DRAWN, 2 * PART))
def test_drawn_cases_hold(ranks: Ranks, tmp_path: Path, first: int) -> None:
    """Cases drawn by numbers: others for each ``SHARDFOLD_DAY``."""
    day = int(os.environ.get("SHARDFOLD_DAY", "0"))
    hold(ranks, [of_number(DRAWN * day + first + number) for number in range(2 * PART)], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 60, HOSTS))
def test_cases_of_hosts_hold(ranks: Ranks, tmp_path: Path, first: int) -> None:
    """A host dies, is cut off, stands still, or its link is bad: 60 cases, and those that have failed once."""
    if reason := why_not():
        pytest.skip(reason)
    cases = [hosts.of_number(number) for number in range(first, first + HOSTS)]
    cases += [HostCase.read(line) for line in kept(hosts=True) if not first]
    hold(ranks, cases, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 200, 2 * PART))
def test_the_others_go_on_in_drawn_cases(ranks: Ranks, tmp_path: Path, first: int) -> None:
    """A rank is struck at any operation, and in most of them another one amid the recovery."""
    cases = [healing.of_number(number) for number in range(first, first + 2 * PART)]
    (wrong,) = ranks.run(healing.held, cases, str(tmp_path), world_size=1, distributed=False, timeout=3000.0)
    assert not wrong, "\n".join(wrong)


@pytest.mark.soak
def test_where_states_are_lost_it_is_said_what_and_who_was_killed(ranks: Ranks, tmp_path: Path) -> None:
    """Another rank dies amid the recovery that has what only the first one has, too."""
    cases = [healing.lost_of(number) for number in range(PART)]
    (wrong,) = ranks.run(healing.held, cases, str(tmp_path), world_size=1, distributed=False, timeout=1000.0)
    assert not wrong, "\n".join(wrong)


def test_a_line_is_the_case_that_it_was_written_from() -> None:
    for number in range(200):
        assert Case.read(str(of_number(number))) == of_number(number)
        assert HostCase.read(str(hosts.of_number(number))) == hosts.of_number(number)


@pytest.mark.soak
def test_each_choice_meets_each_other_one() -> None:
    """All pairs that drawn cases have."""
    assert len(pairwise()) <= MOST
    assert set().union(*map(pairs, pairwise())) >= set().union(*(pairs(of_number(number)) for number in range(500)))
