"""Milliseconds of a small step with as many ranks as cores, and with more, beside DistributedDataParallel.

python benchmarks/small_steps.py                     2, 4 and 8 ranks
python benchmarks/small_steps.py --ranks 16 --rounds 3
python benchmarks/small_steps.py --sockets           over Gloo's sockets in place of memory that ranks share

A residual MLP of 24 blocks (1.6M parameters), 8 rows on each rank, fused AdamW. Such a step is short, so that what it
takes is what ranks tell each other, and how they wait for it. Contenders take turns in rounds of one run; a figure is
the median of the rounds' medians, slowest rank. `switches` are voluntary changes of context of a rank in a step, `CPU`
the milliseconds that a rank works in it: a machine that is busy with other work distorts these least.
"""

from __future__ import annotations

import argparse
import os
import resource
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks

BLOCKS, WIDTH, ROWS = 24, 256, 8
WARM = 6
CONTENDERS = ("torch-ddp", "ddp", "zero1", "zero2", "zero3")
LIMIT = 900.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x))


class Took(NamedTuple):
    """What a step took on one rank: milliseconds, those of the CPU, and changes of context."""

    wall: float
    cpu: float
    switches: float


def steps(contender: str, count: int) -> Took:
    """The median of so many steps on this rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    adam: Any = partial(torch.optim.AdamW, lr=1e-3, fused=True)
    engine: Any = None
    if contender == "torch-ddp":
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = adam(model.parameters())
    else:
        engine = optimizer = sf.Engine(model, optimizer=adam, layout=contender)

    def step() -> None:
        loss = (engine or model)(x).square().mean()
        if engine is not None:
            engine.backward(loss)
        else:
            loss.backward()
        optimizer.step()
        if engine is None:
            optimizer.zero_grad()

    for _ in range(WARM):
        step()
    before, times = resource.getrusage(resource.RUSAGE_SELF), []
    for _ in range(count):
        begun = perf_counter()
        step()
        times.append(perf_counter() - begun)
    after = resource.getrusage(resource.RUSAGE_SELF)
    if engine is not None:
        engine.close()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(1e3 * median(times), 1e3 * cpu / count, (after.ru_nvcsw - before.ru_nvcsw) / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of each contender in a round")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--sockets", action="store_true", help="over Gloo's sockets")
    given = parser.parse_args()
    if given.sockets:
        os.environ["SHARDFOLD_NEAR"] = "0"
    print("| ranks | contender | ms | / torch-ddp | CPU ms | switches |\n|---|---|---|---|---|---|")
    for count in given.ranks:
        rounds: dict[str, list[Took]] = {name: [] for name in given.only}
        with Ranks(count) as ranks:
            for _ in range(given.rounds):
                for name in given.only:
                    took = ranks.run(steps, name, given.steps, timeout=LIMIT)
                    rounds[name].append(Took(*(max(figures) for figures in zip(*took, strict=True))))
        found = {name: Took(*map(median, zip(*took, strict=True))) for name, took in rounds.items()}
        for name, took in found.items():
            ratio = f"{took.wall / found['torch-ddp'].wall:.2f}" if "torch-ddp" in found else ""
            print(
                f"| {count} | `{name}` | {took.wall:.1f} | {ratio} | {took.cpu:.1f} | {took.switches:.0f} |", flush=True
            )


if __name__ == "__main__":
    main()
