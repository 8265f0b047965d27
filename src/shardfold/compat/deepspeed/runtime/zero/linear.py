"""``deepspeed.runtime.zero.linear``: linear layers by the names of those that keep no copy of gathered weights.

No layer keeps one here, so these are PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "MemoryEfficientLinear", "zero3_linear_wrap"]


class LinearModuleForZeroStage3(nn.Linear):
    """``torch.nn.Linear``."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


MemoryEfficientLinear = LinearModuleForZeroStage3


class LinearFunctionForZeroStage3:
    """Has ``apply(input, weight, bias=None)``, which is ``torch.nn.functional.linear``."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        return torch.nn.functional.linear(input, weight, bias)


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``."""
    return torch.nn.functional.linear(input, weight, bias)
