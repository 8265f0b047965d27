"""Copies of other ranks' states are what the originals are, behind each step and whatever was done to these."""

from __future__ import annotations

import random
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks
from tests.support.copied import differing, misplaced

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.1, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1),
}


class Branches(nn.Module):
    """Of which a step may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.left, self.right = nn.Linear(13, 13), nn.Linear(13, 13), nn.Linear(13, 13)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = torch.tanh(self.first(x))
        return self.left(y) + (self.right(y) if both else 0)


def trained(layout: str, optimizer: str, options: dict[str, Any], accumulate: int, survive: str | None) -> Any:
    """Steps, some of which leave a branch out, and writes between them; weights, and what differed behind which."""
    given = dict(options, accumulate=accumulate, runtime=sf.Runtime(survive=survive))
    with closing(sf.Engine(Branches(), optimizer=OPTIMIZERS[optimizer], layout=layout, **given)) as engine:
        wrong: list[tuple[int, list[str]]] = []
        for step in range(6):
            for batch in range(accumulate):
                draw = torch.Generator().manual_seed(100 * step + 10 * batch + engine.data_rank)
                engine.backward(engine(torch.randn(4, 13, generator=draw), step % 3 != 1).square().mean())
            engine.step()
            if parts := differing(engine):
                wrong.append((step, parts))
            if step == 2:
                with torch.no_grad(), engine.gathered(write=True):
                    engine.module.left.weight.clamp_(-0.1, 0.1)  # pyright: ignore
            if step == 3:
                engine.load_state_dict({name: value * 0.5 for name, value in engine.state_dict().items()})
        assert engine.copying is None or engine.copying.renewals == 3, "at first, and behind each write"
        assert engine.copying is None or misplaced(engine) == []
        rows = [(row.state, row.table + row.padding, row.held) for row in engine.memory().rows]
        sent = [(row.op, row.program, row.sent) for row in engine.traffic().rows]
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        return weights, wrong, rows, sent


def composition(seed: int) -> tuple[str, str, dict[str, Any], int, int]:
    draw = random.Random(seed)
    layout = draw.choice(["zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz"])
    options: dict[str, Any] = {"precision": draw.choice(["fp32", "fp32", "bf16", "fp16"])}
    if draw.random() < 0.5:
        options["clip_norm"] = 0.1
    ranks = draw.choice([2, 3, 4])
    if ranks == 4:
        options["parallel"] = {"inter": 2, "intra": 2}
    return layout, draw.choice([*OPTIMIZERS]), options, draw.choice([1, 2]), ranks


def check(ranks: Ranks, seed: int) -> None:
    layout, optimizer, options, accumulate, count = composition(seed)
    words = draw_word(layout, options)
    given = layout, optimizer, options, accumulate
    plain = ranks.run(trained, *given, None, world_size=count)
    copied = ranks.run(trained, *given, words, world_size=count)
    for (weights, _, _, _), (same, wrong, rows, sent) in zip(plain, copied, strict=True):
        assert wrong == [], (seed, wrong)
        assert all(torch.equal(value, same[name]) for name, value in weights.items()), seed
        assert {"copies", "log"} <= {state for state, _, _ in rows}
        assert all(table == held for _, table, held in rows), (seed, rows)
        assert all(program == counted for _, program, counted in sent) and "LOG" in {op for op, _, _ in sent}


def draw_word(layout: str, options: dict[str, Any]) -> str:
    """Which copies there are where ranks have the same anyway only if an axis is named."""
    return "intra" if layout == "hsdp" else "host" if "parallel" in options else "rank"


@pytest.mark.parametrize("seed", [0, 1])
def test_copies_are_the_originals_behind_each_step(ranks: Ranks, seed: int) -> None:
    check(ranks, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 26))
def test_copies_of_drawn_compositions(ranks: Ranks, seed: int) -> None:
    check(ranks, seed)


def refused() -> list[str]:
    said: list[str] = []
    every: list[dict[str, Any]] = [
        {"optimizer": partial(torch.optim.Adagrad, lr=0.1)},
        {"optimizer": OPTIMIZERS["adamw"], "overlap": sf.Overlap(update_thread=True)},
    ]
    for options in every:
        with pytest.raises(ConfigError) as told:
            sf.Engine(nn.Linear(4, 4), layout="zero2", runtime=sf.Runtime(survive="rank"), **options)
        said.append(str(told.value))
    return said


def test_updates_that_cannot_be_done_twice_are_refused(ranks: Ranks) -> None:
    said = ranks.run(refused, world_size=2)[0]
    assert "element by element" in said[0] and "Adagrad" in said[0]
    assert "leave Overlap(update_thread=...) out" in said[1]


@pytest.mark.parametrize("given", ["rnak", "inter", 2])
def test_who_holds_copies_is_a_word(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"Runtime\(survive=.*it says who holds copies of states.*rank"):
        sf.Engine(nn.Linear(4, 4), optimizer=OPTIMIZERS["adamw"], layout="zero3", runtime=sf.Runtime(survive=given))
