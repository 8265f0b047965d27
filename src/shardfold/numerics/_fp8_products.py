"""Products of linear layers in 8 bits (arXiv 2209.05433): inputs and weights are rounded to e4m3, which has 3 bits
behind the point, gradients of outputs to e5m2, which has 2 and a wider range; sums are fp32.

    y  = e4m3(x) e4m3(w)^T        forward
    dx = e5m2(dy) e4m3(w)         backward
    dw = e5m2(dy)^T e4m3(x)

Each tensor is divided by a scale before it is rounded and the product is multiplied by both: the least power of two
with which its largest magnitude is at most that of the format, 448 and 57344. ``rowwise`` has a scale for each row of
the left factor and each column of the right one. A division by a power of two is exact, so what a number is rounded to
depends on its own digits, and on others only if it is less than 2^-14 of the largest: not on how a batch or a weight is
divided. A tensor (``rowwise``: row or column) with inf or NaN in it is NaN throughout, and so is what it is multiplied
to: whoever looks for such numbers finds them.

Between forward and backward the codes of x are kept, 1 byte for an element, and the weight, which is there anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardfold.torch_internals import scaled_mm

__all__ = ["E4M3", "E5M2", "MULTIPLE", "fp8_linear", "rounded"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Of this each side of a weight is one: kernels for fp8 take no others."""
_EXPONENT = {E4M3: 8, E5M2: 15}  # of the largest number, which is 1.75 times that power of two in both formats
_DIGITS, _UP = 23, 0x1FFFFF  # bits of fp32 behind its exponent, and what of them is between 1.75 and 2


def rounded(values: Tensor, dtype: torch.dtype, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Values in 8 bits, and what they are to be multiplied by.

    Args:
        values: ``(m, n)``, floating-point numbers of up to 32 bits.
        dtype: :data:`E4M3` or :data:`E5M2`.
        dim: along which elements share a scale, 1: those of a row; None: all do.

    Returns:
        Codes ``(m, n)``, contiguous, and fp32 scales ``()``, ``(m, 1)`` or ``(1, n)``.
    """
    low, high = torch.aminmax(values) if dim is None else torch.aminmax(values, dim=dim, keepdim=True)
    most = torch.maximum(-low, high).float()
    exponent = ((most.view(torch.int32) + _UP) >> _DIGITS) - _EXPONENT[dtype]  # as fp32 has it, of which 1 is the least
    scale = (exponent.clamp(min=1) << _DIGITS).view(torch.float32) + (most - most)  # NaN, where that is not finite
    wide = values if values.dtype is torch.bfloat16 else values.float()  # both have the exponents of every scale
    return (wide * scale.reciprocal().to(wide.dtype)).to(dtype).contiguous(), scale


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, rowwise: bool, native: bool) -> Tensor:
    """``F.linear`` with products in fp8; its gradients have no gradients.

    Args:
        x: ``(..., inputs)``.
        weight: ``(outputs, inputs)``, in the dtype of ``x`` unless autocast is on; both sides are multiples of 16.
        bias: ``(outputs,)``, which is added to what is rounded already.
        rowwise: see the module.
        native: whether the device has such products; else its numbers are multiplied in fp32, which gives the same but
            for the order of sums.

    Returns:
        ``(..., outputs)``, in the dtype of ``x``, or in autocast's.
    """
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if not x.numel() or (x.dtype != weight.dtype and not autocast):
        return F.linear(x, weight, bias)  # nothing to multiply; what PyTorch refuses, it refuses here too
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    y: Any = (_Native if native else _Emulated).apply(x.reshape(-1, x.shape[-1]), weight, rowwise, dtype)
    y = y.view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias.to(dtype)


class _Native(torch.autograd.Function):
    """``(m, inputs)`` by ``(outputs, inputs)``, to ``(m, outputs)``, where the device has such products."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool, dtype: torch.dtype) -> Tensor:
        return _forward(ctx, x, weight, rowwise, dtype, native=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _backward(ctx, grads[0], native=True)


class _Emulated(torch.autograd.Function):
    """The same, where it has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool, dtype: torch.dtype) -> Tensor:
        return _forward(ctx, x, weight, rowwise, dtype, native=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _backward(ctx, grads[0], native=False)


def _forward(ctx: Any, x: Tensor, weight: Tensor, rowwise: bool, dtype: torch.dtype, *, native: bool) -> Tensor:
    along = 1 if rowwise else None
    a, a_scale = rounded(x, E4M3, along)
    b, b_scale = rounded(weight, E4M3, along)
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_weight else None, a_scale, weight if needs_x else None)
    return _product(a, b.t(), a_scale, _turned(b_scale), dtype, native, fast=True)


def _backward(ctx: Any, grad: Tensor, *, native: bool) -> Any:
    a, a_scale, weight = ctx.saved_tensors
    rowwise = a_scale.dim() > 0
    rows, columns = (1, 0) if rowwise else (None, None)
    of_x = of_weight = None
    g, g_scale = rounded(grad, E5M2, rows)
    if weight is not None:
        b, b_scale = rounded(weight, E4M3, columns)
        of_x = _product(g, _across(b).t(), g_scale, b_scale, grad.dtype, native)
    if a is not None:
        if rowwise:  # what is summed over is along the rows now
            g, g_scale = rounded(grad, E5M2, columns)
            a, a_scale = rounded(a.to(torch.bfloat16) * a_scale.to(torch.bfloat16), E4M3, columns)
        of_weight = _product(_across(g), _across(a).t(), _turned(g_scale), a_scale, grad.dtype, native)
    return of_x, of_weight, None, None


def _across(codes: Tensor) -> Tensor:
    """``(n, m)`` of codes ``(m, n)``, whose rows end with zeros: kernels sum over a multiple of 16."""
    across = codes.t().contiguous()
    lacking = -across.shape[1] % MULTIPLE
    return F.pad(across.view(torch.uint8), (0, lacking)).view(codes.dtype) if lacking else across


def _turned(scale: Tensor) -> Tensor:
    """Transposed, and with the strides that kernels ask for."""
    return scale.view(scale.shape[::-1])


def _product(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, native: bool, *, fast: bool = False
) -> Tensor:
    """Codes ``(m, k)`` by ``(k, n)``, rows of the one and columns of the other contiguous, times the scales; ``fast``:
    where a kernel may keep fewer bits of its sums, as torchao's forward does."""
    if native:
        return scaled_mm(a, b, a_scale, b_scale, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(a.device.type, enabled=False):
        return (a.float() @ b.float() * a_scale * b_scale).to(dtype)
