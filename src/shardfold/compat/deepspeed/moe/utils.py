"""``deepspeed.moe.utils``: which parameters are experts'. None is split over ranks here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardfold.compat.deepspeed.lazy import attach

__all__ = ["has_moe_layers", "is_moe_param", "is_moe_param_group", "split_params_into_shared_and_expert_params"]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """``(False, 0)``: there are no layers of DeepSpeed's ``MoE``."""
    return False, 0


def is_moe_param(param: Any) -> bool:
    """Whether it is marked as an expert's, by a false attribute ``allreduce``."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: Mapping[str, Any]) -> bool:
    """Whether a group is marked as experts'."""
    return param_group.get("moe", False)


def split_params_into_shared_and_expert_params(params: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Those of all, and those marked as experts'."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for param in params:
        found[is_moe_param(param)].append(param)
    return found


__getattr__, __dir__ = attach(__name__)
