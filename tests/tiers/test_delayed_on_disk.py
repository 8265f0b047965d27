"""Updates behind their step of states in files, which are read and written meanwhile."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Event, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import UsageError
from shardfold.optim._fused_optimizer import FusedOptimizer
from shardfold.testing import Ranks
from shardfold.tiers.disk import DiskRegion, DiskTier
from tests.tiers.test_delayed_update import (
    ADAMW,
    DELAYED,
    PATIENCE,
    _go_on,
    _see,
    _written,
    delayed,
    held_back,
    train,
    values,
)
from tests.tiers.test_failing_disk import at_once, said, wrong
from tests.tiers.test_offload import SUMS, make, states

DISK = {"optimizer": "disk", "grads": "host"}
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)

CASES: list[tuple[str, Mapping[str, str], Mapping[str, str], dict[str, Any]]] = [
    ("zero2", DISK, SUMS, {"precision": "bf16", "clip_norm": 2.0, "accumulate": 2}),
    ("zero3", {**DISK, "params": "host"}, {**SUMS, "params": "host"}, {"precision": "bf16"}),
    ("zero3", {"moments": "disk", "master": "host", "grads": "host"}, SUMS, {"precision": "fp16", "loss_scale": 4.0}),
    ("zero2", {"master": "disk", "moments": "host", "grads": "host"}, SUMS, {"optimizer": MOMENTUM}),
]


def _differ(layout: str, tiers: Mapping[str, str], options: dict[str, Any]) -> tuple[Any, ...]:
    factors = [1.0, float("inf") if "loss_scale" in options else 1e3, 1.0, 1.0]
    engine = make(layout, **{"optimizer": ADAMW, "offload": tiers, "overlap": DELAYED, **options})
    losses = train(engine, factors)
    wrong = [f"{row} of the program" for row in engine.traffic().moved if row.moved != row.program or not row.calls]
    kinds = {(row.tier, row.op) for row in engine.traffic().moved}
    copies = {row.state: row for row in engine.memory().rows}
    updated = copies["updated"]
    wrong += [] if updated.held == updated.table > 0 else [f"{updated} behind a step"]
    found = states(engine)
    for row in engine.memory().rows:
        held = 0 if row.state == "updated" else row.table + row.padding
        wrong += [] if row.held == held else [f"{row} of the table"]
    engine.close()
    return losses, found, kinds, wrong


def _both(case: int) -> list[str]:
    layout, far, near, options = CASES[case]
    losses, found, kinds, wrong = _differ(layout, far, options)
    expected, values, _, _ = _differ(layout, near, options)
    wrong += [] if losses == expected else ["losses"]
    wrong += [name for name in values if not torch.equal(values[name], found[name])]
    return wrong + ([] if {("disk", "FETCH"), ("disk", "STORE")} <= kinds else ["nothing moved"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2])
def test_training_is_that_with_states_in_host_memory(ranks: Ranks, world: int) -> None:
    """Losses, values and moments are equal to the bit: clipped, accumulated, with a step that overflows, and with
    states in part in files. Bytes moved are the program's, bytes held the table's; what updates make of parameters is
    counted, from a step until it arrives."""
    for case in range(len(CASES)):
        assert ranks.run(_both, case, world_size=world) == [[]] * world, case


def _program() -> tuple[str, dict[str, tuple[float, float]]]:
    store = DiskRegion.store

    def store_and_wait(self: DiskRegion, values: Tensor) -> None:
        store(self, values)
        self.flush()

    DiskRegion.store = store_and_wait
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])  # shards of whole blocks
    engine = sf.Engine(
        model,
        optimizer=ADAMW,
        layout="zero2",
        precision="bf16",
        offload=DISK,
        overlap=DELAYED,
        init=sf.Init(units=[nn.Linear]),
    )
    tier = engine.sharded.tiers.named("disk")
    assert isinstance(tier, DiskTier)
    counted: list[tuple[int, int]] = []
    for _ in range(4):
        engine.backward(engine(torch.ones(2, 64)).float().square().mean())
        engine.step()
        engine._runner.handlers.cursor.end()  # of the updates behind it, which arrive in the next step
        counted.append((tier.bytes_read, tier.bytes_written))
    rows = {row.op: row.program for row in engine.traffic().moved if row.tier == "disk"}
    text = engine.explain()
    engine.close()
    DiskRegion.store = store
    read, written = (after - before for before, after in zip(*counted[-2:], strict=True))
    return text, {"FETCH": (rows["FETCH"], read), "STORE": (rows["STORE"], written)}


def test_the_program_says_what_is_read_and_written_behind_a_step(ranks: Ranks) -> None:
    """States of the next unit are fetched ahead of each update, as in a step, and go back behind it; the files' own
    count of a step's bytes is the program's. ``explain()`` has the copies that wait for their arrival."""
    for text, moved in ranks.run(_program, world_size=2):
        behind = [line.strip() for line in text.split("\nbehind:\n")[1].split("\narrive:")[0].split("\n")]
        first = behind.index("UPDATE 3 @host")
        assert {"FETCH 3 master @disk", "FETCH 3 moments @disk", "FETCH 2 moments @disk"} <= {*behind[:first]}
        assert behind[first + 1 : first + 3] == ["STORE 3 master @disk", "STORE 3 moments @disk"]
        step, arrive = (text.split(f"\n{name}:\n")[1].split("\n\n")[0] for name in ("step", "arrive"))
        assert "@disk" not in step.split("behind:")[0] and "@disk" not in arrive
        assert f"  updated  {2 * 64 * 64 * 4 // 2:>18,}  (host)" in text
        for what, (program, counted) in moved.items():
            assert program == counted > 0, what


def _meanwhile() -> list[Any]:
    engine, done, threads = delayed(offload=DISK), Event(), set[str]()
    store, num = FusedOptimizer.store, sum(bool(unit.trainable) for unit in engine.units)
    seen: list[str] = []

    def stored(self: FusedOptimizer, unit: Any) -> None:
        store(self, unit)
        threads.add(current_thread().name)
        seen.append(unit.name)
        if len(seen) == num:
            done.set()

    FusedOptimizer.store = stored
    try:
        train(engine, [1.0])
        came = done.wait(PATIENCE)  # nothing of the engine is called meanwhile
    finally:
        FusedOptimizer.store = store
    moved = {row.op for row in engine.traffic().moved}
    train(engine, [1.0], first=1)
    later = {row.op for row in engine.traffic().moved}
    engine.close()
    return [came, len(threads) == 1 and "MainThread" not in threads, moved, later]


def test_states_are_read_and_written_while_the_next_step_computes() -> None:
    """All of it, on another thread, with nothing of the engine called; what was moved is counted by the step that it
    arrives in."""
    assert _meanwhile() == [True, True, {"STORE"}, {"FETCH", "FILL", "STORE"}]


def _others(folder: str) -> list[Any]:
    return [_go_on(folder, DISK), _see(DISK), _written(DISK)]


@pytest.mark.soak
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_who_asks_behind_a_step_has_it_finished(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Checkpoints, whole values, and what users write: as with states in host memory."""
    expected = [[True] * 3, [True] * 3, [True] * 4]
    assert ranks.run(_others, str(tmp_path), world_size=world) == [expected] * world


