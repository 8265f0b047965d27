"""What TRL's last PPO makes of given models, answers and rewards, as `tests/golden/ppo.json`: what ours is held to.

pip install trl==1.12.0     # in an environment of its own: 1.13 has no PPO
python benchmarks/ppo_values.py tests/golden/ppo.json

TRL's trainer runs as it is, but for where answers and rewards come from: both are drawn here, by no model. Its losses
are kept in two cases:

- answers that all have the length that is allowed: losses of policy and value model,
- answers that end before it, with lambda and gamma 1 and a value model that stays: losses of the policy. TRL puts the
  reward of such an answer one place behind its last token, and trains what the value model says there, so that the
  others are another sum.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

STEPS, PROMPTS, MOST, UPDATES = 20, 4, 6, 3
SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
FIRST = 2  # of the tokens that are no mark
COMMON = {"lr": 5e-3, "beta": 0.1, "epsilon": 0.2, "value_clip": 0.2}
CASES: dict[str, dict[str, Any]] = {
    "whole": {**COMMON, "gamma": 0.97, "lam": 0.9, "ends": False},
    "ended": {**COMMON, "gamma": 1.0, "lam": 1.0, "ends": True},
}
SCALE = 1 / 256
"""Of the whole numbers that weights are kept as: exact in every format, on every machine."""


def weights(model: torch.nn.Module, draw: random.Random) -> dict[str, list[Any]]:
    """Whole numbers for each parameter, and the model has them, times the scale."""
    found: dict[str, list[Any]] = {}
    for name, parameter in model.named_parameters():
        numbers = torch.tensor([draw.randint(-99, 99) for _ in range(parameter.numel())]).view(parameter.shape)
        parameter.data.copy_(numbers * SCALE)
        found[name] = numbers.tolist()
    return found


def drawn(ends: bool) -> tuple[list[list[int]], list[Any], list[Any]]:
    """Prompts, and of each step an answer to each of them and its reward."""
    draw = random.Random(7 + ends)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST, SIZES["vocab_size"]) for _ in range(count)]

    prompts = [[FIRST + number, *tokens(4)] for number in range(PROMPTS)]
    answers, rewards = [], []
    for _ in range(STEPS):
        lengths = [draw.randrange(0, MOST) for _ in prompts] if ends else [MOST] * PROMPTS
        answers.append([[*tokens(length), 1] if ends else tokens(length) for length in lengths])
        rewards.append([draw.randint(-8, 8) / 4 for _ in prompts])
    return prompts, answers, rewards


def losses(case: dict[str, Any], policy: Any, value: Any, prompts: Any, answers: Any, rewards: Any) -> Any:
    """Of policy and value model, by TRL."""
    import copy

    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    words = {"<pad>": 0, "<eos>": 1, **{str(n): n for n in range(FIRST, SIZES["vocab_size"])}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    given = iter(answers)
    theirs: Any = ppo_trainer
    plain = theirs.get_reward
    now: dict[str, Any] = {"step": -1}

    def answered(model: Any, queries: Any, *_: Any) -> Any:
        now["step"] += 1
        step = next(given)
        rows = [step[int(query[0]) - FIRST] for query in queries]
        padded = torch.tensor([row + [0] * (MOST - len(row)) for row in rows])
        whole = torch.cat([queries, padded], 1)
        return whole, theirs.forward(model, whole, 0).logits[:, queries.shape[1] - 1 : -1]

    def rewarded(model: Any, queries: Any, *rest: Any) -> Any:
        if model is not reward:
            return plain(model, queries, *rest)
        return None, torch.tensor([rewards[now["step"]][int(query[0]) - FIRST] for query in queries]), None

    theirs.batch_generation, theirs.get_reward = answered, rewarded
    reward = copy.deepcopy(value)
    with tempfile.TemporaryDirectory() as folder:
        arguments = PPOConfig(
            output_dir=folder, total_episodes=STEPS * PROMPTS, per_device_train_batch_size=PROMPTS,
            gradient_accumulation_steps=1, num_mini_batches=1, num_ppo_epochs=UPDATES, response_length=MOST,
            temperature=1.0, learning_rate=case["lr"], lr_scheduler_type="constant", weight_decay=0.0,
            kl_coef=case["beta"], cliprange=case["epsilon"], cliprange_value=case["value_clip"],
            vf_coef=0.0 if case["ends"] else 1.0, gamma=case["gamma"], lam=case["lam"], logging_steps=1,
            stop_token="eos" if case["ends"] else None, num_sample_generations=0, report_to="none", use_cpu=True,
            bf16=False, gradient_checkpointing=False, save_strategy="no",
        )  # fmt: skip
        rows = Dataset.from_dict({"input_ids": prompts})
        trainer = PPOTrainer(
            arguments, tokenizer, policy, copy.deepcopy(policy), reward, rows, value, eval_dataset=rows,
            data_collator=lambda each: {"input_ids": torch.tensor([row["input_ids"] for row in each])},
        )  # fmt: skip
        trainer.train()
    lines = [line for line in trainer.state.log_history if "loss/policy_avg" in line]
    return [line["loss/policy_avg"] for line in lines], [line["loss/value_avg"] for line in lines]


def made(case: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    draw = random.Random(3)
    policy = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), dtype=torch.float32)
    value = AutoModelForSequenceClassification.from_config(LlamaConfig(**SIZES, num_labels=1), dtype=torch.float32)
    kept = {"policy": weights(policy, draw), "value": weights(value, draw)}
    prompts, answers, rewards = drawn(case["ends"])
    found, values = losses(case, policy, value, prompts, answers, rewards)
    assert len(found) == STEPS
    return {
        "settings": case, "prompts": prompts, "answers": answers, "rewards": rewards, "losses": found,
        **({} if case["ends"] else {"value_losses": values}), "weights": kept,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    cases = {name: made(case) for name, case in CASES.items()}
    kept = [case.pop("weights") for case in cases.values()]
    assert kept[0] == kept[1]
    said = {
        "made by": "python benchmarks/ppo_values.py tests/golden/ppo.json",
        "versions": {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")},
        "updates": UPDATES, "sizes": SIZES, "scale": SCALE, "weights": kept[0], "cases": cases,
    }  # fmt: skip
    file.write_text(json.dumps(said, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
