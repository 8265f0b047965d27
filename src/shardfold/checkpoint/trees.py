"""What a run is made of beside its tensors, as JSON: no pickle, so that reading a checkpoint runs no code of its own.

How a tree is written: :mod:`shardfold.sharding.plain`. Tensors of several elements go to the files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from shardfold.checkpoint.files import check_dense
from shardfold.checkpoint.index import DEPTH, is_deep
from shardfold.errors import CheckpointError, ConfigError
from shardfold.plan.checks import described, is_integer
from shardfold.sharding import plain
from shardfold.sharding.plain import StrangeValue

__all__ = ["check_loadable", "check_rows", "check_states", "decode", "encode", "strangers"]

ABOVE = 8  # levels of an index that a tree lies in, at most
#: What is raised by reading a tree that :func:`encode` did not make.
WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)


def encode(value: Any, where: str, tensors: dict[str, Tensor], called: str = "") -> Any:
    """A tree as JSON; its larger tensors are put into ``tensors`` by the names that the JSON has.

    Args:
        value: the tree.
        where: begins these names.
        tensors: is added to.
        called: what users call the tree, for messages; as ``where``, if not given.

    Raises:
        CheckpointError: something of another kind is in it, which is named by its keys (``state['o'][1]``), or it is
            nested too deeply to be read again.
    """
    said: Any = None
    try:
        said = plain.encode(value, where, tensors)
        deep = is_deep(said, DEPTH - ABOVE)
    except StrangeValue:
        name, each = next(strangers(value, called or where))
        if isinstance(each, Tensor):
            check_dense(each, name)
        if isinstance(each, torch.Generator):
            raise CheckpointError(
                f"{name} is a torch.Generator, which a checkpoint does not take as it is: give its get_state(), a "
                "tensor that set_state() takes when it is loaded."
            ) from None
        kind = f"{type(each).__name__} of dtype {each.dtype}" if isinstance(each, np.ndarray) else type(each).__name__
        raise CheckpointError(
            f"{name} is a {kind}, which a checkpoint does not take (it has no pickled objects): give "
            "None, numbers, strings, bytes, lists, tuples, dicts, tensors or arrays of numbers; a value of state= or "
            "rank_state= itself may also be an object with state_dict() and load_state_dict()."
        ) from None
    except RecursionError:
        deep = True
    if deep:
        raise CheckpointError(
            f"{called or where} is nested too deeply, or holds itself: a checkpoint takes {DEPTH} levels of JSON."
        )
    return said


def strangers(value: Any, called: str) -> Iterator[tuple[str, Any]]:
    """What in a tree a checkpoint does not take, with its place: ``state['o'][1]``."""
    if isinstance(value, Mapping):
        for key, inner in cast("Mapping[Any, Any]", value).items():
            yield from strangers(key, f"the key {key!r} of {called}")
            yield from strangers(inner, f"{called}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(cast("Sequence[Any]", value)):
            yield from strangers(inner, f"{called}[{i}]")
    else:
        try:
            plain.encode(value, called, {})
        except StrangeValue:
            yield called, value


def decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """The tree that :func:`encode` was given; ``read`` gives the tensor of a name.

    Raises:
        CheckpointError: it is no such tree.
    """
    try:
        return plain.decode(value, read)
    except CheckpointError:
        raise
    except WRONG as error:
        words = str(error).partition("\n")[0][:100]
        raise CheckpointError(
            f"the index of a checkpoint is damaged: one of its trees cannot be read ({type(error).__name__}: {words})."
        ) from None


def check_states(call: str, **states: Any) -> None:
    """
    Raises:
        ConfigError: one of the states, by the names of their arguments, is neither None nor a mapping.
    """
    for name, state in states.items():
        if state is not None and not isinstance(state, Mapping):
            raise ConfigError(f"{call}: {name}= is {described(state)}: give a dict by name.")


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
