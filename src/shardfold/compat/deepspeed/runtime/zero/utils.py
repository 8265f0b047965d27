"""``deepspeed.runtime.zero.utils``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator
from shardfold.compat.deepspeed.comm import world
from shardfold.compat.deepspeed.utils.logging import logger
from shardfold.compat.deepspeed.zero.attributes import is_zero_param
from shardfold.errors import UsageError as ZeRORuntimeException

__all__ = [
    "ZeRORuntimeException",
    "apply_to_tensors_only",
    "assert_ints_same_as_other_ranks",
    "assert_lst_len_same_as_other_ranks",
    "get_lst_from_rank0",
    "is_builtin_type",
    "is_zero_param",
    "is_zero_supported_optimizer",
    "isinstance_namedtuple",
]


def is_builtin_type(obj: Any) -> bool:
    """Whether an object's class is one of Python's own."""
    return type(obj).__module__ == "builtins"


def isinstance_namedtuple(obj: object) -> bool:
    """Whether it is a namedtuple."""
    return isinstance(obj, tuple) and hasattr(obj, "_fields") and hasattr(obj, "_asdict")


def is_zero_supported_optimizer(optimizer: Any) -> bool:
    """Whether it is an optimizer of PyTorch's: any works under every stage."""
    return isinstance(optimizer, torch.optim.Optimizer)


def apply_to_tensors_only(
    function: Callable[[Tensor], Any], value: Any, warning_msg_fn: Callable[[Any], str] | None = None
) -> Any:
    """``function`` of every tensor in tuples, lists and dicts; a dict is changed in its place.

    Args:
        function: of a tensor.
        value: what has them.
        warning_msg_fn: makes the message that rank 0 logs for an object that it cannot look into.
    """
    if isinstance(value, (tuple, list)):
        done = [apply_to_tensors_only(function, each) for each in value]
        return type(value)(*done) if isinstance_namedtuple(value) else type(value)(done)
    if isinstance(value, dict):
        for key in value:
            value[key] = apply_to_tensors_only(function, value[key])
        return value
    if isinstance(value, Tensor):
        return function(value)
    if (
        warning_msg_fn is not None
        and not is_builtin_type(value)
        and (not world.is_initialized() or not world.get_rank())
    ):
        logger.warning(warning_msg_fn(value))
    return value


def get_lst_from_rank0(lst: Sequence[int]) -> list[int]:
    """Rank 0's list of integers; every rank calls it with one of that length."""
    values = torch.tensor(lst, dtype=torch.int64, device=get_accelerator().current_device_name())
    torch.distributed.broadcast(values, src=0)
    return values.tolist()


def assert_lst_len_same_as_other_ranks(lst: Sequence[int]) -> None:
    """
    Raises:
        RuntimeError: rank 0's list has another length.
    """
    (length,) = get_lst_from_rank0([len(lst)])
    if length != len(lst):
        raise RuntimeError(f"Rank 0 has a list of {length}, and rank {world.get_rank()} one of {len(lst)}.")


def assert_ints_same_as_other_ranks(ints: Sequence[int]) -> None:
    """
    Raises:
        RuntimeError: rank 0's list is another.
    """
    assert_lst_len_same_as_other_ranks(ints)
    theirs = get_lst_from_rank0(ints)
    if list(ints) != theirs:
        raise RuntimeError(f"Rank 0 has {theirs}, and rank {world.get_rank()} has {list(ints)}.")
