"""What a steady step waits for: no message between hosts. What messages promise holds in it as it does in the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ShardfoldError
from shardfold.optim.fused import FusedShard
from shardfold.plan.presets import LOSSY
from shardfold.testing import Ranks

WIDTH = 8
STEADY = 4  # steps in which ranks do the same: from the third on they know what follows
SGD = partial(torch.optim.SGD, lr=0.5)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
LIMIT = 120.0
GLOO = pytest.mark.parametrize("near", [True, False], ids=["near", "gloo"])


class Towers(nn.Module):
    """A trunk, towers of which each call uses some, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.towers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, chosen: tuple[int, ...] = (0, 1)) -> Tensor:
        x = self.trunk(x)
        for i in chosen:
            x = x + torch.tanh(self.towers[i](x))
        return self.head(x)


@contextmanager
def engine_of(layout: str, *, near: bool = True, optimizer: Any = ADAMW, **options: Any) -> Iterator[sf.Engine]:
    """One whose ranks read each other's memory, or send everything over Gloo."""
    torch.manual_seed(0)
    mesh = {"inter": 1, "intra": dist.get_world_size()} if layout in ("hsdp", "hpz", "zeropp") else None
    os.environ["SHARDFOLD_NEAR"] = "1" if near else "0"
    try:
        with closing(
            sf.Engine(
                Towers(),
                optimizer=optimizer,
                layout=layout,
                parallel=mesh,
                init=sf.Init(units=["towers.*"]),
                runtime=sf.Runtime(patience=4.0, timeout=60.0),
                **options,
            )
        ) as engine:
            yield engine
    finally:
        del os.environ["SHARDFOLD_NEAR"]


def backward(engine: sf.Engine, chosen: tuple[int, ...] = (0, 1), scale: float = 1.0) -> None:
    engine.backward((engine(torch.full((2, WIDTH), 1.0 + engine.rank), chosen) * scale).square().mean())


def train(engine: sf.Engine, steps: int = STEADY) -> None:
    for _ in range(steps):
        for _ in range(engine.accumulate):
            backward(engine)
        engine.step()


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except ShardfoldError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- how many there are


def _counts(layout: str) -> dict[tuple[bool, int, bool], list[tuple[int, int]]]:
    """Messages of each step, and of those the ones that it waits for; over what, in how many micro-batches, clipped."""
    found: dict[tuple[bool, int, bool], list[tuple[int, int]]] = {}
    for key in [
        (near, accumulate, clips) for near in (True, False) for accumulate in (1, 3) for clips in (False, True)
    ]:
        near, accumulate, clips = key
        with engine_of(layout, near=near, accumulate=accumulate, clip_norm=1.0 if clips else None) as engine:
            found[key] = []
            for _ in range(STEADY + 2):
                train(engine, 1)
                stats = engine.stats()
                found[key].append((stats.messages, stats.blocking_messages))
    return found


@pytest.mark.sampled(12)
@pytest.mark.parametrize("layout", [*sf.PRESETS, *LOSSY])
def test_a_steady_step_waits_for_no_message(ranks: Ranks, layout: str) -> None:
    """Neither with accumulation nor with clipping, whatever carries the data. There is one message for each pass that
    sends something, and one for the step."""
    table = (sf.PRESETS | LOSSY)[layout]
    split, reduces = table.params is None or bool(table.params.over), bool(table.grads.over)
    for found in ranks.run(_counts, layout, world_size=2, timeout=LIMIT):
        for (_, accumulate, _), counts in found.items():
            passes = 2 * accumulate if split else accumulate if reduces else 1
            told = 0 if split else int(table.moments.tier is not sf.Tier.DEVICE)  # whether all updates were done
            assert counts[STEADY:] == [(passes + 1 + told, 0)] * 2, (layout, found)


# -- what they promise


