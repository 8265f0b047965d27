"""What an optimizer says of how units are cut: groups, elements that stay together, and states like the parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

__all__ = ["PerElement", "alignment", "group_numbers"]


def group_numbers(optimizer: Optimizer) -> dict[int, int]:
    """``{id(parameter): number of its group}``."""
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def alignment(optimizer: Optimizer | None) -> int:
    """Elements that no rank boundary may cut, for this optimizer."""
    return int(getattr(optimizer, "align", 1))  # of ours; torch's cut anywhere


@dataclass(frozen=True)
class PerElement:
    """A part of an optimizer's state that has one value for each element of its parameter."""

    dtype: torch.dtype
