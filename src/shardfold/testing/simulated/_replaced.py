"""A function of PyTorch's that is replaced, and that PyTorch still knows.

PyTorch looks its own functions up, in sets and tables: which of them make tensors, and so take the device of
``torch.device(...)`` as a context; which of them TorchScript has an operation for; which of them a mode or a subclass
of tensors handles. What stands in the place of one is found there too, as it equals it, is handed to modes and
subclasses itself, and is pickled by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from shardfold.torch_internals import function_modes_are_on, register_in_torchscript

__all__ = ["ReplacedFunction"]


class ReplacedFunction:
    """Calls ``run`` in the place of ``plain``.

    Args:
        plain: the function of PyTorch's.
        run: takes its arguments.
        owner: the module or the class that has it.
        of_tensor: whether its first argument is a tensor.
    """

    def __init__(self, plain: Any, run: Callable[..., Any], owner: Any, *, of_tensor: bool) -> None:
        self._plain, self._run, self._owner, self._of_tensor = plain, run, owner, of_tensor
        self.__name__: str = plain.__name__
        self.__qualname__: str = getattr(plain, "__qualname__", plain.__name__)
        self.__module__, self.__doc__ = owner.__name__ if owner is torch else "torch", plain.__doc__

    @classmethod
    def put(cls, owner: Any, name: str, run: Callable[..., Any], *, of_tensor: bool) -> None:
        """In the place of ``owner.name``, for good."""
        replaced = cls(getattr(owner, name), run, owner, of_tensor=of_tensor)
        setattr(owner, name, replaced)
        if owner is torch:
            register_in_torchscript(replaced, f"aten::{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        relevant = args[:1] if self._of_tensor else ()
        if function_modes_are_on() or has_torch_function(relevant):
            return handle_torch_function(self, relevant, *args, **kwargs)
        return self._run(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None or self._owner is torch else partial(self, instance)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._plain

    def __hash__(self) -> int:
        return hash(self._plain)

    def __reduce__(self) -> Any:
        return self.__name__ if self._owner is torch else (getattr, (self._owner, self.__name__))

    def __repr__(self) -> str:
        return repr(self._plain)
