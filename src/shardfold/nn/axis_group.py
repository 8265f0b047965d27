"""The ranks along one axis, as who computes with them asks them: layers, losses, optimizers, recomputed units.

Here is what can be asked, and an axis of one rank. Those along the axes of an engine's mesh are in
``comm.mesh_group``; what a module keeps, which an engine binds to them, is in ``parallel.module_group``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

__all__ = ["AxisGroup", "Everyone", "Lengths", "OneRank", "Shift", "numbered"]

_NUMBERED: WeakValueDictionary[int, AxisGroup] = WeakValueDictionary()
_NUMBERS = count(1)


class Shift:
    """Tensors on their way from one neighbour, and to the other.

    Args:
        received: what :meth:`wait` gives.
        finish: returns when it is there.
    """

    def __init__(self, received: Sequence[Tensor], finish: Callable[[], object] = lambda: None) -> None:
        self._received, self._finish = list(received), finish

    def wait(self) -> list[Tensor]:
        """What came, once it is there."""
        self._finish()
        self._finish = lambda: None
        return self._received


Lengths = Sequence[int] | None
"""By rank; None: all have as much."""


class AxisGroup:
    """The ranks along one axis, of which this one is the ``rank``-th of ``size``.

    Calls are the same on all of them, in one order. No call changes what it is given, and on one rank each gives that
    back. Sums of 16-bit tensors over Gloo are in fp32 and in the order of ranks; results that all ranks get are equal
    to the bit on them. A kind of group has those calls that who it is made for asks for, or says which other group
    has them.
    """

    def __init__(self, axis: str, size: int, rank: int) -> None:
        self._axis, self._size, self._rank = axis, size, rank
        self._number = next(_NUMBERS)
        _NUMBERED[self._number] = self

    @property
    def axis(self) -> str:
        return self._axis

    @property
    def size(self) -> int:
        return self._size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def number(self) -> int:
        """By which a compiled graph finds it (see :func:`numbered`)."""
        return self._number

    def range(self, length: int) -> tuple[int, int]:
        """``(start, stop)`` of this rank's part of so many rows; the first ranks have one more where need be."""
        short, more = divmod(length, self.size)
        start = self.rank * short + min(self.rank, more)
        return start, start + short + (self.rank < more)

    def _bound(self) -> AxisGroup:
        """The group that has the calls that this one has not."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks."""
        return self._bound().all_reduce(tensor)

    def max(self, tensor: Tensor) -> Tensor:
        """The largest of each element over the ranks."""
        return self._bound().max(tensor)

    def all_gather(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        """The ranks' tensors one behind the other along ``dim``, where the r-th has ``sizes[r]``; None: as this one."""
        return self._bound().all_gather(tensor, dim, sizes)

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        """This rank's part along ``dim`` of the sum, where the r-th gets ``sizes[r]``; None: equal parts."""
        return self._bound().reduce_scatter(tensor, dim, sizes)

    def all_to_all(
        self, tensor: Tensor, split: int, concat: int, *, split_sizes: Lengths = None, concat_sizes: Lengths = None
    ) -> Tensor:
        """Cuts ``tensor`` along ``split``, the r-th part for rank r, and puts what comes one behind the other along
        ``concat``. ``split_sizes``: of the parts; None: equal ones. ``concat_sizes``: what each rank's tensor has along
        ``concat``; None: as this one's."""
        return self._bound().all_to_all(tensor, split, concat, split_sizes=split_sizes, concat_sizes=concat_sizes)

    def exchange(self, rows: Tensor, to: Sequence[int], by: Sequence[int]) -> Tensor:
        """Sends rank r the next ``to[r]`` of ``rows``, and gives those that come, ``by[r]`` of rank r, in the order of
        ranks."""
        return self._bound().exchange(rows, to, by)

    def shift(self, tensors: Sequence[Tensor], to: int = 1, shapes: Sequence[Sequence[int]] | None = None) -> Shift:
        """Begins to send to the rank ``to`` further on, as in a ring, what the one as far behind sends here.
        ``tensors`` stay as they are until :meth:`Shift.wait`. ``shapes``: of what comes; None: as of what goes."""
        return self._bound().shift(tensors, to, shapes)


class OneRank(AxisGroup):
    """An axis of one rank."""

    def __init__(self, axis: str = "") -> None:
        super().__init__(axis, 1, 0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        return tensor

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Lengths = None) -> Tensor:
        return tensor

    def all_to_all(
        self, tensor: Tensor, split: int, concat: int, *, split_sizes: Lengths = None, concat_sizes: Lengths = None
    ) -> Tensor:
        return tensor

    def exchange(self, rows: Tensor, to: Sequence[int], by: Sequence[int]) -> Tensor:
        return rows

    def shift(self, tensors: Sequence[Tensor], to: int = 1, shapes: Sequence[Sequence[int]] | None = None) -> Shift:
        return Shift(tensors)


def numbered(number: int) -> AxisGroup:
    """The group of that number, while somebody has it."""
    return _NUMBERED[number]


class Everyone:
    """All ranks that read other things than this one, by axis: an engine tells a module who they are. A copy, or what
    comes of a pickle, is of one rank."""

    def __init__(self) -> None:
        self.axes: Sequence[AxisGroup] = ()

    def follow(self, axes: Sequence[AxisGroup]) -> None:
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
