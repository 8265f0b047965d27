"""Tiny decoders of transformers with random weights, and what they say alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

VOCABULARY = 97


def made(family: str = "llama", **more: Any) -> Any:
    """A decoder whose logits lie far apart, so that rounding turns no choice."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 8,
        "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "use_cache": True,
    }  # fmt: skip
    names = {"llama": "Llama", "mistral": "Mistral", "gemma2": "Gemma2", "qwen3": "Qwen3", "gpt2": "GPT2"}
    name = names[family]
    if family == "gpt2":
        sizes = {
            "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
            "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
        }  # fmt: skip
    config = getattr(transformers, f"{name}Config")(**{**sizes, **more})
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "gpt2" else f"{name}ForCausalLM")
    return kind(config).eval()


def unequal(count: int, most: int, seed: int = 0) -> list[list[int]]:
    """Prompts of one to ``most`` tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, most))] for _ in range(count)]


def alone(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """What transformers' own generate gives, greedily, for one prompt."""
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return whole[0, len(prompt) :].tolist()


def training_log_probs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> list[float]:
    """Of an answer's tokens, by one forward over the whole."""
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].float() / temperature
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, torch.tensor(list(answer))[:, None]).squeeze(-1).tolist()
