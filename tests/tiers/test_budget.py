"""Training within a number of bytes of the device, which the simulated one enforces."""

from __future__ import annotations

import gc
import re
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.accelerator import GRANULE
from shardfold.testing import Ranks
from shardfold.testing.simulated import is_supported, simulated
from tests.support.options import grouped

pytestmark = pytest.mark.skipif(not is_supported(), reason="PyTorch lacks what the simulated device is made of")

WIDTH = 96  # a matrix has more bytes than gradients that wait to be copied together
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
UNIT = 4 * 4 * WIDTH * (WIDTH + 1)  # bytes of a block's parameters in fp32


class Block(nn.Module):
    """Four layers, so that one parameter is a small part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _train(engine: sf.Engine) -> list[float]:
    x = torch.ones(1, WIDTH, device=engine.device)
    losses: list[float] = []
    for _ in range(3):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _made(blocks: int, layout: str, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    with sf.meta_init():
        model = Deep(blocks)
    return sf.Engine(
        model,
        optimizer=ADAMW,
        **grouped(layout=layout, units=[Block], device="sim", **options),
        activations="recompute",
    )


def _within(memory: int | None, blocks: int, layout: str, options: dict[str, Any]) -> tuple[list[float], str]:
    """Losses of a training in so many bytes, or what it ended with."""
    gc.collect()  # what earlier trainings left to it is no part of this one's
    left = torch.get_device_module("sim").memory_allocated()
    with simulated(memory=None if memory is None else left + memory) as sim:
        try:
            engine = _made(blocks, layout, **options)
        except torch.OutOfMemoryError as error:
            return [], str(error)
        try:
            losses = _train(engine)
        except torch.OutOfMemoryError as error:
            return [], str(error)
        finally:
            with suppress(RuntimeError):  # other ranks were left
                engine.close()
        sim.expect_clean()
    return losses, ""


@pytest.mark.soak
def test_what_does_not_fit_fits_with_states_in_host_memory(sim_ranks: Ranks) -> None:
    """Under `zero2` the states of four units are beyond the budget, in a sentence; with gradients, masters and moments
    in host memory the same model trains in it, to the losses that it has without a budget."""
    memory = 8 * UNIT  # of whole parameters, 4 units; of all states, 16
    [(losses, said)] = sim_ranks.run(_within, memory, 4, "zero2", {}, world_size=1)
    assert not losses and said.startswith("The simulated device is out of memory: an allocation asks for ")
    [(losses, said)] = sim_ranks.run(_within, memory, 4, "zero2", {"offload": "host"}, world_size=1)
    assert not said and losses == sim_ranks.run(_within, None, 4, "zero2", {}, world_size=1)[0][0]


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_one_budget_is_enough_for_any_depth(sim_ranks: Ranks, world: int) -> None:
    """Under `infinity` models of four, eight and sixteen units train in the same budget, which is below the parameters
    of the smallest: two units' parameters, one unit's gradients, this rank's part of their sum, and one parameter's
    gradient as autograd makes it. Nothing is out of order."""
    options = {"overlap": sf.Overlap(reduces_in_flight=0)}
    for blocks in (4, 8, 16):
        for losses, said in sim_ranks.run(_within, int(3.9 * UNIT), blocks, "infinity", options, world_size=world):
            assert not said and len(losses) == 3
    for losses, said in sim_ranks.run(_within, int(2.9 * UNIT), 4, "infinity", options, world_size=world):
        assert not losses and "out of memory" in said


def _predicted(blocks: int, layout: str, options: dict[str, Any]) -> int:
    with simulated():
        engine = _made(blocks, layout, **options)
        found = re.search(r"without activations: *([\d,]+)", engine.explain())
        assert found is not None
        rest = engine.memory().tiers.get("device", 0)
        engine.close()
        return rest + int(found[1].replace(",", ""))


PREDICTED: list[tuple[int, str, dict[str, Any], float]] = [
    (1, "zero2", {"offload": "host"}, 0.99),
    (2, "zero2", {"offload": "host"}, 0.93),
    (2, "infinity", {}, 0.9),
    (2, "zero3", {"offload": {"optimizer": "host"}, "clip_norm": 0.1}, 0.93),
]
"""Ranks, what is trained, and with which part of the prediction it fails. With several ranks a reduction's temporary
and the gradient that autograd makes are never there at once, which the prediction does not know."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", PREDICTED, ids=[f"{layout}-{world}" for world, layout, *_ in PREDICTED])
def test_the_predicted_peak_is_a_budget(sim_ranks: Ranks, case: tuple[int, str, dict[str, Any], float]) -> None:
    """A training runs in the bytes that `memory()` says are at rest on the device and `explain()` says are there
    besides, and activations; it does not in a little less."""
    world, layout, options, less = case
    [predicted, *_] = sim_ranks.run(_predicted, 4, layout, options, world_size=world)
    activations = 40 * GRANULE  # one row: four of a block that is computed again, one of each other, the loss
    for losses, said in sim_ranks.run(_within, predicted + activations, 4, layout, options, world_size=world):
        assert not said and len(losses) == 3
    for losses, _ in sim_ranks.run(_within, int(less * predicted), 4, layout, options, world_size=world):
        assert not losses
