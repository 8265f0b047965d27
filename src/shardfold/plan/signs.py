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
from shardfold.plan.arguments import known_arguments
from shardfold.plan.blocks import Blocks
from shardfold.plan.checks import described, is_flag, is_integer

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Sign", "Signs"]

WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


class Sign(Blocks):
    """One bit for each value: that of element ``8 i + k`` of a block is bit ``k`` of its byte ``i``."""

    def __init__(self, base: str, block: int, options: Sequence[str]) -> None:
        if block % 32:
            raise LayoutError(f"the format 'sign/{block}': blocks of signs have a multiple of 32 elements.")
        super().__init__(base, block, options, 1)

    def _scale(self, values: Tensor) -> tuple[Tensor, Tensor]:
        count = values.count_nonzero(-1).unsqueeze(-1).clamp_(min=1)
        total = values.abs().sum(-1, keepdim=True)
        scale = total / count + (total - total)
        return scale, scale

    def _code(self, values: Tensor, scale: Tensor, numbers: Tensor, codes: Tensor) -> None:
        import torch

        bits = (values >= 0).view(len(values), -1, 8).to(torch.uint8)
        weights = torch.tensor(WEIGHTS, dtype=torch.uint8, device=values.device)
        codes.copy_((bits * weights).sum(-1, dtype=torch.uint8))

    def _value(self, codes: Tensor, numbers: Tensor, values: Tensor) -> None:
        import torch

        weights = torch.tensor(WEIGHTS, dtype=torch.uint8, device=codes.device)
        bits = (codes.unsqueeze(-1) & weights).ne_(0).view(len(codes), -1)
        values.copy_(bits).mul_(2).sub_(1).mul_(numbers[:, :1])


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
