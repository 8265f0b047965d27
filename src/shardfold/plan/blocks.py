"""Blocks of codes: each has a scale, which lies behind its codes in the payload.

    | codes of block 0 | scale | codes of block 1 | scale | ...

    Integers    ``int8``, ``int4``: code = round(value / scale), scale = greatest magnitude / 127 or / 7. With a
                ``zero`` point the codes go from the least value to the greatest, and 0 is one of them. Two codes of 4
                bits share a byte: that of element i of a block and that of element i + block / 2.
    Fp8         ``fp8``: e4m3 numbers, scale = greatest magnitude / 448

An element is at most half a step away from what is decoded (``stochastic``: less than one), where a step is the scale;
of ``fp8``, 1/16 of the element's own magnitude, or 2^-10 of the scale. Zeros are exact. A block with inf or NaN in it
is decoded as NaN throughout, so whoever looks for such numbers finds them. Scales are 2^-126 or more, which keeps their
reciprocals finite: a block of smaller numbers than that is sent as zeros.

Rounding is to the nearest, ties to even. ``stochastic`` adds a number from [0, 1) and rounds down, so that sums over
many elements have no bias; the draws are seeded by the scales, so that the same values give the same codes. With
``error`` what is lost is kept, and added to what is encoded next (arXiv 1809.07599, LoCo: arXiv 2407.04480); of a block
that is not finite nothing is kept, and what was stays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from shardfold.plan.format import FLOATS, Format

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Blocks", "Fp8", "Integers"]

SMALLEST_SCALE = 2.0**-126
"""The smallest normal number of fp32."""
AT_ONCE = 2**18
"""Elements that are encoded or decoded at a time: temporaries stay in the cache."""


class Blocks(Format):
    """Blocks of codes, each with a scale in fp32 behind it.

    Attributes:
        coded: bytes of the codes of a block.
        numbers: of fp32 behind them.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = ("error",)
    numbers = 1

    def __init__(self, base: str, block: int, options: Sequence[str], bits: int) -> None:
        super().__init__(f"{base}/{block}" + (f":{','.join(options)}" if options else ""))
        self.block, self.coded = block, block * bits // 8
        self.state = "fp32" if "error" in options else None
        self.gathers = self.state is None

    def carries(self, dtype: str) -> bool:
        return dtype in FLOATS

    def nbytes(self, length: int) -> int:
        return length // self.block * (self.coded + 4 * self.numbers)

    @abstractmethod
    def _scale(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Of blocks ``(n, block)`` the scales ``(n, 1)``, NaN where one is not finite, and all numbers behind the
        codes ``(n, numbers)``."""

    @abstractmethod
    def _code(self, values: Tensor, scale: Tensor, numbers: Tensor, codes: Tensor) -> None:
        """Writes ``codes`` ``(n, coded)``."""

    @abstractmethod
    def _value(self, codes: Tensor, numbers: Tensor, values: Tensor) -> None:
        """Writes ``values`` ``(n, block)``, in fp32."""

    def encode(self, values: Tensor, payload: Tensor, state: Tensor | None = None) -> None:
        import torch

        for part, codes, numbers, kept in self._parts(values, payload, state):
            wide = part.float()
            if kept is not None:
                wide = wide + kept
            scale, behind = self._scale(wide)
            numbers.copy_(behind)
            self._code(wide, scale, behind, codes)
            if kept is not None:
                sent = torch.empty_like(wide)
                self._value(codes, behind, sent)
                lost, old = torch.sub(wide, sent, out=sent).view(torch.int32), kept.view(torch.int32)
                finite = (scale == scale).to(torch.int32).neg_()  # ones throughout; bits are taken faster than by where
                old.bitwise_xor_(lost.bitwise_xor_(old).bitwise_and_(finite))

    def decode(self, payload: Tensor, values: Tensor) -> None:
        import torch

        for part, codes, numbers, _ in self._parts(values, payload, None):
            if part.dtype == torch.float32:
                self._value(codes, numbers, part)
            else:
                wide = torch.empty(part.shape, device=part.device)
                self._value(codes, numbers, wide)
                part.copy_(wide)

    def _parts(
        self, values: Tensor, payload: Tensor, state: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Blocks ``(n, block)``, their codes ``(n, coded)``, the numbers behind these ``(n, numbers)``, and their
        state, a few at a time."""
        import torch

        together = all(each is None or each.is_contiguous() for each in (values, payload, state))
        rows = [...] if together else range(len(values))
        step = max(AT_ONCE // self.block, 1)
        for row in rows:
            blocks, into = values[row].view(-1, self.block), payload[row].view(-1, self.coded + 4 * self.numbers)
            feedback = None if state is None else state[row].view(-1, self.block)
            for i in range(0, len(blocks), step):
                some = into[i : i + step]
                yield (
                    blocks[i : i + step],
                    some[:, : self.coded],
                    some[:, self.coded :].view(torch.float32),
                    None if feedback is None else feedback[i : i + step],
                )


class Integers(Blocks):
    """Integers of 8 or 4 bits."""

    OPTIONS: ClassVar[tuple[str, ...]] = ("zero", "stochastic", "error")

    def __init__(self, base: str, block: int, options: Sequence[str]) -> None:
        self._bits = int(base.removeprefix("int"))
        self._zero, self._draws = "zero" in options, "stochastic" in options
        self.numbers = 2 if self._zero else 1
        self._most = 2**self._bits - 1 if self._zero else 2 ** (self._bits - 1) - 1
        super().__init__(base, block, options, self._bits)

    def _scale(self, values: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        if not self._zero:
            scale = _scale_of(values.abs().amax(-1, keepdim=True), self._most)
            return scale, scale
        low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
        scale = _scale_of(high - low, self._most)
        return scale, torch.cat([scale, (low * -scale.reciprocal()).round()], -1)

    def _code(self, values: Tensor, scale: Tensor, numbers: Tensor, codes: Tensor) -> None:
        import torch

        steps = values * scale.reciprocal()
        if self._draws:
            steps += _draws(steps, scale)
            steps.floor_()
        else:
            steps.round_()
        if self._zero:
            steps += numbers[:, 1:]
        if self._zero or self._draws:
            steps.clamp_(0 if self._zero else -self._most, self._most)
        kind = torch.uint8 if self._zero else torch.int8
        if self._bits == 8:
            codes.view(kind).copy_(steps)
        else:
            whole = steps.to(kind).view(torch.uint8)
            half = self.block // 2
            torch.bitwise_or(whole[:, :half] & 15, whole[:, half:] << 4, out=codes)

    def _value(self, codes: Tensor, numbers: Tensor, values: Tensor) -> None:
        import torch

        scale = numbers[:, :1]
        halves = [(codes, values)]
        if self._bits == 4:
            half = self.block // 2
            if self._zero:
                low, high = codes & 15, codes >> 4
            else:  # shifted as signed numbers, which extends the sign
                low, high = (codes.view(torch.int8) << 4) >> 4, codes.view(torch.int8) >> 4
            halves = [(low, values[:, :half]), (high, values[:, half:])]
        for part, into in halves:
            if self._zero:
                torch.sub(part, numbers[:, 1:], out=into)
                into.mul_(scale)
            else:
                torch.mul(part.view(torch.int8), scale, out=into)


class Fp8(Blocks):
    """Numbers of 8 bits, of which 4 are an exponent: e4m3."""

    def __init__(self, base: str, block: int, options: Sequence[str]) -> None:
        super().__init__(base, block, options, 8)

    def _scale(self, values: Tensor) -> tuple[Tensor, Tensor]:
        scale = _scale_of(values.abs().amax(-1, keepdim=True), 448)
        return scale, scale

    def _code(self, values: Tensor, scale: Tensor, numbers: Tensor, codes: Tensor) -> None:
        import torch

        codes.view(torch.float8_e4m3fn).copy_(values * scale.reciprocal())

    def _value(self, codes: Tensor, numbers: Tensor, values: Tensor) -> None:
        import torch

        values.copy_(codes.view(torch.float8_e4m3fn))
        values.mul_(numbers[:, :1])


def _scale_of(spread: Tensor, steps: int) -> Tensor:
    """Of the size of each block; NaN where that is not finite."""
    import torch

    # By a tensor: by a number, CUDA's kernel multiplies by the reciprocal, which rounds otherwise than a division.
    by = torch.full((), steps, dtype=spread.dtype, device=spread.device)
    return (spread / by).clamp_(min=SMALLEST_SCALE).add_(spread - spread)


def _draws(values: Tensor, scale: Tensor) -> Tensor:
    """Numbers from [0, 1) in steps of 2^-16, so that what is added to a code and a draw is exact.

    Each is the place of the number, with the scales mixed in, behind the last steps of MurmurHash3 (Appleby, 2011): the
    same on all devices, and nothing is read by the host.
    """
    import torch

    mixed = torch.arange(values.numel(), dtype=torch.int32, device=values.device)
    mixed += scale.view(torch.int32).sum().to(torch.int32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed ^= (mixed >> shift) & (2 ** (32 - shift) - 1)
        mixed *= factor - 2**32 if factor >= 2**31 else factor  # as a number of int32, whose products wrap around
    return (mixed & 0xFFFF).view(values.shape) / 2**16
