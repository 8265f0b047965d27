"""What a plan says of a tuning is what a step takes, and a reference takes no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardfold.testing import Ranks
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers", "peft")

LENGTH = 64
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("sft", {}),
    "lora": ("sft", {"adapter": {"rank": 8}}),
    "qlora": ("sft", {"adapter": {"rank": 8}, "base": {"bits": 4}}),
    "recomputed": ("sft", {"adapter": {"rank": 8}, "activations": "recompute"}),
    "dpo": ("dpo", {"adapter": {"rank": 8}}),
    "qdpo": ("dpo", {"adapter": {"rank": 8}, "base": {"bits": 4}}),
    "orpo": ("orpo", {}),
    "reward": ("reward", {"adapter": {"rank": 8}}),
}


def peaks(folder: str, recipe: str, more: dict[str, Any], layout: str) -> tuple[float, float]:
    """Bytes of the third step on this rank: planned, and measured."""
    from shardfold.plan.lifetimes import CPU
    from shardfold.planner.division import Division
    from shardfold.planner.setting import PlannedRank
    from shardfold.tools.bench.planned import WatchedBytes, inside_hooks
    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.run import TuneRun
    from shardfold.tools.tune.tuning_plan import planned_tuning

    here = Path(folder)
    settings = {
        "model": here / "base", "data": str(here / f"{recipe}.jsonl"), "cache": here / "cache", "steps": 3,
        "micro_batch": 4, "layout": layout, "text": {"length": LENGTH}, **more,
    }  # fmt: skip
    run = TuneRun(config_class(recipe).load(settings), lenient_console())
    run.recipe.begin(run)
    windows = iter(run.batches)
    for _ in range(2):
        run.step(windows)
    with WatchedBytes(run.engine, (), []) as live, inside_hooks():
        run.step(windows)
    subject = planned_tuning(run.config, Division(streams=False), samples=2).subject
    rank = PlannedRank(mesh=run.engine.mesh.sizes.axes, precision="fp32", clip=True, behaviour=CPU)
    plan = rank.plan(subject, run.config.table(), run.config.activations, 4)[1]
    run.engine.close()
    return plan.peak, live.most


def _folder(tmp_path: Path) -> str:
    """Rows of the greatest length, and shorter ones in each batch, so that there is a mask."""
    support.model_folder(tmp_path / "base", hidden_size=128, intermediate_size=256)
    answers = ["x" * (LENGTH if i % 2 else LENGTH // 2) for i in range(24)]
    rows = [{"prompt": f"{i} ", "completion": answer} for i, answer in enumerate(answers)]
    support.write_rows(tmp_path / "sft.jsonl", rows)
    pairs = [{"prompt": f"{i} ", "chosen": "x" * LENGTH, "rejected": "x" * (LENGTH // 2)} for i in range(24)]
    for recipe in ("dpo", "orpo", "reward"):
        support.write_rows(tmp_path / f"{recipe}.jsonl", pairs)
    return str(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_plan_is_what_a_step_takes(case: str, layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks no step takes more than its plan says, nor less by more than 3 %."""
    recipe, more = CASES[case]
    planned, measured = ranks.run(peaks, _folder(tmp_path), recipe, more, layout, world_size=2)[0]
    assert measured <= 1.005 * planned
    assert planned <= 1.03 * measured


@pytest.mark.soak
def test_a_reference_takes_no_memory_of_its_own(ranks: Ranks, tmp_path: Path) -> None:
    """DPO's step of 4 pairs peaks within 2 % of supervised fine-tuning's of 8 samples."""
    folder = _folder(tmp_path)
    adapter = {"adapter": {"rank": 8}}
    _, dpo = ranks.run(peaks, folder, "dpo", adapter, "zero3", world_size=2)[0]
    _, sft = ranks.run(peaks, folder, "sft", {**adapter, "micro_batch": 8}, "zero3", world_size=2)[0]
    assert dpo <= 1.02 * sft
