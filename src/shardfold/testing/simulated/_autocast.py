"""Automatic mixed precision: which operations ``torch.autocast("sim")`` computes in 16 bits, and which in fp32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardfold.testing.simulated.memory import NAME
from shardfold.testing.simulated.nested import mapped
from shardfold.torch_internals import AUTOCAST_KEYS, ExcludeKeys

__all__ = ["AUTOCAST"]

LOWER = (
    "mm",
    "mv",
    "bmm",
    "addmm",
    "addmv",
    "baddbmm",
    "addbmm",
    "matmul",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
)
FP32 = (
    "exp",
    "log",
    "softmax.int",
    "log_softmax.int",
    "layer_norm",
    "group_norm",
    "cross_entropy_loss",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "binary_cross_entropy_with_logits",
    "cumsum",
    "prod",
    "norm.Scalar",
    "rsqrt",
)


def _cast(dtype: torch.dtype | None, value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
    if not floating or value.device.type != NAME:
        return value
    return value.to(dtype or torch.get_autocast_dtype(NAME))


def _call(op: Any, dtype: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    with ExcludeKeys(AUTOCAST_KEYS):
        cast = partial(_cast, dtype)
        return op(*mapped(cast, args), **mapped(cast, kwargs))


def _kernels() -> dict[str, Callable[..., Any]]:
    aten = torch.ops.aten
    found: dict[str, Callable[..., Any]] = {}
    for names, dtype in ((LOWER, None), (FP32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            found[name] = partial(_call, getattr(getattr(aten, packet), overload or "default"), dtype)
    return found


AUTOCAST = _kernels()
"""By operation."""
