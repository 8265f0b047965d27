"""A model that goes from one engine of this layer to the next: ``initialize()`` may be given it again, as there."""

from __future__ import annotations

import weakref

from torch import nn

from shardfold.engine.engine import Engine, engine_of

__all__ = ["made_here", "take_over"]

_MADE: weakref.WeakSet[Engine] = weakref.WeakSet()
"""Engines underneath those of this layer; one that the user made beside them is not taken anything from."""

TAKEN = "this engine is closed: its model was given to another deepspeed.initialize(), use the engine that it returned"


def made_here(core: Engine) -> None:
    """Notes an engine underneath one of the compatibility layer."""
    _MADE.add(core)


def take_over(model: nn.Module) -> None:
    """Closes engines of this layer that hold parameters of ``model``, which stay as they are, whole or split; every
    rank calls it."""
    found = {id(core): core for p in model.parameters() if (core := engine_of(p)) is not None and core in _MADE}
    for core in sorted(found.values(), key=lambda core: (len(core.mesh.name), core.mesh.name)):
        core.close_split(TAKEN)
