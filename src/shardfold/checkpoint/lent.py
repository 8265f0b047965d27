"""Copies of other ranks' states that a save reads beside the training, and copies nothing of before.

No step writes a copy but by its MIRROR, so from a save until then the thread that writes reads them as they lie, block
by block. Who is about to write one says so first (:meth:`LentMemory.give_back`): what was written to the file by then
is not needed any more, and what was not is taken out of its way. For a slow disk nobody waits.
"""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from shardfold.sharding.shard import Shard
from shardfold.tiers.tier import Region

__all__ = ["Lending", "LentMemory", "LentShard"]


class Lending:
    """All that one save reads so, in one thread.

    Args:
        spares: memory of saves before, for what is taken out of the way: fresh pages cost more than what is written
            to them. It has what this one took when that is over.

    Attributes:
        lock: held while a block is read, and while memory is taken out of the way.
        over: whether nothing is read any more.
    """

    def __init__(self, spares: list[Tensor]) -> None:
        self.lock, self.over = Lock(), False
        self._spares, self._taken = spares, list[Tensor]()
        self._block = torch.empty(0, dtype=torch.uint8)

    @property
    def taken(self) -> int:
        """Bytes that had to be taken out of the way."""
        return sum(values.nbytes for values in self._taken)

    def take(self, values: Tensor) -> Tensor:
        """The same values in other memory."""
        like = values.numel(), values.dtype
        number = next((n for n, each in enumerate(self._spares) if (each.numel(), each.dtype) == like), None)
        memory = torch.empty_like(values) if number is None else self._spares.pop(number)
        self._taken.append(memory.copy_(values))
        return memory

    def block(self, values: Tensor) -> Tensor:
        """The same values, until the next block."""
        if self._block.nbytes < values.nbytes:
            self._block = torch.empty(values.nbytes, dtype=torch.uint8)
        return self._block[: values.nbytes].view(values.dtype).copy_(values)

    def end(self) -> None:
        """Nothing of it is read any more."""
        with self.lock:
            if not self.over:
                self._spares += self._taken
            self.over = True


class LentMemory:
    """What one region had when it was lent, ``(n,)``.

    Args:
        lending: of the save.
        region: in memory of the host.
    """

    def __init__(self, lending: Lending, region: Region) -> None:
        self._lending, self._region = lending, region
        self._values, self._apart = region.values(), False

    def shard(self) -> LentShard:
        """All of it."""
        return LentShard(self, self._region, 0, self._values.numel())

    def block(self, start: int, stop: int) -> Tensor:
        """A range of the values, which stay what they are until the next block of any is asked for."""
        with self._lending.lock:
            values = self._values[start:stop]
            return values if self._apart else self._lending.block(values)

    def give_back(self) -> None:
        """The region is about to be written."""
        with self._lending.lock:
            if not self._lending.over and not self._apart:
                self._values, self._apart = self._lending.take(self._values), True


class LentShard(Shard):
    """A range of what was lent."""

    def __init__(self, lent: LentMemory, region: Region, start: int, stop: int) -> None:
        super().__init__(region, start, stop - start)
        self._lent = lent

    def part(self, part: slice) -> LentShard:
        first, stop, _ = part.indices(self._numel)
        return LentShard(self._lent, self.region, self._start + first, self._start + max(first, stop))

    @property
    def memory(self) -> Tensor | None:
        """None: it is read when it is its turn to be written."""
        return None

    def read(self) -> Tensor:
        return self._lent.block(self._start, self._start + self._numel)
