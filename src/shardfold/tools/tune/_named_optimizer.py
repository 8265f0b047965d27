"""The optimizer and the schedule that a tuning's settings name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import shardfold as sf
from shardfold.tools.tune.adapters import optimizer_groups
from shardfold.tools.tune.config import TuneConfig

__all__ = ["optimizer_of", "schedule_of"]

BETAS = (0.9, 0.999)


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
    if config.optimizer == "muon":
        return sf.optim.Muon(
            sf.optim.muon_groups(model, lr=config.lr, adamw_lr=config.lr, betas=BETAS), weight_decay=config.weight_decay
        )
    if config.optimizer in ("galore", "galore8bit"):
        names = {"rank": config.galore_rank, "update_proj_gap": config.galore_every, "scale": config.galore_scale}
        return sf.optim.GaLore(
            sf.optim.galore_groups(model, others=("*head*", "score*"), **names),
            lr=config.lr,
            betas=BETAS,
            weight_decay=config.weight_decay,
            bits=8 if config.optimizer == "galore8bit" else 32,
        )
    classes: dict[str, tuple[type, dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"betas": BETAS}),
        "adamw8bit": (sf.optim.AdamW8bit, {"betas": BETAS}),
        "adafactor": (sf.optim.Adafactor, {}),
        "lion": (sf.optim.Lion, {}),
    }
    kind, options = classes[config.optimizer]
    if config.adapter is not None and config.adapter.lr_ratio is not None:
        return optimizer_groups(model, config.adapter, kind, config.lr, config.weight_decay, **options)
    return partial(kind, lr=config.lr, weight_decay=config.weight_decay, **options)