def test_a_closed_engine_has_read_and_written_all() -> None:
    """Closed behind a step, before any update has begun: all is done, and nothing hangs."""
    engine, reached = delayed(offload=DISK), Event()
    with held_back(reached) as came:
        train(engine, [1.0])
        reached.set()
        engine.close()
    assert len(came) == 6


# -- a disk that fails behind a step


def finish(engine: sf.Engine) -> None:
    """What is under way behind the step is done, and in the files; it has not arrived."""
    engine._runner.handlers.cursor.end()
    tier = engine.sharded.tiers.named("disk")
    assert isinstance(tier, DiskTier)
    tier.look(patient=True)


@contextmanager
def failing(engine: sf.Engine, call: str) -> Iterator[None]:
    """The last rank's disk fails."""
    with wrong(engine, "broken", call) if engine.rank == engine.world_size - 1 else nullcontext():
        yield
        finish(engine)


def _cannot_read(folder: str) -> list[Any]:
    engine = delayed(offload=DISK)
    train(engine, [1.0] * 2)
    engine.save(f"{folder}/step", wait=True)
    finish(engine)
    with failing(engine, "preadv"):
        found = [said(partial(train, engine, [1.0], 2))]
        found.append(said(partial(train, engine, [1.0], 3)))
        found.append(said(lambda: engine.save(f"{folder}/other")))
    engine.load(f"{folder}/step")
    losses = train(engine, [1.0] * 3, first=2)
    after = values(engine)
    engine.close()
    other = delayed(offload=SUMS)
    other.load(f"{folder}/step")
    same = train(other, [1.0] * 3, first=2) == losses
    same &= all(map(torch.equal, values(other), after))
    other.close()
    return [*found, same]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_what_cannot_be_read_behind_a_step_is_told_by_the_next(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """The step that begins the updates says nothing; the next one raises one sentence on every rank. A checkpoint puts
    all right."""
    found = ranks.run(_cannot_read, str(tmp_path), world_size=world)
    for rank, (first, (kind, words, cause), refused, same) in enumerate(found):
        who = "rank 1: " if world == 2 else ""
        assert first == ("", "", None)
        assert kind == "StepError" and words.startswith(f"step 3 ended half-way: {who}UPDATE ")
        assert "Input/output error" in words and cause == (errno.EIO if rank == world - 1 else None)
        assert refused[0] == UsageError.__name__ and refused[1].startswith("engine.save(): step 3 ended half-way")
        assert same


@at_once()
def _cannot_write(folder: str) -> list[Any]:
    engine = delayed(offload=DISK)
    train(engine, [1.0])
    finish(engine)
    with failing(engine, "pwrite"):
        found = [said(partial(train, engine, [1.0], 1))]
        engine.save(f"{folder}/step", wait=True)  # what is in memory only is saved too
        found.append(said(partial(train, engine, [1.0], 2)))
    found.append(said(partial(train, engine, [1.0], 3)))
    train(engine, [1.0], first=4)
    after = values(engine)
    engine.close()
    other = delayed(offload=SUMS)
    train(other, [1.0] * 2)
    other.save(f"{folder}/other", wait=True)
    train(other, [1.0] * 3, first=2)
    same = all(map(torch.equal, values(other), after))
    other.close()
    return [*found, same]


@pytest.mark.soak
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_what_cannot_be_written_behind_a_step_is_told_by_the_next(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Nothing is lost: a save behind it has all, the next step tells of it in one sentence on every rank and is done,
    and training goes on."""
    for rank, (first, *told, same) in enumerate(ranks.run(_cannot_write, str(tmp_path), world_size=world)):
        who = "rank 1: " if world == 2 else ""
        assert first == ("", "", None) and same
        for number, (kind, words, cause) in enumerate(told, 2):
            assert kind == "StepError" and words.startswith(
                f"step {number} is done, but not all states are back where they rest: {who}STORE "
            )
            assert "Input/output error" in words and cause == (errno.EIO if rank == world - 1 else None)
