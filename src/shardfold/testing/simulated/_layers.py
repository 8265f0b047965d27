"""Layers for which PyTorch expects kernels of a device that the CPU has under other names, or not at all:
convolutions and the cells of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["CELLS", "CONVOLUTIONS"]

Call = Callable[..., Any]


def _convolution(call: Call, *args: Any) -> Tensor:
    return call(torch.ops.aten.convolution.default, *args)


def _convolution_backward(call: Call, grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    stride, padding, dilation, transposed, output_padding, groups, wanted = args
    bias = [weight.shape[1] * groups if transposed else weight.shape[0]]
    how = (stride, padding, dilation, transposed, output_padding, groups, wanted)
    return call(torch.ops.aten.convolution_backward.default, grad, x, weight, bias, *how)


CONVOLUTIONS: dict[str, Call] = {
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}
"""By operation; each is handed what calls an operation of the CPU first."""


def _gates(given: Tensor, bias: Tensor | None, number: int) -> Sequence[Tensor]:
    return (given if bias is None else given + bias).chunk(number, 1)


def _lstm(x: Tensor, h: Tensor, c: Tensor, x_bias: Tensor | None = None, h_bias: Tensor | None = None) -> Any:
    pairs = zip(_gates(x, x_bias, 4), _gates(h, h_bias, 4), strict=True)
    take, keep, new, show = [a + b for a, b in pairs]
    state = keep.sigmoid() * c + take.sigmoid() * new.tanh()
    return show.sigmoid() * state.tanh(), state, x.new_empty(0)


def _gru(x: Tensor, h: Tensor, state: Tensor, x_bias: Tensor | None = None, h_bias: Tensor | None = None) -> Any:
    (reset, update, new), (old_reset, old_update, old_new) = _gates(x, x_bias, 3), _gates(h, h_bias, 3)
    keep = (update + old_update).sigmoid()
    fresh = (new + (reset + old_reset).sigmoid() * old_new).tanh()
    return (state - fresh) * keep + fresh, x.new_empty(0)


CELLS: dict[str, Call] = {"_thnn_fused_lstm_cell": _lstm, "_thnn_fused_gru_cell": _gru}
"""By operation: made of operations that have a backward."""
