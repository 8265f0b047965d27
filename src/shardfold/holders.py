"""Which engine holds a parameter: found from the parameter alone, without keeping an engine, or a parameter, alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["engine_of", "engines", "hold", "let_go", "name_in"]

_NAMES: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
"""Of each engine: the names of the parameters of its units, by ``id``. No more: that would keep the engine."""


def hold(engine: Engine) -> None:
    """From now on the engine is found from the parameters that its units have now."""
    _NAMES[engine] = {id(parameter): name for unit in engine.units for name, parameter in unit.parameters()}


def let_go(engine: Engine) -> None:
    """The engine is closed."""
    _NAMES.pop(engine, None)


def engines() -> list[Engine]:
    """All engines that are not closed."""
    return list(_NAMES)


def engine_of(parameter: nn.Parameter) -> Engine | None:
    """The engine that holds ``parameter`` in one of its units, or None; one that was closed holds nothing."""
    return next((engine for engine, names in list(_NAMES.items()) if id(parameter) in names), None)


def name_in(engine: Engine, parameter: nn.Parameter) -> str:
    """The (first) name of a parameter that ``engine`` holds."""
    return _NAMES[engine][id(parameter)]
