"""Hosts that are cut off while they train: the others go on, and who is cut off stops by itself and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardfold.launch.namespaces import why_not
from shardfold.testing import Ranks
from tests.launch.partitions import Parted, cuts, held


def hold(ranks: Ranks, cases: list[Parted], place: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (wrong,) = ranks.run(held, cases, str(place), world_size=1, distributed=False, timeout=100.0 * len(cases))
    assert not wrong, "\n".join(wrong)


def test_the_others_go_on_without_the_host_that_has_the_store(ranks: Ranks, tmp_path: Path) -> None:
    hold(ranks, [Parted()], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_each_cut_of_three_hosts(ranks: Ranks, tmp_path: Path, backend: str) -> None:
    hold(ranks, [Parted(3, away, backend=backend) for away in cuts(3)], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(3))
def test_each_cut_of_five_hosts(ranks: Ranks, tmp_path: Path, part: int) -> None:
    hold(ranks, [Parted(5, away) for away in cuts(5)[part::3]], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("saves", ["unwritten", "unwritten beside"])
def test_a_cut_amid_a_save_is_waited_for_no_longer(ranks: Ranks, tmp_path: Path, saves: str) -> None:
    """Neither for the part of who is gone, nor for a disk that takes nothing."""
    hold(ranks, [Parted(3, away, saves=saves) for away in cuts(3)], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("frozen", [False, True])
def test_who_comes_back_is_out(ranks: Ranks, tmp_path: Path, frozen: bool) -> None:
    """Amid what the others agree on, and behind it; and a cut that is over soon is nobody's end."""
    times = (2.2, 3.3, 4.0, 8.0)
    hold(ranks, [Parted(3, (n % 3,), heals=heals, frozen=frozen) for n, heals in enumerate(times)], tmp_path)


@pytest.mark.soak
def test_who_ends_well_amid_the_run_is_named_at_once(ranks: Ranks, tmp_path: Path) -> None:
    """Also behind a death that the others have gone on without."""
    cases = [Parted(3, (node,), leaves=True, patience=10.0) for node in range(2)]
    hold(ranks, [*cases, Parted(4, (1,), leaves=True, killed=2, patience=10.0)], tmp_path)


@pytest.mark.soak
def test_copies_on_other_hosts_outlive_a_cut(ranks: Ranks, tmp_path: Path) -> None:
    cases = [
        Parted(3, (node,), layout=layout, survive="host") for node, layout in enumerate(("zero1", "zero2", "zero3"))
    ]
    hold(ranks, cases, tmp_path)
