"""Saved tensors in fewer bits: masks exactly, other values within the bound that is stated."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.activations._encoded import BLOCK, EncodedTier
from shardfold.errors import ConfigError
from shardfold.testing import Ranks

SGD = partial(torch.optim.SGD, lr=0.1)
WIDTH, ROWS = 48, 40


def through(values: Tensor, mode: str) -> tuple[Tensor, int] | None:
    """What comes back, and the bytes that are kept; None: it is left as it is."""
    tier = EncodedTier(mode)
    if not tier.takes(values):
        return None
    region = tier.allocate(values.shape, values.dtype)
    region.store(values)
    return region.get(), region.nbytes


def bound(values: Tensor) -> Tensor:
    """1 / 127 of the largest of each element's block."""
    blocks = F.pad(values.double().abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    return (blocks.amax(1, keepdim=True) / 127).expand_as(blocks).reshape(-1)[: len(values)]


@pytest.mark.parametrize("numel", [1, 7, 8, 1000, 1003])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_two_values_are_bits(numel: int, dtype: torch.dtype) -> None:
    """Exactly, in an eighth of a byte each, whatever the other value is."""
    draw = torch.Generator().manual_seed(numel)
    mask = torch.rand(numel, generator=draw) < 0.7
    mask[0] = True
    for other in (1 / 0.7, -3.0, float("inf")):
        values = mask if dtype is torch.bool else torch.where(mask, other, 0.0).to(dtype)
        found = through(values, "packed")
        assert found is not None and torch.equal(found[0], values) and found[1] == -(-numel // 8)


def test_other_values_are_left_alone() -> None:
    """A third value, wherever it is, a negative zero, NaN, and whole numbers."""
    for value in (0.5, -0.0, float("nan")):
        values = torch.zeros(5000)
        values[:10], values[4999] = 2.0, value
        assert through(values, "packed") is None
    assert through(torch.arange(8), "int8") is None
    assert through(torch.zeros(8), "packed") is None  # which of two values it lacks is not known


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_eight_bits_are_within_the_bound(dtype: torch.dtype) -> None:
    """Errors are at most 1/127 of a block's largest (and the dtype's own rounding), signs and zeros exact, at one byte
    and a scale."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(3 * BLOCK + 5, dtype=torch.float64, generator=draw)
    values *= 10 ** (4 * torch.rand(len(values), dtype=torch.float64, generator=draw) - 3)
    values[::7], values[BLOCK : 2 * BLOCK] = 0, 0
    values = values.to(dtype)
    found = through(values, "int8")
    assert found is not None
    back, num_bytes = found
    assert back.dtype is dtype and torch.equal(back.sign(), values.sign())
    error, own = (back.double() - values.double()).abs(), torch.finfo(dtype).eps * back.double().abs()
    assert bool((error <= bound(values) * (1 + 1e-6) + own).all()) and error.max() > 0
    assert num_bytes == 4 * BLOCK + 4 * (8 if dtype is torch.float64 else 4)
    assert torch.equal(through(torch.zeros(4).to(dtype), "int8")[0], torch.zeros(4).to(dtype))  # pyright: ignore


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_does_not_hide(value: float) -> None:
    """A block with such an element has no finite one; the next block is as it was."""
    values = torch.linspace(-1, 1, 2 * BLOCK)
    values[3], values[5] = value, 0
    back, _ = through(values, "int8")  # pyright: ignore
    assert not back[:BLOCK].isfinite().any() and back[BLOCK:].isfinite().all()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).relu()
        return x + F.dropout(self.down(y.masked_fill(y > 2, 2.0)), 0.1, self.training)


class Weighted(nn.Module):
    """Blocks behind a layer that saves its input and the mask of its activation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.double()

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        self.given = x.detach()
        y = self.last(x)
        self.let = (y > 0).detach()
        return (y * weights).sum()


def _trained(mode: str) -> dict[str, Any]:
    """A step: its loss and gradients, bytes by block, and what the last layer was given."""
    rules = {"*": sf.Activations(mode=mode, smallest=0)}
    engine = sf.Engine(
        Weighted(), optimizer=SGD, layout="zero3", activations=rules, init=sf.Init(units=[Block, "last"])
    )
    draw = torch.Generator().manual_seed(engine.data_rank)
    x, weights = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=draw) for _ in range(2))
    torch.manual_seed(5)
    with engine.count_saved() as saved:
        loss = engine(x, weights)
        held = sum(row.device for row in engine.memory().activations)
        engine.backward(loss)
    after = engine.memory().activations
    with engine.gathered(of="grads") as grads:
        found = {"loss": loss.item(), "grads": {name: grad.clone() for name, grad in grads.items()}}
    found |= {"rows": saved.rows, "held": held, "after": after, "outside": saved.outside}
    found |= {"given": engine.module.given, "let": engine.module.let, "weights": weights}
    found["explained"] = engine.explain()
    engine.close()
    return found


def _modes() -> dict[str, dict[str, Any]]:
    return {mode: _trained(mode) for mode in ("keep", "packed", "int8")}


def test_a_model_trains(ranks: Ranks) -> None:
    """Packed masks: everything to the bit. 8 bits: the loss to the bit; the gradient of a layer's weight is off by no
    more than the bound on its input says, that of its bias not at all; and what is reported is what is kept."""
    both = ranks.run(_modes, world_size=2)
    for found in both:
        keep, packed, eight = found["keep"], found["packed"], found["int8"]
        assert keep["loss"] == packed["loss"] == eight["loss"]
        for name, grad in keep["grads"].items():
            assert torch.equal(grad, packed["grads"][name]), name
        assert torch.equal(keep["grads"]["last.0.bias"], eight["grads"]["last.0.bias"])
        numel, wide = ROWS * WIDTH, 2 * ROWS * WIDTH
        blocks = {mode: next(row for row in found[mode]["rows"] if row.unit.endswith("blocks.0")) for mode in found}
        mask = blocks["keep"].device - blocks["packed"].device
        assert mask == 8 * numel - numel // 8 + wide - wide // 8  # dropout's numbers, and booleans
        assert blocks["int8"].device < 0.16 * blocks["keep"].device and eight["outside"] == packed["outside"] == 0
        assert eight["held"] < 0.2 * keep["held"] and not eight["after"] and not packed["after"]
        assert "int8" in eight["explained"] and "packed" in packed["explained"]
    allowed = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for found in both:
        eight = found["int8"]
        reaches = (eight["weights"] * eight["let"]).abs()
        allowed += reaches.T @ bound(eight["given"].reshape(-1)).view(ROWS, WIDTH) / 2  # the mean over two ranks
    error = (both[0]["int8"]["grads"]["last.0.weight"] - both[0]["keep"]["grads"]["last.0.weight"]).abs()
    assert bool((error <= allowed * (1 + 1e-9)).all()) and error.max() > 0


def test_a_budget_does_not_round() -> None:
    with pytest.raises(ConfigError, match=r"Activations.among has 'int8', but names what 'fit:...' chooses from"):
        sf.Activations(mode="fit:1GiB", among=("keep", "int8"))
