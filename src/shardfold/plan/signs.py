"""Signs: of each value one bit, of each block one scale, the mean magnitude of its values that are not 0.

A block that is not finite has the scale NaN, as blocks of codes have (see ``blocks``). Zeros have no bit of their own:
they are decoded as the scale, so whoever sends some that are to stay zeros sets them so again. Also what 1-bit
optimizers let the ranks of an axis send (:class:`Signs`; arXiv 2102.02888).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.blocks import Blocks
from shardfold.plan.checks import described, is_flag, is_integer, known_arguments

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sign", "Signs"]

GATHER = sum(1 << (56 - 7 * k) for k in range(8))
"""Times a word of eight bytes that are 0 or 1: its highest byte has byte ``k`` as bit ``k``, as no sum carries."""
REPEAT = sum(1 << (8 * k) for k in range(8))
"""Times a byte: a word of eight of it."""
EACH = sum(1 << (9 * k) for k in range(8)) - (1 << 64)
"""Bit ``k`` of byte ``k``, as a signed word."""


class Sign(Blocks):
    """One bit for each value: that of element ``8 i + k`` of a block is bit ``k`` of its byte ``i``."""

    def __init__(self, base: str, block: int, options: Sequence[str]) -> None:
        if block % 32:
            raise LayoutError(f"the format 'sign/{block}': blocks of signs have a multiple of 32 elements.")
        super().__init__(base, block, options, 1)
        self.gathers = False

    def _scale(self, values: Tensor) -> tuple[Tensor, Tensor]:
        import torch

        # Comparisons that give floats are vectorized on a CPU; those that give bools take ten times as long.
        each = torch.ne(values, 0, out=torch.empty_like(values))
        count = each.sum(-1, keepdim=True).clamp_(min=1)
        total = torch.abs(values, out=each).sum(-1, keepdim=True)
        scale = total / count + (total - total)
        return scale, scale

    def _code(self, values: Tensor, scale: Tensor, numbers: Tensor, codes: Tensor) -> None:
        import torch

        bits = torch.ge(values, 0, out=torch.empty_like(values)).to(torch.int8)
        words = bits.view(torch.int64).mul_(GATHER)
        codes.copy_(words.view(torch.uint8)[:, 7::8])

    def _value(self, codes: Tensor, numbers: Tensor, values: Tensor) -> None:
        import torch

        words = codes.to(torch.int64).mul_(REPEAT).bitwise_and_(EACH)
        bits = words.view(torch.uint8).clamp_(max=1).view(torch.int8)
        values.copy_(bits.mul_(2).sub_(1)).mul_(numbers[:, :1])


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Signs:
    """Ranks along an axis send the signs of their momentum in place of gradients, once their optimizer's variance is
    frozen: 1-bit Adam (arXiv 2102.02888).

    Attributes:
        axis: an axis of data, by default the slow one. Within the groups of ranks that differ on other axes, the layout
            holds as ever.
        block: elements that share a scale.
        error: whether each side keeps what it loses, and adds it to what it sends next; False is for comparison.

    Raises:
        ConfigError: a field is of a wrong type or value.

    Examples:
        >>> sf.Signs(axis="inter", block=1024).error
        True
    """

    axis: str = "inter"
    block: int = 1024
    error: bool = True

    def __post_init__(self) -> None:
        given: Any = self.axis
        if not isinstance(given, str):
            raise ConfigError(f"Signs.axis is {described(given)}: it is the name of an axis, as 'inter'.")
        if not is_integer(self.block, 32, 65536) or self.block % 32:
            raise ConfigError(
                f"Signs.block is {described(self.block)}: it is a number of elements, a multiple of 32 up to 65536."
            )
        if not is_flag(self.error):
            raise ConfigError(f"Signs.error is {described(self.error)}: it is True or False.")

    @property
    def back(self) -> str:
        """The format of what comes back."""
        return f"sign/{self.block}"

    @property
    def format(self) -> str:
        """The format of what is sent to be averaged."""
        return self.back + ":error" * self.error

    def __str__(self) -> str:
        return f"of momentum over {self.axis}, in blocks of {self.block}" + ", errors dropped" * (not self.error)
