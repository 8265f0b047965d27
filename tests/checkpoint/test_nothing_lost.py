"""Runs that share a folder, are killed, go bad or meet a full disk: no checkpoint is lost without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.losing import check, lives, small_disk

CASES = [pytest.param(number, marks=[] if number < 3 else pytest.mark.soak) for number in range(100)]


@pytest.mark.parametrize("number", CASES)
def test_nothing_is_lost_without_a_refusal_or_a_status(tmp_path: Path, number: int) -> None:
    with small_disk(tmp_path / "disk", lives(number)[1]) as made:
        if not made:
            pytest.skip("a small file system is mounted by root only")
        check(number, tmp_path / "disk")
