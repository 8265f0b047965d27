"""Blocks whose codes are numbers of levels in a fixed table, and scales that are codes themselves.

    Levels      ``nf4``: 16 levels, quantiles of a normal distribution (QLoRA, arXiv 2305.14314, appendix E);
                ``int2``: four, evenly spaced. The scale of a block is its greatest magnitude, each element the nearest
                level times that. The first element of a byte is in its highest bits.
    Double      ``+double`` behind any of ``nf4``, ``int8``, ``int4``, ``int2``: scales are codes of 8 bits (QLoRA,
                section 3). From all scales of a tensor their mean is taken, and what is left is coded in groups of 256
                with a dynamic exponent (arXiv 1511.04561) and the group's greatest magnitude.

Codes and scales of ``nf4`` are those of bitsandbytes 0.50 on a CPU to the bit, where a tensor has a whole number of
blocks: an element in the middle of two levels takes the lower one; what is left of a scale is first put on a grid of
65,535 steps, and then takes the nearest code.

Such formats are for what rests (see ``Layout.base``). The mean of a tensor's scales is beside each group, so that
ranks which have a part of a tensor decode it alone:

    | codes of 256 blocks | 256 codes of scales | greatest magnitude, fp32 | mean, fp32 |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from shardfold.errors import LayoutError
from shardfold.plan.blocks import AT_ONCE, Blocks
from shardfold.plan.format import FLOATS, Family, Format

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Double", "Levels", "WithDouble"]

TABLES: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "int2": (-1.0, -1 / 3, 1 / 3, 1.0),
}  # fmt: skip
TINY = 1e-38
"""Scales are divided by as if they were at least that."""
CELLS = 64
"""Of the numbers from -1 to 1: neighbouring middles of levels are farther apart than one of them is wide."""
GROUP = 256
"""Scales that share what they are coded by."""
GRID = 65535
"""Steps from -1 to 1 on which what is left of a scale lies before it takes a code."""


class Levels(Blocks):
    """Codes of 4 or 2 bits, each the number of a level."""

    OPTIONS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, base: str, block: int, options: Sequence[str]) -> None:
        self._table = TABLES[base]
        self._bits = len(self._table).bit_length() - 1
        super().__init__(base, block, options, self._bits)
        self.only_rests = 0.0 not in self._table  # what is sent keeps zeros, and int2 has none

    def _scale(self, values: Tensor) -> tuple[Tensor, Tensor]:
        scale = values.abs().amax(-1, keepdim=True)
        scale = scale + (scale - scale)
        return scale, scale

    def _code(self, values: Tensor, scale: Tensor, numbers: Tensor, codes: Tensor) -> None:
        import torch

        steps = (values * scale.clamp(min=TINY).reciprocal()).nan_to_num_().clamp_(-1, 1)
        below, middles = _cells(self._table, values.device)
        cell = _cell_of(steps).view(-1)
        above = torch.gt(steps.view(-1), middles.index_select(0, cell))
        level = below.index_select(0, cell).add_(above).view(steps.shape)
        count = 8 // self._bits
        packed = level[:, ::count] << (8 - self._bits)
        for place in range(1, count):
            packed |= level[:, place::count] << (8 - self._bits * (place + 1))
        codes.copy_(packed)

    def _value(self, codes: Tensor, numbers: Tensor, values: Tensor) -> None:
        import torch

        found = _bytes(self._table, self._bits, values.device).index_select(0, codes.reshape(-1).int())
        torch.mul(found.view(torch.float32).view(values.shape), numbers[:, :1], out=values)


class Double(Format):
    """Blocks whose scales are codes of 8 bits; a row of values is one tensor."""

    gathers = False
    only_rests = True

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(f"{blocks.name}:double")
        self._blocks = blocks
        self.block = blocks.block * GROUP
        self._coded = blocks.coded * GROUP
        self._nbytes = self._coded + GROUP + 8

    def carries(self, dtype: str) -> bool:
        return dtype in FLOATS

    def nbytes(self, length: int) -> int:
        return length // self.block * self._nbytes

    def encode(self, values: Tensor, payload: Tensor, state: Tensor | None = None) -> None:
        for row, into in zip(values, payload, strict=True):
            self.encode_tensor(row, into)

    def encode_tensor(self, values: Tensor, payload: Tensor) -> None:
        import torch

        blocks, each = self._blocks, self._blocks.block
        into = payload.view(-1, self._nbytes)
        count = -(-values.numel() // each)
        scales = torch.zeros(len(into) * GROUP, device=values.device)
        step = max(AT_ONCE // self.block, 1)
        for i in range(0, len(into), step):
            rows = into[i : i + step]
            part = values[i * self.block : (i + len(rows)) * self.block].float()
            wide = torch.nn.functional.pad(part, (0, len(rows) * self.block - part.numel())).view(-1, each)
            scale, behind = blocks._scale(wide)
            codes = torch.empty(len(wide), blocks.coded, dtype=torch.uint8, device=values.device)
            blocks._code(wide, scale, behind, codes)
            rows[:, : self._coded] = codes.view(len(rows), -1)
            scales[i * GROUP : (i + len(rows)) * GROUP] = scale.view(-1)
        mean = scales[:count].mean()
        scales[:count] -= mean
        scales[count:] = 0  # what pads the last group counts for nothing
        groups = scales.view(-1, GROUP)
        most = groups.abs().amax(-1, keepdim=True)
        steps = (groups * most.reciprocal()).clamp_(-1, 1)
        place = ((steps + 1) * 0.5 * GRID + 0.5).nan_to_num_().int()
        codes = _grid_codes(values.device).index_select(0, place.view(-1)).view(-1, GROUP)
        into[:, self._coded : self._coded + GROUP] = codes.masked_fill_(most == 0, 0)
        numbers = into[:, self._coded + GROUP :].view(torch.float32)
        numbers[:, :1], numbers[:, 1:] = most, mean

    def decode(self, payload: Tensor, values: Tensor) -> None:
        import torch

        each, step = self._blocks.block, max(AT_ONCE // self.block, 1)
        dynamic = _dynamic(values.device)
        for row, into in zip(payload, values, strict=True):
            groups, out = row.view(-1, self._nbytes), into.view(-1, each)
            for i in range(0, len(groups), step):
                some, part = groups[i : i + step], out[i * GROUP : (i + step) * GROUP]
                numbers = some[:, self._coded + GROUP :].view(torch.float32)
                codes = some[:, self._coded : self._coded + GROUP].reshape(-1).int()
                scales = dynamic.index_select(0, codes).view(-1, GROUP).mul_(numbers[:, :1]).add_(numbers[:, 1:])
                wide = part if part.dtype == torch.float32 else torch.empty(part.shape, device=part.device)
                self._blocks._value(some[:, : self._coded].reshape(-1, self._blocks.coded), scales.view(-1, 1), wide)
                if wide is not part:
                    part.copy_(wide)


class WithDouble:
    """A family whose names may have the option ``double`` besides, alone."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self.OPTIONS = (*family.OPTIONS, "double")

    def __call__(self, base: str, block: int, options: Sequence[str]) -> Format:
        if "double" not in options:
            return self._family(base, block, options)
        if len(options) > 1:
            raise LayoutError(
                f"the format '{base}/{block}+{'+'.join(options)}' has an option beside 'double': scales that are codes "
                "go with none; leave one of them out."
            )
        made = self._family(base, block, ())
        assert isinstance(made, Blocks)
        return Double(made)


