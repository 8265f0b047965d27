"""What functions of this room ask of the ranks that have the other parts of a tensor."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Ranks"]


class Ranks(Protocol):
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
