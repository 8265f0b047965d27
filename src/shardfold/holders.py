"""Which engine holds a parameter: found from the parameter alone, without keeping an engine, or a parameter, alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["engine_of", "hold", "let_go", "name_in"]

_NAMES: weakref.WeakKeyDictionary[Any, tuple[Any, dict[int, str]]] = weakref.WeakKeyDictionary()
"""Of each engine: the list of its units that was read last, and the name of each of their parameters by ``id``."""


def hold(engine: Engine) -> None:
    """From now on the engine is found from the parameters of its units."""
    _NAMES[engine] = (None, {})


def let_go(engine: Engine) -> None:
    """The engine is closed."""
    _NAMES.pop(engine, None)


def engine_of(parameter: nn.Parameter) -> Engine | None:
    """The engine that holds ``parameter`` in one of its units, or None; one that was closed holds nothing."""
    for engine in list(_NAMES):
        if id(parameter) in _names(engine):
            return engine
    return None


def name_in(engine: Engine, parameter: nn.Parameter) -> str:
    """The (first) name of a parameter that ``engine`` holds."""
    return _names(engine)[id(parameter)]


def _names(engine: Engine) -> dict[int, str]:
    units, names = _NAMES[engine]
    if units is not engine.units:  # the engine makes a new list when the structure of its model changed
        names = {id(parameter): name for unit in engine.units for name, parameter in unit.parameters()}
        _NAMES[engine] = (engine.units, names)
    return names
