"""DiLoCo while groups come and go: how much of the time they train, and what becomes of the loss.

    python benchmarks/outer_away.py [--seconds 60] [--quorum 2] [--away 0.2] [--seeds 2]

Four groups of a rank each. A group's work in a step is a rest of 50 ms and an update of a model of two numbers, so that
the cores of this machine do not set the pace. With ``away`` each group does nothing for so much of the time, for 2 s on
average at drawn moments. Printed is, in tokens that were learned from:

    there   of those that groups would learn from in the time that they are there, at the pace of a step without an
            outer step
    wall    of those that they would in all of the time, never away

Then a GPT (benchmarks/outer.py) is trained in plain loops over four models, with the same steps between the same outer
steps, and its loss on other text is compared with runs of which no group is away: as long, and with as many tokens.
tests/training/test_quorum.py holds that an engine comes to what such loops come to. ``--seeds``: of the batches.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from outer import BATCH, GPT, text, windows
from torch import nn

import shardfold as sf
from shardfold.optim.present_groups import OuterMeeting
from shardfold.testing import run_ranks

GROUPS, EVERY, PADDED, AWAY = 4, 30, 0.05, 2.0
DILOCO = partial(sf.Outer, every=EVERY, optimizer="nesterov", lr=0.7, momentum=0.5)


class Met(NamedTuple):
    """An outer step, as one group came to it: which one it was, behind how many of the group's steps, and whose."""

    number: int
    done: int
    meeting: OuterMeeting


class Came(NamedTuple):
    """What a group's run came to: its steps, seconds that it was there, and away, a usual step's, its longest one, and
    its outer steps."""

    steps: int
    there: float
    away: float
    usual: float
    longest: float
    met: list[Met]


def train(seconds: float, outer: sf.Outer, away: float, seed: int) -> Came:
    """Of a group."""
    torch.set_num_threads(1)
    sgd = partial(torch.optim.SGD, lr=0.1)
    layout = sf.PRESETS["ddp"].with_outer(outer)
    engine = sf.Engine(nn.Linear(1, 1), optimizer=sgd, layout=layout, parallel={"inter": GROUPS, "intra": 1})
    met, x = noted(engine), torch.ones(1, 1)
    dice, rate = random.Random(f"{seed} {engine.rank}"), away / (AWAY - AWAY * away)  # of leaving, by the second
    engine.mean(torch.zeros(()))  # all begin together
    begun = now = time.monotonic()
    leaves = begun + (dice.expovariate(rate) if rate else float("inf"))
    gone, took = 0.0, list[float]()
    while now < begun + seconds:
        if now > leaves:
            length = min(dice.expovariate(1 / AWAY), begun + seconds - now)
            time.sleep(length)
            gone, leaves = gone + length, time.monotonic() + dice.expovariate(rate)
        began = time.monotonic()
        time.sleep(PADDED)
        engine.backward(engine(x).square().sum())
        engine.step(tokens=float(BATCH))
        now = time.monotonic()
        took.append(now - began)
    engine.outer_step()
    engine.close()
    return Came(len(took), now - begun - gone, gone, statistics.median(took), max(took), met)


def noted(engine: sf.Engine) -> list[Met]:
    """The outer steps that its group will have come to."""
    met, rounds = list[Met](), engine._rounds
    assert rounds is not None
    if (quorum := rounds.quorum) is not None:
        turn, done = quorum.turn, 0

        def asked(**given: Any) -> OuterMeeting | None:
            nonlocal done
            done += not given["everyone"]
            if (meeting := turn(**given)) is not None:
                met.append(Met(quorum.version, done, meeting))
            return meeting

        quorum.turn = asked  # pyright: ignore[reportAttributeAccessIssue]
    return met


def even(steps: int, rounds: int | None = None) -> list[list[Met]]:
    """Of groups that all do so many steps, and are never away; None: in rounds of the usual length."""
    all_of_them = tuple(range(GROUPS)), (1 / GROUPS,) * GROUPS
    ends = sorted({*range(EVERY, steps + 1, EVERY), steps})
    if rounds is not None:
        ends = [round(steps * number / rounds) for number in range(1, rounds + 1)]
    return [[Met(n, end, OuterMeeting(*all_of_them, (), 0, end)) for n, end in enumerate(ends, 1)]] * GROUPS


