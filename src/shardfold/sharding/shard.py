"""This rank's part of one state of a segment, to be read and written by ranges wherever it rests.

What is in memory is read as that memory itself; what is in a file is read into memory of the host, as much as was asked
for, and written back by whoever changes it. So whoever goes through a model shard by shard, or range by range, never
has more of it in memory than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shardfold.tiers.tier import Region

__all__ = ["Shard", "values_of"]


class Shard:
    """A range of a region.

    Args:
        region: that it rests in.
        start: where it begins there, in elements.
        numel: its elements.
    """

    def __init__(self, region: Region, start: int, numel: int) -> None:
        self.region, self._start, self._numel = region, start, numel
        self.dtype = region.dtype
        self.itemsize = region.dtype.itemsize

    def numel(self) -> int:
        """Its elements."""
        return self._numel

    def part(self, part: slice) -> Shard:
        """A range of it."""
        first, stop, _ = part.indices(self._numel)
        return Shard(self.region, self._start + first, max(0, stop - first))

    @property
    def memory(self) -> Tensor | None:
        """The memory itself, ``(numel,)``, once nothing is on its way to or from it; None: it is in a file."""
        return None if self.region.resting is None else self.read()

    def read(self) -> Tensor:
        """The values, ``(numel,)``: the memory itself, or, of a file, a copy in memory of the host.

        Raises:
            OSError: they could not be read.
        """
        return self.region.values(slice(self._start, self._start + self._numel))

    def write(self, values: Tensor) -> None:
        """Takes values ``(numel,)`` of any dtype and device.

        Raises:
            OSError: see :meth:`Region.store`.
        """
        if self._numel:
            self.region.write(self._start, values.detach())

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """Inside, all values, to be read and changed in place; at the end of the block they are where they rest. Where
        they cannot be read, the block does not begin."""
        values = self.read()
        yield values
        if self.memory is None:
            self.write(values)


def values_of(given: Tensor | Shard) -> Tensor:
    """A tensor itself, or what a shard holds."""
    return given if isinstance(given, Tensor) else given.read()
