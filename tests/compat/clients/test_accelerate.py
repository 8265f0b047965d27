"""An ordinary training loop of Accelerate with its DeepSpeed plugin trains as Accelerate does over DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support.clients import (
    BF16_STRAY,
    BF16_TOL,
    FP32_TOL,
    apart,
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

STEPS, ACCUMULATE, MICRO, CLIP = 6, 2, 3, 0.5
CASES = [(1, "no"), (2, "bf16"), (3, "no"), (3, "bf16")]


def prepared(start_at: Path, stage: int | None, precision: str) -> tuple[Any, ...]:
    """Accelerate's own objects; ``stage`` None is DDP."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.utils import InitProcessGroupKwargs
    from transformers import LlamaForCausalLM, get_linear_schedule_with_warmup

    fresh()
    if stage is None:
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=ACCUMULATE)
    else:
        accelerator = Accelerator(
            mixed_precision=precision,
            deepspeed_plugin=DeepSpeedPlugin(
                zero_stage=stage,
                gradient_accumulation_steps=ACCUMULATE,
                gradient_clipping=CLIP,
                zero3_init_flag=stage == 3,
                zero3_save_16bit_model=True,
            ),
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        )
    model = LlamaForCausalLM.from_pretrained(start_at, dtype=torch.float32)
    groups = [
        {"params": [p for name, p in model.named_parameters() if "norm" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in model.named_parameters() if "norm" in name], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 4, 2 * STEPS + 4)  # stepped once per process
    loader = DataLoader(TensorDataset(sequences(2 * STEPS * ACCUMULATE * MICRO)), batch_size=MICRO)
    return accelerator, *accelerator.prepare(model, optimizer, loader, schedule)


def train(parts: tuple[Any, ...], first: int = 0, save: Path | None = None) -> list[tuple[float, float]]:
    """Mean loss and gradient norm of each step from ``first`` on; the state is saved in the middle."""
    accelerator, model, optimizer, loader, schedule = parts
    told, losses = [], []
    batches = accelerator.skip_first_batches(loader, first * ACCUMULATE) if first else loader
    for (tokens,) in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), CLIP) if accelerator.sync_gradients else None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        if accelerator.sync_gradients:
            assert norm is not None and not optimizer.step_was_skipped
            told.append((sum(losses) / ACCUMULATE, float(norm)))
            losses = []
            if save is not None and len(told) == STEPS // 2:
                accelerator.save_state(str(save))
    return told


def loops(folder: Path) -> dict[Any, Any]:
    """What each case told: steps, steps after going back to the middle, rates, and the final weights where held."""
    told: dict[Any, Any] = {}
    start_at = start(folder)
    for stage, precision in [(None, "no"), *CASES]:
        parts = prepared(start_at, stage, precision)
        accelerator, model, _, _, schedule = parts
        saved = folder / f"{stage}-{precision}"
        steps = train(parts, save=saved)
        rate = schedule.get_last_lr()
        weights = accelerator.get_state_dict(model)
        bare = accelerator.unwrap_model(model)
        accelerator.load_state(str(saved))  # in place, into an engine that has gone on
        again = train(parts, first=STEPS // 2)
        accelerator.save_model(model, str(saved / "model"))
        weights = None if weights is None else {name: value.float().cpu() for name, value in weights.items()}
        told[stage, precision] = steps, again, rate, weights, type(bare).__name__, type(model).__name__
        accelerator.free_memory()
    return told


def test_a_loop_of_accelerate_trains_as_over_ddp(tmp_path: Path) -> None:
    """Stages 1 to 3 in fp32: losses, norms and weights of plain DDP; in bf16, its losses and weights.

    ``load_state`` is exact.
    """
    first, second = on_ranks(loops, tmp_path)
    steps, again, rate, weights, _, _ = first[None, "no"]
    assert again == steps[STEPS // 2 :] and steps[-1][0] < steps[0][0]
    for case in CASES:
        stage, precision = case
        theirs, resumed, their_rate, their_weights, bare, engine = first[case]
        tol = FP32_TOL if precision == "no" else BF16_TOL
        assert apart([loss for loss, _ in theirs], [loss for loss, _ in steps]) <= tol, case
        if precision == "no":
            assert apart([norm for _, norm in theirs], [norm for _, norm in steps]) <= 10 * tol, case
            assert weights_apart(their_weights, weights) <= 10 * tol, case
        else:
            assert strayed(their_weights, weights, saved_weights(tmp_path / "start")) <= BF16_STRAY, case
        assert resumed == theirs[STEPS // 2 :], case
        assert their_rate == rate, case
        assert (bare, engine) == ("LlamaForCausalLM", "DeepSpeedEngine"), case
        assert first[case][:3] == second[case][:3], case
        assert (second[case][3] is None) == (stage == 3), case  # whole values on the main process only