def _other_call(layout: str, near: bool, other: str) -> str:
    calls: dict[str, Callable[[sf.Engine], object]] = {
        "step": lambda engine: engine.step(),
        "mean": lambda engine: engine.mean(1.0),
        "state": lambda engine: engine.state_dict(),
    }
    with engine_of(layout, near=near) as engine:
        train(engine)
        backward(engine)
        if other != "step":
            engine.step()

        def goes_on() -> None:
            if other == "step":  # which rank 0 leaves out
                (backward if engine.rank == 0 else calls[other])(engine)
            elif engine.rank:
                calls[other](engine)
            backward(engine)
            backward(engine)

        return raised(goes_on)


OTHERS = {"step": "the optimizer step", "mean": "engine.mean()", "state": "engine.state_dict("}


@GLOO
@pytest.mark.sampled(4)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_rank_that_does_something_else_in_a_steady_step_is_told_on_all(
    ranks: Ranks, layout: str, other: str, near: bool
) -> None:
    """One rank does what all expected, and waits for data that does not come: it comes to the other's meeting."""
    for said in ranks.run(_other_call, layout, near, other, world_size=2, timeout=LIMIT):
        assert said.startswith("OrderError: ") and "about to do different things" in said, said
        mine, _, other_rank = said.partition("; rank 1: ")
        assert "rank 0: a " in mine and OTHERS[other] in other_rank, said


def _apart(layout: str, near: bool, when: str) -> list[str]:
    """Rank 1's rate is another one, from a steady step on: before its backward, or behind it."""
    with engine_of(layout, near=near) as engine:
        train(engine)
        assert engine.optimizer is not None
        (group,) = engine.optimizer.param_groups
        for name in ("before", "behind"):
            if name == when and engine.rank:
                group["lr"] = 0.25
            if name == "before":
                backward(engine)
        said = [raised(engine.step), str(engine.steps)]
        group["lr"] = 1e-2
        said.append(raised(lambda: (engine.step(), train(engine, 1)) if when == "before" else backward(engine)))
        return said


@GLOO
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_settings_that_differ_behind_a_steady_backward_update_nothing(ranks: Ranks, layout: str, near: bool) -> None:
    """All ranks hear of it before the step, and mend it."""
    for first, steps, second in ranks.run(_apart, layout, near, "before", world_size=2, timeout=LIMIT):
        assert first.startswith("ConfigError: engine.step(): the optimizer's settings of rank 1 differ from rank 0's")
        assert (steps, second) == (str(STEADY), "nothing")


@GLOO
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_settings_that_one_rank_changes_before_a_steady_step_end_the_engine(
    ranks: Ranks, layout: str, near: bool
) -> None:
    """The other one steps as all expected: what it has done it cannot take back, so neither goes on."""
    for first, _, second in ranks.run(_apart, layout, near, "behind", world_size=2, timeout=LIMIT):
        told = first if first != "nothing" else second
        assert told.startswith("OrderError: ") and second.startswith("OrderError: "), (first, second)
        assert ("settings or gradients than behind" in told) or ("gradients or settings than it had" in told), told


def _used(layout: str) -> tuple[float, list[str]]:
    """After steady steps rank 0 uses the first tower and rank 1 the second, then none uses the second."""
    torch.manual_seed(0)
    plain, sgd = Towers(), partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
    update = sgd(plain.parameters())
    ways = [((0, 1), (0, 1))] * STEADY + [((0,), (1,))] * 2 + [((0,), (0,))] * 3
    with engine_of(layout, optimizer=sgd) as engine:
        for chosen in ways:
            backward(engine, chosen[engine.rank])
            engine.step()
            for rank, those in enumerate(chosen):
                (plain(torch.full((2, WIDTH), 1.0 + rank), those).square().mean() / 2).backward()
            update.step()
            update.zero_grad()
        state = engine.state_dict()
        return max((state[k] - v).abs().max().item() for k, v in plain.state_dict().items()), list(state)


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_what_only_another_rank_used_is_updated_in_a_steady_step(ranks: Ranks, layout: str) -> None:
    """With its decay; what no rank used is left as it is."""
    assert max(off for off, _ in ranks.run(_used, layout, world_size=2, timeout=LIMIT)) < 1e-6


