"""Models, batches and optimizers of draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

from tests.draws.blocks import TIME, WIDTH, Block, make_block, square_of

ROWS = 4


class Boom(Exception):
    """What a draw lets fail, and catches."""


class Fails(torch.autograd.Function):
    """Nothing in forward, an exception in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise Boom("in backward")


class Model(nn.Module):
    """Blocks and a head: it is ``called``, ``read`` (its weight is) or ``tied`` to the first block with a matrix."""

    def __init__(self, blocks: Sequence[Block], head: str) -> None:
        super().__init__()
        made: list[nn.Module] = []
        for block in blocks:
            made.append(make_block(block, made))
        self.blocks = nn.ModuleList(made)
        self.head, self.how = nn.Linear(WIDTH, WIDTH, bias=False), head
        owner, name = square_of(self.blocks)
        if head == "tied" and name:
            self.head.weight = getattr(owner, name)

    def forward(self, x: Tensor, skip: Sequence[int] = (), fails: tuple[str, int] | None = None) -> Tensor:
        """``skip``: numbers of blocks that do not run; ``fails``: in which pass, and behind which block."""
        count = max(1, len(self.blocks))
        left_out, aside = {i % count for i in skip}, x.new_zeros(())
        for i, block in enumerate(self.blocks):
            if i not in left_out:
                x = block(x)
                aside = aside + getattr(block, "aside", 0.0)
            if fails is not None and fails[1] % count == i:
                if fails[0] == "forward":
                    raise Boom("in forward")
                x = Fails.apply(x)
        x = F.linear(x, self.head.weight) if self.how == "read" else self.head(x)
        return x + 0.1 * aside


def make_model(blocks: Sequence[Block], head: str, dtype: str) -> Model:
    torch.manual_seed(0)
    return Model(blocks, head).to(getattr(torch, dtype))


def make_batch(seed: int, rank: int, dtype: str) -> Tensor:
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(ROWS, TIME, WIDTH, generator=draw, dtype=torch.float64).to(getattr(torch, dtype))


# Where a gradient is zero but for rounding, an `eps` of 1e-8 would turn that into a step of its own.
ONE_GROUP: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.1),
    "momentum": partial(SGD, lr=0.05, momentum=0.5, weight_decay=0.1),
    "nesterov": partial(SGD, lr=0.05, momentum=0.5, nesterov=True),
    "adamw": partial(AdamW, lr=0.01, eps=1e-3),
    "amsgrad": partial(AdamW, lr=0.01, eps=1e-3, amsgrad=True),
    "adagrad": partial(Adagrad, lr=0.02, eps=1e-3),
    "rmsprop": partial(RMSprop, lr=0.005, eps=1e-2),
}


def two_groups(model: nn.Module, kind: Callable[..., Optimizer]) -> Optimizer:
    """Matrices, and what is none with another rate."""
    found = list(model.parameters())
    groups = [[p for p in found if p.dim() > 1], [p for p in found if p.dim() < 2]]
    rates = [0.02, 0.005]
    made = [{"params": group, "lr": rate} for group, rate in zip(groups, rates, strict=True) if group]
    return kind(made)


def make_optimizer(name: str, model: nn.Module) -> Optimizer:
    """``two:adamw`` has two groups."""
    kind = ONE_GROUP[name.removeprefix("two:")]
    return two_groups(model, kind) if name.startswith("two:") else kind(model.parameters())
