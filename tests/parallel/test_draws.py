"""Dropout along an axis of tensor: of parts each rank draws its own, of what is the same all draw alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.parallel.plan import split_model
from shardfold.plan.axes import Axis, Mesh
from shardfold.testing import Ranks

WIDTH, HEADS, TOKENS = 8, 4, 5


class Dropping(nn.Module):
    """A block with dropout of attention's weights, of hidden units, and of what is whole; before the block as well.

    Attributes:
        masks: to take in place of random numbers.
        drawn: what was kept, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head_dim = WIDTH // HEADS
        self.masks: dict[str, Tensor] = {}
        self.drawn: dict[str, list[Tensor]] = {}

    def drop(self, name: str, x: Tensor) -> Tensor:
        if name in self.masks:
            return x * self.masks[name] * 2
        y = F.dropout(x, 0.5, self.training)
        self.drawn.setdefault(name, []).append((y != 0).detach())
        return y

    def forward(self, x: Tensor) -> Tensor:
        rows, time, _ = x.shape
        k, v = (each(x).view(rows, time, -1, self.head_dim).transpose(1, 2) for each in (self.k, self.v))
        x = self.drop("whole, after columns", x)
        q = self.q(x).view(rows, time, -1, self.head_dim).transpose(1, 2)
        scores = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(self.head_dim), -1)
        y = (self.drop("weights", scores) @ v).transpose(1, 2).reshape(rows, time, -1)
        x = x + self.drop("whole, after a row", self.o(y))
        return x + self.down(self.drop("hidden", torch.tanh(self.up(x))))


class Fused(nn.Module):
    """Heads that are all the same, under the attention that draws by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 24), nn.Linear(8, 4)
        with torch.no_grad():
            self.qkv.weight.copy_(self.qkv.weight[:2].repeat(12, 1))
            self.qkv.bias.zero_()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)
        self.seen.append(y.detach())
        return self.out(y.transpose(1, 2).flatten(2))


PLAN: dict[str, Any] = {"*.[qkv]": "column", "*.up": "column", "*.o": "row", "*.down": "row"}
HEAD_DIMS = {"weights": 1, "hidden": 2}
"""What parts lie side by side on."""


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Dropping(), Dropping()).double()


def given() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _trained() -> list[Any]:
    """Outputs, masks and gradients, of blocks that are kept and that are computed again."""
    found: list[Any] = []
    for activations in (None, "recompute"):
        engine = sf.Engine(
            build(), layout="ddp", parallel=sf.Parallel(mesh={"tensor": 2}, tensor=PLAN), activations=activations
        )
        blocks: Any = list(engine.module)
        torch.manual_seed(5)
        out = engine(given())
        engine.backward(out.square().sum())
        grads = {name: p.grad for name, p in engine.module.named_parameters()}
        drawn = [block.drawn for block in blocks]
        assert sf.numerics.replicas(engine) == []
        after = torch.rand(3)  # generators of all ranks go on alike
        found.append((out.detach(), drawn, grads, after))
        engine.close()
    engine = sf.Engine(
        Fused(), layout="ddp", parallel=sf.Parallel(mesh={"tensor": 2}, tensor={"qkv": ("column", 3), "out": "row"})
    )
    torch.manual_seed(5)
    engine(torch.ones(1, 6, 4))
    engine.module.eval()
    engine(torch.ones(1, 6, 4))
    found.append(engine.module.seen)
    engine.close()
    return found


def test_parts_draw_apart_and_wholes_alike(ranks: Ranks) -> None:
    """Masks of heads and of hidden units differ between ranks, masks of wholes do not; with the ranks' masks side by
    side plain PyTorch computes the same; what is computed again draws the same again."""
    (one, again, fused), (two, again_two, fused_two) = ranks.run(_trained, world_size=2)
    assert torch.equal(one[0], two[0]) and torch.equal(one[3], two[3])
    model = build()
    for number, block in enumerate(model):
        assert isinstance(block, Dropping)
        for name, masks in one[1][number].items():
            mine, theirs = masks[0], two[1][number][name][0]
            whole = name.startswith("whole")
            assert torch.equal(mine, theirs) is whole, name
            block.masks[name] = mine if whole else torch.cat([mine, theirs], HEAD_DIMS[name])
    out = model(given())
    out.square().sum().backward()
    torch.testing.assert_close(one[0], out, rtol=1e-12, atol=1e-12)
    whole_grads = {name: p.grad for name, p in model.named_parameters()}
    for name in ("0.o.bias", "1.down.bias", "0.down.bias"):
        torch.testing.assert_close(one[2][name], whole_grads[name], rtol=1e-12, atol=1e-12)
    for kept, recomputed in ((one, again), (two, again_two)):
        assert torch.equal(kept[0], recomputed[0]) and torch.equal(kept[3], recomputed[3])
        for name, grad in kept[2].items():
            assert torch.equal(grad, recomputed[2][name]), name
        for before, after in zip(kept[1], recomputed[1], strict=True):
            for name, (mask, *_) in before.items():
                assert all(torch.equal(mask, each) for each in after[name]), name
    assert len(again[1][0]["weights"]) == 2
    assert not torch.equal(fused[0], fused_two[0]) and torch.equal(fused[1], fused_two[1])


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Knowing(nn.Module):
    """A model with a plan of its own, one of whose rows does more."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.tensor_plan = {"up": "column", "down": "row"}
        self.up, self.down = nn.Linear(4, 8), Doubled(8, 4, bias=bias)


def test_a_row_that_does_more_has_no_bias() -> None:
    """A model's own plan may name one, because it knows that the sum is right; a bias would not go through it."""
    split_model(Knowing(False), "auto", Mesh([Axis("tensor", 2)]), {"tensor": 0})
    with pytest.raises(ConfigError, match="'down' 'row', but Doubled computes in its own way"):
        split_model(Knowing(True), "auto", Mesh([Axis("tensor", 2)]), {"tensor": 0})
