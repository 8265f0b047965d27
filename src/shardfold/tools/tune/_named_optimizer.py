"""The optimizer and the schedule that a tuning's settings name."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

import shardfold as sf
from shardfold.tools.named_optimizers import named_optimizer
from shardfold.tools.tune.adapters import optimizer_groups
from shardfold.tools.tune.config import TuneConfig

__all__ = ["optimizer_of", "schedule_of"]


def schedule_of(config: TuneConfig, total: int) -> Any:
    """As an engine takes it; ``total``: updates of the whole run."""
    from torch.optim.lr_scheduler import LambdaLR

    if config.schedule == "cosine":
        return sf.optim.warmup_cosine(warmup=min(config.warmup, total), total=total, floor=0.0)

    def factor(step: int) -> float:
        if step < config.warmup:
            return (step + 1) / config.warmup
        if config.schedule == "constant":
            return 1.0
        return max(0.0, (total - step) / max(1, total - config.warmup))

    return lambda optimizer: LambdaLR(optimizer, factor)


def optimizer_of(config: TuneConfig, model: nn.Module) -> Any:
    """As an engine takes it."""
    galore = {"rank": config.galore_rank, "update_proj_gap": config.galore_every, "scale": config.galore_scale}
    found: Any = named_optimizer(config.optimizer, model, lr=config.lr, weight_decay=config.weight_decay, galore=galore)
    if isinstance(found, partial) and config.adapter is not None and config.adapter.lr_ratio is not None:
        options = {name: value for name, value in found.keywords.items() if name not in ("lr", "weight_decay")}
        kind: Any = found.func
        return optimizer_groups(model, config.adapter, kind, config.lr, config.weight_decay, **options)
    return found