def _cell_of(steps: Tensor) -> Tensor:
    """In which of the cells that the numbers from -1 to 1 are divided into each is, int32; of a greater number it is
    none before."""
    return ((steps + 1) * (CELLS / 2)).int()


@cache
def _cells(table: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each cell how many middles between neighbouring levels lie in cells before it, uint8, and the one that lies in
    it: there is one at most. So a search is one look and one comparison."""
    import torch

    levels = torch.tensor(table)
    middles = (levels[:-1] + levels[1:]) / 2
    cells = _cell_of(middles).long()
    below = torch.searchsorted(cells, torch.arange(CELLS + 1))
    inside = torch.full((CELLS + 1,), torch.inf).index_put_((cells,), middles)
    return below.to(torch.uint8).to(device), inside.to(device)


@cache
def _bytes(table: tuple[float, ...], bits: int, device: torch.device) -> Tensor:
    """The levels that each byte stands for, fp32, two of them as one number of 64 bits, which are copied faster than
    rows: ``(256,)`` of 4 bits, ``(256, 2)`` of 2."""
    import torch

    places = torch.arange(8 - bits, -1, -bits)
    levels = torch.tensor(table)[(torch.arange(256)[:, None] >> places) & (len(table) - 1)]
    return levels.view(torch.int64).squeeze(-1).to(device)


@cache
def _dynamic(device: torch.device) -> Tensor:
    """What the 256 codes of scales stand for, ascending: 0, 1, and with either sign for each power of ten from -6 to 0
    evenly spaced numbers, twice as many as for the one before."""
    import torch

    found = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        numbers = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (exponent - 6)
        found += [*numbers.tolist(), *(-numbers).tolist()]
    return torch.tensor(sorted(found)).to(device)


@cache
def _grid_codes(device: torch.device) -> Tensor:
    """The code of each number of the grid."""
    import torch

    codes = _dynamic(torch.device("cpu"))
    grid = -1.0 + (2.0 * torch.arange(GRID + 1, dtype=torch.float32)) / GRID
    return torch.bucketize(grid, 0.5 * (codes[:-1] + codes[1:])).to(torch.uint8).to(device)
