"""``deepspeed.runtime.zero.utils``."""

from __future__ import annotations

from typing import Any

import torch

from shardfold.compat.deepspeed.zero.attributes import is_zero_param
from shardfold.errors import UsageError as ZeRORuntimeException

__all__ = ["ZeRORuntimeException", "is_zero_param", "is_zero_supported_optimizer"]


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether it is an optimizer of PyTorch's: any works under every stage."""
    return isinstance(optimizer, torch.optim.Optimizer)
