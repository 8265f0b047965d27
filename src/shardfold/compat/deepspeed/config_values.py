"""Values of a config by their type, with what DeepSpeed's pydantic models take for one: ``1`` and ``"true"`` for a
boolean, ``"8"`` for a number, a string for a list of one.

JSON that another program wrote (YAML, a command line, an environment variable) often has such values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["TYPES", "coerced"]

YES, NO = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in (*YES, *NO):
        return value.lower() in YES
    raise ValueError


def _number(value: Any) -> float:
    if isinstance(value, str):
        value = float(value)
        value = int(value) if math.isfinite(value) and value == int(value) else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
        raise ValueError
    return value


def _integer(value: Any) -> int:
    number = _number(value)
    if not math.isfinite(number) or number != int(number):
        raise ValueError
    return int(number)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _path(value: Any) -> Any:
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise ValueError
    return value


def _strings(value: Any) -> list[str]:
    if not isinstance(value, (str, list, tuple)):
        raise ValueError
    return [value] if isinstance(value, str) else [_string(one) for one in value]


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return value


def _pair(value: Any) -> list[float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError
    return [_number(one) for one in value]


def _rate(value: Any) -> float | list[float]:
    return [_number(one) for one in value] if isinstance(value, (list, tuple)) else _number(value)


TYPES: Mapping[str, Callable[[Any], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "string": _string,
    "path": _path,
    "list of strings": _strings,
    "object": _object,
    "any": lambda value: value,
    "pair of numbers": _pair,
    "rate": _rate,
}
"""The types of values: what JSON calls them, and what makes a value of it. ``5e8`` is an integer."""


def coerced(type: str, value: Any) -> Any:
    """The value as one of its type.

    Raises:
        ValueError: it is none, and nothing that stands for one.
    """
    return TYPES[type](value)
