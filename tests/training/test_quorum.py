"""Groups that come and go between outer steps: those that are there go on, and all come to what a plain loop over as
many models comes to, given who was there when."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

import shardfold as sf
from shardfold.engine._quorum import Quorum
from shardfold.errors import ConfigError
from shardfold.optim.present_groups import OuterMeeting
from shardfold.testing import Ranks
from tests.support.options import grouped

WIDTH, STEPS, UNITS = 8, 18, ["0", "1"]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
DILOCO = {"every": 3, "optimizer": "nesterov", "lr": 0.7, "momentum": 0.5, "deadline": 0.4, "quorum": 2}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in UNITS)).double()


def batch(group: int, step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * group + step), dtype=torch.float64)


def loss_of(module: Any, x: torch.Tensor) -> torch.Tensor:
    return (module(x).tanh() - x).square().mean()


def work(layout: str, groups: int, each: int, seed: int, outer: dict[str, Any]) -> dict[str, Any]:
    """A rank's weights, and the outer steps that its group took part in: behind which of its steps."""
    dice = random.Random(seed)
    rests = [[dice.choice((0.0, 0.0, 0.0, 0.5)) for _ in range(STEPS)] for _ in range(groups)]
    options = grouped(layout=layout, mesh={"inter": groups, "intra": each}, units=UNITS, outer=sf.Outer(**outer))
    engine = sf.Engine(model(), optimizer=SGD, **options)
    group, rounds = engine.mesh.coords["inter"], engine._rounds
    assert rounds is not None and rounds.quorum is not None
    met: list[tuple[int, int, OuterMeeting]] = []
    done, turn, quorum = 0, rounds.quorum.turn, rounds.quorum

    def noted(**given: Any) -> OuterMeeting | None:
        if (meeting := turn(**given)) is not None:
            met.append((quorum.version, done, meeting))
        return meeting

    quorum.turn = noted  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(STEPS):
        time.sleep(rests[group][step])  # it is away
        engine.backward(loss_of(engine, batch(group, step)))
        done += 1
        engine.step(tokens=10.0 + group)
    put_off = engine.stats().put_off
    engine.outer_step()
    state = engine.state_dict()
    memory = {row.state: (row.table + row.padding, row.held) for row in engine.memory().rows}
    engine.close()
    return {"group": group, "met": met, "state": state, "put_off": put_off, "memory": memory}


@torch.no_grad()
def came_to(
    models: list[nn.Sequential], shared: list[Any], momentum: list[Any], meeting: OuterMeeting, outer: sf.Outer
) -> None:
    """An outer step of plain models."""
    source = meeting.source
    for group in meeting.behind:
        for p, old, new in zip(models[group].parameters(), shared[group], shared[source], strict=True):
            p.add_(new - old)
        shared[group] = [each.clone() for each in shared[source]]
        momentum[group] = [each.clone() for each in momentum[source]]
    for i in range(len(shared[source])):
        gaps = [shared[group][i] - list(models[group].parameters())[i] for group in meeting.groups]
        mean = sum(share * gap for share, gap in zip(meeting.shares, gaps, strict=True))
        for group in meeting.groups:
            momentum[group][i].mul_(outer.beta).add_(mean)
            shared[group][i] -= outer.rate * (mean + outer.beta * momentum[group][i])
            list(models[group].parameters())[i].copy_(shared[group][i])


def expected(groups: int, found: list[dict[str, Any]], outer: sf.Outer) -> list[dict[str, torch.Tensor]]:
    """What models of a plain loop come to, with those outer steps."""
    models = [model() for _ in range(groups)]
    optimizers, done = [SGD(each.parameters()) for each in models], [0] * groups
    shared = [[p.detach().clone() for p in each.parameters()] for each in models]
    momentum = [[torch.zeros_like(p) for p in each] for each in shared]
    of = {(number, each["group"]): (steps, meeting) for each in found for number, steps, meeting in each["met"]}
    for number in sorted({number for number, _ in of}):
        meetings = {group: of[number, group] for group in range(groups) if (number, group) in of}
        (meeting,) = {meeting for _, meeting in meetings.values()}
        assert meeting.groups == tuple(meetings)
        for group, (steps, _) in meetings.items():
            while done[group] < steps:
                optimizers[group].zero_grad()
                loss_of(models[group], batch(group, done[group])).backward()
                optimizers[group].step()
                done[group] += 1
        came_to(models, shared, momentum, meeting, outer)
    assert done == [STEPS] * groups
    return [each.state_dict() for each in models]


def judge(ranks: Ranks, layout: str, groups: int, each: int, seed: int, **more: Any) -> list[dict[str, Any]]:
    outer = {**DILOCO, **more}
    found = ranks.run(work, layout, groups, each, seed, outer, world_size=groups * each, timeout=120.0)
    wanted = expected(groups, found, sf.Outer(**outer))
    for one in found:
        for name, value in wanted[one["group"]].items():
            torch.testing.assert_close(one["state"][name], value, rtol=1e-11, atol=1e-11)
    return found


def test_groups_come_and_go(ranks: Ranks) -> None:
    """Some outer steps are without a group, which catches up later; no two groups differ in the end."""
    found = judge(ranks, "ddp", 3, 1, 4, deadline=0.2)
    meetings = {number: meeting for one in found for number, _, meeting in one["met"]}
    assert any(len(meeting.groups) < 3 for meeting in meetings.values())
    assert any(meeting.behind for meeting in meetings.values())
    for one in found:
        for name, value in found[0]["state"].items():
            assert torch.equal(one["state"][name], value)
        assert one["memory"]["momentum"] == one["memory"]["global"]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layout", "groups", "each", "tier"),
    [("zero1", 2, 2, "device"), ("zero3", 2, 2, "host"), ("ddp", 4, 1, "host"), ("zero2", 4, 1, "device")],
)
def test_drawn_comings_and_goings(ranks: Ranks, layout: str, groups: int, each: int, tier: str) -> None:
    judge(ranks, layout, groups, each, groups + each, tier=tier)


