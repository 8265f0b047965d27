"""Many prompts at once, each compared with what it gives alone."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

import shardfold as sf
from tests.generation.models import alone, made, unequal


def _model() -> Any:
    """The trained model of ``SHARDFOLD_TEST_DATA`` where there is one, else a random one."""
    folder = Path(os.environ.get("SHARDFOLD_TEST_DATA", "")) / "stories260K"
    if "SHARDFOLD_TEST_DATA" in os.environ and folder.is_dir():
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(folder).eval()
    return made(max_position_embeddings=1024)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_256_unequal_prompts_give_what_each_gives_alone() -> None:
    """Prompts of 8 to 300 tokens, answers of 8 to 200, all tokens; with all pages, and with a fifth of them."""
    model, draw = _model(), random.Random(0)
    model.generation_config.eos_token_id = None
    prompts = [(prompt * 38)[: draw.randint(8, 300)] for prompt in unequal(256, 40, seed=1)]
    most = [draw.randint(8, 200) for _ in prompts]
    expected = [alone(model, prompt, tokens) for prompt, tokens in zip(prompts, most, strict=True)]
    for pages in (None, 1000):
        found = sf.generate(model, prompts, max_tokens=most, temperature=0, pages=pages)
        tokens = {each.request: each.tokens for each in found}
        different = [number for number in range(256) if tokens[number] != expected[number]]
        assert not different
