"""DiLoCo while groups come and go: how much of the time that they are there they train, and what becomes of the loss.

    python benchmarks/outer_away.py [--steps 900] [--quorum 2]

Four groups of a rank each train the GPT of benchmarks/outer.py, each on as many batches of its own. ``away``: each
group is away for a fifth of the time, for 2 s on average at drawn moments, in which its rank does nothing; steps are
padded to 30 ms, so that a group that is away leaves the others no faster processors. Goodput is what is left of the
time that groups are there without what outer steps add to a step: waiting for others, and what is sent. Each run ends
with an outer step of all, which is not counted; the loss is on other text.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from functools import partial
from typing import NamedTuple

import torch
from outer import BATCH, GPT, text, windows

import shardfold as sf
from shardfold.testing import run_ranks

GROUPS, EVERY, PADDED = 4, 30, 0.03
MEASURED = 0.7
"""Of a group's steps: behind them another one may have come to its end, for which the others wait."""
AWAY, THERE = 2.0, 8.0
"""Seconds on average."""


class Came(NamedTuple):
    """What a group's run came to: seconds that it was there, that it trained of these, and that it was away; its
    longest step with an outer step; outer steps that it put off; and the loss."""

    there: float
    trained: float
    away: float
    longest: float
    put_off: int
    loss: float


def train(steps: int, outer: sf.Outer, seed: int | None) -> Came:
    """``seed``: of when groups are away; None: they never are."""
    torch.set_num_threads(1)
    layout = sf.PRESETS["ddp"].with_outer(outer)
    adam = partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.01)
    engine = sf.Engine(GPT(), optimizer=adam, layout=layout, parallel={"inter": GROUPS, "intra": 1})
    data, other = text()
    draw, dice = torch.Generator().manual_seed(engine.rank), random.Random(f"{seed} {engine.rank}")
    engine.mean(torch.zeros(()))  # all begin together
    begun = time.monotonic()
    leaves = begun + dice.expovariate(1 / THERE) if seed is not None else float("inf")
    away, put_off, took, met = 0.0, 0, list[float](), list[float]()
    there, gone, usual, waits = 0.0, 0.0, 0.0, list[float]()
    for step in range(steps):
        if time.monotonic() > leaves:
            length = dice.expovariate(1 / AWAY)
            time.sleep(length)
            away += length
            leaves = time.monotonic() + dice.expovariate(1 / THERE)
        began = time.monotonic()
        engine.backward(engine(windows(data, BATCH, draw)))
        time.sleep(max(0.0, began + PADDED - time.monotonic()))
        engine.step(tokens=float(BATCH))
        waited = put_off != (put_off := engine.stats().put_off)
        outer_step = waited or any(row.sent for row in engine.traffic().rows if row.purpose == "outer")
        (met if outer_step else took).append(time.monotonic() - began)
        if step == int(MEASURED * steps):
            there, gone, waits, usual = time.monotonic() - begun - away, away, list(met), statistics.median(took)
    engine.outer_step()
    with torch.no_grad():
        seen = torch.stack([engine(windows(other, 16, torch.Generator().manual_seed(i))) for i in range(8)])
    engine.close()
    lost = sum(max(0.0, each - usual) for each in waits)
    return Came(there, there - lost, gone, max(waits, default=0.0), put_off, float(seen.mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--only", help="runs whose name has this in it")
    options = parser.parse_args()
    diloco = partial(sf.Outer, every=EVERY, optimizer="nesterov", lr=0.7, momentum=0.5)
    quorum = diloco(deadline=10.0, quorum=options.quorum)
    for name, outer, seed in (
        ("all there", diloco(), None),
        ("all there, quorum", quorum, None),
        ("away, quorum", quorum, 1),
        ("away, all waited for", diloco(), 1),
    ):
        if options.only and options.only not in name:
            continue
        found = run_ranks(train, GROUPS, options.steps, outer, seed, timeout=3600.0)
        there, trained, away = (sum(each) for each in list(zip(*found, strict=True))[:3])
        print(
            f"{name:<22} goodput {trained / there:6.1%}  away {away / (away + there):5.1%}  "
            f"longest step {max(one.longest for one in found):5.2f} s  put off {sum(one.put_off for one in found):3}  "
            f"loss {found[0].loss:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
