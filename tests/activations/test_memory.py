"""Bytes that autograd holds under each mode: as counted, as shown by memory(), and as all tensors take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.activations.modes import MODES
from shardfold.testing import Ranks
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import GPTConfig
from tests.support import models
from tests.training import test_peak

SGD = partial(torch.optim.SGD, lr=0.1)

ROWS, LAYERS = 2048, 4
ALONE = sf.Overlap(bucket=None)  # a unit for each layer
CONFIG = GPTConfig(vocab=64, d_model=64, layers=LAYERS, heads=2, context=128)
SEQUENCES = 8
HIDDEN = SEQUENCES * CONFIG.context * CONFIG.d_model * 4  # bytes of one value per token and channel


class Wide(nn.Module):
    """Blocks whose activations are much more than their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(64) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _job(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(CONFIG), tuple(torch.randint(CONFIG.vocab, (2, SEQUENCES, CONFIG.context)))
    return Wide(), (torch.randn(ROWS, 64),)


def _bytes(layout: str, mode: str, name: str = "wide") -> dict[str, Any]:
    """What is counted, and what tensors take in one forward and backward beyond what rests, gradients among it."""
    model, inputs = _job(name)
    engine = sf.Engine(model, optimizer=SGD, layout=layout, activations=mode, accumulate=2, overlap=ALONE)

    def loss() -> Tensor:
        return engine(*inputs).mean()

    engine.backward(loss())
    with engine.count_saved() as saved:
        engine.backward(loss())
    engine.step()
    with test_peak.LiveBytes([segment.flat for unit in engine.units for segment in unit.segments]) as live:
        engine.backward(loss())
        engine.step()
        live.peak = 0
        live.sample()
        rest = live.peak
        value = loss()
        live.peak = 0
        live.sample()
        after = live.peak
        engine.backward(value)
        peak = live.peak
    engine.close()
    return {"rows": saved.rows, "peak": saved.peak, "text": str(saved), "after": after - rest, "backward": peak - rest}


def test_recomputation_takes_the_inputs_and_one_unit(ranks: Ranks) -> None:
    kept = ranks.run(_bytes, "ddp", "keep", world_size=1)[0]
    made = ranks.run(_bytes, "ddp", "recompute", world_size=1)[0]
    one = kept["rows"][1].device
    inputs = [row.device for row in made["rows"][1:]]
    assert inputs == [ROWS * 64 * 4] * LAYERS
    assert one == 10 * ROWS * 64 * 4 + 2 * ROWS * 4  # input, normalized, two of four times the width; mean and variance
    # The first input rests, and what tensors take is a little more: gradients of parameters, the loss.
    assert made["after"] == pytest.approx(sum(inputs[1:]), rel=0.01)
    assert kept["after"] == pytest.approx(LAYERS * one - inputs[0], rel=0.01)
    gradients = kept["backward"] - kept["after"]  # of activations, which both have
    assert made["backward"] - gradients <= 1.1 * (sum(inputs) + one)


@pytest.mark.soak
def test_formulas_of_a_gpt(ranks: Ranks) -> None:
    """Of a block each storage once, in multiples of one value per token and channel: 3 of each norm, 5 of projected and
    turned queries, keys and values, 2 of attention, 4f of a feed-forward layer that is f times as wide."""
    f = CONFIG.d_ff / CONFIG.d_model
    few = 2 / CONFIG.d_model + CONFIG.heads / CONFIG.d_model  # what norms and attention save per token
    expected = {"keep": 13 + 4 * f + few, "recompute": 1, "select": 7 + 2 * f + CONFIG.heads / CONFIG.d_model}
    kept = ranks.run(_bytes, "ddp", "keep", "gpt", world_size=1)[0]
    root, one = kept["rows"][0].device, (13 + 4 * f + few) * HIDDEN
    gradients = kept["backward"] - kept["after"]  # of activations and weights under way, under every mode
    for mode, units in expected.items():
        found = ranks.run(_bytes, "ddp", mode, "gpt", world_size=1)[0]
        assert [row.device for row in found["rows"][1:]] == [units * HIDDEN] * LAYERS
        assert found["after"] == pytest.approx(root + LAYERS * units * HIDDEN, rel=0.03)
        if mode == "recompute":
            assert found["backward"] <= 1.1 * (found["after"] + one)
            assert found["backward"] - gradients <= 1.1 * (LAYERS * HIDDEN + one)
    for mode in ("host", "disk"):
        found = ranks.run(_bytes, "ddp", mode, "gpt", world_size=1)[0]
        assert found["after"] <= 1.03 * root + LAYERS * few * HIDDEN
        assert found["peak"] <= 2 * one
        assert found["backward"] - gradients <= 2 * one + root + LAYERS * few * HIDDEN


def test_selection_keeps_products(ranks: Ranks) -> None:
    made = ranks.run(_bytes, "ddp", "select", world_size=1)[0]
    for row in made["rows"][1:]:
        assert row == (row.unit, "select", (1 + 4 + 1) * ROWS * 64 * 4, 0)
    assert made["after"] == pytest.approx(sum(row.device for row in made["rows"]) - ROWS * 64 * 4, rel=0.01)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["host", "disk"])
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_two_units_at_a_time_are_on_the_device(ranks: Ranks, layout: str, mode: str) -> None:
    for found in ranks.run(_bytes, layout, mode, world_size=2):
        rows = found["rows"][1:]
        assert [row.mode for row in rows] == [mode] * LAYERS
        one = 10 * ROWS * 64 * 4
        assert [row.outside for row in rows] == [one] * LAYERS
        assert all(row.device == 2 * ROWS * 4 for row in rows)  # smaller than what is moved
        assert found["peak"] == 2 * one
        assert found["after"] < one / 10
        assert f"blocks.{LAYERS - 1}" in found["text"] and mode in found["text"]


