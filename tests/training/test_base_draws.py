"""Draws of a layout, a mesh, tiers, a format and a life of an engine, of which each trains adapters over codes as plain
PyTorch does over the values that these stand for."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.support.adapted import Adapted, Layer, batches, quantized

FORMATS = ("nf4/64", "nf4/64+double", "int8/64", "int8/64+double", "int4/64", "int4/32+double", "int2/32", "nf4/32")
ADAM = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)
"""See ``test_base.py``."""
RELATIVE, ABSOLUTE = 1e-5, 1e-6
BEFORE, BEHIND, ROWS = 2, 2, 24


@dataclass(frozen=True)
class Draw:
    """What is run.

    Attributes:
        width: of the model; of 20 a matrix ends within a block.
        trained: parameters that are trained besides adapters, by a part of their names.
        build: how the model is made: ``here``, under ``meta_init`` with ``weights``, or under ``sharded_init``.
        first, then: an engine's table, by a preset and the tier of what rests, before and behind the checkpoint.
        frozen: what the checkpoint has of the base.
    """

    seed: int
    width: int
    trained: str
    base: str
    build: str
    first: tuple[str, str]
    then: tuple[str, str]
    frozen: str
    mesh: dict[str, int] | None
    options: dict[str, Any]

    def table(self, which: tuple[str, str], folder: str) -> sf.Layout:
        """The table of one of the engines."""
        layout, tier = which
        table = sf.PRESETS[layout].replace(base=self.base)
        if not tier:
            return table
        states = ["master", "moments"]
        if (
            table.params is not None and table.params.over == table.master.over
        ):  # else others would update what is there
            states.append("params")
        more = {"folder": folder} if tier == "disk" else {}
        return table.edit(*states, tier=tier, **more)


def compose(seed: int, ranks: int) -> Draw:
    """The draw of that number for so many ranks."""
    draw = random.Random(f"{seed} {ranks}")
    first, then = ((draw.choice(list(sf.PRESETS)), draw.choice(("", "", "host", "disk"))) for _ in range(2))
    options: dict[str, Any] = {"accumulate": draw.choice((1, 1, 2))}
    if draw.random() < 0.3:
        options["clip_norm"] = 0.05
    if draw.random() < 0.3:
        options["activations"] = "recompute"
    if draw.random() < 0.4:
        options["overlap"] = sf.Overlap(prefetch=draw.choice((0, 2)))
    return Draw(
        seed, draw.choice((20, 32, 64)), draw.choice(("", "norm", "base.bias")), draw.choice(FORMATS),
        draw.choice(("here", "weights", "early")), first, then, draw.choice(("keep", "skip")),
        {"inter": 2, "intra": 2} if ranks == 4 else None, options,
    )  # fmt: skip


def _model(draw: Draw) -> nn.Module:
    torch.manual_seed(draw.seed)
    model = Adapted(draw.width, layers=2)
    for name, parameter in model.named_parameters():
        if draw.trained and draw.trained in name:
            parameter.requires_grad_(True)
    return model


def _plain(draw: Draw) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = quantized(_model(draw), draw.base)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = ADAM(trained), list[float]()
    for batch in batches(BEFORE + BEHIND, ROWS, draw.width):
        loss = model(batch)
        loss.backward()
        if "clip_norm" in draw.options:
            nn.utils.clip_grad_norm_(trained, draw.options["clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def _engine(draw: Draw, which: tuple[str, str], folder: str) -> sf.Engine:
    around: Any = {"here": nullcontext, "weights": sf.meta_init, "early": sf.sharded_init}[draw.build]
    with around():
        model = _model(draw)
    weights = _model(draw).state_dict() if draw.build == "weights" else None
    parallel = sf.Parallel(mesh=draw.mesh) if draw.mesh else None
    init = sf.Init(weights=weights, units=[Layer] if draw.seed % 2 else None)
    table = draw.table(which, folder)
    return sf.Engine(model, optimizer=ADAM, layout=table, parallel=parallel, init=init, **draw.options)


def _steps(engine: sf.Engine, given: list[torch.Tensor], accumulate: int) -> list[float]:
    losses = list[float]()
    for batch in given:
        parts = batch.chunk(engine.world_size)[engine.rank].chunk(accumulate)
        total = 0.0
        for part in parts:
            loss = engine(part)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(parts)
        losses.append(engine.mean(total))
    return losses


def _counted(engine: sf.Engine) -> list[str]:
    rows = [f"{row} is not as planned" for row in engine.memory().rows if row.table + row.padding != row.held]
    return rows + [f"{row} is not as sent" for row in engine.traffic().rows if row.program != row.sent]


def check(seeds: list[int], folder: str, ranks: int) -> list[str]:
    """What is wrong on this rank."""
    wrong = list[str]()
    for draw in (compose(seed, ranks) for seed in seeds):
        given, path = batches(BEFORE + BEHIND, ROWS, draw.width), f"{folder}/{draw.seed}-{ranks}"
        accumulate = draw.options["accumulate"]
        engine = _engine(draw, draw.first, folder)
        losses = _steps(engine, given[:BEFORE], accumulate)
        here = _counted(engine)
        engine.save(path, wait=True, frozen=draw.frozen)
        engine.close()
        engine = _engine(draw, draw.then, folder)
        engine.load(path)
        losses += _steps(engine, given[BEFORE:], accumulate)
        here += _counted(engine)
        expected, state = _plain(draw)
        found = {"losses": torch.tensor(losses), **engine.state_dict()}
        for name, should in {"losses": torch.tensor(expected), **state}.items():
            exact = name.endswith("base.weight")
            same = torch.equal if exact else partial(torch.allclose, rtol=RELATIVE, atol=ABSOLUTE)
            if not same(found[name], should):
                here.append(f"{name} is off by {(found[name] - should).abs().max()}")
        engine.close()
        wrong += [f"{draw}: {each}" for each in here]
    return wrong


def test_draws_train_as_over_the_decoded_values(ranks: Ranks, tmp_path: Path) -> None:
    """Losses and adapters to rounding, coded matrices to the bit, memory and traffic to the byte, before a checkpoint
    and behind it."""
    for rank in ranks.run(check, list(range(2)), str(tmp_path), 2, world_size=2):
        assert rank == []


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 124, 6))
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_many_draws_do(count: int, first: int, ranks: Ranks, tmp_path: Path) -> None:
    for rank in ranks.run(check, list(range(first, first + 6)), str(tmp_path), count, world_size=count):
        assert rank == []
