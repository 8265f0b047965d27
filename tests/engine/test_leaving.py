"""Notice: a rank is told that the run shall end, and all of them stop behind the same step, with no message more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import shardfold as sf
from shardfold.comm import launcher_notes
from shardfold.testing import Ranks

LAYOUTS = ["ddp", "zero1", "zero2", "zero3", "offload"]
DRAWS = 5


class Told(nn.Module):
    """Calls whatever it is given in the middle of its forward, and of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.in_forward: Any = None
        self.in_backward: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.in_forward:
            self.in_forward()
        if self.in_backward:
            x.register_hook(lambda grad: self.in_backward())
        return self.second(x)


MOMENTS = ["before", "forward", "backward", "between", "behind"]


def _leaves(layout: str, moments: list[tuple[int, str, int, int]]) -> list[tuple[int, int]]:
    """For each moment the step behind which this rank saw that it shall leave, and messages in the last steps."""
    found = []
    for told, moment, rank, accumulate in moments:
        torch.manual_seed(0)
        model = Told()
        sgd = SGD(model.parameters(), lr=0.1)
        engine = sf.Engine(model, optimizer=sgd, layout=layout, accumulate=accumulate)
        before = 0
        for step in range(20):
            mine = step == told and engine.rank == rank
            for number in range(accumulate):
                now = mine and number == 0
                model.in_forward = engine.leave if now and moment == "forward" else None
                model.in_backward = engine.leave if now and moment == "backward" else None
                if now and moment == "before":
                    engine.leave()
                engine.backward(engine(torch.ones(2, 4)).sum())
                if now and moment == "between":
                    engine.leave()
            before = engine.stats().blocking_messages
            engine.step()
            if mine and moment == "behind":
                engine.leave()
            if engine.leaving:
                break
        found.append((step, before))
        engine.close()
    return found


def _draw(seed: int, ranks: int) -> list[tuple[int, str, int, int]]:
    random = Random(seed)
    return [
        (random.randrange(8), random.choice(MOMENTS), random.randrange(ranks), random.choice([1, 3]))
        for _ in range(DRAWS)
    ]


@pytest.mark.parametrize("layout", [LAYOUTS[0], *(pytest.param(each, marks=pytest.mark.soak) for each in LAYOUTS[1:])])
@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_stop_behind_the_same_step(ranks: Ranks, layout: str, seed: int) -> None:
    """Whichever rank is told, and when: that step or one of the two behind it."""
    drawn = _draw(seed, 2)
    one, other = ranks.run(_leaves, layout, drawn, world_size=2)
    assert [step for step, _ in one] == [step for step, _ in other]
    for (told, *_), (step, _) in zip(drawn, one, strict=True):
        assert told <= step <= told + 2, (drawn, one)


def test_notice_on_one_rank_is_notice_to_itself(ranks: Ranks) -> None:
    assert [step for step, _ in _leaves("ddp", [(3, moment, 0, 1) for moment in MOMENTS])] == [3] * 5


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The launcher's file, for this process alone."""
    file = tmp_path / "note"
    file.touch()
    monkeypatch.setenv(launcher_notes.FILE, str(file))
    before, launcher_notes._file[:] = [*launcher_notes._file], []
    yield file
    for each in launcher_notes._file:
        os.close(each)
    launcher_notes._file[:] = before


def test_the_launchers_notice_is_read_between_steps(note: Path) -> None:
    model = nn.Linear(2, 2)
    engine = sf.Engine(model, optimizer=SGD(model.parameters(), lr=0.1))
    assert not engine.leaving
    with note.open("r+b") as file:
        file.seek(launcher_notes.NOTICE)
        file.write(b"1")
    assert engine.leaving
    engine.close()
