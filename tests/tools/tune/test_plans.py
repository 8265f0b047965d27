"""What a plan says of a tuning is what a step takes, and a reference takes no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardfold as sf
from shardfold.testing import Ranks
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers", "peft")

LENGTH, ANSWER = 64, 16
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("sft", {}),
    "lora": ("sft", {"adapter": {"rank": 8}}),
    "qlora": ("sft", {"adapter": {"rank": 8}, "base": {"bits": 4}}),
    "packed": ("sft", {"adapter": {"rank": 8}, "text": {"length": LENGTH, "pack": True}}),
    "recomputed": ("sft", {"adapter": {"rank": 8}, "activations": "recompute"}),
    "dpo": ("dpo", {"adapter": {"rank": 8}}),
    "qdpo": ("dpo", {"adapter": {"rank": 8}, "base": {"bits": 4}}),
    "orpo": ("orpo", {}),
    "reward": ("reward", {"adapter": {"rank": 8}}),
    "galore": ("sft", {"optimizer": "galore", "galore_rank": 8}),
    "galore8bit": ("sft", {"optimizer": "galore8bit", "galore_rank": 8}),
    "lion": ("sft", {"optimizer": "lion"}),
    "adamw8bit": ("sft", {"optimizer": "adamw8bit"}),
    "kto": ("kto", {"adapter": {"rank": 8}}),
    "distill": ("distill", {"adapter": {"rank": 8}}),
    "grpo": ("grpo", {"adapter": {"rank": 8}, "n": 2, "max_tokens": ANSWER, "micro_batch": 4}),
    "grpo beside a copy": (
        "grpo",
        {"n": 2, "max_tokens": ANSWER, "micro_batch": 4, "beta": 0.1, "reference": "copy"},
    ),
    "ppo": ("ppo", {"adapter": {"rank": 8}, "n": 2, "max_tokens": ANSWER, "micro_batch": 4}),
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
    rows = "packed" if "text" in more else recipe
    settings = {
        "model": here / "base", "data": str(here / f"{rows}.jsonl"), "cache": here / "cache", "steps": 3,
        "micro_batch": 4, "layout": layout, "text": {"length": LENGTH}, **more,
    }  # fmt: skip
    if recipe == "distill":
        settings["teacher"] = here / "base"
    if recipe in ("grpo", "ppo"):
        settings["reward"] = f"{here / 'rewards.py'}:even"
    run = TuneRun(config_class(recipe).load(settings), lenient_console())
    run.recipe.begin(run)
    windows = iter(run.batches)
    for _ in range(2):
        run.step(windows)
    others = [engine for engine in vars(run.recipe).values() if isinstance(engine, sf.Engine)]
    with WatchedBytes(run.engine, (), others=others) as live, inside_hooks():
        run.step(windows)
    subject = planned_tuning(run.config, Division(streams=False), samples=2).subject
    rank = PlannedRank(mesh=run.engine.mesh.sizes.axes, precision="fp32", clip=True, behaviour=CPU)
    plan = rank.plan(subject, run.config.table(), run.config.activations, run.config.micro_batch)[1]
    run.recipe.close()
    run.engine.close()
    return plan.peak, live.most


def _folder(tmp_path: Path) -> str:
    """Rows of the greatest length, and shorter ones in each batch, so that there is a mask."""
    support.model_folder(tmp_path / "base", hidden_size=128, intermediate_size=256)
    answers = ["x" * (LENGTH if i % 2 else LENGTH // 2) for i in range(24)]
    rows = [{"prompt": f"{i} ", "completion": answer} for i, answer in enumerate(answers)]
    support.write_rows(tmp_path / "sft.jsonl", rows)
    # Two samples fill a line.
    parts = [{"prompt": f"{i:02}", "completion": "x" * ((40, LENGTH - 40)[i % 2] - 3)} for i in range(48)]
    support.write_rows(tmp_path / "packed.jsonl", parts)
    pairs = [{"prompt": f"{i} ", "chosen": "x" * LENGTH, "rejected": "x" * (LENGTH // 2)} for i in range(24)]
    for recipe in ("dpo", "orpo", "reward"):
        support.write_rows(tmp_path / f"{recipe}.jsonl", pairs)
    # Almost every token is a target.
    full = [{"prompt": f"{i:02}", "completion": "x" * (LENGTH - 8 * (i % 2))} for i in range(24)]
    support.write_rows(tmp_path / "distill.jsonl", full)
    support.write_rows(tmp_path / "kto.jsonl", [{**row, "label": i % 3 == 0} for i, row in enumerate(rows)])
    prompts = [{"prompt": f"{i:02}" + "x" * (LENGTH - 2 - 8 * (i % 2))} for i in range(24)]
    for recipe in ("grpo", "ppo"):
        support.write_rows(tmp_path / f"{recipe}.jsonl", prompts)
    (tmp_path / "rewards.py").write_text("def even(answer):\n    return len(answer.text) % 2\n")
    return str(tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_plan_is_what_a_step_takes(case: str, layout: str, ranks: Ranks, tmp_path: Path) -> None:
    """On two ranks no step takes more than its plan says, nor less by more than 3 %; PPO's, in which two engines train,
    takes up to 2 % more."""
    recipe, more = CASES[case]
    planned, measured = ranks.run(peaks, _folder(tmp_path), recipe, more, layout, world_size=2)[0]
    assert measured <= (1.02 if recipe == "ppo" else 1.005) * planned
    assert planned <= 1.03 * measured


@pytest.mark.soak
@pytest.mark.parametrize("adapter", [{"rank": 8}, None], ids=["switched off", "kept by row"])
@pytest.mark.parametrize("recipe", ["dpo", "kto"])
def test_a_reference_takes_no_memory_of_its_own(
    recipe: str, adapter: dict[str, Any] | None, ranks: Ranks, tmp_path: Path
) -> None:
    """A step of DPO with 4 pairs, or of KTO with 8 answers, peaks within 2 % of supervised fine-tuning's with 8
    samples."""
    folder, rows = _folder(tmp_path), {"dpo": 4, "kto": 8}[recipe]
    _, found = ranks.run(peaks, folder, recipe, {"adapter": adapter, "micro_batch": rows}, "zero3", world_size=2)[0]
    _, sft = ranks.run(peaks, folder, "sft", {"adapter": adapter, "micro_batch": 8}, "zero3", world_size=2)[0]
    assert found <= 1.02 * sft
