"""What outer steps and signs do to the loss: a small GPT on the bytes of docs/, on 2 ranks, beside plain training.

    python benchmarks/outer.py [--steps 300] [--picture docs/pictures/outer.png]

Every run begins with the same weights, and rank r reads the same batches in each. Printed is the loss on text that no
run has seen, over the weights that all ranks have in the end.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.optim import OneBitAdam, ZeroOneAdam
from shardfold.testing import run_ranks

CONTEXT, WIDTH, LAYERS, BATCH, RANKS = 64, 64, 2, 8, 2
DOCS = Path(__file__).parent.parent / "docs"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and the last tenth of them to look at."""
    raw = b"".join(path.read_bytes() for path in sorted(DOCS.glob("*.md")))
    every = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    return every[: -len(every) // 10], every[-len(every) // 10 :]


def windows(data: Tensor, count: int, draw: torch.Generator) -> Tensor:
    starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=draw)
    return torch.stack([data[s : s + CONTEXT + 1] for s in starts.tolist()])


def train(steps: int, optimizer: Any, outer: Any) -> tuple[list[float], float, int]:
    """Losses by step, the loss on other text in the end, and the bytes that this rank sent to the other."""
    engine = sf.Engine(
        GPT(), optimizer=optimizer, layout=sf.PRESETS["ddp"].with_outer(outer), parallel={"inter": RANKS, "intra": 1}
    )
    data, other = text()
    draw = torch.Generator().manual_seed(engine.rank)
    losses: list[float] = []
    sent = 0
    for _ in range(steps):
        loss = engine(windows(data, BATCH, draw))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        sent += sum(row.sent for row in engine.traffic().rows)
    engine.outer_step()
    with torch.no_grad():
        seen = torch.stack([engine(windows(other, 16, torch.Generator().manual_seed(i))) for i in range(8)])
    engine.close()
    return losses, float(seen.mean()), sent


def runs(steps: int) -> dict[str, tuple[Any, Any]]:
    """By name an optimizer and what is between ranks."""
    adam = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01)
    onebit = partial(OneBitAdam, lr=2e-3, freeze_step=steps * 15 // 100, weight_decay=0.01)
    zero_one = partial(
        ZeroOneAdam, lr=2e-3, freeze_step=steps * 15 // 100, weight_decay=0.01, local_scaler=steps // 4,
        local_clipper=4,
    )  # fmt: skip
    diloco = partial(sf.Outer, every=20, optimizer="nesterov", lr=0.7)
    return {
        "AdamW": (adam, None),
        "DiLoCo, momentum 0.5": (adam, diloco(momentum=0.5)),
        "DiLoCo, momentum 0.9": (adam, diloco(momentum=0.9)),
        "1-bit Adam": (onebit, sf.Signs(block=256)),
        "1-bit Adam, errors dropped": (onebit, sf.Signs(block=256, error=False)),
        "0/1 Adam": (zero_one, sf.Signs(block=256)),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    for name, (optimizer, outer) in runs(options.steps).items():
        found = run_ranks(train, RANKS, options.steps, optimizer, outer, timeout=1200.0)
        curves[name] = [sum(each) / RANKS for each in zip(*(losses for losses, _, _ in found), strict=True)]
        print(f"{name:<30} loss {found[0][1]:.4f}  {found[0][2]:>12,} bytes sent by each rank", flush=True)
    if options.picture is not None:
        import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]

        for name, losses in curves.items():
            smooth = torch.tensor(losses).unfold(0, min(10, len(losses)), 1).mean(1)
            plt.plot(smooth, label=name)
        plt.xlabel("step")
        plt.ylabel("loss, mean of 10 steps")
        plt.legend()
        plt.savefig(options.picture, dpi=100)


if __name__ == "__main__":
    main()
