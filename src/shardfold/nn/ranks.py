"""What functions of this room ask of the ranks that have the other parts of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["AxisRanks", "Everyone"]


class AxisRanks(Protocol):
    """This one is the ``rank``-th of ``size``; a ``shardfold.parallel.Link`` is one."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, equal to the bit on all of them; ``tensor`` stays as it is."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """The largest of each element over the ranks; ``tensor`` stays as it is."""
        ...


class Everyone:
    """All ranks that read other things than this one, by axis: an engine tells a module who they are. A copy, or what
    comes of a pickle, is of one rank."""

    def __init__(self) -> None:
        self.axes: Sequence[AxisRanks] = ()

    def follow(self, axes: Sequence[AxisRanks]) -> None:
        """They are those along ``axes`` from now on."""
        self.axes = axes

    def __reduce__(self) -> Any:
        return Everyone, ()

    @property
    def size(self) -> int:
        found = 1
        for ranks in self.axes:
            found *= ranks.size
        return found

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all of them."""
        for ranks in self.axes:
            tensor = ranks.all_reduce(tensor)
        return tensor

    def total(self, tensor: Tensor) -> Tensor:
        """The same, as autograd knows it, for a loss that is one number on all of them: an engine divides gradients by
        the ranks, so that of each summand is the sum's times them."""
        return tensor if self.size == 1 else _Total.apply(tensor, self)  # pyright: ignore[reportReturnType]


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, everyone: Everyone) -> Tensor:
        ctx.size = everyone.size
        return everyone.sum(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0] * ctx.size, None