def _held(layout: str, mode: str) -> dict[str, Any]:
    """What memory() says of activations between forward and backward, and behind it."""
    engine = sf.Engine(Wide(), optimizer=SGD, layout=layout, activations=mode, overlap=ALONE)
    x = torch.randn(ROWS, 64)
    found: dict[str, Any] = {}
    loss = engine(x).mean()
    found["not counted"] = engine.memory().activations
    engine.backward(loss)
    engine.step()
    with engine.count_saved() as saved:
        losses = []
        for _ in range(2):
            losses.append(engine(x).mean())
            found.setdefault("between", engine.memory())
        found["two graphs"] = engine.memory().activations
        for loss in losses:
            engine.backward(loss)
            found.setdefault("one graph", engine.memory().activations)
        found["after"] = engine.memory()
        lost = engine(x)
        found["third"] = engine.memory().activations
        del lost
        found["lost"] = engine.memory().activations
    found["rows"], found["text"] = saved.rows, str(found["between"])
    engine.close()
    return found


@pytest.mark.sampled(15)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_memory_shows_what_autograd_holds_by_unit(ranks: Ranks, layout: str, mode: str) -> None:
    for found in ranks.run(_held, layout, mode, world_size=2):
        between = found["between"].activations
        assert [row.unit for row in between if row.unit != "(root)"] == [f"blocks.{i}" for i in range(LAYERS)]
        assert all(row.mode == mode for row in between if row.unit != "(root)")
        # Three forwards were counted. Of the input, which all share, each graph holds a part.
        assert found["third"] == between
        assert found["rows"][2:] == tuple(
            row._replace(device=3 * row.device, outside=3 * row.outside)
            for row in between
            if row.unit not in ("(root)", "blocks.0")
        )
        assert found["two graphs"][-1] == between[-1]._replace(
            device=2 * between[-1].device, outside=2 * between[-1].outside
        )
        assert found["one graph"][-1] == between[-1]
        assert found["after"].activations == found["lost"] == ()
        # Without counting, what was moved is known, and what is kept in fewer bits.
        moved, fewer = mode in ("host", "disk"), mode == "int8"
        assert [row.outside for row in found["not counted"] if row.outside] == [
            row.outside for row in between if row.outside
        ]
        assert all((row.device > 0) == fewer for row in found["not counted"])
        assert bool(found["not counted"]) == (moved or fewer)
        assert found["between"].held == found["after"].held
        assert f"{f'blocks.{LAYERS - 1}':<28}  {mode}" in found["text"]
