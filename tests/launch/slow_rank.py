"""A rank gets slow, and others take micro-batches of it: what steps come to, and how long they take.

GLOO_SOCKET_IFNAME=lo python -m shardfold run --nproc-per-node 3 tests/launch/slow_rank.py OUT     # prints the figure

Each row takes some milliseconds of a forward, on the slow rank twice as many from a step on: a sleep, so that ranks do
not compete for the cores of this machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shardfold as sf

VIRTUAL, ROWS, EACH = 15, 16, 0.008
"""Micro-batches of a step, rows of one, and seconds of a row."""
SLOW, FROM, STEPS = 1, 32, 76


class Slow(nn.Module):
    """Takes its time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()
        self.seconds = 0.0  # of a row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds * len(x))
        return self.body(x)


def samples() -> torch.Tensor:
    return torch.randn(4000, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sampler(rank: int) -> sf.Sampler:
    return sf.Sampler(4000, ROWS, seed=3, rank=rank, num_ranks=VIRTUAL, fill_last=True)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # pyright: ignore[reportArgumentType]


def plain() -> list[float]:
    """Losses in one process, without an engine."""
    model, rows, found = Slow(), samples(), list[float]()
    optimizer = sgd(model.parameters())
    virtual = [sampler(rank) for rank in range(VIRTUAL)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses: list[float] = []
        for each in virtual:
            x = rows[next(iter(each.batches()))]
            each.advance()
            loss = (model(x) - x).square().mean()
            (loss / VIRTUAL).backward()
            losses.append(loss.item())
        optimizer.step()
        found.append(statistics.fmean(losses))
    return found


def main(out: Path) -> None:
    torch.set_num_threads(1)
    run = sf.ElasticRun(lambda ranks: sf.Engine(Slow(), optimizer=sgd, layout="ddp"))
    rank, losses, seconds, passes = run.engine.rank, list[float](), list[float](), list[int]()
    total, count, began, mine = 0.0, 0.0, time.perf_counter(), 0
    for x in run.batches(sf.Loader(samples(), sampler(rank)), steps=STEPS):
        with run.attempt() as engine:
            weight = engine.micro_batch_weight
            engine.module.seconds = EACH * (2 if rank == SLOW and engine.steps >= FROM else 1)
            loss = (engine(x) - x).square().mean()
            engine.backward(loss)
            total += loss.item() * (1.0 if weight is None else weight)
            count += 1.0 if weight is None else weight
            mine += weight != 0
            if engine.step().updated:
                losses.append(engine.mean(total / max(count, 1), weight=count))
                seconds.append(time.perf_counter() - began)
                passes.append(mine)
                total, count, began, mine = 0.0, 0.0, time.perf_counter(), 0
    run.close()
    (out / f"rank-{rank}").write_text(json.dumps({"losses": losses, "seconds": seconds, "passes": passes}))
    if rank == 0:
        ideal, last = VIRTUAL * ROWS * EACH / 2.5, seconds[FROM + 20 :]
        before, amid = statistics.median(seconds[4:FROM]), statistics.median(seconds[FROM : FROM + 6])
        now = statistics.median(last)
        print(f"step {before:.3f} s, with a slow rank {amid:.3f}, from the 20th of those on {now:.3f}: ", end="")
        print(f"{ideal / now:.2f} of the ideal {ideal:.3f} s; micro-batches of rank 0: {passes[FROM]}, {passes[-1]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
