"""Learning-rate schedules: callables that take an optimizer and give a ``torch.optim.lr_scheduler``."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardfold.errors import ConfigError

__all__ = ["warmup_cosine"]


def warmup_cosine(*, warmup: int, total: int, floor: float = 0.1) -> Callable[[Optimizer], LambdaLR]:
    """Linear warm-up over ``warmup`` steps, then half a cosine down to ``floor`` times the peak at step ``total``.

    The first step already trains: its rate is ``1 / warmup`` of the peak (Loshchilov & Hutter, arXiv 1608.03983).

    Raises:
        ConfigError: the numbers do not describe a schedule.
    """
    if not 0 <= warmup <= total or total < 1 or not 0.0 <= floor <= 1.0:
        raise ConfigError(
            f"warmup_cosine(warmup={warmup}, total={total}, floor={floor}): "
            "0 <= warmup <= total, total >= 1 and 0 <= floor <= 1 must hold."
        )

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(total - warmup, 1), 1.0)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return lambda optimizer: LambdaLR(optimizer, factor)
