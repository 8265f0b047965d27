"""Who makes steps longer is found from times that ranks tell each other: soon, and by what; and nobody where nobody
does."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.engine.pace import Pace, Spent, _code, _seconds
from shardfold.plan.report import Straggler
from shardfold.testing import Ranks

Extra = Callable[[int, int], tuple[float, float, float]]
"""Of a step and a rank: seconds of computation, data and link besides."""


def told_by(ranks: int, steps: int, extra: Extra, *, noise: float, spikes: float, seed: int) -> list[Straggler | None]:
    """What all ranks have found after each step of 0.1 s: noise is log-normal, and hangs on from step to step; some
    steps take up to 5 times as long."""
    draw = random.Random(seed)
    paces = [Pace(range(ranks), rank) for rank in range(ranks)]
    state, said, found = [0.0] * ranks, b"", list[Straggler | None]()
    for step in range(steps):
        for pace in paces:
            pace.hear(said, lambda rank: f"n{rank}")
        assert len({str(pace.slowest) for pace in paces}) == 1
        found.append(paces[0].slowest)
        spent: list[tuple[float, float]] = []
        longest = 0.0
        for rank in range(ranks):
            state[rank] = 0.5 * state[rank] + math.sqrt(0.75) * draw.gauss(0, noise)
            times = draw.uniform(1.5, 5) if draw.random() < spikes else 1.0
            computation, data, _ = extra(step, rank)
            own = 0.08 * math.exp(state[rank]) * times + computation, 0.02 * math.exp(draw.gauss(0, noise)) + data
            spent.append(own)
            longest = max(longest, sum(own))
        parts = [
            pace.told(Spent(*own, longest - sum(own) + 0.01 + extra(step, rank)[2]))
            for rank, (pace, own) in enumerate(zip(paces, spent, strict=True))
        ]
        said = bytes(map(max, *parts))
    return found


def steps_until(found: list[Straggler | None], since: int) -> int:
    assert not any(found[:since])
    return next(step for step, each in enumerate(found[since:], 1) if each is not None)


@pytest.mark.parametrize(
    ("factor", "limit", "kind"),
    [(1.3, 8, "computation"), (1.3, 8, "data"), (1.3, 8, "link"), (1.1, 50, "computation"), (1.1, 50, "data")],
)
def test_a_straggler_is_named_soon(kind: str, factor: float, limit: int) -> None:
    """Of 8 ranks, with a noise of 3 %: from the step on in which it gets slow, so many steps until all ranks know."""
    more = 0.1 * (factor - 1) * (1.1 if kind == "link" else 1.0)
    place = ("computation", "data", "link").index(kind)

    def extra(step: int, rank: int) -> tuple[float, float, float]:
        own = [0.0, 0.0, 0.0]
        own[place] = more * (step >= 100) * (rank == 5 or kind == "link")
        return own[0], own[1], own[2]

    for seed in range(2):
        found = told_by(8, 160, extra, noise=0.03, spikes=0.0, seed=seed)
        assert steps_until(found, 100) <= limit
        last = found[-1]
        assert last is not None and last.kind == kind and abs(last.factor - factor) < 0.05
        assert (last.rank, last.host) == ((None, "") if kind == "link" else (5, "n5"))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("noise", "steps"), [(0.05, 400), pytest.param(0.05, 10_000, marks=pytest.mark.soak)], ids=["short", "long"]
)
def test_nobody_is_named_where_nobody_is_slow(ranks: int, noise: float, steps: int) -> None:
    found = told_by(ranks, steps, lambda step, rank: (0.0, 0.0, 0.0), noise=noise, spikes=0.01, seed=ranks)
    assert not any(found)


def test_it_is_over_when_it_is_over() -> None:
    found = told_by(
        3, 160, lambda step, rank: (0.05 * (rank == 1 and 40 <= step < 80), 0.0, 0.0), noise=0.03, spikes=0.0, seed=0
    )
    assert found[60] is not None and found[60].rank == 1 and not any(found[110:])


def test_who_waits_in_a_collective_of_the_users_is_not_slow() -> None:
    """Between passes, for the one whose computation is: all but that one are busy there as long."""
    found = told_by(
        4, 80, lambda step, rank: (0.05, 0.0, 0.0) if rank == 2 else (0.0, 0.05, 0.0), noise=0.02, spikes=0.0, seed=1
    )
    assert found[-1] is not None and (found[-1].rank, found[-1].kind) == (2, "computation")


def test_many_ranks_take_turns() -> None:
    found = told_by(
        40, 200, lambda step, rank: (0.05 * (rank == 37 and step >= 100), 0.0, 0.0), noise=0.03, spikes=0.0, seed=2
    )
    assert steps_until(found, 100) <= 3 * 8 and found[-1] is not None and found[-1].rank == 37


def test_times_keep_their_digits() -> None:
    for seconds in (1e-5, 1e-3, 0.1, 7.0, 3600.0):
        assert abs(_seconds(_code(seconds).to_bytes(2, "big")) / seconds - 1) < 2e-4


def slow(kind: str, seconds: float, since: int, steps: int) -> tuple[list[Straggler | None], str]:
    """One of the ranks takes longer from a step on."""
    model = nn.Linear(4, 4)
    engine = sf.Engine(
        model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01), layout="zero2", accumulate=2
    )
    found: list[Straggler | None] = []
    for step in range(steps):
        late = seconds * (engine.rank == 1 and step >= since)
        for _ in range(2):
            if kind == "data":
                time.sleep(late)
            loss = engine(torch.ones(1, 4)).sum()
            time.sleep(0.01 + late * (kind == "computation"))
            engine.backward(loss)
            report = engine.step()
        found.append(report.straggler)
    said = str(engine.stats())
    engine.close()
    return found, said


@pytest.mark.parametrize(
    ("kind", "seconds", "since", "steps"),
    [
        ("computation", 0.08, 0, 24),
        pytest.param("data", 0.08, 0, 24, marks=pytest.mark.soak),
    ],
)
def test_a_slow_rank_is_named_by_all(ranks: Ranks, kind: str, seconds: float, since: int, steps: int) -> None:
    """Real ranks: in the report of each step and in ``stats()``, with its host."""
    each = ranks.run(slow, kind, seconds, since, steps, world_size=3)
    last, said = each[0][0][-1], each[0][1]
    assert last is not None and (last.rank, last.kind) == (1, kind) and last.host and last.factor > 1.1
    assert f"without rank 1 on host {last.host}" in said
    assert all(found == each[0][0] for found, _ in each)
