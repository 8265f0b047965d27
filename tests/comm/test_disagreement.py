"""What ranks cannot do together raises on every rank, in time, with the names; what only looks like it is right."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.comm import launcher_notes
from shardfold.comm._boards import possible
from shardfold.errors import ShardfoldError
from shardfold.testing import Ranks
from tests.support.options import grouped

WIDTH = 12
SGD = partial(torch.optim.SGD, lr=0.1)
SPLIT = ["zero3", "fsdp2", "hsdp", "hpz"]
DESYNC_TIMEOUT = 6.0
DEADLINE = 15.0  # seconds: the default patience is 10, and every rank must have raised by then


class Towers(nn.Module):
    """A trunk and towers that a call names in the order in which it wants them run."""

    def __init__(self, towers: int = 3) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(towers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, order: list[int], between: Callable[[int], None] | None = None) -> Tensor:
        x = self.trunk(x)
        for i in order:
            x = x + torch.tanh(self.towers[i](x))
            if between is not None:
                between(i)
        return self.head(x)


def _engine(layout: str = "zero3", **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    world = dist.get_world_size()
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") else None
    given = {"patience": DESYNC_TIMEOUT, **options}
    if given["patience"] is None:  # the default
        del given["patience"]
    return sf.Engine(Towers(), optimizer=SGD, **grouped(layout=layout, units=["towers.*"], mesh=mesh, **given))


def _train(engine: sf.Engine, order: list[int], between: Callable[[int], None] | None = None) -> None:
    engine.backward(engine(torch.ones(4, WIDTH), order, between).sum())
    engine.step()


def _raised(body: Callable[[sf.Engine], None], layout: str = "zero3", **options: Any) -> tuple[str, float]:
    """What ``body`` raised on this rank after two steps together, and how long that took."""
    engine = _engine(layout, **options)
    _train(engine, [0, 1, 2])
    _train(engine, [0, 2])
    begun = time.monotonic()
    try:
        body(engine)
    except ShardfoldError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begun
    return "nothing was raised", time.monotonic() - begun


def _raised_over_gloo(body: Callable[[sf.Engine], None]) -> tuple[str, float]:
    """The same where a gather needs all ranks; ranks of one host read what rests without waiting."""
    os.environ["SHARDFOLD_NEAR"] = "0"
    try:
        return _raised(body)
    finally:
        del os.environ["SHARDFOLD_NEAR"]


def _check(answers: list[tuple[str, float]], *words: str) -> None:
    for said, seconds in answers:
        assert all(word in said for word in words), said
        assert seconds < DEADLINE, said


# -- contradicting orders


def _contradict(engine: sf.Engine) -> None:
    _train(engine, [1, 0] if engine.rank else [0, 1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", SPLIT)
def test_contradicting_orders_raise_on_every_rank(ranks: Ranks, layout: str) -> None:
    answers = ranks.run(_raised, _contradict, layout, world_size=4 if layout in ("hsdp", "hpz") else 2, timeout=60)
    _check(answers, "OrderError", "rank", "'towers.", "forward")


@pytest.mark.soak
def test_contradicting_orders_raise_on_every_rank_with_the_default_patience(ranks: Ranks) -> None:
    """Nobody gave ``patience``: every rank has raised soon after the documented 10 seconds."""
    body = partial(_raised, patience=None)
    _check(ranks.run(body, _contradict, world_size=2, timeout=60), "OrderError", "rank", "'towers.", "forward")


def test_the_default_patience_is_the_documented_one() -> None:
    """What docs/engine.md says is what an engine gets that was given none, and what its ranks wait by."""
    text = " ".join((Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8").split())
    said = re.search(r"within `patience` seconds \((\d+) by default\) after all are stuck", text)
    late = re.search(r"after `timeout` seconds \((\d+)\) it is an error", text)
    assert said is not None and late is not None
    engine = sf.Engine(nn.Linear(2, 2))
    agreement = engine.sharded.comm.agreement
    assert (agreement._patience, agreement.timeout) == (
        float(said.group(1)),
        float(late.group(1)),
    )
    engine.close()


def _contradict_at_once(layout: str, order: str) -> str:
    engine = _engine(layout, overlap=sf.Overlap(order=order))
    try:
        _train(engine, [1, 0] if engine.rank else [0, 1])
    except ShardfoldError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_contradicting_orders_in_the_first_step_raise_on_every_rank_unless_any_order_is_allowed(
    ranks: Ranks, layout: str
) -> None:
    for said in ranks.run(_contradict_at_once, layout, "recorded", world_size=2):
        assert "rank 0 ran 'towers.0' before 'towers.1'" in said and "rank 1 ran 'towers.1'" in said
    assert ranks.run(_contradict_at_once, layout, "any", world_size=2) == ["nothing was raised"] * 2


# -- different passes


def _evaluate(engine: sf.Engine) -> None:
    with torch.no_grad():
        engine(torch.ones(4, WIDTH), [0, 1])


def _alone_in_evaluation(engine: sf.Engine) -> None:
    if engine.rank:
        _evaluate(engine)
    else:
        _train(engine, [0, 1])


def _alone_in_evaluation_and_a_barrier(engine: sf.Engine) -> None:
    if engine.rank:
        _evaluate(engine)
    dist.barrier()


def _alone_in_gathered(engine: sf.Engine) -> None:
    if engine.rank:
        with engine.gathered("head.weight"):
            pass
    else:
        _train(engine, [0, 1])


def _one_step_less(engine: sf.Engine) -> None:
    x = torch.ones(4, WIDTH)
    engine.backward(engine(x, [0]).sum())
    if engine.rank:
        engine.step()
    engine.backward(engine(x, [0]).sum())


def _alone_in_state_dict(engine: sf.Engine) -> None:
    if engine.rank:
        engine.state_dict()
    else:
        _train(engine, [0, 1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layout", SPLIT)
def test_a_rank_alone_in_evaluation_raises_on_every_rank(ranks: Ranks, layout: str) -> None:
    world = 4 if layout in ("hsdp", "hpz") else 2
    answers = ranks.run(_raised, _alone_in_evaluation, layout, world_size=world, timeout=60)
    _check(answers, "OrderError", "a forward pass in evaluation", "a forward pass in training", "rank 0")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", [_alone_in_gathered, _one_step_less, _alone_in_state_dict])
def test_ranks_about_to_do_different_things_raise_on_every_rank(ranks: Ranks, body: Any) -> None:
    _check(ranks.run(_raised, body, world_size=2, timeout=60), "about to do different things", "rank 0", "rank 1")


def test_a_rank_alone_in_evaluation_while_others_wait_in_a_collective_of_the_users_raises_on_every_rank(
    ranks: Ranks,
) -> None:
    answers = ranks.run(_raised, _alone_in_evaluation_and_a_barrier, world_size=2, timeout=60)
    _check(answers, "no rank can go on", "evaluation", "torch.distributed.barrier", "test_disagreement.py")


# -- collectives of the user's own


def _collective_between(engine: sf.Engine) -> None:
    """Rank 0 runs tower 0 first, then reduces; rank 1 reduces first, then runs tower 1."""

    def between(i: int) -> None:
        if i == (2, 0)[engine.rank]:
            dist.all_reduce(torch.ones(1))

    _train(engine, [0, 1, 2], between)


def test_a_collective_of_the_users_between_divergent_units_raises_on_every_rank(ranks: Ranks) -> None:
    answers = ranks.run(_raised_over_gloo, _collective_between, world_size=2, timeout=60)
    _check(answers, "no rank can go on", "torch.distributed.all_reduce", "towers.", "rank 1")


@pytest.mark.skipif(not possible(), reason="this system has no cross memory attach")
def test_where_gathers_wait_for_nobody_collectives_of_the_users_may_stand_at_different_places(ranks: Ranks) -> None:
    for body in (_collective_between, _asynchronous_between):
        assert [said for said, _ in ranks.run(_raised, body, world_size=2, timeout=60)] == ["nothing was raised"] * 2


def _collective_at_one_place(engine: sf.Engine) -> None:
    total = torch.zeros(1)

    def between(i: int) -> None:
        total.add_(1)
        dist.all_reduce(total)

    for _ in range(3):
        _train(engine, [0, 1, 2], between)
    assert total.item() == (2**9 - 1) * 2


def test_collectives_of_the_users_at_the_same_place_are_theirs(ranks: Ranks) -> None:
    assert [said for said, _ in ranks.run(_raised, _collective_at_one_place, world_size=2)] == [
        "nothing was raised"
    ] * 2


def _subgroup(engine: sf.Engine) -> None:
    """Rank 0 alone enters a collective of a group of its own with rank 1."""
    group = dist.new_group([0, 1])
    if engine.rank == 0:
        dist.all_reduce(torch.ones(1), group=group)
    _train(engine, [0, 1])


def test_a_rank_stuck_in_a_group_of_the_users_is_waked(ranks: Ranks) -> None:
    _check(ranks.run(_raised, _subgroup, world_size=3, timeout=60), "no rank can go on", "all_reduce", "ranks 1, 2")


def _asynchronous_between(engine: sf.Engine) -> None:
    """As above, with a work that is waited for."""

    def between(i: int) -> None:
        if i == (2, 0)[engine.rank]:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            work.wait()

    _train(engine, [0, 1, 2], between)


def test_a_work_of_the_users_that_is_waited_for_raises_on_every_rank(ranks: Ranks) -> None:
    answers = ranks.run(_raised_over_gloo, _asynchronous_between, world_size=2, timeout=60)
    _check(answers, "no rank can go on", "the wait for a work", "test_disagreement.py")


def _two_engines() -> tuple[str, float]:
    """Two engines, which the ranks use in different order."""
    engines = [_engine(), _engine()]
    begun = time.monotonic()
    try:
        for engine in engines[:: -1 if engines[0].rank else 1]:
            _train(engine, [0])
    except ShardfoldError as error:
        return str(error), time.monotonic() - begun
    return "nothing was raised", 0.0


def test_engines_used_in_different_order_raise_on_every_rank(ranks: Ranks) -> None:
    _check(ranks.run(_two_engines, world_size=2, timeout=60), "no rank can go on", "of engine")


def _late(engine: sf.Engine) -> None:
    """One rank is slow between and inside passes: nobody gives up for that."""
    for _ in range(2):
        _train(engine, [0, 1, 2], lambda i: time.sleep(2.5) if engine.rank and i == 1 else None)


def test_a_rank_that_is_late_is_waited_for(ranks: Ranks) -> None:
    answers = ranks.run(partial(_raised, patience=1.0), _late, world_size=2, timeout=60)
    assert [said for said, _ in answers] == ["nothing was raised"] * 2


def _endless(until: Callable[[], bool]) -> None:
    while not until():
        time.sleep(0.02)


def _busy(folder: str) -> list[str]:
    """What rank 0 warns of while rank 1 computes, which goes on when it has been told twice."""
    heard, log = list[str](), logging.getLogger("shardfold")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: (heard.append(record.getMessage()), Path(folder, str(len(heard))).touch())[0]
    model = nn.Linear(4, 4)
    engine = sf.Engine(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        layout="zero2",
        runtime=sf.Runtime(patience=1.0, timeout=60.0),
    )
    if engine.rank == 0:
        log.addHandler(handler)
    else:
        deadline = time.monotonic() + 40
        _endless(lambda: Path(folder, "2").exists() or time.monotonic() > deadline)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    log.removeHandler(handler)
    engine.close()
    return heard


@pytest.mark.soak
def test_where_a_rank_computes_for_ever_is_told_though_it_says_so_late(ranks: Ranks, tmp_path: Path) -> None:
    """It publishes its place some seconds on, when a short patience is over: then the others warn once more."""
    said = ranks.run(_busy, str(tmp_path), world_size=2, timeout=90)[0]
    assert len(said) == 2 and "rank 1: has said nothing" in said[0]
    assert "rank 1: is at test_disagreement.py:" in said[1] and " in _endless" in said[1]


def _close_early(engine: sf.Engine) -> None:
    if engine.rank == 0:
        engine.close()
    else:
        _train(engine, [0, 1])


def test_a_rank_that_closed_its_engine_is_named(ranks: Ranks) -> None:
    answers = ranks.run(_raised, _close_early, world_size=2, timeout=60)
    assert answers[0][0] == "nothing was raised"
    _check(answers[1:], "CollectiveError", "rank 0 has closed its engine")


# -- different numbers of batches


def _count(rank: int) -> int:
    return 2 + rank


def _unequal(layout: str) -> tuple[list[list[float]], float]:
    """Rank r evaluates 2 + r batches between two steps, twice; then the value of the model on ones."""
    engine = _engine(layout)
    _train(engine, [0, 1, 2])
    seen: list[list[float]] = []
    for _ in range(2):
        engine.module.eval()
        with torch.no_grad():
            seen.append([_value(engine, i) for i in range(_count(engine.rank))])
        engine.module.train()
        _train(engine, [0, 1, 2])
    assert engine.memory().transient == 0
    with engine.gathered(), torch.no_grad():
        value = _value(engine, 1)
    return seen, engine.mean(value)


def _unequal_plain() -> tuple[list[list[float]], float]:
    torch.manual_seed(0)
    model = Towers()
    optimizer = SGD(model.parameters())
    seen: list[list[float]] = []
    for repeat in range(3):
        model(torch.ones(4, WIDTH), [0, 1, 2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if repeat < 2:
            with torch.no_grad():
                seen.append([_value(model, i) for i in range(5)])
    with torch.no_grad():
        return seen, _value(model, 1)


def _value(model: Any, i: int) -> float:
    return model(torch.full((1, WIDTH), float(i)), [0] if i == 3 else [0, 2]).sum().item()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_ranks_may_evaluate_different_numbers_of_batches(ranks: Ranks, layout: str) -> None:
    expected, after = _unequal_plain()
    answers = ranks.run(_unequal, layout, world_size=4 if layout in ("hsdp", "hpz") else 2, timeout=100)
    for rank, (seen, value) in enumerate(answers):
        for mine, plain in zip(seen, expected, strict=True):
            assert mine == pytest.approx(plain[: _count(rank)], rel=1e-5)
        assert value == pytest.approx(after, rel=1e-5)


def _finally(seconds: float) -> tuple[str, bool]:
    """Rank 0 gives up and waits in a barrier of the user's; rank 1 comes that much later."""
    engine = _engine(timeout=2.0)
    said, met = "", False
    if engine.rank == 1:
        time.sleep(seconds)  # it is late: nothing waits for this to end
    try:
        engine.mean(1.0)
    except ShardfoldError as error:
        said = str(error)
    finally:
        dist.barrier()
        met = dist.is_initialized()
    engine.close()
    return said, met


