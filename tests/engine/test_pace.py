"""Who makes steps longer is found from times that ranks tell each other: soon, and by what; and nobody where nobody
does."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.engine.pace import ASKED, CROWDED, Pace, Spent, _code, _seconds
from shardfold.plan.report import Straggler
from shardfold.testing import Ranks

SEEDS = 27
Extra = Callable[[int, int], tuple[float, float, float]]
"""Of a step and a rank: seconds of computation, data and link besides."""
NOISES = [(noise, hangs_on) for noise in (0.03, 0.05, 0.1) for hangs_on in (0.0, 0.5, 0.97)]


def nothing(step: int, rank: int) -> tuple[float, float, float]:
    return 0.0, 0.0, 0.0


def slow_by(seconds: float, slow_one: int, since: int = 0) -> Extra:
    """In its computation."""
    return lambda step, rank: (seconds * (rank == slow_one and step >= since), 0.0, 0.0)


def told_by(
    ranks: int,
    steps: int,
    extra: Extra,
    *,
    noise: float,
    seed: int,
    late: float = 0.0,
    hangs_on: float = 0.5,
    seconds: float = 0.1,
    crowd: float = 1.0,
    throttled: Callable[[int], float] = float,
) -> list[Straggler | None]:
    """What all ranks have found after each step of so many ``seconds``.

    Args:
        noise: of a rank's times, log-normal.
        late: how often 50 ms are lost in a step of a rank, as for a page that comes from a disk.
        hangs_on: how much of its noise a step has from the one before.
        throttled: for how many seconds a rank was kept from computing so far.
    """
    draw = random.Random(seed)
    paces = [Pace(range(ranks), rank, crowd=crowd, throttled=partial(throttled, rank)) for rank in range(ranks)]
    state, said, found = [0.0] * ranks, b"", list[Straggler | None]()
    for step in range(steps):
        for pace in paces:
            pace.hear(said, lambda rank: f"n{rank}")
        for pace in paces if paces[0].asks else ():
            pace.answer("n3")
        assert len({(str(pace.slowest), pace.asks) for pace in paces}) == 1
        found.append(paces[0].slowest)
        spent: list[tuple[float, float]] = []
        for rank in range(ranks):
            state[rank] = hangs_on * state[rank] + math.sqrt(1 - hangs_on**2) * draw.gauss(0, noise)
            computation, data, _ = extra(step, rank)
            computation += 0.8 * seconds * math.exp(state[rank]) + 0.05 * (draw.random() < late)
            spent.append((computation, data + 0.2 * seconds * math.exp(draw.gauss(0, noise))))
        longest = max(map(sum, spent)) + 0.1 * seconds
        parts = [
            pace.told(Spent(*own, longest - sum(own) + extra(step, rank)[2]))
            for rank, (pace, own) in enumerate(zip(paces, spent, strict=True))
        ]
        if told := [part for part in parts if part is not None]:
            said = bytes(map(max, *told, bytes(len(told[0]))))
            assert len(told) == ranks  # all in the same step
    return found


def steps_until(found: list[Straggler | None], since: int) -> int:
    assert not any(found[:since])
    return next(step for step, each in enumerate(found[since:], 1) if each is not None)


SLOW = [(1.3, 8, "computation"), (1.3, 8, "data"), (1.3, 8, "link"), (1.1, 50, "computation"), (1.1, 50, "data")]
"""By how much, in how many steps it is to be named, and what is slow."""


def gets_slow(kind: str, factor: float, seed: int) -> list[Straggler | None]:
    """Of 8 ranks, with a noise of 3 %, one from step 240 on; or the link."""
    more = 0.1 * (factor - 1) * (1.1 if kind == "link" else 1.0)
    place = ("computation", "data", "link").index(kind)

    def extra(step: int, rank: int) -> tuple[float, float, float]:
        own = [0.0, 0.0, 0.0]
        own[place] = more * (step >= 240) * (rank == 5 or kind == "link")
        return own[0], own[1], own[2]

    return told_by(8, 300, extra, noise=0.03, seed=seed)


@pytest.mark.parametrize(("factor", "limit", "kind"), SLOW)
def test_a_straggler_is_named_soon(kind: str, factor: float, limit: int) -> None:
    """From the step on in which it gets slow, so many steps until all ranks know, and from then on it is said."""
    found = gets_slow(kind, factor, 0)
    assert (behind := steps_until(found, 240)) <= limit and all(found[239 + behind :])
    last = found[-1]
    assert last is not None and last.kind == kind and abs(last.factor - factor) < 0.05
    assert (last.rank, last.host) == ((None, "n3") if kind == "link" else (5, "n5"))


def test_who_gets_slow_does_not_hide_in_noise_that_is_its_own() -> None:
    """Its own slow steps would widen what it is compared with: by 1.15 it would never be named, with this seed."""
    assert steps_until(told_by(4, 160, slow_by(0.015, 1, 100), noise=0.03, seed=8), 100) <= 50


def test_what_few_medians_of_a_rank_do_not_tell_of_its_noise_the_others_tell() -> None:
    """By its own alone it would be taken for twice as much, with this seed, and 1.1 be within it."""
    assert steps_until(gets_slow("computation", 1.1, 28), 240) <= 50


@pytest.mark.soak
@pytest.mark.parametrize(("factor", "limit", "kind"), SLOW)
def test_stragglers_are_named_soon_with_most_seeds(kind: str, factor: float, limit: int) -> None:
    """With each of these; noise that is measured of few medians is itself known to some parts only."""
    found = [gets_slow(kind, factor, seed) for seed in range(SEEDS)]
    assert sum(any(each[240 : 240 + limit]) and not any(each[:240]) for each in found) == SEEDS


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak), 8])
@pytest.mark.parametrize(
    ("noise", "hangs_on"), [(0.1, 0.9), *(pytest.param(*each, marks=pytest.mark.soak) for each in NOISES)]
)
@pytest.mark.parametrize("steps", [400, pytest.param(10_000, marks=pytest.mark.soak)], ids=["short", "long"])
def test_nobody_is_named_where_nobody_is_slow(ranks: int, noise: float, hangs_on: float, steps: int) -> None:
    """Whatever the noise, and be it that of tens of steps on end, with 50 ms lost now and then."""
    assert not any(told_by(ranks, steps, nothing, noise=noise, hangs_on=hangs_on, late=0.01, seed=ranks))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nobody_is_named_in_ten_thousand_steps_of_any_seed(seed: int) -> None:
    """Of 2, 4 and 8 ranks in turn, and each noise with each of them."""
    noise, hangs_on = NOISES[seed // 3 % len(NOISES)]
    ranks = (2, 4, 8)[seed % 3]
    assert not any(told_by(ranks, 10_000, nothing, noise=noise, hangs_on=hangs_on, late=0.01, seed=1000 + seed))


def test_where_noise_is_greater_the_same_is_named_only_if_it_is_more() -> None:
    """10 % that hang on for ten steps: 1.3 is within it, 2.2 is not."""
    for factor, named in ((1.2, False), (2.2, True)):
        found = told_by(4, 240, slow_by(0.1 * (factor - 1), 3, 200), noise=0.1, hangs_on=0.9, seed=1)
        assert not any(found[:200]) and any(found) == named


def test_who_waits_for_a_core_is_not_slow() -> None:
    """Two ranks of each core: the one that computes last in each step takes up to twice as long."""
    for more, named in ((0.085, False), (0.2, True)):
        found = told_by(4, 80, slow_by(more, 1), noise=0.05, late=0.01, seed=1, crowd=2.0)
        assert (found[-1] is not None) == named and any(found) == named


def test_short_steps_are_told_together() -> None:
    """Steps of 10 ms: ten of them in a record, of which a lost page is not seen; who is slow in all of them is."""
    assert not any(told_by(4, 2000, nothing, noise=0.1, late=0.05, seconds=0.01, seed=3))
    found = told_by(4, 800, slow_by(0.005, 2, 500), noise=0.03, seconds=0.01, seed=4)
    assert 20 <= steps_until(found, 500) <= 130 and found[-1] is not None and found[-1].rank == 2


def test_what_a_quota_takes_is_seen_though_it_takes_it_of_a_few_steps() -> None:
    """Of 100 ms 27: most steps of 10 ms are as long as without it."""
    for known in (True, False):
        taken = [0.0, 0.0]

        def extra(step: int, rank: int, taken: list[float] = taken) -> tuple[float, float, float]:
            more = 0.027 * (rank == 1 and step >= 500 and step % 7 == 0)
            taken[rank] += more
            return more, 0.0, 0.0

        told = taken.__getitem__ if known else float
        found = told_by(2, 700, extra, noise=0.03, seconds=0.01, seed=0, throttled=told)
        assert any(found) == known
        if known:
            assert steps_until(found, 500) <= 80 and (last := found[-1]) is not None and abs(last.factor - 1.38) < 0.1


def test_ranks_look_a_few_times_only_for_whose_link_is_slow() -> None:
    """It costs time: where a link is slow again and again, it is said of the link in the end."""
    found = told_by(2, 1100, lambda step, _: (0.0, 0.0, 0.06 * (step % 100 >= 60)), noise=0.03, seed=0)
    hosts = [now.host for before, now in pairwise(found) if now is not None and before is None]
    assert len(hosts) > ASKED and hosts[:ASKED] == ["n3"] * ASKED and not any(hosts[ASKED:])


def test_it_is_over_when_it_is_over() -> None:
    found = told_by(3, 260, lambda step, rank: (0.05 * (rank == 1 and 140 <= step < 180), 0.0, 0.0), noise=0.03, seed=0)
    assert found[160] is not None and found[160].rank == 1 and not any(found[200:])


def test_who_waits_in_a_collective_of_the_users_is_not_slow() -> None:
    """Between passes, for the one whose computation is: all but that one are busy there as long."""
    found = told_by(4, 80, lambda step, rank: (0.05, 0.0, 0.0) if rank == 2 else (0.0, 0.05, 0.0), noise=0.02, seed=1)
    assert found[-1] is not None and (found[-1].rank, found[-1].kind) == (2, "computation")


def test_many_ranks_take_turns() -> None:
    found = told_by(18, 160, lambda step, rank: (0.05 * (rank == 17 and step >= 130), 0.0, 0.0), noise=0.03, seed=2)
    assert steps_until(found, 130) <= 2 * 8 + 2 and found[-1] is not None and found[-1].rank == 17


def test_times_keep_their_digits() -> None:
    for seconds in (1e-5, 1e-3, 0.1, 7.0, 3600.0):
        assert abs(_seconds(_code(seconds).to_bytes(2, "big")) / seconds - 1) < 2e-4


def slow(kind: str, seconds: float, since: int, steps: int) -> tuple[list[Straggler | None], str, float]:
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
            time.sleep(0.005 + late * (kind == "computation"))
            engine.backward(loss)
            report = engine.step()
        found.append(report.straggler)
    said, pace = str(engine.stats()), engine._clock.pace
    assert pace is not None
    engine.close()
    return found, said, pace._crowd / CROWDED


@pytest.mark.parametrize(
    ("kind", "seconds", "since", "steps"),
    [
        ("computation", 0.1, 0, 40),
        pytest.param("data", 0.1, 0, 40, marks=pytest.mark.soak),
    ],
)
def test_a_slow_rank_is_named_by_all(ranks: Ranks, kind: str, seconds: float, since: int, steps: int) -> None:
    """Real ranks: in the report of each step and in ``stats()``, with its host."""
    each = ranks.run(slow, kind, seconds, since, steps, world_size=3)
    last, said = each[0][0][-1], each[0][1]
    assert last is not None and (last.rank, last.kind) == (1, kind) and last.host and last.factor > 1.1
    assert f"without rank 1 on host {last.host}" in said
    assert all(found == each[0][0] for found, _, _ in each)
    crowd = max(1.0, 3 * torch.get_num_threads() / len(os.sched_getaffinity(0)))
    assert all(abs(told - math.log(crowd)) <= 0.5 / CROWDED + 1e-5 for _, _, told in each)
