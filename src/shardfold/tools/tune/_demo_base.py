"""What the demo begins with: text, a tokenizer of its words, and a small LLaMA with random values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardfold.tools.tune._demo_text import THINGS, write_rows

__all__ = ["REWARD_FILE", "held_out", "make_base", "make_text"]

VOCABULARY, WIDTH = 512, 96
NUMBERS = {"texts": 3000, "chats": 3000, "pairs": 1500, "prompts": 2000}
HELD_OUT, LEAST_HELD_OUT = 64, 8
LEAST = 64  # rows of each kind, however small a part of the demo is asked for

PAD, END, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|>{{ message.content }}"
    "{% else %}<|assistant|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

REWARD_FILE = f'''"""What the demo's answers are rated by."""

import re

THINGS = {THINGS!r}


def has_word(answer):
    """1 for a story that ends and names the thing that was asked for, and no other thing, else 0.

    Without the second half, lists of all things would be worth as much, and that is what a model then learns.
    """
    named = [word for word in re.findall("[a-z]+", answer.text) if word in THINGS]
    is_story = len(answer.text.split()) >= 8
    return float(answer.ended and is_story and named == [answer.row["word"]])
'''


def make_text(folder: Path, *, share: float, seed: int) -> dict[str, Path]:
    """Write the rows of every recipe and the file of the reward, and return the paths of rows by name."""
    folder.mkdir(parents=True)
    numbers = {kind: max(LEAST, round(number * share)) for kind, number in NUMBERS.items()}
    (folder / "rewards.py").write_text(REWARD_FILE, encoding="utf-8")
    return write_rows(folder, numbers, held_out(share), seed)


def held_out(share: float) -> int:
    """How many rows of each kind are not trained."""
    return max(LEAST_HELD_OUT, round(HELD_OUT * share))


def make_base(folder: Path, rows: dict[str, Path], *, seed: int) -> dict[str, int]:
    """Write a folder of transformers, and return how many parameters and tokens the model has."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words: list[str] = []
    for name in ("texts", "chats"):
        for line in rows[name].read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            words += [row["text"]] if "text" in row else [each["content"] for each in row["messages"]]
    backend = train_tokenizer(words)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    end: Any = tokenizer.eos_token_id
    padding: Any = tokenizer.pad_token_id
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=WIDTH**-0.5,  # with the usual 0.02 a model of this width copies nothing for 250 steps
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return {"parameters": sum(each.numel() for each in model.parameters()), "vocabulary": len(tokenizer)}


def train_tokenizer(texts: list[str]) -> object:
    """Byte-pair encoding of these texts, trained here in a few seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return backend
