"""This rank's part of a state that rests as codes, to be read and written as the values that they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from shardfold.plan.formats import Format
from shardfold.sharding.shard import Shard
from shardfold.tiers.tier import Region

__all__ = ["CodedShard"]


class CodedShard(Shard):
    """A range of what a region's codes stand for. It has no memory of its own: what is read is decoded, and what is
    written is coded again, with all of the blocks that it is a part of.

    Args:
        region: of codes, uint8.
        start: where the range begins, in elements.
        numel: its elements.
        form: of the codes.
        dtype: of the values.
    """

    def __init__(self, region: Region, start: int, numel: int, form: Format, dtype: torch.dtype) -> None:
        super().__init__(region, start, numel)
        self.dtype, self.itemsize = dtype, dtype.itemsize
        self._form = form

    def part(self, part: slice) -> CodedShard:
        first, stop, _ = part.indices(self._numel)
        return CodedShard(self.region, self._start + first, max(0, stop - first), self._form, self.dtype)

    @property
    def memory(self) -> Tensor | None:
        return None

    def read(self) -> Tensor:
        first, _, values = self._blocks()
        return values[self._start - first : self._start - first + self._numel]

    def write(self, values: Tensor) -> None:
        if not self._numel:
            return
        first, size, whole = self._blocks(whole=self._numel % self._form.block or self._start % self._form.block)
        whole[self._start - first : self._start - first + self._numel] = values.detach()
        payload = torch.empty(self._form.nbytes(whole.numel()), dtype=torch.uint8, device=whole.device)
        self._form.encode_tensor(whole, payload)
        self.region.write(first // self._form.block * size, payload)

    def _blocks(self, *, whole: object = True) -> tuple[int, int, Tensor]:
        """Where the blocks begin that the range is in, in elements, the bytes of one, and their values; undefined where
        these are not wanted ``whole``."""
        block, size = self._form.block, self._form.nbytes(self._form.block)
        first, last = self._start // block, -(-(self._start + self._numel) // block)
        codes = self.region.values(slice(first * size, last * size)) if whole else self.region.values(slice(0, 0))
        values = torch.empty((last - first) * block, dtype=self.dtype, device=codes.device)
        if whole:
            self._form.decode(codes.view(1, -1), values.view(1, -1))
        return first * block, size, values
