"""The TF32 switches of PyTorch, which a process has once: set while an engine lives that says how."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from shardfold.errors import ConfigError

__all__ = ["hold_tf32"]

_held: list[bool] = []  # by each engine that says how
_before: list[tuple[str, str, str]] = []  # how the switches were, if any engine holds them


def hold_tf32(owner: Any, allow: bool) -> weakref.finalize[Any, Any]:
    """Sets the switches of matrix products, convolutions and recurrent layers on NVIDIA GPUs.

    Returns:
        Calling it gives them back; it is called when ``owner`` is collected. The last one sets them as they were.

    Raises:
        ConfigError: another engine holds them the other way.
    """
    if _held and _held[0] is not allow:
        raise ConfigError(
            f"Precision.tf32 is {allow}, but another engine of this process has {_held[0]}, and PyTorch has one switch "
            "for all: give both the same, or close the other engine first."
        )
    if not _held:
        _before.append(_read())
        _set(allow, allow)
    _held.append(allow)
    held = weakref.finalize(owner, _give_back)
    held.atexit = False
    return held


def _give_back() -> None:
    _held.pop()
    if not _held:
        product, convolution, recurrent = _before.pop()
        _set(product == "tf32", convolution == "tf32")
        cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = product, convolution, recurrent


def _read() -> tuple[str, str, str]:
    cuda: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    return cuda.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision


def _set(product: bool, convolution: bool) -> None:
    # By their older names, because these set the newer ones (``fp32_precision``) too. The other way round PyTorch
    # raises where it reads an older one, as torch.compile does. Some versions warn that there are newer names.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.cuda.matmul.allow_tf32 = product
        torch.backends.cudnn.allow_tf32 = convolution
