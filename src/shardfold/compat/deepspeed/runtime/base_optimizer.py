"""What returned optimizers are instances of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["DeepSpeedOptimizer", "DeepSpeedOptimizerCallable", "DeepSpeedSchedulerCallable", "ZeROOptimizer"]

DeepSpeedOptimizerCallable = Callable[[Any], Optimizer]
DeepSpeedSchedulerCallable = Callable[[Optimizer], LRScheduler]


class DeepSpeedOptimizer:
    """Base of the optimizers that ``initialize`` returns."""


class ZeROOptimizer(DeepSpeedOptimizer):
    """Base of those whose states are split over the ranks."""
