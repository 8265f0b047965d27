"""What users give a save or a load, before anything is done with it: places and states."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from shardfold.errors import ConfigError
from shardfold.plan.checks import described, is_integer
from shardfold.sharding.model import ShardedModel

__all__ = ["check_loadable", "check_place", "check_rows", "check_slices", "check_states"]


def check_place(call: str, path: Any, what: str) -> None:
    """
    Raises:
        ConfigError: ``path`` is no path; ``call``, and ``what`` it should be of, are for the sentence.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigError(f"{call}: the path is {described(path)}: give the path of {what}, a str or a Path.")
    if not os.fspath(path).strip():
        raise ConfigError(f"{call}: the path is empty: give the path of {what}; '.' is the current folder.")


def check_states(call: str, **states: Any) -> None:
    """
    Raises:
        ConfigError: one of the states, by the names of their arguments, is neither None nor a mapping.
    """
    for name, state in states.items():
        if state is not None and not isinstance(state, Mapping):
            raise ConfigError(f"{call}: {name}= is {described(state)}: give a dict by name.")


def check_slices(call: str, model: ShardedModel) -> None:
    """
    Raises:
        ConfigError: ranks hold parts of a parameter, and nothing says which part of which whole.
    """
    apart = (
        (slot.name, s.spec.distinct)
        for s in model.segments()
        if s.spec.distinct
        for slot in s.spec.slots
        if not slot.box
    )
    if (found := next(apart, None)) is not None:
        name, axes = found
        raise ConfigError(
            f"{call}: each rank along the axis {axes[0]!r} has another {name!r}, and nothing says which part of which "
            f"whole: say so with mark_slice(module, {name.rpartition('.')[2]!r}, axis={axes[0]!r}, dim=...), or with "
            "whole= and start=."
        )


def check_loadable(call: str, state: Mapping[str, Any] | None) -> None:
    """
    Raises:
        ConfigError: an object that is to take what was saved has no ``load_state_dict()``.
    """
    for name, target in (state or {}).items():
        if not hasattr(target, "load_state_dict"):
            raise ConfigError(
                f"{call}: state[{name!r}] is {described(target)}, which has no load_state_dict(): what was saved as a "
                "plain value is in the report's .state; give objects that take theirs."
            )


def check_rows(call: str, rows: Any) -> None:
    """
    Raises:
        ConfigError: it is no mapping of names to whole numbers.
    """
    check_states(call, rows=rows)
    for name, numbers in (rows or {}).items():
        listed = isinstance(numbers, Sequence) and not isinstance(numbers, str)
        if not listed or not all(is_integer(number, -1) for number in numbers):
            raise ConfigError(
                f"{call}: rows[{name!r}] is {described(numbers)}: give for each row its number in the checkpoint, or "
                "-1 for one that is new."
            )
