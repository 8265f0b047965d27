"""Milliseconds of a small step with as many ranks as cores, and with more, beside DistributedDataParallel.

python benchmarks/small_steps.py                     2, 4 and 8 ranks
python benchmarks/small_steps.py --ranks 16 --rounds 3
python benchmarks/small_steps.py --sockets           over sockets in place of memory that ranks share
python benchmarks/small_steps.py --ranks 2 --delay 0 1 10    each rank a host, whose packets come so many ms later

A residual MLP of 24 blocks (1.6M parameters), 8 rows on each rank, fused AdamW. Such a step is short, so that what it
takes is what ranks tell each other, and how they wait for it. Contenders take turns in rounds of one run; a figure is
the median of the rounds' medians, slowest rank. `switches` are voluntary changes of context of a rank in a step, `CPU`
the milliseconds that a rank works in it: a machine that is busy with other work distorts these least.

With a delay each rank is in a network namespace of its own (root is needed, see ``shardfold.testing.links``). `rounds`
are the messages of a step that one rank sends when it has what another one sent: a gather or reduce-scatter is one, an
all-reduce two, and so is a round trip of a small message. What a step takes longer than without a delay is at most that
many delays, if none waits for more.
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
from shardfold.testing.links import Links

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
    """What a step took on one rank: milliseconds, those of the CPU, changes of context, and messages in a row."""

    wall: float
    cpu: float
    switches: float
    rounds: float = 0.0


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
    rounds = 0
    if engine is not None:
        rounds = sum(row.calls * (1 + (row.op == "ALL_REDUCE")) for row in engine.traffic().rows)
        rounds += 2 * engine.stats().blocking_messages
        engine.close()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(1e3 * median(times), 1e3 * cpu / count, (after.ru_nvcsw - before.ru_nvcsw) / count, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of each contender in a round")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--sockets", action="store_true", help="over sockets")
    parser.add_argument("--delay", type=float, nargs="+", help="ms, each rank on a host of its own")
    given = parser.parse_args()
    if given.sockets:
        os.environ["SHARDFOLD_NEAR"] = "0"
    if given.delay is not None:
        delayed(given)
        return
    print("| ranks | contender | ms | / torch-ddp | CPU ms | switches |\n|---|---|---|---|---|---|")
    for count in given.ranks:
        with Ranks(count) as ranks:
            found = turns(ranks.run, given)
        for name, took in found.items():
            ratio = f"{took.wall / found['torch-ddp'].wall:.2f}" if "torch-ddp" in found else ""
            print(
                f"| {count} | `{name}` | {took.wall:.1f} | {ratio} | {took.cpu:.1f} | {took.switches:.0f} |", flush=True
            )


def turns(run: Any, given: argparse.Namespace) -> dict[str, Took]:
    """The median of each contender's rounds."""
    rounds: dict[str, list[Took]] = {name: [] for name in given.only}
    for _ in range(given.rounds):
        for name in given.only:
            took = run(steps, name, given.steps, timeout=LIMIT)
            rounds[name].append(Took(*(max(figures) for figures in zip(*took, strict=True))))
    return {name: Took(*map(median, zip(*took, strict=True))) for name, took in rounds.items()}


def delayed(given: argparse.Namespace) -> None:
    """A table of what delays of the link cost."""
    print("| ranks | delay, ms | contender | ms | more than without | rounds | rounds x delay |")
    print("|---|---|---|---|---|---|---|")
    for count in given.ranks:
        without: dict[str, Took] = {}
        for delay in given.delay:
            with Links(nodes=count, ranks=1, delay=1e-3 * delay) as links:
                found = turns(links.run, given)
            without = without or found
            for name, took in found.items():
                more = f"{took.wall - without[name].wall:.1f}"
                rounds = (f"{took.rounds:.0f}", f"{took.rounds * delay:.0f}") if took.rounds else ("", "")
                print(
                    f"| {count} | {delay:g} | `{name}` | {took.wall:.1f} | {more} | {rounds[0]} | {rounds[1]} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
