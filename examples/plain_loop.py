"""Trains a small transformer on the sources of Python's standard library: a plain loop, top to bottom.

    python examples/plain_loop.py                                # one process
    torchrun --nproc-per-node 2 examples/plain_loop.py           # two, each with half of every state
    torchrun --nproc-per-node 2 examples/plain_loop.py zero1     # another layout, the same training
    python examples/plain_loop.py zero3 runs/a                   # its figures go to TensorBoard too

Other layouts: ddp, zero1, zero2, zero3, fsdp2, hsdp, hpz.
"""

import sys
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf

WIDTH, HEADS, LAYERS, CONTEXT = 64, 4, 2, 64
BATCH, STEPS = 16, 80
LAYOUT = sys.argv[1] if len(sys.argv) > 1 else "zero3"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
draw = torch.Generator().manual_seed(0)  # every rank draws the same global batch and takes its rows of it

torch.manual_seed(0)
engine = sf.Engine(
    Transformer(),
    optimizer=partial(torch.optim.AdamW, lr=3e-3),
    layout=LAYOUT,
    clip_norm=1.0,
    lr_schedule=sf.optim.warmup_cosine(warmup=10, total=STEPS),
)
run = sf.observe.Run(sys.argv[2], steps=STEPS, track="tensorboard") if len(sys.argv) > 2 else None
for step in range(STEPS):
    starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw)[engine.rank :: engine.world_size]
    windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(engine.device)
    loss = F.cross_entropy(engine(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    engine.backward(loss)
    report = engine.step()
    mean = engine.mean(loss.item())  # over all ranks, so every rank calls it
    if run is not None:
        run.log(report.step, loss=mean, lr=report.lr, grad_norm=report.grad_norm)
    if engine.rank == 0 and (step % 10 == 0 or step == STEPS - 1):
        print(f"step {report.step:3}  loss {mean:.4f}  lr {report.lr:.2e}  norm {report.grad_norm:.2f}")

if engine.rank == 0:
    print(f"\n{LAYOUT} on {engine.world_size} rank(s), bytes on this rank:\n{engine.memory()}")
    print(f"\nbytes that this rank sent in the last step:\n{engine.traffic()}")
if run is not None:
    run.close()
engine.close()
