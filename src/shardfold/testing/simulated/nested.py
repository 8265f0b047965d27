"""Arguments and results of operations: values, and lists of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["mapped"]


def mapped(change: Callable[[Any], Any], values: Any) -> Any:
    """``values`` with ``change`` of each in its place."""
    kind = type(values)
    if kind is tuple or kind is list:
        return kind([mapped(change, value) for value in values])
    if kind is dict:
        return {name: mapped(change, value) for name, value in values.items()}
    return change(values)
