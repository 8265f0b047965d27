"""``OnDevice``: models that are made where, and as what, they are to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["OnDevice"]

_FACTORIES = frozenset(
    getattr(torch, name)
    for name in ("arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint")
    + ("randn", "randperm", "scalar_tensor", "tensor", "zeros")
)


class OnDevice:
    """Inside of it new tensors that name no device are made on ``device``, floating ones in ``dtype``.

        with OnDevice(dtype=torch.float16, device="meta"):
            model = Model()  # takes no memory

    Args:
        dtype: of floating tensors, those that name another among them.
        device: where; ``"meta"`` has shapes only.
        enabled: False: nothing happens.
    """

    def __init__(self, dtype: torch.dtype, device: Any = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._modes: list[TorchFunctionMode] = []

    def __enter__(self) -> None:
        if self.enabled:
            self._modes.append(_Made(self.dtype, torch.device(self.device)))
            self._modes[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._modes:
            self._modes.pop().__exit__(*error)


class _Made(TorchFunctionMode):
    """Gives factory functions the device, and what they make the dtype."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.dtype, self.device = dtype, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _FACTORIES:
            return func(*args, **kwargs)
        if kwargs.get("device") is None:
            kwargs["device"] = self.device
        made: Tensor = func(*args, **kwargs)
        return made.to(self.dtype) if made.is_floating_point() else made
