"""Accelerate and the Trainer with ranks that share sequences, or layers, train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.clients import (
    CONTEXT,
    FP32_TOL,
    apart,
    config,
    fresh,
    needs,
    on_ranks,
    saved_weights,
    sequences,
    start,
    weights_apart,
)

pytestmark = needs("accelerate", "transformers")

STEPS, MICRO = 4, 2
SIZES: dict[str, dict[str, Any]] = {"sp": {"sp_size": 2, "sp_backend": "deepspeed"}, "tp": {"tp_size": 2}}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    positions = torch.arange(CONTEXT)
    return [{"input_ids": row, "labels": row, "position_ids": positions} for row in sequences(count)]


def trainer(folder: Path, start_at: Path, how: str, stage: int = 0) -> Any:
    """A Trainer whose two ranks share sequences (``sp``) or layers (``tp``); ``"one"`` is for one process."""
    from accelerate import ParallelismConfig
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    fresh()
    more: dict[str, Any] = {"tensor_parallel": {"autotp_size": 2}} if how == "tp" else {}
    given = config(stage, **more)
    given["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True  # layers are put together for it too
    options: dict[str, Any] = {
        "max_steps": STEPS, "per_device_train_batch_size": MICRO, "per_device_eval_batch_size": MICRO,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 1,
        "lr_scheduler_type": "linear", "max_grad_norm": 0.5, "logging_steps": 1, "save_steps": STEPS,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True,
        "deepspeed": None if how == "one" else given,
        "parallelism_config": ParallelismConfig(**SIZES[how]) if how in SIZES else None,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **options)
    model = LlamaForCausalLM.from_pretrained(start_at, dtype=torch.float32, attn_implementation="sdpa")
    return Trainer(model=model, args=arguments, train_dataset=rows(48), eval_dataset=rows(8))


def logged(trained: Any) -> tuple[list[float], ...]:
    lines = [line for line in trained.state.log_history if "loss" in line]
    return tuple([float(line[key]) for line in lines] for key in ("loss", "grad_norm", "learning_rate"))


def run_of(folder: Path, start_at: Path, how: str, stage: int = 0) -> tuple[Any, ...]:
    trained = trainer(folder, start_at, how, stage)
    trained.train()
    held_out = trained.evaluate()["eval_loss"]
    trained.save_model(str(folder / "model"))
    return *logged(trained), held_out


def of_trainers(folder: Path, cases: list[tuple[str, int]]) -> dict[Any, Any]:
    start_at = start(folder)
    return {(how, stage): run_of(folder / f"{how}-{stage}", start_at, how, stage) for how, stage in cases}


CASES = [("tp", 1), ("sp", 2), ("sp", 3)]  # sequences are shared until the process ends


@pytest.mark.soak
def test_a_trainer_trains_as_in_one_process(tmp_path: Path) -> None:
    """Losses, gradient norms, rates, evaluation and saved weights of one process, where two share sequences and where
    they share layers. (Layers at stage 3 are refused by ``from_pretrained`` of transformers.)"""
    [alone] = on_ranks(of_trainers, tmp_path, [("one", 0)], ranks=1)
    losses, norms, rates, held_out = alone["one", 0]
    wanted = saved_weights(tmp_path / "one-0/model")
    for told in on_ranks(of_trainers, tmp_path, CASES):
        for case, (its_losses, its_norms, its_rates, its_held_out) in told.items():
            assert apart(its_losses, losses) <= FP32_TOL, (case, its_losses, losses)
            assert apart(its_norms, norms) <= 10 * FP32_TOL, (case, its_norms, norms)
            assert its_rates == rates and abs(its_held_out - held_out) <= FP32_TOL, case
            saved = saved_weights(tmp_path / f"{case[0]}-{case[1]}/model")
            assert weights_apart(saved, wanted) <= 10 * FP32_TOL, case


def loop(start_at: Path, how: str, stage: int, save: Path) -> tuple[list[float], list[float], Any]:
    """A training loop of Accelerate: losses, norms and the state that is saved and loaded again."""
    from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
    from accelerate.utils import InitProcessGroupKwargs
    from transformers import LlamaForCausalLM

    fresh()
    if how == "one":
        accelerator = Accelerator(cpu=True)
    else:
        plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.5, zero3_save_16bit_model=True)
        if how == "tp":
            plugin.deepspeed_config |= {"tensor_parallel": {"autotp_size": 2}, "train_micro_batch_size_per_gpu": MICRO}
        accelerator = Accelerator(
            deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(**SIZES[how]),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )  # fmt: skip
        if how == "sp":
            accelerator.parallelism_config.sp_handler.sp_attn_implementation = "sdpa"
    model = LlamaForCausalLM.from_pretrained(start_at, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(STEPS * MICRO), batch_size=MICRO))
    model.train()  # in evaluation each rank reads whole sequences
    losses: list[float] = []
    norms: list[float] = []
    for batch in loader:
        if how == "sp":
            batch["labels"] = batch["shift_labels"]
        loss = model(**batch).loss
        if how == "sp":
            loss = over_ranks(loss, batch["shift_labels"])
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = accelerator.get_state_dict(model)
    accelerator.save_state(str(save))
    accelerator.load_state(str(save))
    return losses, norms, None if state is None else {name: value.clone() for name, value in state.items()}


def over_ranks(loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As DeepSpeed's and Accelerate's documentation write it."""
    from deepspeed.utils import groups

    group = groups._get_sequence_parallel_group()
    of_ranks = torch.distributed.nn.functional.all_gather(loss, group=group)
    good = torch.distributed.nn.functional.all_gather((labels != -100).sum(), group=group)
    total = sum(one * number for one, number in zip(of_ranks, good, strict=True))
    return total / max(sum(good), 1)


def of_loops(folder: Path, cases: list[tuple[str, int]]) -> dict[Any, Any]:
    start_at = start(folder)
    return {(how, stage): loop(start_at, how, stage, folder / f"loop-{how}-{stage}") for how, stage in cases}


@pytest.mark.soak
def test_a_loop_of_accelerate_trains_as_in_one_process(tmp_path: Path) -> None:
    """The same with a loop of one's own: ``ParallelismConfig(sp_size=2)`` and ``tp_size=2``. The consolidated state has
    whole tensors, on the main process where any is split; a saved state loads in place."""
    [alone] = on_ranks(of_loops, tmp_path, [("one", 0)], ranks=1)
    losses, norms, wanted = alone["one", 0]
    for rank, told in enumerate(on_ranks(of_loops, tmp_path, [("tp", 2), ("sp", 3)])):
        for case, (its_losses, its_norms, state) in told.items():
            assert apart(its_losses, losses) <= FP32_TOL, (case, its_losses, losses)
            assert apart(its_norms, norms) <= 10 * FP32_TOL, (case, its_norms, norms)
            assert (state is None) == (rank > 0), case
            if state is not None:
                assert weights_apart(state, wanted) <= 10 * FP32_TOL, case
