"""Tiny random models of transformers, a tokenizer that is made in memory, and rows, for tests of tuning."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "As",
    "From",
    "chats",
    "labelled",
    "model_folder",
    "pairs",
    "prompts",
    "scored_folder",
    "texts",
    "tiny_tokenizer",
    "write_rows",
]

TEMPLATE = """\
{%- for message in messages -%}
{{ '<' + message['role'] + '>' + message['content'] }}
{%- if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}
"""
SPECIAL = ("<pad>", "<eos>", "<user>", "<assistant>", "<system>")
WORDS = ("one", "two", "red", "blue", "cat", "dog", "runs", "sits", "here", "there")
VOCABULARY = 256 + len(SPECIAL)


@dataclass(frozen=True)
class From:
    """A source of rows, as a recipe's settings say it."""

    path: str
    format: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class As:
    """How text becomes tokens, as a recipe's settings say it."""

    length: int = 64
    template: str = "model"
    train_on: Any = "assistant"


def tiny_tokenizer() -> Any:
    """Of bytes, with a chat template: 261 tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate([*SPECIAL, *alphabet])}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_config(kind: str = "llama", **changes: Any) -> Any:
    """transformers' config of a decoder of two layers."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    }  # fmt: skip
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return transformers.GPT2Config(**{**common, **sizes, **dropped, **changes})
    sizes = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    classes = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "mistral": "MistralConfig"}
    return getattr(transformers, classes[kind])(**{**common, **sizes, **changes})


def model_folder(folder: Path, kind: str = "llama", *, seed: int = 0, scale: float = 1.0, **changes: Any) -> Path:
    """Write a random model with its tokenizer; with ``scale`` times larger weights its outputs are less alike."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(scale)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def chats(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of one or two turns."""
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for _ in range(number):
        messages: list[dict[str, str]] = []
        for _ in range(draw.randint(1, 2)):
            messages.append({"role": "user", "content": _words(draw, 1, 4)})
            messages.append({"role": "assistant", "content": _words(draw, 1, 5)})
        rows.append({"messages": messages})
    return rows


def pairs(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with a better and a worse answer."""
    draw = random.Random(seed)
    return [
        {"prompt": _words(draw, 1, 4) + " ", "chosen": "yes " + _words(draw, 1, 4), "rejected": _words(draw, 2, 6)}
        for _ in range(number)
    ]


def labelled(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with an answer that is good or not."""
    draw = random.Random(seed)
    return [
        {"prompt": _words(draw, 1, 4) + " ", "completion": _words(draw, 1, 5), "label": draw.random() < 0.5}
        for _ in range(number)
    ]


def prompts(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts with a word that an answer is to have."""
    draw = random.Random(seed)
    return [{"prompt": _words(draw, 1, 4) + " ", "contains": draw.choice("abcdefgh")} for _ in range(number)]


def texts(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Texts of a few words."""
    draw = random.Random(seed)
    return [{"text": _words(draw, 3, 9)} for _ in range(number)]


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def scored_folder(base: Path, folder: Path) -> Path:
    """Write the reward model that a run begins with, from seed 0."""
    import copy

    import torch
    from transformers import AutoModelForSequenceClassification

    from shardfold.tools.tune.adapters import beginning
    from shardfold.tools.tune.models import ModelPlace, hollow_model

    place = ModelPlace.find(base)
    _, tensors = beginning(hollow_model(copy.deepcopy(place.config), "score"), place, None, "score", 0)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    model.load_state_dict({name: tensors[name] for name in tensors}, strict=True)
    model.save_pretrained(folder)
    return folder
