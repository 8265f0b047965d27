"""Saves read copies of other ranks' states beside the training: what is written is of the step of the save."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Event, Thread, current_thread
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.checkpoint import messages, save
from shardfold.checkpoint.lent import Lending, LentMemory
from shardfold.testing import Ranks
from shardfold.tiers.host import HostTier

ADAMW = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
HOST = HostTier(torch.device("cpu"))


def made(layout: str, survive: str | None, offload: str | None = None) -> sf.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(65, 65), nn.Tanh()) for _ in range(3)))
    return sf.Engine(model, optimizer=ADAMW, layout=layout, offload=offload, runtime=sf.Runtime(survive=survive))


def step(engine: sf.Engine) -> None:
    draw = torch.Generator().manual_seed(10 * engine.steps + engine.data_rank)
    engine.backward(engine(torch.randn(4, 65, generator=draw)).square().mean())
    engine.step()


def saved(layout: str, offload: str | None, folder: str, *, held_up: bool) -> tuple[int, list[str]]:
    """A save behind three steps, and three more steps; bytes that it held, and what a new engine has not as it was.
    ``held_up``: nothing is written until these steps are over."""
    go, write = Event(), save.write_file

    def later(*given: Any) -> Any:
        go.wait()
        return write(*given)

    with closing(made(layout, "rank", offload)) as engine:
        for _ in range(3):
            step(engine)
        with torch.no_grad():
            for parameter in engine.module.parameters() if layout == "zero1" else ():
                parameter.data.mul_(0.5)  # which leaves no trace
        save.write_file = later if held_up else write
        saving = engine.save(folder)
        assert saving is not None
        for _ in range(3):
            if not held_up:
                saving.wait()
            step(engine)
        go.set()
        held = saving.wait().held_bytes
        save.write_file = write
    wrong: list[str] = []
    with closing(made(layout, None)) as plain, closing(made("ddp", None)) as other:
        for _ in range(3):
            step(plain)
        with torch.no_grad():
            for parameter in plain.module.parameters() if layout == "zero1" else ():
                parameter.data.mul_(0.5)
        other.load(folder)
        for of in ("master", "exp_avg", "exp_avg_sq"):
            with plain.gathered(of=of) as one, other.gathered(of=of) as two:
                pairs = zip(one.items(), two.values(), strict=True)
                wrong += [f"{of} of {name}" for (name, a), b in pairs if not torch.equal(a, b)]
        assert other.steps == 3
    return held, wrong


@pytest.mark.parametrize(("layout", "offload"), [("zero1", None), ("zero3", None), ("zero2", "host")])
def test_a_save_reads_copies_as_they_were(ranks: Ranks, tmp_path: Path, layout: str, offload: str | None) -> None:
    numel = 3 * (65 * 65 + 65)
    for held_up in (False, True):
        folder = str(tmp_path / f"step-{held_up}")
        for held, wrong in ranks.run(saved, layout, offload, folder, held_up=held_up, world_size=3):
            assert wrong == []
            whole = 4 if layout == "zero1" else 0  # of an element: parameters that users may write are copied at once
            assert (held >= 12 * numel / 3) == held_up, "what is not written by the next update is taken out of its way"
            assert held_up or whole * numel / 3 <= held < whole * numel / 3 + 16384


def test_what_is_read_is_what_was_lent() -> None:
    """Before and behind a write, which takes it out of its way once; the next save has that memory."""
    region, spares = HOST.adopt(torch.arange(8.0)), list[torch.Tensor]()
    for _ in range(2):
        lending = Lending(spares)
        lent = LentMemory(lending, region)
        block, there = lent.shard().part(slice(0, 4)).read(), region.values().clone()
        region.values()[0] += 1  # of what was read nothing is read again
        assert torch.equal(block, there[:4])
        lent.give_back()
        region.values().zero_()
        lent.give_back()
        assert lending.taken == 32 and torch.equal(lent.shard().part(slice(4, 8)).read(), there[4:])
        lending.end()
        region.values().copy_(torch.arange(8.0))
    assert [each.nbytes for each in spares] == [32]
    over = Lending(spares)
    lent = LentMemory(over, region)
    over.end()
    lent.give_back()
    assert not over.taken, "nothing reads it any more"


def waited_for(folder: str) -> list[str]:
    """What the thread that trains waits for in a save beside it, behind another one."""
    here, found = current_thread(), list[str]()
    sync, asked, start = os.fsync, messages.ask, Thread.start

    def synced(file: int) -> None:
        found.extend(["a disk"] * (current_thread() is here))
        sync(file)

    def ask(store: Any, call: str, *arguments: Any) -> Any:
        found.extend([call] * (current_thread() is here))
        return asked(store, call, *arguments)

    def started(thread: Thread) -> None:
        found.extend([f"thread {thread.name}"] * (current_thread() is here))
        start(thread)

    with closing(made("zero3", "rank")) as engine:
        step(engine)
        first = engine.save(f"{folder}/first")  # which makes the folder this run's
        assert first is not None
        first.wait()
        step(engine)
        comm = engine.sharded.comm
        control = comm.control
        os.fsync, messages.ask, save.ask, Thread.start = synced, ask, ask, started
        comm.control = lambda *given, **more: found.append("the others") or control(*given, **more)
        try:
            saving = engine.save(f"{folder}/second")
        finally:
            os.fsync, messages.ask, save.ask, Thread.start = sync, asked, asked, start
            comm.control = control
        assert saving is not None
        saving.wait()
    return found


def test_training_waits_for_the_other_ranks_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Where nothing is wrong: on a place, that all have their parts, and that all see one folder."""
    assert ranks.run(waited_for, str(tmp_path), world_size=2) == [["the others"] * 3] * 2
