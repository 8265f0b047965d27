"""A transformers Trainer with a DeepSpeed config trains as the same Trainer does over DDP."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.clients import (
    BF16_STRAY,
    BF16_TOL,
    FP32_TOL,
    VOCAB,
    apart,
    config,
    fresh,
    needs,
    on_ranks,
    saved_weights,
    sequences,
    start,
    strayed,
    weights_apart,
)

pytestmark = needs("accelerate", "transformers")

STEPS = 6
CASES = [*itertools.product((1, 2, 3), (False, True))]
OWN_SCHEDULE = {  # DeepSpeed's optimizer and schedule, which the Trainer fills in and does not step itself
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}
DELAYED = (0, 0, 0.5, 1, 0.75, 0.5, 0.25)
"""The factors of DeepSpeed's WarmupDecayLR over 6 steps, 2 of them warm-up: its first value holds for two steps."""


def trainer(folder: Path, start_at: Path, stage: int | None, bf16: bool, **more: Any) -> Any:
    """A Trainer of the model that lies at ``start_at``; ``stage`` None is DDP."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    fresh()
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": STEPS // 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": bf16,
        "deepspeed": None if stage is None else config(stage, **more),
    }
    arguments = TrainingArguments(output_dir=str(folder), **options)
    model = LlamaForCausalLM.from_pretrained(start_at, dtype=torch.float32)  # under stage 3 in shards
    rows = [{"input_ids": row, "labels": row} for row in sequences(96)]
    return Trainer(model=model, args=arguments, train_dataset=rows[:72], eval_dataset=rows[72:])


def logged(trained: Any) -> tuple[list[float], ...]:
    """Loss, gradient norm and rate of each step."""
    lines = [line for line in trained.state.log_history if "loss" in line]
    return tuple([float(line[key]) for line in lines] for key in ("loss", "grad_norm", "learning_rate"))


def written(trained: Any) -> list[int]:
    """What the trained model generates, greedily; under stage 3 every rank takes part in every token."""
    from transformers.integrations import is_deepspeed_zero3_enabled

    bare = trained.accelerator.unwrap_model(trained.model_wrapped).eval()
    prompt = sequences(4)[:1, :5]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return bare.generate(
            prompt, attention_mask=torch.ones_like(prompt), synced_gpus=is_deepspeed_zero3_enabled(), **options
        )[0].tolist()


def reference(folder: Path, start_at: Path) -> tuple[Any, ...]:
    trained = trainer(folder / "ddp", start_at, None, False)
    trained.train()
    held_out = trained.evaluate()["eval_loss"]
    trained.save_model(str(folder / "ddp/model"))
    return *logged(trained), held_out, written(trained)


def runs(folder: Path) -> dict[Any, Any]:
    """What DDP and each case told, and what a second Trainer told that went on from the middle of the first's run."""
    start_at = start(folder)
    told: dict[Any, Any] = {None: reference(folder, start_at)}
    for stage, bf16 in CASES:
        here = folder / f"{stage}-{bf16}"
        trained = trainer(here, start_at, stage, bf16)
        trained.train()
        held_out = trained.evaluate()["eval_loss"]
        trained.save_model(str(here / "model"))
        text = written(trained)
        again = trainer(here / "again", start_at, stage, bf16)
        again.train(resume_from_checkpoint=str(here / f"checkpoint-{STEPS // 2}"))
        again.save_model(str(here / "again/model"))
        told[stage, bf16] = *logged(trained), held_out, text, logged(again)
    return told


@pytest.mark.soak
def test_a_trainer_trains_as_over_ddp(tmp_path: Path) -> None:
    """Stages 1 to 3 in fp32: losses, norms, evaluation, saved weights and written text of DDP.

    In bf16 losses, evaluation and saved weights, up to what bf16 may do.

    A run that goes on from a checkpoint ends in the very same weights.
    """
    first, second = on_ranks(runs, tmp_path)
    losses, norms, rates, held_out, text = first[None]
    assert losses[-1] < losses[0] and len(set(rates)) > 3 and max(text) < VOCAB
    for case in CASES:
        stage, bf16 = case
        their_losses, their_norms, their_rates, their_held_out, their_text, resumed = first[case]
        assert apart(their_losses, losses) <= (BF16_TOL if bf16 else FP32_TOL), case
        assert abs(their_held_out - held_out) <= (BF16_TOL if bf16 else FP32_TOL), case
        assert their_rates == rates, case
        folder = tmp_path / f"{stage}-{bf16}"
        weights = saved_weights(folder / "model")
        if not bf16:
            assert apart(their_norms, norms) <= 10 * FP32_TOL, case
            assert weights_apart(weights, saved_weights(tmp_path / "ddp/model")) <= 10 * FP32_TOL, case
            assert their_text == text, case
        else:
            begun, wanted = saved_weights(tmp_path / "start"), saved_weights(tmp_path / "ddp/model")
            assert strayed(weights, wanted, begun) <= BF16_STRAY, case
        assert second[case][4] == their_text, case
        # The log of a resumed run begins with that of the run before it.
        assert resumed == (their_losses, their_norms, their_rates), case
        assert weights_apart(saved_weights(folder / "again/model"), weights) == 0.0, case