def _infinite(layout: str) -> list[int]:
    found: list[int] = []
    with engine_of(layout) as engine:
        train(engine)
        for scale in (1.0, torch.inf if engine.rank else 1.0):
            backward(engine, scale=scale)
            found.append(len(engine.step().findings))
    return found


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.filterwarnings("ignore")
def test_a_loss_of_one_rank_that_is_not_finite_is_found_by_all_in_a_steady_step(ranks: Ranks, layout: str) -> None:
    for finite, infinite in ranks.run(_infinite, layout, world_size=2, timeout=LIMIT):
        assert finite == 0 and infinite > 0


def _dropped(layout: str) -> str:
    with engine_of(layout) as engine:
        train(engine)
        backward(engine)
        assert engine.optimizer is not None
        engine.optimizer.zero_grad()  # on every rank
        report = engine.step()
        return f"{report.updated} {engine.steps}"


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_gradients_that_all_ranks_drop_before_a_steady_step_are_dropped(ranks: Ranks, layout: str) -> None:
    assert ranks.run(_dropped, layout, world_size=2, timeout=LIMIT) == [f"True {STEADY + 1}"] * 2


def _fails(layout: str) -> list[str]:
    with engine_of(layout) as engine:
        train(engine)
        update = FusedShard._update

        def fail(self: FusedShard, *args: Any) -> None:
            if engine.rank:
                raise RuntimeError("no memory")
            update(self, *args)

        FusedShard._update = fail  # pyright: ignore[reportAttributeAccessIssue]
        try:
            backward(engine)
            said = [raised(engine.step)]
        finally:
            FusedShard._update = update
        return [*said, raised(lambda: backward(engine)), raised(lambda: backward(engine)), raised(engine.step)]


@pytest.mark.parametrize("layout", ["offload", "infinity"])
def test_an_update_in_host_memory_that_fails_is_told_by_the_next_pass(ranks: Ranks, layout: str) -> None:
    """On every rank, in one sentence; until something is loaded no step is taken."""
    for step, first, _, again in ranks.run(_fails, layout, world_size=2, timeout=LIMIT):
        assert step == "nothing"
        assert first.startswith(f"StepError: step {STEADY + 1} ended half-way: rank 1: UPDATE "), first
        assert "no memory" in first and "half-way" in again


def _evaluates(layout: str, alone: bool) -> list[int]:
    """Between steady steps rank 1 evaluates one batch more than rank 0, which evaluates one (or, ``alone``, none), and
    one more in each place of the step behind."""

    def evaluate(batches: int) -> None:
        with torch.no_grad():
            for _ in range(batches):
                engine(torch.ones(1, WIDTH))

    with engine_of(layout) as engine:
        train(engine)
        found: list[int] = []
        for _ in range(3):
            evaluate(engine.rank + (not alone))
            loss = engine(torch.ones(2, WIDTH)).square().mean()
            evaluate(engine.rank)
            engine.backward(loss)
            evaluate(engine.rank)
            engine.step()
            train(engine, 2)
            found.append(engine.stats().blocking_messages)
        return found


@pytest.mark.parametrize(("layout", "alone"), [("zero3", False), ("ddp", False), ("ddp", True)])
def test_ranks_may_evaluate_different_numbers_of_batches_in_steady_steps(
    ranks: Ranks, layout: str, alone: bool
) -> None:
    """Where parameters are whole, a rank alone too. A step without evaluations waits for nothing again."""
    assert ranks.run(_evaluates, layout, alone, world_size=2, timeout=LIMIT) == [[0, 0, 0]] * 2


def _closes_first(near: bool) -> bool:
    """Rank 1 leaves a steady step out; rank 0 takes it, closes its engine, and comes to where rank 1 waits for it."""
    with engine_of("zero3", near=near) as engine:
        train(engine)
        backward(engine)
        if engine.rank == 0:
            engine.step()
            engine.close()
        dist.barrier()
        return True


@GLOO
def test_who_expects_something_and_closes_its_engine_waits_for_nobody(ranks: Ranks, near: bool) -> None:
    assert ranks.run(_closes_first, near, world_size=2, timeout=60.0) == [True] * 2
