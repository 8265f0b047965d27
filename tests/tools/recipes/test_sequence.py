"""The recipe trains on sequences that are cut over processes as it does on whole ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardfold.testing import Ranks
from shardfold.tools.recipes.lm import TrainConfig, train


def _train(out: Path, data: Path, sequence: int, attention: str) -> float:
    settings = {"d_model": 12, "layers": 1, "heads": 2, "context": 15, "steps": 3, "eval_windows": 4, "sample": 4}
    return train(
        TrainConfig.load({**settings, "data": data, "out": out, "sequence": sequence, "attention": attention})
    ).bits_per_byte


@pytest.mark.soak
@pytest.mark.parametrize("attention", ["ring", pytest.param("ulysses", marks=pytest.mark.soak)])
def test_the_recipe_cuts_sequences(ranks: Ranks, tmp_path: Path, attention: str) -> None:
    """Losses of each step, norms, and what is measured on held-out text, are those of one process, in fp32; two ranks
    have 8 and 7 of 15 bytes."""
    data = tmp_path / "text"
    data.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(2000)))
    [expected] = ranks.run(_train, tmp_path / "one", data, 1, "auto", world_size=1)
    found = ranks.run(_train, tmp_path / "two", data, 2, attention, world_size=2)
    assert found == pytest.approx([expected, expected], rel=1e-5)
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == 3
    for mine, theirs in zip(two, one, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
