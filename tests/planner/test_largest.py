"""The largest micro-batch by plan: a run with it stays within the budget, and the plan of one more does not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from shardfold.errors import ConfigError
from shardfold.plan.lifetimes import CPU
from shardfold.planner.choice import Option, largest_of, options
from shardfold.planner.division import Division
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.testing import Ranks
from shardfold.tools.bench.planned import compare
from shardfold.tools.recipes import lm
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from shardfold.tools.recipes.train_config import TrainConfig, read_settings
from tests.support.options import grouped

SHAPE = GPTConfig(d_model=64, layers=2, heads=4, context=64)
STAGES = Division(pipeline=2, micro_batches=4)
WHOLE = Division()
ENGINE = {WHOLE: {}, STAGES: {"mesh": {"pipeline": 2}, "accumulate": 4}}


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.randint(256, (rows, SHAPE.context)) for name in ("tokens", "targets")}


@cache  # what one of them has traced is not traced again
def _subjects(division: Division) -> list[Subject]:
    return [
        Subject(GPT(SHAPE), _batch(), division=replace(division, stage=stage)) for stage in range(division.pipeline)
    ]


def _rank(division: Division, budget: float) -> PlannedRank:
    axes = division.over({"inter": 1, "intra": 2}).axes
    return PlannedRank(mesh=axes, budget=budget, micro_batches=division.micro_batches, behaviour=CPU)


def _option(division: Division, samples: int | None, budget: float = 0.0) -> Option:
    tables = {"zero1": TrainConfig(layout="zero1").table()}
    (found,) = options(_subjects(division), _rank(division, budget), tables, ["recompute"], samples)
    return found


def _planned(division: Division, samples: int) -> float:
    return _option(division, samples).plan.peak


def _largest(division: Division, budget: float) -> int:
    return largest_of(_subjects(division), _rank(division, budget), "zero1", "recompute").largest


def _measured(division: Division, samples: int) -> float:
    torch.manual_seed(0)
    return compare(
        partial(GPT, SHAPE), _batch(samples), layout="zero1", precision="bf16", mode="recompute", division=division,
        **grouped(**ENGINE[division]),  # type: ignore[arg-type]
    ).measured  # fmt: skip


@pytest.mark.soak
def test_a_run_of_the_largest_micro_batch_stays_within_the_budget(ranks: Ranks) -> None:
    """On real ranks, of which live storages are watched; one more does not fit by plan."""
    budget = 1.005 * _planned(WHOLE, 7)
    most = _largest(WHOLE, budget)
    assert most >= 7 and _planned(WHOLE, most) <= budget < _planned(WHOLE, most + 1)
    assert all(measured <= 1.01 * budget for measured in ranks.run(_measured, WHOLE, most, world_size=2))


def test_the_largest_fits_all_stages() -> None:
    """Of which one needs more than the other: four samples of some six."""
    budget = 1.001 * _planned(STAGES, 6)
    most = _largest(STAGES, budget)
    assert most >= 6 and _planned(STAGES, most) <= budget < _planned(STAGES, most + 1)
    assert _option(STAGES, None, budget).largest == most


@pytest.mark.soak
def test_a_recipe_takes_as_many_as_fit(tmp_path: Path) -> None:
    """And writes down how many these are; of too little memory it says what one takes."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.py").write_text("def f(x):\n    return x * 17 + 4\n" * 2000)
    (tmp_path / "text" / "b.py").write_text("def g(y):\n    return y - 12 * 7\n" * 2000)
    few = TrainConfig.load({
        "size": "tiny", "layers": 1, "layout": "zero2", "steps": 1, "eval_windows": 1, "sample": 0, "warmup": 0,
        "data": str(tmp_path / "text"), "micro_batch": "max", "memory": "6MiB", "out": str(tmp_path / "run"),
    })  # fmt: skip
    lm.train(few)
    assert read_settings(tmp_path / "run" / "config.json")["micro_batch"] > 1
    with pytest.raises(ConfigError, match="not even one sequence"):
        lm.train(few.model_copy(update={"memory": "1MiB", "out": tmp_path / "other"}))
    with pytest.raises(ConfigError, match="experts"):
        TrainConfig.load({"micro_batch": "max", "experts": 4})
