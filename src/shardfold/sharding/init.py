"""What a new engine begins with: values, and the cut of the model into units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardfold.plan.checks import known_arguments

__all__ = ["Init"]


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Init:
    """Where the values of a new engine come from, and how its model is cut into units.

    Attributes:
        weights: a state dict, safetensors (a file or a folder) or a checkpoint, read into the shards tensor by tensor.
        seed: of the initial values of a model built under :func:`shardfold.meta_init`.
        units: which modules are units, by path pattern or class; None finds them.

    Examples:
        >>> with sf.meta_init():
        ...     hollow = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        >>> begun = sf.Engine(hollow, optimizer=adam, init=sf.Init(seed=1, units=[nn.Linear]))
        >>> [unit.name for unit in begun.units]
        ['0', '1']
    """

    weights: Any = None
    seed: int = 0
    units: Sequence[str | type[nn.Module]] | None = None
