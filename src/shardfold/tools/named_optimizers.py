"""Optimizers by the names that options have for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from shardfold.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import nn

__all__ = ["OPTIMIZERS", "check_optimizer", "named_optimizer"]

OPTIMIZERS = {
    "adamw": "AdamW",
    "adamw8bit": "8-bit AdamW",
    "adafactor": "Adafactor",
    "lion": "Lion",
    "muon": "Muon",
    "galore": "GaLore",
    "galore8bit": "8-bit GaLore",
}
"""What each is called."""
BETAS = (0.9, 0.999)


def check_optimizer(name: str) -> str:
    """The name.

    Raises:
        ConfigError: there is no such optimizer.
    """
    if name not in OPTIMIZERS:
        raise ConfigError(
            f"there is no optimizer {name!r}.{did_you_mean(name, OPTIMIZERS)} Known are {', '.join(OPTIMIZERS)}."
        )
    return name


def named_optimizer(
    name: str, model: nn.Module, *, lr: float = 1e-3, weight_decay: float = 0.0, galore: Mapping[str, Any]
) -> Any:
    """An optimizer as an engine takes it: of groups of the model's parameters, or a ``partial`` that takes parameters.

    Args:
        name: of ``OPTIMIZERS``.
        galore: GaLore's ``rank``, ``update_proj_gap`` and ``scale``.
    """
    import torch

    import shardfold as sf

    if name == "muon":
        groups = sf.optim.muon_groups(model, lr=lr, adamw_lr=lr, betas=BETAS)
        return sf.optim.Muon(groups, weight_decay=weight_decay)
    if name in ("galore", "galore8bit"):
        return sf.optim.GaLore(
            sf.optim.galore_groups(model, others=("*head*", "score*"), **galore),
            lr=lr,
            betas=BETAS,
            weight_decay=weight_decay,
            bits=8 if name == "galore8bit" else 32,
        )
    classes: dict[str, tuple[type, dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"betas": BETAS}),
        "adamw8bit": (sf.optim.AdamW8bit, {"betas": BETAS}),
        "adafactor": (sf.optim.Adafactor, {}),
        "lion": (sf.optim.Lion, {}),
    }
    kind, options = classes[name]
    return partial(kind, lr=lr, weight_decay=weight_decay, **options)
