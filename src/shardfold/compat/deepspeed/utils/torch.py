"""``deepspeed.utils.torch``: which PyTorch this is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from shardfold.torch_internals import functorch_stack

__all__ = ["is_functorch_transforming", "jit_script_compat", "register_grad_hook", "required_torch_version"]

Function = TypeVar("Function", bound=Callable[..., Any])


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Whether PyTorch's version is in ``[min_version, max_version]``; each is a number or a string.

    Raises:
        AssertionError: neither is given.
    """
    if not min_version and not max_version:
        raise AssertionError("required_torch_version() takes a min_version or a max_version.")
    version = TorchVersion(torch.__version__)
    if min_version and version < str(min_version):
        return False
    return not (max_version and version > str(max_version))


def register_grad_hook(param: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Calls ``hook(param)`` whenever a backward has added to ``param.grad``."""
    return param.register_post_accumulate_grad_hook(hook)


def is_functorch_transforming() -> bool:
    """Whether this runs inside of ``torch.func.grad``, ``vmap`` or the like."""
    return functorch_stack() is not None


def jit_script_compat(fn: Function) -> Function:
    """The function itself: nothing is compiled."""
    return fn
