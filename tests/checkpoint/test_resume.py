"""A run that is broken off and resumed ends where it would have: bit by bit under the same layout, else by rounding."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from shardfold.testing import Ranks
from tests.support.keeping import Setting, different
from tests.support.resuming import CASES, Case, Wet, many_resumed, many_unbroken


def _rounding(case: Case) -> float:
    """How far apart losses may be: sums over other ranks have another order. Muon orthogonalizes in bf16."""
    if case.precision != "fp32":
        return 3e-3
    return 1e-5 if case.optimizer == "Muon" else 1e-6


def _resume(
    ranks: Ranks,
    folder: Path,
    names: list[str],
    steps: int,
    elsewhere: dict[Setting, list[str]],
    grown: float = 1.0,
) -> None:
    """``elsewhere``: what is resumed under another layout; ``grown``: how many times the rounding of few steps the
    losses of many may be apart."""
    before = ranks.run(many_unbroken, names, str(folder), steps, world_size=2, timeout=600)
    after = ranks.run(many_resumed, names, str(folder), steps, world_size=2, timeout=600)
    for rank, name in ((rank, name) for rank in range(2) for name in names):
        old, new = before[rank][name], after[rank][name]
        assert len(new.losses) == steps - steps // 2 and len(set(new.losses)) > 1
        assert new.losses == old.losses, name
        assert not different(new.contents, old.contents), (name, different(new.contents, old.contents)[:5])
    if "fp16" in names:  # overflows and growth on both sides of the break, or nothing was tested
        fp16, half = before[0]["fp16"], steps // 2
        assert any(fp16.skipped[:half]) and any(fp16.skipped[half:]), fp16.skipped
        for scales in (fp16.scales[:half], fp16.scales[half:]):
            assert any(b > a for a, b in pairwise(scales)), fp16.scales
    for setting, some in elsewhere.items():
        found = ranks.run(many_resumed, some, str(folder), steps, setting, world_size=setting.ranks, timeout=600)[0]
        for name in some:
            losses = zip(before[0][name].losses, found[name].losses, strict=True)
            apart = max(abs(a - b) / abs(a) for a, b in losses)
            assert apart <= grown * _rounding(CASES[name][0]), (name, setting, apart)


#: Where no random numbers are drawn, so that other ranks compute the same.
DRY = [name for name, (case, _) in CASES.items() if case.build is not Wet]


def test_resumed_is_as_if_never_broken(ranks: Ranks, tmp_path: Path) -> None:
    some = list(CASES)[::6]  # the soak has all of them
    dry = [name for name in some if name in DRY]
    _resume(ranks, tmp_path, some, 12, {Setting("zero1", 3): dry[::2], Setting("hpz", 4): dry[1::2]})


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_resumed_after_a_hundred_steps_is_as_if_never_broken(ranks: Ranks, tmp_path: Path, name: str) -> None:
    some = [name] if name in DRY else []
    others = (Setting("zero1", 3), Setting("hpz", 4), Setting("hsdp", 4), Setting("fsdp2", 1))
    _resume(ranks, tmp_path, [name], 200, dict.fromkeys(others, some), grown=100.0)
