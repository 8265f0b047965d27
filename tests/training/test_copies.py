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
from shardfold.checkpoint.collect import collect, copied
from shardfold.checkpoint.files import UnwrittenPiece
from shardfold.errors import ConfigError
from shardfold.plan.copies import WORDS, Copies
from shardfold.plan.offload import offloaded
from shardfold.sharding.shard import values_of
from shardfold.testing import Ranks
from tests.support.copied import differing, misplaced

RANK = sf.Runtime(survive="rank")
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
    given = dict(options, accumulate=accumulate)
    model, frozen, tier = Branches(), given.pop("frozen", False), given.pop("tier", None)
    model.first.requires_grad_(not frozen)
    table = offloaded(sf.PRESETS[layout], given.pop("offload", None))
    if survive is not None and (tier is not None or survive not in WORDS):
        table = table.replace(copies=Copies(to=survive, tier=tier))
    else:
        given["runtime"] = sf.Runtime(survive=survive)
    with closing(sf.Engine(model, optimizer=OPTIMIZERS[optimizer], layout=table, **given)) as engine:
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
        report = engine.traffic()
        sent = [(row.op, row.program, row.sent) for row in report.rows]
        sent += [(f"{row.op} {row.tier}", row.program, row.moved) for row in report.moved]
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        return weights, wrong, rows, sent


TIERS: list[dict[str, Any]] = [
    {},
    {"offload": "host"},
    {"offload": {"optimizer": "host"}},
    {"offload": {"optimizer": "disk", "grads": "host"}},
    {"offload": {"moments": "disk"}},
    {"tier": "host"},
    {"offload": "host", "tier": "disk"},
    {"offload": "host:0.6"},
]
"""Where states and copies rest."""


def composition(seed: int) -> tuple[str, str, dict[str, Any], int, int]:
    draw = random.Random(seed)
    layout = draw.choice(["zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz"])
    options: dict[str, Any] = {"precision": draw.choice(["fp32", "fp32", "bf16", "fp16"])}
    options |= draw.choice(TIERS)
    if layout in ("zero3", "fsdp2") and draw.random() < 0.4:
        options["frozen"] = True
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
        assert all(program == counted for _, program, counted in sent), (seed, sent)
        assert "LOG" in {op for op, _, _ in sent}


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


def pieces_of(engine: sf.Engine) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What this rank would write of its own states, and of those that it holds for another; bytes by place."""
    own, _ = collect(engine.sharded, {}, {}, {}, {}, every=True)
    held, _ = copied(engine.sharded)

    def found(parts: list[UnwrittenPiece]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for part in parts:
            if part.piece.kind in ("element", "block"):
                assert not callable(part.values)
                found[str(part.piece)] = values_of(part.values).view(torch.uint8).numpy().tobytes()
        return found

    return found(own), found(held)


def written(layout: str, base: str | None) -> Any:
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    model[0].requires_grad_(False)
    table = sf.PRESETS[layout].replace(base=base)
    with closing(sf.Engine(model, optimizer=OPTIMIZERS["adamw"], layout=table, runtime=RANK)) as engine:
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
        assert engine.copying is not None and engine.copying.renewals == 1
        with torch.no_grad(), engine.gathered(write=True):
            engine.module[0].weight.mul_(2.0)  # pyright: ignore
        engine.backward(engine(torch.ones(2, 64)).square().mean())
        engine.step()
        assert engine.copying.renewals == 2, "what is frozen was written"
        assert all(row.table + row.padding == row.held for row in engine.memory().rows)
        return pieces_of(engine)


@pytest.mark.parametrize(("layout", "base"), [("zero3", None), ("zero3", "nf4/64")])
def test_a_copy_is_held_as_its_owner_would_write_it(ranks: Ranks, layout: str, base: str | None) -> None:
    """Of three ranks, each of what the one before has; of what is frozen too, and where it rests as codes."""
    found = ranks.run(written, layout, base, world_size=3)
    for number, (_, held) in enumerate(found):
        before, _ = found[number - 1]
        assert held == before and any("'0.weight'" in place for place in held), (layout, base)


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
