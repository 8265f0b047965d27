"""LoRA of peft under a Trainer with a DeepSpeed config trains as over DDP, with whole modules beside the adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.clients import FP32_TOL, apart, config, fresh, needs, on_ranks, sequences, start, weights_apart

pytestmark = needs("accelerate", "transformers", "peft")

STEPS = 4


def lora(folder: Path, start_at: Path, stage: int | None, modules_to_save: list[str] | None, resume: bool) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments

    fresh()
    options: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_steps": STEPS // 2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "deepspeed": None if stage is None else config(stage),
    }
    arguments = TrainingArguments(output_dir=str(folder), **options)
    base = LlamaForCausalLM.from_pretrained(start_at, dtype=torch.float32)
    torch.manual_seed(2)
    adapters = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], modules_to_save=modules_to_save, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, adapters)
    trainable, whole = model.get_nb_trainable_parameters()
    rows = [{"input_ids": row, "labels": row} for row in sequences(96)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{STEPS // 2}") if resume else None)
    trainer.save_model(str(folder / "adapter"))
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    return losses, trainable, whole, adapter(folder) if trainer.is_world_process_zero() else {}


def adapter(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter/adapter_model.safetensors")


def runs(folder: Path) -> dict[Any, Any]:
    start_at = start(folder)
    told: dict[Any, Any] = {}
    for modules_to_save in (None, ["lm_head"]):
        for stage in (None, 2, 3):
            here = folder / f"{stage}-{'head' if modules_to_save else 'adapters'}"
            told[stage, bool(modules_to_save)] = lora(here, start_at, stage, modules_to_save, False)
    told["resumed"] = lora(folder / "3-head", start_at, 3, ["lm_head"], True)
    return told


@pytest.mark.soak
def test_lora_trains_as_over_ddp(tmp_path: Path) -> None:
    """Stages 2 and 3, with and without ``modules_to_save``: losses, saved adapters and counts of parameters of DDP."""
    first, _ = on_ranks(runs, tmp_path)
    for modules_to_save in (False, True):
        losses, trainable, whole, values = first[None, modules_to_save]
        assert losses[-1] < losses[0] and trainable < whole
        for stage in (2, 3):
            theirs, *counts, their_values = first[stage, modules_to_save]
            assert apart(theirs, losses) <= FP32_TOL, (stage, modules_to_save)
            assert counts == [trainable, whole], (stage, modules_to_save)
            assert weights_apart(their_values, values) <= 10 * FP32_TOL, (stage, modules_to_save)
    assert first["resumed"][0] == first[3, True][0]
    assert weights_apart(first["resumed"][3], first[3, True][3]) == 0.0