def with_own_schedule(folder: Path) -> dict[Any, Any]:
    start_at = start(folder)
    trained = trainer(folder / "ddp", start_at, None, False)
    # Norms decay too: the config's optimizer is given no groups.
    trained.optimizer = torch.optim.AdamW(trained.model.parameters(), lr=1e-2, weight_decay=0.1)
    trained.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trained.optimizer, lambda step: DELAYED[step])
    trained.train()
    told: dict[Any, Any] = {None: (logged(trained), trained.evaluate()["eval_loss"])}
    for stage in (2, 3):
        trained = trainer(folder / str(stage), start_at, stage, False, **OWN_SCHEDULE)
        trained.train()
        told[stage] = logged(trained), trained.evaluate()["eval_loss"], type(trained.lr_scheduler.scheduler).__name__
    saved = trainer(folder / "evaluated", folder / f"3/checkpoint-{STEPS}", 3, False, **OWN_SCHEDULE)
    told["saved"] = saved.evaluate()["eval_loss"]  # under stage 3 an engine that only evaluates
    return told


@pytest.mark.soak
def test_optimizer_and_schedule_of_the_config(tmp_path: Path) -> None:
    """A config that names AdamW and WarmupDecayLR, all values "auto"; and evaluation of a saved model, untrained."""
    first, _ = on_ranks(with_own_schedule, tmp_path)
    (losses, _, _), held_out = first[None]
    for stage in (2, 3):
        (their_losses, _, _), their_held_out, schedule = first[stage]
        assert schedule == "WarmupDecayLR"
        assert apart(their_losses, losses) <= FP32_TOL
        assert abs(their_held_out - held_out) <= FP32_TOL
    assert abs(first["saved"] - held_out) <= FP32_TOL


MOMENTS = ("forward", "before the update", "behind the step")


def left(folder: Path, seed: int, count: int) -> list[tuple[str, int, int]]:
    """Trainers that one rank is told to leave, at drawn moments: when, in which step, and behind which they ended; each
    then goes on to the end."""
    from transformers import TrainerCallback

    class Leaves(TrainerCallback):
        """As ``docs/launch.md`` shows it, and who gives notice."""

        def __init__(self, trained: Any, told: int, moment: str, mine: bool) -> None:
            self.trained, self.told, self.moment, self.mine, self.begun = trained, told, moment, mine, 0

        def at(self, moment: str) -> None:
            if self.mine and moment == self.moment and self.begun == self.told:
                self.trained.deepspeed._core.leave()

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun += 1
            self.at("forward")

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            self.at("before the update")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if self.trained.deepspeed.leaving:
                control.should_save = control.should_training_stop = True
            self.at("behind the step")

    start_at, draw, told = start(folder), random.Random(seed), list[tuple[str, int, int]]()
    for number in range(-1, count):
        moment, step, rank, stage = (
            draw.choice(MOMENTS),
            draw.randrange(1, STEPS - 1),
            draw.randrange(2),
            2 + number % 2,
        )
        if number < 0:
            stage, rank = 2, -1
        trained = trainer(
            here := folder / f"{number}",
            start_at,
            stage,
            False,
        )
        trained.add_callback(Leaves(trained, step, moment, rank == trained.args.process_index))
        trained.train()
        told.append((moment, step, trained.state.global_step))
        if number >= 0:
            trained = trainer(here, start_at, stage, False)
            trained.train(resume_from_checkpoint=str(here / f"checkpoint-{told[-1][2]}"))
        trained.save_model(str(here / "model"))
    return told


@pytest.mark.soak
def test_a_trainer_that_has_notice_loses_no_step(tmp_path: Path) -> None:
    """All ranks end behind the same step, the one under way or one of the two behind it, and what goes on from there
    comes to the weights of a run without notice."""
    first, second = on_ranks(left, tmp_path, 0, 6)
    assert first == second and first[0][2] == STEPS
    for number, (moment, step, stopped) in enumerate(first[1:]):
        assert step <= stopped <= step + 2, (moment, step, stopped)
        assert weights_apart(saved_weights(tmp_path / f"{number}/model"), saved_weights(tmp_path / "-1/model")) <= 1e-6