def _gives_up(folder: str) -> tuple[bool, bytes]:
    """What a rank leaves for a launcher when rank 0 gives up: whether another is to blame, and which."""
    os.environ[launcher_notes.FILE] = str(Path(folder, f"note{dist.get_rank()}"))
    Path(os.environ[launcher_notes.FILE]).touch()
    try:
        _closes(folder)
        left = Path(os.environ[launcher_notes.FILE]).read_bytes()
        return launcher_notes.has_followed(), left[launcher_notes.GIVEN_UP :].partition(b"\0")[0]
    finally:
        faulthandler.unregister(launcher_notes.STACK)
        for notes in (launcher_notes._file, launcher_notes._stacks):
            while notes:
                os.close(notes.pop())
        del os.environ[launcher_notes.FILE]


def test_a_rank_that_gives_up_leaves_for_whom_it_waited(ranks: Ranks, tmp_path: Path) -> None:
    """The launcher is to end and to name those, though who gave up takes longer to end than one that has only heard of
    it. Nobody names itself."""
    assert ranks.run(_gives_up, str(tmp_path), world_size=3, timeout=60) == [(True, b"1,2"), (True, b"2"), (True, b"1")]


def test_a_barrier_in_a_finally_is_met_and_hides_no_error(ranks: Ranks) -> None:
    """A rank that gave up and waits there for the others is not taken for one that is stuck: they raise, and come."""
    for said, met in ranks.run(_finally, 8.0, world_size=2):
        assert "did not finish within 2 s" in said and met


