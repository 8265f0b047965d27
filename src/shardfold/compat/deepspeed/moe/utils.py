"""``deepspeed.moe.utils``: which parameters are experts', and groups of these for an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardfold.compat.deepspeed.lazy import attach
from shardfold.compat.deepspeed.moe.layer import MoE
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = [
    "has_moe_layers",
    "is_moe_param",
    "is_moe_param_group",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there are layers of ``MoE``, and how many experts the first has."""
    layers = [module for module in m.modules() if isinstance(module, MoE)]
    return bool(layers), layers[0].num_experts if layers else 0


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


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | float = 178956971
) -> list[dict[str, Any]]:
    """The groups without experts' parameters, and behind them groups of these, with the same settings, ``moe=True`` and
    the name of the experts' group; of at most ``max_group_size`` elements each, but for one that has more alone.

    Raises:
        WrongArgument: a group has no name.
    """
    given: Any = param_groups
    groups: list[dict[str, Any]] = [given] if isinstance(given, dict) else list(given)
    shared: list[dict[str, Any]] = []
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for number, group in enumerate(groups):
        if "name" not in group:
            raise WrongArgument("split_params_into_different_moe_groups_for_optimizer(): each group needs a 'name'.")
        own, experts = split_params_into_shared_and_expert_params(group["params"])
        shared.append({**group, "params": own})
        for param in experts:
            name = getattr(param, "group_name", "experts")
            of_name = found.setdefault((number, name), [])
            held = sum(p.numel() for p in of_name[-1]["params"]) if of_name else 0
            if not of_name or held + param.numel() > max_group_size:
                of_name.append({**group, "params": [], "name": name, "moe": True})
            of_name[-1]["params"].append(param)
    return [*shared, *(group for made in found.values() for group in made)]


__getattr__, __dir__ = attach(__name__)
