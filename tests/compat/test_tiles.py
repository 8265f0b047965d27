"""Tiled computation in the words of ALST: the numbers of the whole, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.compat import deepspeed
from shardfold.compat.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from shardfold.errors import ConfigError
from shardfold.testing import Ranks

ROWS, TOKENS, WIDTH, WORDS = 2, 7, 6, 11


class Small(nn.Module):
    """A feed-forward layer and a head; with ``shards`` both work in tiles."""

    def __init__(self, shards: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shards = shards
        self.words = nn.Embedding(WORDS, WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH), nn.Linear(WIDTH, WORDS)
        self.double()

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, -2), y.flatten(), reduction="sum")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        if not self.shards:
            return self.loss(x + self.mlp(x), targets) / targets.numel()
        weights = [self.up.weight, self.down.weight]
        x = x + TiledMLP.apply(Small.mlp, self, x, self.shards, weights)
        summed = TiledFusedLogitsLoss.apply(
            Small.loss, self, x, targets, None, self.shards, [self.head.weight], "sum"
        )  # fmt: skip
        return summed / targets.numel()


def values(requires: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.float64, generator=draw).requires_grad_(requires)
    y = torch.randint(WORDS, (ROWS, TOKENS), generator=draw)
    return x, y, torch.rand(ROWS, TOKENS, generator=draw) < 0.7


def grads(call: Callable[[Small, Tensor, Tensor, Tensor], Tensor]) -> list[Tensor]:
    """What comes out, and gradients of the input and the parameters that are used."""
    model, (x, y, mask) = Small(), values()
    out = call(model, x, y, mask)
    (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape)).sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]  # pyright: ignore


def masked(model: Small, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return (F.cross_entropy(model.head(x).flatten(0, -2), y.flatten(), reduction="none") * mask.flatten()).sum()


def of_parts(model: Small, x: Tensor, y: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """The losses of tiles of 5 of the 14 rows."""
    parts = zip(*(each.flatten(0, 1).split(5) for each in (x, y, mask)), strict=True)
    found = torch.stack([masked(model, *part) for part in parts])
    return found.sum() if reduction == "sum" else found.mean()


def scored(x: Tensor, weights: Tensor, scale: float, model: Small) -> Tensor:
    """With an input of three dimensions and one of two."""
    return model.mlp(x) * weights.unsqueeze(-1) * scale


CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "mlp": (
        lambda m, x, y, mask: TiledMLP.apply(Small.mlp, m, x, 3, None),
        lambda m, x, y, mask: m.mlp(x),
    ),
    "sum": (
        lambda m, x, y, mask: TiledFusedLogitsLoss.apply(masked, m, x, y, mask, 3, None, "sum"),
        lambda m, x, y, mask: masked(m, x, y, mask),
    ),
    "mean": (
        lambda m, x, y, mask: TiledFusedLogitsLoss.apply(masked, m, x, y, mask, 3, None, "mean"),
        lambda m, x, y, mask: of_parts(m, x, y, mask, "mean"),
    ),
    "any": (
        lambda m, x, y, mask: sequence_tiled_compute(
            scored, TOKENS, 3, {"x": x, "weights": mask.double()}, {"scale": 0.5, "model": m}, "x",
            output_reduction=None,
        ),
        lambda m, x, y, mask: scored(x, mask.double(), 0.5, m),
    ),
    "any, losses": (
        lambda m, x, y, mask: SequenceTiledCompute.apply(
            m.loss, TOKENS, 7, ["x", "y"], [], "x", None, 0, None, x, y
        ),
        lambda m, x, y, mask: torch.stack([m.loss(x[:, i : i + 1], y[:, i : i + 1]) for i in range(TOKENS)]),
    ),
    "any, mean": (
        lambda m, x, y, mask: sequence_tiled_compute(
            lambda x: x.square().unflatten(-1, (2, 3)), TOKENS, 2, {"x": x}, {}, "x"
        ),
        lambda m, x, y, mask: x.square().mean(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_numbers_of_the_whole(case: str) -> None:
    """Outputs and gradients to 1e-12, where parts are of different lengths; under ``no_grad`` as well."""
    tiled, whole = CASES[case]
    mine, expected = grads(tiled), grads(whole)
    assert len(mine) == len(expected)
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        model, given = Small(), values(False)
        torch.testing.assert_close(tiled(model, *given), whole(model, *given), rtol=1e-12, atol=1e-12)


def test_a_tile_at_a_time() -> None:
    """What a feed-forward layer keeps for backward is its input."""
    kept: list[int] = []
    model, (x, _, _) = Small(), values()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        TiledMLP.apply(Small.mlp, model, x, 7, None)
    assert sum(kept) <= x.numel() + 7  # and nothing of width 9


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, y: TiledMLP.apply(Small.mlp, None, x, 0, None), "shards=0"),
        (lambda x, y: TiledMLP.apply(Small.mlp, None, x[0, 0], 2, None), "it is \\(..., tokens, width\\)"),
        (lambda x, y: TiledFusedLogitsLoss.apply(masked, None, x, y, None, 2, None, "max"), "'mean' or 'sum'"),
        (lambda x, y: TiledFusedLogitsLoss.apply(masked, None, x, y[:, 1:], None, 2, None, "sum"), "x and y are"),
        (lambda x, y: sequence_tiled_compute(scored, 7, 2, {"x": x}, {}, "y"), "it is one of kwargs_to_shard"),
        (lambda x, y: sequence_tiled_compute(scored, 8, 2, {"x": x}, {}, "x"), "a tensor \\(batch, seqlen, ...\\)"),
        (lambda x, y: sequence_tiled_compute(scored, 7, 2, {"x": x}, {}, "x", None, 2), "the dimension is 1"),
        (lambda x, y: SequenceTiledCompute.apply(scored, 7, 2, ["x"], [], "x", None, 1, None), "1 names and 0 values"),
        (lambda x, y: sequence_tiled_compute(lambda x: x, 7, 2, {"x": x}, {}, "x", None, 0), "it gives one number"),
    ],
)
def test_what_cannot_be_is_one_sentence(call: Callable[..., Any], said: str) -> None:
    x, y, _ = values()
    with pytest.raises(ConfigError, match=said) as caught:
        call(x, y)
    assert isinstance(caught.value, ValueError)


def _trained() -> dict[str, Tensor]:
    """A step of stage 3, clipped, on this rank's tokens."""
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "gradient_clipping": 0.5, "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "steps_per_print": None,
    }  # fmt: skip
    engine = deepspeed.initialize(model=Small(3), config=config)[0]
    for step in range(2):
        engine.backward(engine(*batch(step, engine.get_data_parallel_rank())))
        engine.step()
    found = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return found


def batch(step: int, of: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(WORDS, (ROWS, TOKENS + 1), generator=torch.Generator().manual_seed(10 * step + of))
    return tokens[:, :-1], tokens[:, 1:]


def test_under_stage_3(ranks: Ranks) -> None:
    """Weights of one process that computes the whole, with every rank's gradient once."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for of in range(2):
            (model(*batch(step, of)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for found in ranks.run(_trained, world_size=2):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
