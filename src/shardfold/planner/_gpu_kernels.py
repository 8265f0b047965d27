"""What a GPU's kernels keep for backward where those of the CPU, on which models are traced, keep something else.

    dropout        a mask of one byte an element, where a CPU keeps the factors
    RMS norm       one kernel, which keeps its input and a number a row, where a CPU keeps what it computed on the way
    attention      with dropout as without one kernel, where a CPU keeps all pairs of tokens; in 16 bits its backward
                   adds up the gradient of the queries in fp32 (FlashAttention-2, Dao 2023)

Found by comparing plans with what the allocator of an H200 counted under PyTorch 2.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["gpu_kernels"]

ATEN: Any = torch.ops.aten
ROWS = 128
"""A multiple of these tokens has the sum in fp32."""
_ONE = RLock()  # two threads that exchanged functions by turns would put back each other's


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Inside, on this thread, operations keep what a GPU's kernels keep. PyTorch's functions are exchanged in the whole
    process, so that what backward recomputes meets them too, where a mode of functions is off; other threads that train
    meanwhile meet PyTorch's own."""
    with _ONE:
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in _OTHERWISE]
        try:
            for (owner, name, make), (_, _, usual) in zip(_OTHERWISE, before, strict=True):
                setattr(owner, name, partial(_on_thread, get_ident(), partial(make, usual), usual))
            yield
        finally:
            for owner, name, usual in before:
                setattr(owner, name, usual)


def _on_thread(thread: int, here: Callable[..., Any], elsewhere: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return (here if get_ident() == thread else elsewhere)(*args, **named)


def _dropout(usual: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if not training or inplace or not 0.0 < p < 1.0:
        return usual(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    usual: Any, input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if weight is not None and weight.dtype != input.dtype:
        return usual(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, weight, len(normalized_shape))


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, axes: int) -> Tensor:
        rows = input.shape[: input.dim() - axes]
        ctx.save_for_backward(input, weight, input.new_zeros(rows, dtype=torch.float32))
        return torch.zeros_like(input)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        input, weight, _ = ctx.saved_tensors
        return torch.zeros_like(input), None if weight is None else torch.zeros_like(weight), None


def _attention(
    usual: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    alike = query.dim() == 4 and query.shape[:2] == key.shape[:2] and query.shape[-1] == value.shape[-1]
    if attn_mask is not None or query.itemsize != 2 or not alike:
        return usual(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
    return _Attention.apply(query, key, value, is_causal, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        ctx.causal, ctx.scale = causal, scale
        run = ATEN._scaled_dot_product_flash_attention_for_cpu
        out, sums = run(query, key, value, 0.0, causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        batch, heads, tokens, width = query.shape
        added = query.new_zeros((batch, heads, -(-tokens // ROWS) * ROWS, width), dtype=torch.float32)
        run = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
        found = run(grads[0], query, key, value, out, sums, 0.0, ctx.causal, scale=ctx.scale)
        del added
        return (*found, None, None)


_OTHERWISE: Sequence[tuple[Any, str, Callable[..., Any]]] = (
    (F, "dropout", _dropout),
    (torch, "rms_norm", _rms_norm),
    (F, "scaled_dot_product_attention", _attention),
)
