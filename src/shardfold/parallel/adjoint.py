"""Functions of one tensor with a backward of their own, as collectives have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["paired"]

Change = Callable[[Tensor], Tensor]


def paired(x: Tensor, there: Change, back: Change, with_: Sequence[Tensor] = ()) -> Tensor:
    """``there(x)``, whose gradient goes through ``back``.

    ``with_`` are in the graph without an effect: those that are trained get zeros as their gradients, and backward
    comes by where ``x`` has none.
    """
    return _Paired.apply(x, there, back, *with_)  # pyright: ignore[reportReturnType]


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change, *with_: Tensor) -> Tensor:
        ctx.back = back, [(each.shape, each.dtype, each.device) if each.requires_grad else None for each in with_]
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        back, with_ = ctx.back
        of_x = back(grads[0])
        zeros = (None if each is None else torch.zeros(each[0], dtype=each[1], device=each[2]) for each in with_)
        return of_x, None, None, *zeros
