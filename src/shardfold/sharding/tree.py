"""Values that hold tensors: the containers that a model's forward takes and gives."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_floats", "widened"]

NARROW = (torch.bfloat16, torch.float16)


def cast_floats(value: Any, dtype: torch.dtype, of: Collection[torch.dtype] = (torch.float32,)) -> Any:
    """``value`` with its tensors of the dtypes ``of`` cast to ``dtype``; what holds none is returned as it is, the rest
    is copied.

    Goes through lists, tuples, named tuples, mappings (also those of transformers) and dataclasses, and keeps their
    types. Other objects are opaque.
    """
    return _mapped(value, lambda tensor: tensor.to(dtype) if tensor.dtype in of else tensor)


def widened(value: Any) -> Any:
    """``value`` with its tensors of 16 bits cast to fp32, as :func:`cast_floats` does it; one that is there several
    times is cast once."""
    known: dict[int, Tensor] = {}

    def cast(tensor: Tensor) -> Tensor:
        if tensor.dtype not in NARROW:
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor.float()
        return known[id(tensor)]

    return _mapped(value, cast)


def _mapped(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return cast(value)
    if isinstance(value, tuple):
        items = [_mapped(item, cast) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make = getattr(type(value), "_make", None)  # of a named tuple
        return make(items) if make is not None else type(value)(items)
    if isinstance(value, list):
        changed = {i: new for i, old in enumerate(value) if (new := _mapped(old, cast)) is not old}
    elif isinstance(value, MutableMapping):
        changed = {key: new for key, old in value.items() if (new := _mapped(old, cast)) is not old}
    elif isinstance(value, Mapping):
        items = {key: _mapped(item, cast) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in items) else items
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with_fields(value, cast)
    else:
        return value
    if not changed:
        return value
    made = copy.copy(value)
    for key, new in changed.items():
        made[key] = new
    return made


def _with_fields(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        if (new := _mapped(old, cast)) is not old:
            changed[field.name] = new
    if not changed:
        return value
    made = copy.copy(value)  # not replace(): a field may be none of the constructor's
    for name, new in changed.items():
        object.__setattr__(made, name, new)  # frozen ones too
    return made