def loss(met: Sequence[Sequence[Met]], seed: int) -> float:
    """On other text, of a GPT that plain loops train with these outer steps."""
    torch.set_num_threads(1)
    outer, (data, other) = DILOCO(), text()
    models, done = [GPT() for _ in met], [0] * len(met)
    adams = [torch.optim.AdamW(each.parameters(), lr=2e-3, weight_decay=0.01, fused=True) for each in models]
    draws = [torch.Generator().manual_seed(1000 * seed + group) for group in range(len(met))]
    shared = [[p.detach().clone() for p in each.parameters()] for each in models]
    momentum = [[torch.zeros_like(p) for p in each] for each in shared]
    held = {each.number: each.meeting for of in met for each in of}
    ends = [{each.number: each.done for each in of} for of in met]
    for number, meeting in sorted(held.items()):
        for group in meeting.groups:
            while done[group] < ends[group][number]:
                adams[group].zero_grad()
                models[group](windows(data, BATCH, draws[group])).backward()
                adams[group].step()
                done[group] += 1
        outer_step(models, shared, momentum, meeting, outer)
    with torch.no_grad():
        seen = [models[0](windows(other, 16, torch.Generator().manual_seed(i))) for i in range(32)]
    return float(torch.stack(seen).mean())


@torch.no_grad()
def outer_step(models: list[GPT], shared: list[Any], momentum: list[Any], meeting: OuterMeeting, outer: Any) -> None:
    source = meeting.source
    for group in meeting.behind:
        for p, old, new in zip(models[group].parameters(), shared[group], shared[source], strict=True):
            p.add_(new - old)
        shared[group] = [each.clone() for each in shared[source]]
        momentum[group] = [each.clone() for each in momentum[source]]
    for place, gaps in enumerate(
        zip(*([old - p for old, p in zip(shared[g], models[g].parameters(), strict=True)] for g in meeting.groups),
            strict=True)
    ):  # fmt: skip
        mean = torch.stack([share * gap for share, gap in zip(meeting.shares, gaps, strict=True)]).sum(0)
        for group in meeting.groups:
            momentum[group][place].mul_(outer.beta).add_(mean)
            shared[group][place] -= outer.rate * (mean + outer.beta * momentum[group][place])
            list(models[group].parameters())[place].copy_(shared[group][place])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--away", type=float, default=0.2)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    quorum = DILOCO(deadline=10.0, quorum=options.quorum)
    met: list[list[Met]] = []
    for name, outer, away in (
        ("all there", quorum, 0.0),
        ("away, all waited for", DILOCO(), options.away),
        ("away", quorum, options.away),
    ):
        found = run_ranks(train, GROUPS, options.seconds, outer, away, 1, timeout=options.seconds + 600.0)
        learned = sum(one.steps * one.usual for one in found)
        there, gone = sum(one.there for one in found), sum(one.away for one in found)
        print(
            f"{name:<22} there {learned / there:6.1%}  wall {learned / (there + gone):6.1%}  "
            f"away {gone / (there + gone):5.1%}  longest step {max(one.longest for one in found):5.2f} s  "
            f"outer steps {max((len(one.met) for one in found), default=0):3}",
            flush=True,
        )
        met = [one.met for one in found]
    steps = sum(of[-1].done for of in met) / GROUPS
    long = round(options.seconds / PADDED)
    for name, of in (
        ("away", met),
        (f"never away, as many tokens: {steps:.0f} steps", even(round(steps))),
        (f"never away, as long: {long} steps", even(long)),
    ):
        losses = [loss(of, seed) for seed in range(options.seeds)]
        print(
            f"{name:<45} loss {statistics.mean(losses):.4f}  ({' '.join(f'{each:.4f}' for each in losses)})", flush=True
        )


if __name__ == "__main__":
    main()
