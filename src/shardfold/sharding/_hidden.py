"""What ``parameter.grad`` is between backward and step where no rank could show the gradient itself.

Code that reads it gets one sentence, instead of a None that it would skip: a norm of such gradients would be 0, and
clipping by it nothing. What asks for no values answers; ``zero_()`` acts, because ``zero_grad(set_to_none=False)``
calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardfold.errors import UsageError
from shardfold.sharding.freed import CONVERSIONS, MEMORY, METADATA, SET_DATA, keeps_dtype
from shardfold.torch_internals import no_subclass_functions

__all__ = ["HiddenGradient"]

_ITSELF: frozenset[Any] = frozenset(
    [Tensor.detach, Tensor.detach_, Tensor.requires_grad_, Tensor.data.__get__]  # pyright: ignore
)


class HiddenGradient(Tensor):
    """Stands for the gradient of a parameter, with its shape, dtype and device.

    Raises:
        UsageError: whatever needs its values; it says where they are.
    """

    _name: str
    _why: str
    _zero: Callable[[], None]

    @staticmethod
    def of(parameter: nn.Parameter, name: str, why: str, zero: Callable[[], None]) -> HiddenGradient:
        """
        Args:
            parameter: whose gradient it stands for; only its metadata is read.
            name: for the message.
            why: for the message: where the gradient is.
            zero: called when the gradient is set to zero.
        """
        with no_subclass_functions():
            shown = _nothing(parameter.dtype, parameter.device).expand(parameter.shape).as_subclass(HiddenGradient)
        shown._stand_for(name, why, zero)
        return shown

    def _stand_for(self, name: str, why: str, zero: Callable[[], None]) -> None:
        self._name, self._why, self._zero = name, why, zero

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in METADATA or func in MEMORY:
            with no_subclass_functions():
                return func(*args, **(kwargs or {}))
        hidden = _first([*args, *(kwargs or {}).values()])
        if func is Tensor.zero_:
            hidden._zero()
            return hidden
        if func in _ITSELF or (func == SET_DATA and args[0] is args[1]):
            return hidden
        if func in CONVERSIONS and keeps_dtype(func, *args, **(kwargs or {})):
            return hidden
        hidden._refuse(getattr(func, "__qualname__", None) or str(func))

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(
            f"{what} needs the values of the gradient of {self._name!r}, {self._why}: give the engine clip_norm= to "
            f"clip, and read or change whole gradients in `with engine.gathered({self._name!r}, of='grads') as grad:` "
            "(write=True to change), which all ranks enter between the last backward and engine.step()."
        )

    def __reduce_ex__(self, proto: Any) -> Any:
        self._refuse("pickling")

    def __deepcopy__(self, memo: Any) -> Any:
        self._refuse("copy.deepcopy")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Gradient of {self._name!r} of shape {tuple(self.shape)} ({self._why})"


def _first(values: Any) -> HiddenGradient:
    """The first hidden gradient in nested lists."""
    for value in values:
        if isinstance(value, HiddenGradient):
            return value
        if isinstance(value, (list, tuple)):
            try:
                return _first(value)
            except LookupError:
                continue
    raise LookupError


@lru_cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)
