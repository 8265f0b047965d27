"""What values that users give have to be: questions that any file may ask, and how messages show what was given."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from numbers import Integral, Real
from typing import Any

from shardfold.errors import ConfigError

__all__ = ["check_flags", "check_times", "described", "is_flag", "is_integer", "is_number"]

LONGEST = 1e9  # seconds, 31 years: what process groups take
SHORT = 60  # characters of a value that a message shows


def is_integer(value: Any, least: float = -inf, most: float = inf) -> bool:
    """Whether it is a whole number (of Python or NumPy, and not True or False) in that range."""
    return isinstance(value, Integral) and not isinstance(value, bool) and least <= int(value) <= most


def is_number(value: Any, least: float = -inf, most: float = inf) -> bool:
    """Whether it is a real number (not NaN, True or False) in that range, which a float can hold."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return least <= float(value) <= most
    except OverflowError:
        return False


def is_flag(value: Any) -> bool:
    """Whether it is True or False, or 1 or 0."""
    return isinstance(value, int) and value in (0, 1)


def described(value: Any) -> str:
    """A value as a message has it: short ones themselves, of others the type."""
    if value is None or (isinstance(value, (str, bytes, int, float, list, tuple)) and len(repr(value)) <= SHORT):
        return repr(value)
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


def check_flags(call: str, **flags: Any) -> None:
    """
    Raises:
        ConfigError: one of the arguments of ``call``, by their names, is neither True nor False.
    """
    for name, value in flags.items():
        if not is_flag(value):
            raise ConfigError(f"{call}: {name}= is {described(value)}: it is True or False.")


def check_times(call: str, *, desync_timeout: Any, timeout: Any) -> None:
    """
    Raises:
        ConfigError: one of them is no time that ranks can wait.
    """
    times: Mapping[str, Any] = {"desync_timeout": desync_timeout, "timeout": timeout}
    for name, value in times.items():
        if not is_number(value, 0, LONGEST) or value == 0:
            raise ConfigError(
                f"{call}: {name}= is {described(value)}: it is a number of seconds, more than 0 and at most 1e9."
            )
