"""trl's trainers under stage 3 train as over DDP: supervised fine-tuning, preferences, and learning from samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.clients import FP32_TOL, apart, config, fresh, needs, on_ranks, start

pytestmark = needs("accelerate", "transformers", "trl")

STEPS = 3
WORDS = ("a table", "says what", "rests where", "a program", "says what", "moves when")


def tokenizer() -> Any:
    """Of bytes: nothing to download, nothing to train."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*alphabet, "<eos>", "<pad>"])}, merges=[])
    )
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>", pad_token="<pad>")


def many_spaces(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward: the share of a completion's characters that come before 'a' in ASCII."""
    return [sum(c < "a" for c in text) / max(1, len(text)) for text in completions]


def train(kind: str, folder: Path, start_at: Path, stage: int | None) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of each step."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    fresh()
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "deepspeed": None if stage is None else config(stage),
    }
    prompts = [word + " " for word in WORDS] * 4
    more: dict[str, Any] = {}
    if kind == "sft":
        arguments, rows = trl.SFTConfig(**options, max_length=32), {"text": [p + "it is" for p in prompts]}
    elif kind == "dpo":
        arguments = trl.DPOConfig(**options, max_length=32)
        rows = {"prompt": prompts, "chosen": ["it is"] * len(prompts), "rejected": ["not so"] * len(prompts)}
    else:
        arguments = trl.GRPOConfig(
            **options, num_generations=2, max_completion_length=6, beta=0.1, steps_per_generation=1, seed=3
        )
        rows, more = {"prompt": prompts}, {"reward_funcs": many_spaces}
    model = AutoModelForCausalLM.from_pretrained(start_at, dtype="float32")
    trainer_class = {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer, "grpo": trl.GRPOTrainer}[kind]
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer(), **more
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [float(line["loss"]) for line in lines], [float(line["grad_norm"]) for line in lines]


def runs(folder: Path, stage: int) -> dict[str, Any]:
    start_at = start(folder, vocab_size=258)
    told: dict[str, Any] = {}
    for kind in ("sft", "dpo", "grpo"):
        told[kind] = [train(kind, folder / f"{kind}-{where}", start_at, where) for where in (None, stage)]
    return told


@pytest.mark.soak
@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.soak)])
def test_trl_trains_as_over_ddp(stage: int, tmp_path: Path) -> None:
    """Losses and gradient norms of DDP, where the samples that GRPO learns from are the same too."""
    first, _ = on_ranks(runs, tmp_path, stage)
    for kind, ((losses, norms), (their_losses, their_norms)) in first.items():
        assert len(losses) == STEPS and norms[0] > 0, kind
        assert apart(their_losses, losses) <= FP32_TOL, kind
        assert apart(their_norms, norms) <= 10 * FP32_TOL * max(1, *norms), kind
