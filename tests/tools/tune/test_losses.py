"""Each recipe's losses over 20 steps are those of TRL's trainer on the same tokens, on one rank and on two."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from shardfold.testing import Ranks
from tests.support.clients import needs
from tests.tools.tune import support

pytestmark = needs("transformers", "peft", "trl", "datasets")

STEPS = 20
BATCH = 4
LR = 1e-3
TOLERANCE = 1e-5
ROWS = {"sft": support.chats, "dpo": support.pairs, "orpo": support.pairs, "reward": support.pairs,
        "kto": support.labelled}  # fmt: skip


def _number(recipe: str) -> int:
    """Rows: each comes once; kto's answers go behind the prompts of one batch, which TRL pairs within a batch."""
    return BATCH if recipe == "kto" else STEPS * BATCH


def ours(recipe: str, folder: str, layout: str, adapter: dict[str, Any] | None, more: dict[str, Any]) -> list[float]:
    """Losses of a run on these ranks, which share out each batch."""
    import torch

    from shardfold.tools.observe.console import lenient_console
    from shardfold.tools.tune.config import config_class
    from shardfold.tools.tune.run import TuneRun

    torch.manual_seed(0)
    here, world = Path(folder), torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    settings = {
        "model": here / "base", "data": str(here / "rows.jsonl"), "cache": here / "cache", "layout": layout,
        "steps": STEPS, "micro_batch": BATCH // world, "lr": LR, "schedule": "constant", "clip_norm": 0.0,
        "adapter": adapter, **more,
    }  # fmt: skip
    run = TuneRun(config_class(recipe).load(settings), lenient_console())
    run.batches = run.batches_of(run.rows, shuffle=False)
    run.recipe.begin(run)
    windows = iter(run.batches)
    losses = [run.step(windows).loss for _ in range(STEPS)]
    run.recipe.close()
    run.engine.close()
    return losses


def _columns(recipe: str, rows: Any) -> dict[str, list[Any]]:
    """The rows as TRL's trainers take them: tokens, or else the text, of which they make the same."""
    found: dict[str, list[Any]] = {}

    def add(**values: Any) -> None:
        for name, value in values.items():
            found.setdefault(name, []).append(value)

    for number in range(len(rows)):
        row = rows[number]
        if recipe == "sft":
            labels = [int(i) if t else -100 for i, t in zip(row.ids, row.trained, strict=True)]
            add(input_ids=row.ids.tolist(), labels=labels)
        elif recipe == "reward":
            add(chosen_ids=row.chosen.ids.tolist(), rejected_ids=row.rejected.ids.tolist())
        else:
            add(**ROWS[recipe](len(rows))[number])
    return found


def theirs(recipe: str, folder: str, lora: dict[str, Any] | None, more: dict[str, Any]) -> list[float]:
    """Losses of TRL's trainer in one process."""
    import torch
    import trl
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from shardfold.tools.tune.config import Source, Text
    from shardfold.tools.tune.data.prepared import prepare

    disable_progress_bars()
    warnings.simplefilter("ignore")
    here, tokenizer = Path(folder), support.tiny_tokenizer()
    kind: Any = {"sft": "chat", "kto": "label"}.get(recipe, "pair")
    text = Text(length=128)
    rows = prepare([Source(path=here / "rows.jsonl")], tokenizer, text, kind, cache=here / "cache")
    options: dict[str, Any] = {
        "output_dir": str(here / "trl"), "max_steps": STEPS, "per_device_train_batch_size": BATCH, "learning_rate": LR,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0, "logging_steps": 1, "bf16": False,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_length": 128,
        "gradient_checkpointing": False, "train_sampling_strategy": "sequential", **more,
    }  # fmt: skip
    if recipe == "orpo":
        import os

        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        options["max_completion_length"] = 64
        arguments, trainer_class = ORPOConfig(**options), ORPOTrainer
    else:
        names = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
        arguments = getattr(trl, f"{names[recipe]}Config")(**options)
        trainer_class = getattr(trl, f"{names[recipe]}Trainer")
    columns = _columns(recipe, rows)
    kind_of = AutoModelForSequenceClassification if recipe == "reward" else AutoModelForCausalLM
    model: Any = kind_of.from_pretrained(here / ("scored" if recipe == "reward" else "base"), dtype=torch.float32)
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=Dataset.from_dict(columns), processing_class=tokenizer
    )
    trainer.train()
    return [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]


def _both(ranks: Ranks, recipe: str, tmp_path: Path, more: dict[str, Any] | None = None) -> None:
    more = more or {}
    support.model_folder(tmp_path / "base", scale=4.0)
    support.write_rows(tmp_path / "rows.jsonl", ROWS[recipe](_number(recipe)))
    if recipe == "reward":
        support.scored_folder(tmp_path / "base", tmp_path / "scored")
    folder = str(tmp_path)
    wanted = ranks.run(theirs, recipe, folder, None, more, world_size=1)[0]
    assert len(wanted) == STEPS and wanted[-1] < wanted[0]
    one = ranks.run(ours, recipe, folder, "ddp", None, more, world_size=1)[0]
    two = ranks.run(ours, recipe, folder, "zero3", None, more, world_size=2)[0]
    for found in (one, two):
        assert found == pytest.approx(wanted, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.parametrize(
    "recipe",
    ["sft", "dpo", *(pytest.param(name, marks=pytest.mark.soak) for name in ("orpo", "reward", "kto"))],
)
def test_losses_are_those_of_trl(recipe: str, ranks: Ranks, tmp_path: Path) -> None:
    """All parameters trained by AdamW, 20 steps of 4 rows or pairs: within 1e-5, whoever shares them out."""
    _both(ranks, recipe, tmp_path)
