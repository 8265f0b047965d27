"""Ranges in a profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shardfold.compat.deepspeed.accelerator.real_accelerator import get_accelerator

__all__ = ["instrument_w_nvtx"]

Function = TypeVar("Function", bound=Callable[..., Any])


def instrument_w_nvtx(func: Function) -> Function:
    """A function whose calls are ranges of its name in NVIDIA's profilers."""

    @functools.wraps(func)
    def marked(*args: Any, **kwargs: Any) -> Any:
        get_accelerator().range_push(func.__qualname__)
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().range_pop()

    return marked  # pyright: ignore[reportReturnType]
