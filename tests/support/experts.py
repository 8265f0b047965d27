"""A small model with experts in its blocks, and what plain PyTorch makes of it on one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf

__all__ = ["ADAM", "STEPS", "MoENet", "batches", "build", "plain", "reference"]

WIDTH, HIDDEN, EXPERTS, STEPS = 8, 16, 4, 3
ADAM = partial(torch.optim.AdamW, lr=0.02, betas=(0.5, 0.9))


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.moe = sf.nn.MoE(WIDTH, HIDDEN, EXPERTS, std=0.3, **options)

    def forward(self, x: Tensor, loss: Tensor) -> tuple[Tensor, Tensor]:
        x = x + torch.tanh(self.mix(self.norm(x)))
        out, more = self.moe(self.norm2(x))
        return x + out, loss + more


class MoENet(nn.Module):
    """Two blocks between layers that all ranks share."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inside = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, loss = self.inside(x), x.new_zeros(())
        for block in self.blocks:
            x, loss = block(x, loss)
        return (self.head(x)[..., 0] - y).square().mean() + loss


def build(dtype: torch.dtype = torch.float64, forced: Sequence[int] = (), **options: Any) -> MoENet:
    """``forced``: the experts that all tokens go to."""
    torch.manual_seed(0)
    if forced:
        options |= {"bias_rate": 0.0, "top_k": len(forced), "normalize": False}  # or one weight is 1, always
    model = MoENet(**options).to(dtype)
    for block in model.blocks if forced else ():
        block.moe.router.bias[list(forced)] = 100.0
    return model


def batches(dtype: torch.dtype = torch.float64, rows: int = 8, tokens: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(rows, tokens, 3, generator=generator, dtype=dtype) for _ in range(STEPS)]
    return [(x, x.sum(-1).sin() * 2) for x in xs]


def plain(
    clip: float | None, dtype: torch.dtype = torch.float64, pieces: int = 1, rows: int = 8, **options: Any
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of the whole model on one process; ``pieces``: micro-batches, of every rank's."""
    model, losses, norms = build(dtype, **options), [], []
    optimizer = ADAM(model.parameters())
    for batch in batches(dtype, rows):
        total = 0.0
        for piece in range(pieces):
            loss = model(*[part.chunk(pieces)[piece] for part in batch]) / pieces
            loss.backward()
            total += loss.item()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        for block in model.blocks:
            block.moe.router.rebalance()
    return losses, norms, model.state_dict()


def reference(moe: Any, x: Tensor) -> Tensor:
    """What a mixture gives, in twenty lines, a token after the other."""
    out = torch.zeros_like(x)
    router, experts = moe.router, moe.experts
    for at, token in enumerate(x):
        logits = router.weight @ token
        raw = logits.softmax(0) if router.kind == "softmax" else logits.sigmoid()
        ranked = raw + router.bias if router.bias_rate is not None else raw
        chosen = ranked.argsort(descending=True)[: router.top_k].tolist()
        total = sum(raw[e] for e in chosen) if router.normalize else 1.0
        for e in chosen:
            made = experts.gate_up_proj[e] @ token
            if experts.gated:
                gate, up = made.chunk(2)
                made = F.silu(gate) * up
            else:
                made = F.silu(made)
            out[at] = out[at] + raw[e] / total * router.scale * (experts.down_proj[e] @ made)
        if moe.shared is not None:
            out[at] = out[at] + moe.shared(token)
    return out
