"""Hosts that come while others train are taken in between two steps: no process is started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardfold.launch import free_port
from shardfold.launch._open_run import OpenRun
from shardfold.launch.namespaces import why_not
from shardfold.plan.patience import Patience
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


def test_a_run_is_found_in_a_store_that_has_taken_the_place_of_another() -> None:
    port = free_port()
    run, other = (OpenRun("127.0.0.1", port, "job", 3, Patience(2.0)) for _ in range(2))
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert other.find(first=False) is None
    run.tell("10.0.0.1", 5)
    assert other.find(first=True) == ("10.0.0.1", 5)
    del store
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    assert other.find(first=True) == ("10.0.0.1", 5)
    run.take_back()
    assert other.find(first=False) is None
    del store


def test_a_host_that_comes_is_taken_in(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Coming()], tmp_path)


@pytest.mark.soak
def test_a_host_that_comes_with_another_layout_is_refused_and_the_others_go_on(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Coming(other="zero1"), Coming(3, 1, (3,), layout="zero1", survive="rank", other="ddp")], tmp_path)


@pytest.mark.soak
def test_the_host_of_the_endpoint_comes_back(ranks: Ranks, tmp_path: Path) -> None:
    """It begins no other run, although one host would be enough for that; and another one comes behind it."""
    cases = [
        Coming(3, 3, (), dies=(0, 4), again=12, steps=60),
        Coming(4, 3, (40,), dies=(0, 4), again=12, steps=100),
    ]
    hold(ranks, cases, tmp_path)


@pytest.mark.soak
def test_the_store_moves_twice_and_who_came_between_knows_where_to(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Coming(3, 3, (), dies=(0, 4), again=12, then=(1, 60), steps=100)], tmp_path)


@pytest.mark.soak
def test_hosts_come_to_one_that_began_alone_and_come_back(ranks: Ranks, tmp_path: Path) -> None:
    cases = [
        Coming(3, 1, (3, 8)),
        Coming(3, 3, (), dies=(2, 4), again=8),
        Coming(4, 3, (4,), dies=(3, 12), again=18, steps=40),
        Coming(3, 2, (4,), layout="zero2", survive="host"),
    ]
    hold(ranks, cases, tmp_path)
