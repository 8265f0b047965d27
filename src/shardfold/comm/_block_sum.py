"""A sum of what comes from several ranks, block by block: a block is summed as soon as all have sent theirs of it.

The order is that of the ranks, whoever sends first, and 16 bits are summed in fp32 and rounded once: bit for bit what
the other transports give (see ``transport``). No rank's whole values are kept beside the sum, only a block of each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardfold.comm._connection import BLOCK, as_memory
from shardfold.comm.transport import sum_into
from shardfold.torch_internals import storage_key

__all__ = ["BlockSum", "SumRoom"]


class SumRoom:
    """A block of each rank, for one sum after the other.

    Args:
        ranks: how many.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._rows = ranks, torch.empty(0, dtype=torch.uint8)
        self._views: list[memoryview] = []
        self._user: object = None

    def __len__(self) -> int:
        """Bytes."""
        return len(self._rows)

    def take(self, user: object) -> bool:
        """Whether it is this sum's now."""
        if self._user is None:
            self._user = user
            if not len(self._rows):
                with torch.inference_mode(False):  # it serves those without it, too
                    self._rows = torch.empty(self._ranks * BLOCK, dtype=torch.uint8)
                self._views = [as_memory(row) for row in self._rows.view(self._ranks, -1)]
        return self._user is user

    def give_back(self) -> None:
        """The sum that has it is done."""
        self._user = None

    def view(self, rank: int) -> memoryview:
        """Where a block of that rank comes."""
        return self._views[rank]

    def row(self, rank: int, size: int, dtype: torch.dtype) -> Tensor:
        """The same as so many elements."""
        return self._rows[rank * BLOCK : rank * BLOCK + size * dtype.itemsize].view(dtype)


class BlockSum:
    """
    Args:
        room: for blocks of the other ranks.
        ranks: of the group; ``me`` is this one's place.
        mine: this rank's values.
        out: where the sum goes; ``add``: what it is added to. It may be ``mine``.
        told: called with the bytes of the sum that are there.
    """

    def __init__(
        self,
        room: SumRoom,
        ranks: int,
        me: int,
        mine: Tensor,
        out: Tensor,
        *,
        add: bool,
        told: Callable[[int], object] | None = None,
    ) -> None:
        self._room, self._ranks, self._me, self._mine, self._out, self._add = room, ranks, me, mine, out, add
        self._told = told
        self._step, self._at, self._came = BLOCK // mine.itemsize, 0, 0
        self._inference = torch.is_inference_mode_enabled()
        # With three ranks and more a partial sum would overwrite this rank's own values where they are ``out`` itself.
        self._aside = ranks > 2 and storage_key(out.untyped_storage()) == storage_key(mine.untyped_storage())

    @property
    def _size(self) -> int:
        """Elements of the block that comes now."""
        return min(self._step, len(self._mine) - self._at)

    def place(self, rank: int) -> SumPart:
        """Where the values of another rank go."""
        return SumPart(self, rank)

    def room(self, rank: int, got: int) -> memoryview | None:
        """For what comes behind so many bytes of that rank."""
        begin = got - self._at * self._mine.itemsize
        end = self._size * self._mine.itemsize
        if begin >= end or not self._room.take(self):
            return None
        return self._room.view(rank)[begin:end]

    def took(self, got: int) -> None:
        """A rank's bytes have come so far."""
        if got == (self._at + self._size) * self._mine.itemsize:
            self._came += 1
            if self._came == self._ranks - 1:
                self._sum()

    def _sum(self) -> None:
        with torch.inference_mode(self._inference), torch.no_grad():
            at, size = self._at, self._size
            own = self._mine[at : at + size]
            rows = [self._room.row(rank, size, own.dtype) for rank in range(self._ranks)]
            rows[self._me] = rows[self._me].copy_(own) if self._aside else own
            sum_into(self._out[at : at + size], rows, self._add)
        self._at, self._came = at + size, 0
        if self._at == len(self._mine):
            self._room.give_back()
        if self._told is not None:
            self._told(self._at * self._mine.itemsize)


class SumPart:
    """Where one rank's values of a sum go.

    Args:
        whole: the sum.
        rank: whose, by its place in the group.
    """

    __slots__ = ("_got", "_rank", "_whole")

    def __init__(self, whole: BlockSum, rank: int) -> None:
        self._whole, self._rank, self._got = whole, rank, 0

    def room(self) -> memoryview | None:
        return self._whole.room(self._rank, self._got)

    def take(self, count: int) -> None:
        self._got += count
        self._whole.took(self._got)
