"""Values that hold tensors: the containers that a model's forward takes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["cast_floats"]


def cast_floats(value: Any, dtype: torch.dtype, of: Collection[torch.dtype] = (torch.float32,)) -> Any:
    """``value`` with its tensors of the dtypes ``of`` cast to ``dtype``; what holds none is returned as it is, the rest
    is copied.

    Goes through lists, tuples, named tuples, mappings (also those of transformers) and dataclasses, and keeps their
    types. Other objects are opaque.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in of else value
    if isinstance(value, tuple):
        items = [cast_floats(item, dtype, of) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        make = getattr(type(value), "_make", None)  # of a named tuple
        return make(items) if make is not None else type(value)(items)
    if isinstance(value, list):
        changed = {i: new for i, old in enumerate(value) if (new := cast_floats(old, dtype, of)) is not old}
    elif isinstance(value, MutableMapping):
        changed = {key: new for key, old in value.items() if (new := cast_floats(old, dtype, of)) is not old}
    elif isinstance(value, Mapping):
        items = {key: cast_floats(item, dtype, of) for key, item in value.items()}
        return value if all(items[key] is value[key] for key in items) else items
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _cast_fields(value, dtype, of)
    else:
        return value
    if not changed:
        return value
    made = copy.copy(value)
    for key, new in changed.items():
        made[key] = new
    return made


def _cast_fields(value: Any, dtype: torch.dtype, of: Collection[torch.dtype]) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name, None)
        if (new := cast_floats(old, dtype, of)) is not old:
            changed[field.name] = new
    if not changed:
        return value
    made = copy.copy(value)  # not replace(): a field may be none of the constructor's
    for name, new in changed.items():
        object.__setattr__(made, name, new)  # frozen ones too
    return made
