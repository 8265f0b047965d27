"""Which model holds a parameter: found from the parameter alone, without keeping a model, or a parameter, alive."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from shardfold.sharding.model import ShardedModel

__all__ = ["hold", "let_go", "model_of", "models", "name_in", "owner_of"]

_NAMES: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
"""Of each model: the names of the parameters of its units, by ``id``. No more: that would keep the model."""


def hold(model: ShardedModel) -> None:
    """From now on the model is found from the parameters that its units have now."""
    _NAMES[model] = {id(parameter): name for unit in model.units for name, parameter in unit.parameters()}


def let_go(model: ShardedModel) -> None:
    """Its engine is closed."""
    _NAMES.pop(model, None)


def models() -> list[ShardedModel]:
    """All whose engines are not closed."""
    return list(_NAMES)


def model_of(parameter: nn.Parameter) -> ShardedModel | None:
    """The model that holds ``parameter`` in one of its units, or None; one that was closed holds nothing."""
    return next((model for model, names in list(_NAMES.items()) if id(parameter) in names), None)


def owner_of(parameter: nn.Parameter) -> Any:
    """Who trains that model, or None."""
    model = model_of(parameter)
    return model.owner if model is not None else None


def name_in(model: ShardedModel, parameter: nn.Parameter) -> str:
    """The (first) name of a parameter that the model holds."""
    return _NAMES[model][id(parameter)]
