"""``deepspeed.utils.module_utils``: a submodule by its name."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """``model.a.b`` for ``"a.b"``."""
    found: Any = model
    for part in module_name.split("."):
        found = getattr(found, part)
    return found


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """``model.a.b = module`` for ``"a.b"``."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)
