"""GRPO and PPO bring a property that can be checked, the asked word and an end, from less than a fifth of answers to four
fifths and more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardfold.tools.tune import GRPOConfig, PPOConfig, SFTConfig, tune
from tests.tools.tune.support import WORDS, model_folder, write_rows

COMMON: dict[str, Any] = {"layout": "zero2", "micro_batch": 16, "warmup": 2}


def _told(folder: Path, seed: int) -> Path:
    """A model that answers any question with one or two words, and ends."""
    draw = random.Random(seed)
    rows = [
        {"prompt": f"{draw.choice(WORDS)}?", "completion": " ".join(draw.sample(WORDS, draw.randint(1, 2)))}
        for _ in range(2000)
    ]
    base = model_folder(folder / "base", seed=seed, hidden_size=64, intermediate_size=128)
    data = write_rows(folder / "told.jsonl", rows)
    settings = {**COMMON, "micro_batch": 32, "steps": 250, "lr": 4e-3, "cache": folder / "cache"}
    tune(SFTConfig(model=base, data=str(data), out=folder / "told", seed=seed, **settings))
    return folder / "told"


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_checkable_property_is_learnt(tmp_path: Path, recipe: str, seed: int) -> None:
    told = _told(tmp_path, seed)
    rows = write_rows(tmp_path / "asked.jsonl", [{"prompt": f"{word}?", "contains": word} for word in WORDS] * 20)
    held = write_rows(tmp_path / "held.jsonl", [{"prompt": f"{word}?", "contains": word} for word in WORDS] * 10)
    mine = tmp_path / "mine.py"
    mine.write_text("def both(answer):\n    return float(answer.ended and answer.row['contains'] in answer.text)\n")
    settings: dict[str, Any] = {
        **COMMON, "model": told, "reward": f"{mine}:both", "max_tokens": 12, "eval_data": str(held), "seed": seed,
        "cache": tmp_path / "cache",
    }  # fmt: skip
    kind = GRPOConfig if recipe == "grpo" else PPOConfig
    more: dict[str, Any] = {"n": 8, "lr": 2e-3, "schedule": "constant"}
    if recipe == "ppo":
        more |= {"beta": 0, "lr": 1e-3, "value_lr": 4e-3, "updates": 2}
    before = tune(kind(data=str(rows), steps=1, out=tmp_path / "first", **{**settings, **more, "lr": 1e-12}))
    after = tune(kind(data=str(rows), steps=120, out=tmp_path / "learnt", **settings, **more))
    assert before.held_out["reward"] < 0.2
    assert after.held_out["reward"] > 0.8
