"""A byte-level GPT decoder: RMSNorm, rotary positions, SwiGLU, causal attention, no biases and no dropout.

Every module that owns parameters has a `reset_parameters()` that initialises all of its own, so that the model can be
built without memory and materialized module by module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.errors import ConfigError
from shardfold.nn import MoE, parallel_cross_entropy
from shardfold.parallel import Attention as Attend
from shardfold.parallel.functions import copy
from shardfold.parallel.module_group import group_of
from shardfold.tools.recipes.train_config import SIZES, GPTConfig

__all__ = ["GPT", "SIZES", "GPTConfig", "generate"]

INIT_STD = 0.02


class Linear(nn.Linear):
    """A linear map without bias, initialised from a normal distribution of width `std`."""

    def __init__(self, d_in: int, d_out: int, std: float = INIT_STD) -> None:
        self.std = std  # which the constructor reads by way of the next method
        super().__init__(d_in, d_out, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Embedding(nn.Module):
    """One row per token."""

    def __init__(self, vocab: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class RMSNorm(nn.Module):
    """Divides each vector by its root mean square, then scales each dim."""

    def __init__(self, d_model: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary_tables(context: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of every position's angles, each (context, head_dim / 2) in fp32."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(context, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + head_dim / 2]) by their position's angles; x is (batch, heads, time, head_dim)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class CausalSelfAttention(nn.Module):
    """Causal self-attention over `heads` heads."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = Attend(config.heads)
        self.qkv = Linear(config.d_model, 3 * config.d_model)
        self.out = Linear(config.d_model, config.d_model, std=residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x.shape
        qkv = self.qkv(x).view(batch, time, 3, -1, self.head_dim)  # of all heads, or of this rank's
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, head_dim)
        y = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class SwiGLU(nn.Module):
    """The gated feed-forward layer, silu(gate) * up, then down."""

    def __init__(self, config: GPTConfig, residual_std: float) -> None:
        super().__init__()
        self.gate_up = Linear(config.d_model, 2 * config.d_ff)
        self.down = Linear(config.d_ff, config.d_model, std=residual_std)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each normalized before and added to its input after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        # 2 * layers projections add to the residual stream: scaled so that its variance does not grow with depth.
        residual_std = INIT_STD / (2 * config.layers) ** 0.5
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = CausalSelfAttention(config, residual_std)
        self.feed_forward_norm = RMSNorm(config.d_model)
        self.feed_forward = SwiGLU(config, residual_std)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class MixtureBlock(nn.Module):
    """The same with experts in place of one feed-forward layer; the loss of their balance is added to what is given."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        residual_std = INIT_STD / (2 * config.layers) ** 0.5
        self.attention_norm = RMSNorm(config.d_model)
        self.attention = CausalSelfAttention(config, residual_std)
        self.feed_forward_norm = RMSNorm(config.d_model)
        self.feed_forward = MoE(
            config.d_model,
            config.d_ff,
            config.experts,
            top_k=config.top_k,
            balance=config.balance,
            std=INIT_STD,
            down_std=residual_std,
        )

    def forward(self, x: Tensor, loss: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out, more = self.feed_forward(self.feed_forward_norm(x))
        return x + out, loss + more


class GPT(nn.Module):
    """The decoder: tokens (batch, time) to logits (batch, time, vocab), or to the mean loss where targets are given.

    `positions` (batch, time) are those of the tokens in their text; without them they count from 0.
    """

    cos: Tensor
    sin: Tensor
    tensor_plan: Mapping[str, Any] = {
        "embedding": "vocabulary",
        "*.attention.qkv": ("column", 3),
        "*.attention.out": "row",
        "*.feed_forward.gate_up": ("column", 2),
        "*.feed_forward.down": "row",
        "head": "vocabulary",
        "*.attention": "collected",
        "blocks.*_norm": "sequence",
        "norm": "joined",
    }

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab, config.d_model)
        kind = MixtureBlock if config.experts else Block
        self.blocks = nn.ModuleList(kind(config) for _ in range(config.layers))
        if config.experts:  # experts stay whole
            self.tensor_plan = {path: word for path, word in self.tensor_plan.items() if ".feed_forward." not in path}
        self.norm = RMSNorm(config.d_model)
        self.head = Linear(config.d_model, config.vocab)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.ranks = group_of(self.head, "tensor")
        # Derived from the config alone, hence not part of a checkpoint.
        cos, sin = rotary_tables(config.context, config.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        time = tokens.shape[1]
        if time > self.config.context:
            raise ConfigError(f"{time} tokens do not fit a context of {self.config.context}: give a shorter sequence.")
        x = self.embedding(tokens)
        at = slice(time) if positions is None else positions.unsqueeze(1)  # (batch, 1, time): the same for all heads
        cos, sin = self.cos[at].to(x.dtype), self.sin[at].to(x.dtype)
        loss = None
        if self.config.experts:
            loss = x.new_zeros((), dtype=torch.float32)
            for block in self.blocks:
                x, loss = block(x, loss, cos, sin)
        else:
            for block in self.blocks:
                x = block(x, cos, sin)
        x = self.norm(x)
        if targets is None:
            return self.head(x)
        # A head may have a precision of its own, and be split over ranks.
        weight, classes = self.head.weight, self.config.vocab
        x = x.to(weight.dtype)
        if len(weight) < classes:
            x = copy(x, self.ranks)
        nats = parallel_cross_entropy(x, weight, targets, ranks=self.ranks, classes=classes, summed=False)
        return nats if loss is None or not torch.is_grad_enabled() else nats + loss


@torch.no_grad()
def generate(model: GPT, prompt: bytes, n: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Return `n` bytes that the model continues `prompt` with; temperature 0 takes the likeliest byte each time.

    Where the model gives inf or NaN it ends. No keys and values are kept: past the context every byte's rotary position
    changes anyway, and samples are short.
    """
    if temperature < 0:
        raise ConfigError(f"temperature is {temperature}, but must be 0 (likeliest byte) or more.")
    device = model.cos.device
    draw = torch.Generator().manual_seed(seed)
    text = list(prompt or b"\n")
    start = len(text)
    for _ in range(n):
        window = torch.tensor([text[-model.config.context :]], device=device)
        logits = model(window)[0, -1].float().cpu()
        if not logits.isfinite().all():
            break
        if temperature == 0:
            token = int(logits.argmax())
        else:
            # Below the largest, in double: no temperature above 0 then overflows.
            scaled = (logits.double() - logits.max()) / temperature
            token = int(torch.multinomial(scaled.softmax(-1), 1, generator=draw))
        text.append(token)
    return bytes(text[start:])
