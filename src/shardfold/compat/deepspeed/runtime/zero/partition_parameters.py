"""``deepspeed.runtime.zero.partition_parameters``: names that clients read, or put something in the place of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from shardfold.compat.deepspeed.lazy import attach
from shardfold.compat.deepspeed.zero.status import DeepSpeedTensorOverride, ZeroParamStatus, ZeroParamType

_orig_torch_tensor = torch.tensor
_orig_torch_empty = torch.empty
_orig_torch_zeros = torch.zeros
_orig_torch_ones = torch.ones
_orig_torch_full = torch.full
_orig_torch_arange = torch.arange
_orig_torch_eye = torch.eye
_orig_torch_randn = torch.randn


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None, target_device: torch.device | None = None
) -> Callable[..., Any]:
    """``fn``, giving floating tensors another dtype and all a device. ``zero.Init`` leaves constructors of tensors as
    they are, so that buffers keep their dtypes; transformers puts a function of its own in this one's place."""

    @functools.wraps(fn)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        tensor = fn(*args, **kwargs)
        return tensor.to(target_fp_dtype) if target_fp_dtype is not None and tensor.is_floating_point() else tensor

    return made


def shutdown_init_context() -> None:
    """``initialize`` may be called inside of ``zero.Init`` as it is."""


def restore_init_context() -> None:
    """See :func:`shutdown_init_context`."""


__getattr__, __dir__ = attach(
    __name__,
    {
        "GatheredParameters": "zero.gathered",
        "Init": "zero.init",
        "get_accelerator": "accelerator",
        "is_zero_param": "zero.attributes",
        "register_external_parameter": "zero.external",
        "unregister_external_parameter": "zero.external",
    },
)

__all__ = [
    "DeepSpeedTensorOverride",
    "ZeroParamStatus",
    "ZeroParamType",
    "restore_init_context",
    "shutdown_init_context",
    "zero_wrapper_for_fp_tensor_constructor",
]
