"""Blocks of drawn models: each maps (rows, TIME, WIDTH) to the same shape and has one thing that is hard to shard.

A block is drawn as ``(name of its class, argument)``. The argument is the number of an earlier block that it shares
something with, a tuple of blocks that it contains, or 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, TIME = 6, 3

Block = tuple[str, Any]


def make_block(block: Block, earlier: Sequence[nn.Module]) -> nn.Module:
    kind, argument = block
    if isinstance(argument, tuple):
        return globals()[kind]([make_block(inner, earlier) for inner in argument])
    if kind == "Shared":
        return earlier[argument % len(earlier)] if earlier else Mlp()
    if kind in ("Tied", "Reads"):
        return globals()[kind](earlier[argument % len(earlier)] if earlier else Linear())
    return globals()[kind]()


def square_of(module: nn.Module) -> tuple[nn.Module, str]:
    """Where a module has its first trained square matrix: what others can share."""
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if parameter.shape == (WIDTH, WIDTH) and parameter.dtype.is_floating_point:
                return owner, name
    return nn.Module(), ""


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Its output's matrix is read by a function, not called."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.convolution(x.transpose(1, 2))).transpose(1, 2)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.table(x.detach().argmax(-1))


class Recurrent(nn.Module):
    kind: Any

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = self.kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.recurrent(x)[0]


class Rnn(Recurrent):
    kind = nn.RNN


class Gru(Recurrent):
    kind = nn.GRU


class Lstm(Recurrent):
    kind = nn.LSTM


class GruCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, out = x.new_zeros(len(x), WIDTH), []
        for part in x.unbind(1):
            state = self.cell(part, state)
            out.append(state)
        return x + torch.stack(out, 1)


class LstmCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            out.append(state[0])
        return x + torch.stack(out, 1)


class Batch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x).flatten(0, 1)).view_as(x)


class Counter(nn.Module):
    """Buffers that forward writes in place, one of them an integer."""

    average: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) * 0.3)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.seen += 1
                self.average.lerp_(x.mean((0, 1)), 0.2)
        return x * (1 + self.weight) - 0.1 * self.average.clone() + 0.01 * self.seen.to(x.dtype)


class Replaced(nn.Module):
    """A buffer that forward replaces, not saved."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("average", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average = 0.8 * self.average + 0.2 * x.detach().mean((0, 1))
        return x + torch.tanh(self.linear(x - self.average))


class Empty(nn.Module):
    """A parameter without elements, and one of a single element without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.scale = nn.Parameter(torch.empty(0, WIDTH)), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.nothing.sum()


class Integer(nn.Module):
    """Frozen codes and a trained scale."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-4, 4, (WIDTH, WIDTH), dtype=torch.int8)
        self.codes, self.scale = nn.Parameter(codes, requires_grad=False), nn.Parameter(torch.rand(WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.codes.to(x.dtype) * self.scale)


class Never(nn.Module):
    """A part of it never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.used(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(torch.tanh(self.linear(x))))


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


class Function(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Scaled.apply(self.linear(x), self.weight))


class Inner(nn.Module):
    """It takes a gradient in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(torch.tanh(self.linear(inner)).sum(), inner)
        return x + torch.tanh(self.linear(x)) + 0.1 * grad


class Spectral(nn.Module):
    """A parametrized weight with buffers that forward writes in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Aside(nn.Module):
    """It keeps a loss aside, which the model adds to its output."""

    aside: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.aside = y.square().mean()
        return x + torch.tanh(y)


class Tied(nn.Module):
    """Its matrix is that of another block."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        owner, name = square_of(other)
        if name:
            self.linear.weight = getattr(owner, name)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Reads(nn.Module):
    """It reads a matrix of another block, which it does not contain."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.other = (*square_of(other), other)

    def forward(self, x: Tensor) -> Tensor:
        owner, name, _ = self.other
        return x + self.scale * torch.tanh(F.linear(x, getattr(owner, name)) if name else x)


class Nested(nn.Module):
    def __init__(self, inner: Sequence[nn.Module]) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x * self.scale


class Again(Nested):
    """It runs its blocks again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class AgainReentrant(Nested):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


PLAIN = ("Linear", "Mlp", "Attention", "Convolution", "Table", "Twice", "Function", "Aside", "Normed")
ODD = ("Empty", "Integer", "Never", "HalfFrozen", "Inner")
RECURRENT = ("Rnn", "Gru", "Lstm", "GruCell", "LstmCell")
BUFFERED = ("Batch", "Counter", "Replaced", "Spectral")
SHARING = ("Tied", "Shared", "Reads")
CONTAINING = ("Nested", "Nested", "Again", "AgainReentrant")
