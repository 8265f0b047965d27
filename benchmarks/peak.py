"""Peak memory of training steps by resident-set size, beside the sum of the parts that the table and program name.

    python benchmarks/peak.py                          # zero3 on 2 ranks, fp32, 8 units of 9.4M parameters
    python benchmarks/peak.py --layout ddp --ranks 4

Each rank is a fresh process. What it resided in before the model was built (interpreter, torch, connections, and the
kernels that a small model has run) is taken off. Activations are small: a micro-batch has 8 rows.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.plan.checks import human
from shardfold.plan.lifetimes import Behaviour, peak_bytes
from shardfold.testing import run_ranks


class Block(nn.Module):
    """Four square matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layers(x))


class Model(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).float().square().mean()


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` (the largest so far) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def train(model: nn.Module, width: int, layout: str, precision: str, steps: int) -> sf.Engine:
    engine = sf.Engine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        layout=layout,
        precision=precision,
        init=sf.Init(units=["blocks.*"]),
    )
    x = torch.randn(8, width, dtype=torch.bfloat16 if precision.startswith("bf16") else torch.float32)
    for _ in range(steps):
        engine.backward(engine(x))
        engine.step()
    return engine


def measure(width: int, layers: int, layout: str, precision: str) -> tuple[int, float, int]:
    """Peak and bound of this rank, and its states at rest, in bytes."""
    train(Model(64, 2), 64, layout, precision, 2)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at what is resident now
    before = resident("VmRSS")
    with sf.meta_init():
        model = Model(width, layers)
    engine = train(model, width, layout, precision, 3)
    peak = resident("VmHWM") - before
    held, behaviour = engine.memory().held, Behaviour(streams=False, transport=engine.sharded.comm.transport.kind)
    bound = peak_bytes(engine._runner.orders.bound, behaviour, rest=held)
    return peak, bound, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="zero3", choices=list(sf.PRESETS))
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    answers = run_ranks(measure, given.ranks, given.width, given.layers, given.layout, given.precision, timeout=600)
    size = f"{given.layers} units of {4 * given.width**2:,} parameters"
    print(f"{given.layout}, {given.ranks} ranks, {size}, {given.precision}")
    for rank, (peak, bound, held) in enumerate(answers):
        print(f"rank {rank}: at rest {human(held)}, bound {human(bound)}, peak {human(peak)}: {peak / bound:.3f}")


if __name__ == "__main__":
    main()