# -- who takes part, without ranks


def parts(groups: int, **more: Any) -> list[Quorum]:
    store, outer = HashStore(), sf.Outer(**{**DILOCO, **more})
    return [Quorum(store, group, groups, outer, leads=True) for group in range(groups)]


def turn(quorum: Quorum, **given: Any) -> OuterMeeting | None:
    return quorum.turn(**{"due": True, "everyone": False, "steps": 3, "tokens": 1.0, **given})


def together(quorums: list[Quorum], *given: dict[str, Any]) -> list[OuterMeeting | None]:
    with ThreadPoolExecutor(len(quorums)) as pool:
        return [
            *pool.map(lambda each: turn(each[0], **each[1]), zip(quorums, given or [{}] * len(quorums), strict=True))
        ]


def test_shares_are_those_of_tokens() -> None:
    first, second = together(parts(2, deadline=60.0), {"tokens": 30.0}, {"tokens": 10.0, "steps": 5})
    assert first == second == OuterMeeting((0, 1), (0.75, 0.25), (), 0, 5, 1)


def test_who_was_away_comes_to_the_next_one_with_what_it_has_missed_and_not_before_it_is_open() -> None:
    quorums = parts(3)
    assert together(quorums[:2]) == [OuterMeeting((0, 1), (0.5, 0.5), (), 0, 3, 1)] * 2
    assert turn(quorums[2]) is None  # nobody else has come to the second one, and it does not wait
    assert turn(quorums[2], due=False) is None
    met = together(quorums, *[{"steps": 6, "due": group < 2} for group in range(2)], {"steps": 6, "due": False})
    while met[2] is None:  # it came before the others
        met = [*met[:2], turn(quorums[2], due=False)]
    assert met[0] == met[2] and met[2].groups == (0, 1, 2) and met[2].behind == (2,) and met[2].source == 0


def test_too_few_put_it_off_and_so_do_enough_without_the_newest_weights(caplog: pytest.LogCaptureFixture) -> None:
    quorums = parts(4)
    assert turn(quorums[0]) is None  # alone
    quorums[1]._last = 1  # which has heard of it, and so begins the next one too if it is the first
    quorums[0]._deadline, quorums[0]._ended = 2.0, 0.0  # no pace is known, so it waits for so long
    quorums[1]._deadline = 2.0
    assert together(quorums[:2])[0] is not None
    late = parts(4)[2:]
    for each in late:
        each._store = quorums[0]._store
        each._waited = 100  # so long alone that it begins one by itself
    assert not caplog.messages
    assert together(late) == [None, None]
    assert {text.partition(" none")[0] for text in caplog.messages} == {
        "An outer step is put off, as of groups 2, 3, which have come,"
    }
    assert "if groups 0, 1, which have them, stay away" in caplog.text
    assert [each.version for each in quorums] == [1, 1, 0, 0]
    for each in late:
        each._ended, each._waited, each._deadline = 0.0, 100, 2.0
    assert together(late) == [None, None]  # the second in vain, of enough
    for each in late:
        each._ended, each._waited = 0.0, 100
    assert together(late) == [OuterMeeting((2, 3), (0.5, 0.5), (), 2, 3, 2)] * 2
    assert late[0].version == 2


def test_who_was_away_in_the_last_one_is_not_waited_for_until_it_is_back() -> None:
    quorums = parts(3, deadline=60.0)
    for each in quorums:
        each._deadline = 0.2
    assert together(quorums[:2])[0] is not None
    for each in quorums[:2]:
        each._deadline, each._ended = 60.0, 0.0
    begun = time.monotonic()
    assert together(quorums[:2])[0] is not None and time.monotonic() - begun < 30.0
    assert turn(quorums[2], due=False) is None and turn(quorums[2]) is None  # it says that it is there
    for each in quorums[:2]:
        each._ended = 0.0

    def comes() -> OuterMeeting | None:
        while (met := turn(quorums[2], due=False)) is None:
            pass
        return met

    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(turn, each) for each in quorums[:2]]
        while not quorums[2]._store.add("round/3/came", 0):
            pass
        mine = pool.submit(comes).result()
        assert mine is not None and mine.groups == (0, 1, 2) and others[0].result() == mine


def test_groups_are_waited_for_as_long_as_they_use_to_be_late() -> None:
    quorum = parts(3, deadline=60.0)[0]
    assert quorum.grace == 60.0  # nothing is known yet
    quorum._paces.append(2.0)
    assert quorum.grace == 3.0  # half of a round
    quorum._paces[0] = 0.001
    quorum._lags.extend([0.0, 0.1, 0.1, 0.1, 0.2, 0.1, 0.1, 0.3])
    assert quorum.grace == pytest.approx(0.1)
    quorum._paces[0] = 0.2
    assert quorum.grace == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"deadline": None}, "no deadline="),
        ({"quorum": 1}, "2 or more"),
        ({"fragments": 3}, "fragments=3"),
        ({"format": "int8"}, "format='int8'"),
        ({"put_off": 2}, "put_off=2"),
    ],
)
def test_what_does_not_go_with_a_quorum_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sf.Outer(**{**DILOCO, **given})
