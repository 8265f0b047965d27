"""A rank that is slow gets less to do, and a step takes about as long as its ranks can do it in, all together."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from shardfold.engine._rank_shares import AGAIN, TRIED, RankShares
from shardfold.engine.pace import Pace, Spent
from shardfold.plan.report import Straggler

VIRTUAL, RANKS, SLOW, SINCE = 15, 3, 1, 60
PASS, ROWS = 0.02, 16
"""Seconds of a micro-batch, and rows of it: of what does not count two are read."""


def goodput(noise: float, seed: int, steps: int = 40) -> tuple[float, list[int]]:
    """Simulated: of the pace that three ranks could have, one of them at half speed, which part they have from the 20th
    step on behind that in which it got slow; and the shares in the end."""
    draw, shares = random.Random(seed), RankShares(VIRTUAL, RANKS)
    paces = [Pace(range(RANKS), rank) for rank in range(RANKS)]
    said, took = b"", list[float]()
    for step in range(SINCE + steps):
        for pace in paces:
            pace.hear(said, str)
        shares.follow(paces[0].slowest, step)
        spent: list[float] = []
        for rank, count in enumerate(shares.counts):
            passes = count + (max(shares.counts) - count) * 2 / ROWS
            seconds = PASS * math.exp(draw.gauss(0, noise)) * (2 if rank == SLOW and step >= SINCE else 1)
            spent.append(passes * seconds)
        took.append(max(spent))
        parts = [pace.told(Spent(own, 0.0, max(spent) - own)) for pace, own in zip(paces, spent, strict=True)]
        if told := [part for part in parts if part is not None]:
            said = bytes(map(max, *told, bytes(len(told[0]))))
    ideal = VIRTUAL * PASS / (RANKS - 0.5)
    return ideal / statistics.fmean(took[SINCE + 20 :]), shares.counts


@pytest.mark.parametrize("seed", range(8))
def test_a_step_takes_about_as_long_as_it_has_to(seed: int) -> None:
    part, counts = goodput(0.02, seed)
    assert part > 0.83 and counts == [6, 3, 6], part


def test_a_slow_rank_has_less_to_do() -> None:
    shares = RankShares(15, 3)
    assert shares.counts == [5, 5, 5] and not shares.follow(None, 1)
    assert not shares.follow(Straggler(None, "", "link", 2.0), 1)
    assert shares.follow(Straggler(1, "", "computation", 2.0), 2) and shares.counts == [6, 3, 6]
    assert not shares.follow(Straggler(1, "", "computation", 2.0), 3), "its times are of the share before"
    assert shares.follow(Straggler(1, "", "computation", 1.5), 2 + AGAIN) and shares.counts == [7, 2, 6]
    assert shares.follow(None, 2 + AGAIN + TRIED) and shares.counts == [5, 5, 5]
    assert not RankShares(4, 3).follow(Straggler(1, "", "computation", 3.0), 1), "there is nothing to move"
