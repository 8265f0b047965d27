"""Generation with split parameters and no gathered(): units stream, and ranks may generate different lengths."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.testing import Ranks

VOCAB = 61
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def _model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, bos_token_id=1, eos_token_id=None, **sizes, **heads))


def _prompt(rank: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (2, 4 + rank), generator=torch.Generator().manual_seed(rank))


def _generate(model: Any, rank: int) -> list[list[int]]:
    prompt = _prompt(rank)
    with torch.no_grad():
        tokens = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3 + 4 * rank, do_sample=False, pad_token_id=0
        )
    return tokens.tolist()


def _stream(layout: str) -> tuple[list[list[int]], list[float], int]:
    """Generates, each rank another length, between training steps."""
    model = _model()
    engine = sf.Engine(model, optimizer=ADAMW, layout=layout)
    losses: list[float] = []
    tokens: list[list[int]] = []
    for step in range(3):
        batch = torch.randint(3, VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.detach()))
        if step == 1:
            model.eval()
            tokens = _generate(model, engine.rank)
            model.train()
    return tokens, losses, engine.memory().transient


def _plain() -> tuple[dict[int, list[list[int]]], list[float]]:
    model: Any = _model()
    optimizer = ADAMW(model.parameters())
    losses: list[float] = []
    tokens: dict[int, list[list[int]]] = {}
    for step in range(3):
        batch = torch.randint(3, VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            tokens = {rank: _generate(model.eval(), rank) for rank in range(3)}
            model.train()
    return tokens, losses


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["zero2", "zero3", "fsdp2"])
def test_generation_streams_and_ends_cleanly_with_unequal_lengths(ranks: Ranks, layout: str) -> None:
    expected, losses = _plain()
    for rank, (tokens, seen, transient) in enumerate(ranks.run(_stream, layout, world_size=3, timeout=120)):
        assert tokens == expected[rank]
        assert seen == pytest.approx(losses, rel=1e-6)
        assert transient == 0