def _closes(folder: str) -> str:
    """Rank 0 gives up and closes its engine; others come only when that is done."""
    engine, closed = _engine(timeout=2.0), Path(folder) / "closed"
    while engine.rank and not closed.exists():
        time.sleep(0.05)
    try:
        engine.mean(1.0)
    except ShardfoldError as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "nothing raised"
    engine.close()
    closed.touch()
    return said


def test_a_rank_that_gave_up_closes_its_engine_without_waiting(ranks: Ranks, tmp_path: Path) -> None:
    """The late rank raises with what the first one gave up with, though its engine is gone."""
    first, second = ranks.run(_closes, str(tmp_path), world_size=2, timeout=60)
    assert first.startswith("CollectiveError: ") and "did not finish within 2 s" in first
    assert second == first.replace("CollectiveError", "OrderError", 1)


def _agrees(numbers: list[float]) -> str:
    engine = _engine()
    try:
        engine.max_over_ranks(numbers + [1.0] * engine.rank)
    except sf.ShardfoldError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.close()
    return "nothing"


def test_lists_of_different_lengths_are_told_at_once(ranks: Ranks) -> None:
    """`agree` would add up what does not belong together, or wait until `timeout`."""
    for said in ranks.run(_agrees, [1.0], world_size=2):
        assert said.startswith("OrderError") and "1 numbers" in said and "2 numbers" in said
