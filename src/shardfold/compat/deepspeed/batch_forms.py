"""The shapes of a batch as text, and tensors of these shapes without values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import UsageError
from shardfold.parallel.pipeline.flow import Made, placeholder

__all__ = ["describe", "imagine"]


def describe(value: Any) -> Any:
    """What is known of a batch beside its values, for JSON.

    Raises:
        UsageError: it has something that cannot be told.
    """
    if isinstance(value, Tensor):
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch.")]}
    if isinstance(value, (tuple, list)):
        return {type(value).__name__ if type(value) in (tuple, list) else "tuple": [describe(x) for x in value]}
    if isinstance(value, Mapping):
        return {"dict": [[key, describe(x)] for key, x in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise UsageError(
        f"a batch has a {type(value).__name__}, which cannot be described to stages without data: give tensors."
    )


def imagine(form: Any, device: torch.device) -> Any:
    """A batch of that form, without values."""
    ((kind, said),) = form.items()
    if kind == "tensor":
        return placeholder(Made(tuple(said[0]), getattr(torch, said[1]), False), device)
    if kind == "dict":
        return {key: imagine(x, device) for key, x in said}
    if kind == "value":
        return said
    return (tuple if kind == "tuple" else list)(imagine(x, device) for x in said)
