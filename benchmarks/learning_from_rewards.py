"""Whether GRPO and PPO teach a model what can be checked: to answer with the asked word, and to end.

    python benchmarks/learning_from_rewards.py grpo [--seed 0] [--steps 80] [--lr 1e-3]

A tiny model first learns to answer any question with one or two words of ten; the script prints which share of its
answers has the asked word and ends, before and after learning from that as a reward.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", choices=("grpo", "ppo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=1e-3)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    told = _told(folder, given.seed)
    rows = [{"prompt": f"{word}?", "contains": word} for word in WORDS]
    data, held = write_rows(folder / "asked.jsonl", rows * 20), write_rows(folder / "held.jsonl", rows * 10)
    mine = folder / "mine.py"
    mine.write_text("def both(answer):\n    return float(answer.ended and answer.row['contains'] in answer.text)\n")
    settings: dict[str, Any] = {
        **COMMON, "model": told, "data": str(data), "reward": f"{mine}:both", "max_tokens": 12, "eval_data": str(held),
        "seed": given.seed, "cache": folder / "cache", "n": 8, "lr": given.lr, "beta": 0,
    }  # fmt: skip
    kind = GRPOConfig if given.recipe == "grpo" else PPOConfig
    before = tune(kind(**{**settings, "lr": 1e-12, "steps": 1, "out": folder / "first"}))
    after = tune(kind(**settings, steps=given.steps, out=folder / "learnt"))
    shares = f"{before.held_out['reward']:.2f} before, {after.held_out['reward']:.2f} after"
    print(f"{given.recipe}, seed {given.seed}: {shares}")


if __name__ == "__main__":
    main()
