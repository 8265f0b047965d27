"""A model whose linear layers are slices along an axis of tensor, by hand, with the collectives that they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf

__all__ = ["STEPS", "TENSOR", "Columns", "Net", "Rows", "batches", "build", "connect", "joined", "sliced"]

WIDTH, HIDDEN, ROWS, STEPS = 6, 16, 12, 4
TENSOR = {"tensor": 2}


class _SumOfGradients(torch.autograd.Function):
    """Where slices begin: each rank has a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOfOutputs(torch.autograd.Function):
    """Where slices end: each rank has a part of the output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class Columns(nn.Module):
    """This rank's output features of a linear layer."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        whole = nn.Linear(WIDTH, HIDDEN)
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().chunk(ranks)[rank].clone())
        sf.mark_slice(self, "weight", "bias", axis="tensor", dim=0)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self.group is None else _SumOfGradients.apply(x, self.group), self.weight, self.bias)


class Rows(nn.Module):
    """This rank's input features of a linear layer, and all of its bias, which is replicated."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        whole = nn.Linear(HIDDEN, WIDTH)
        self.weight = nn.Parameter(whole.weight.detach().chunk(ranks, dim=1)[rank].clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        sf.mark_slice(self, "weight", axis="tensor", dim=1)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight)
        return (x if self.group is None else _SumOfOutputs.apply(x, self.group)) + self.bias


class Block(nn.Module):
    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), Columns(rank, ranks), Rows(rank, ranks)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks in slices between layers that are replicated."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.inside = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block(rank, ranks) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return (self.head(x)[:, 0] - y).square().mean()


def build(rank: int = 0, ranks: int = 1, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net(rank, ranks).to(dtype)


def connect(engine: sf.Engine) -> None:
    """The layers in slices get the group of the ranks that have the others."""
    for module in engine.module.modules():
        if isinstance(module, (Columns, Rows)):
            module.group = engine.mesh.group(("tensor",))


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(ROWS, 3, generator=generator, dtype=dtype) for _ in range(STEPS)]
    return [(x, x.sum(1).sin() * 2) for x in xs]


def sliced(name: str, whole: Tensor, rank: int, ranks: int) -> Tensor:
    if "up." in name:
        return whole.chunk(ranks)[rank]
    return whole.chunk(ranks, dim=1)[rank] if name.endswith("down.weight") else whole


def joined(name: str, slices: Sequence[Tensor]) -> Tensor:
    """The whole of a parameter, or of what is kept for each of its elements, out of what ranks along tensor have."""
    if "up." in name:
        return torch.cat(list(slices))
    return torch.cat(list(slices), dim=1) if name.endswith("down.weight") else slices[0]
