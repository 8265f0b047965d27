"""Hosts that come while others train are taken in between two steps: no process is started again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardfold.launch.namespaces import why_not
from shardfold.testing import Ranks
from tests.launch.epochs import Walk
from tests.launch.latecomers import Coming, held


def hold(ranks: Ranks, cases: list[Coming], place: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (wrong,) = ranks.run(held, cases, str(place), world_size=1, distributed=False, timeout=150.0 * len(cases))
    assert not wrong, "\n".join(wrong)


def test_every_order_in_which_launchers_come() -> None:
    assert Walk(2, 0, late=1).run()["records"] == 1
    assert Walk(2, 1, late=1).run()["records"] == 2
    assert Walk(1, 0, late=2).run()["records"] == 2
    assert Walk(1, 0, late=1, spares=1).run()["records"] == 1


def test_a_host_that_comes_is_taken_in(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Coming()], tmp_path)


@pytest.mark.soak
def test_a_host_that_comes_with_another_layout_is_refused_and_the_others_go_on(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Coming(other="zero1"), Coming(3, 1, (3,), layout="zero1", survive="rank", other="ddp")], tmp_path)


@pytest.mark.soak
def test_hosts_come_to_one_that_began_alone_and_come_back(ranks: Ranks, tmp_path: Path) -> None:
    cases = [
        Coming(3, 1, (3, 8)),
        Coming(3, 3, (), dies=(2, 4), again=8),
        Coming(4, 3, (4,), dies=(3, 12), again=18, steps=40),
        Coming(3, 2, (4,), layout="zero2", survive="host"),
    ]
    hold(ranks, cases, tmp_path)
