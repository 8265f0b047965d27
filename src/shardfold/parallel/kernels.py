"""Attention of one tile: its output and the logsumexp of its scores, and the gradients, given both of *all* tiles.

Tensors are ``(batch, heads, tokens, head_dim)``, of as many heads each; a logsumexp is ``(batch, heads, queries)``, in
fp32, or fp64 for fp64. Gradients follow the FlashAttention-2 paper (2307.08691): with the output and the logsumexp of a
query over all keys, each tile gives its exact share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Kernel", "kernel_for", "wide"]

ATEN: Any = torch.ops.aten
FLASH_DIMS, FLASH_DIM = 256, 8  # the largest head_dim on CUDA, and what it is a multiple of

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor, Tensor]]


class Kernel(NamedTuple):
    """A way to compute a tile.

    Attributes:
        attend: of queries, keys, values, causal and the scale: output and logsumexp.
        differentiate: of the output's gradient, queries, keys, values, output, logsumexp, causal and the scale: the
            gradients of queries, keys and values.
    """

    name: str
    attend: Forward
    differentiate: Backward


def kernel_for(query: Tensor, value: Tensor) -> Kernel:
    """The fastest that takes these: on the CPU PyTorch's flash kernel, in every dtype; on CUDA its twin in 16 bits;
    else plain products, which hold the scores of a tile."""
    flash = FLASH.get(query.device.type)
    if flash is None or query.shape[-1] != value.shape[-1]:
        return MATH
    narrow = query.dtype in (torch.float16, torch.bfloat16)
    fits = query.shape[-1] % FLASH_DIM == 0 and query.shape[-1] <= FLASH_DIMS
    return flash if flash is CPU_FLASH or (narrow and fits) else MATH


def wide(dtype: torch.dtype) -> torch.dtype:
    """What outputs and gradients of tiles are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dense(tensor: Tensor) -> Tensor:
    """With the elements of ``head_dim`` one behind the other: the flash kernels read wrong elements else, and do
    not say so."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _cpu_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = ATEN._scaled_dot_product_flash_attention_for_cpu
    return kernel(_dense(q), _dense(k), _dense(v), 0.0, causal, scale=scale)


def _cpu_differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = ATEN._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(_dense(grad), _dense(q), _dense(k), _dense(v), _dense(out), lse, 0.0, causal, scale=scale)


def _cuda_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    kernel = ATEN._scaled_dot_product_flash_attention
    out, lse, *_ = kernel(_dense(q), _dense(k), _dense(v), 0.0, causal, False, scale=scale)
    return out, lse[..., : q.shape[2]]


def _cuda_differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of a dropout, which there is not
    return ATEN._scaled_dot_product_flash_attention_backward(
        _dense(grad), _dense(q), _dense(k), _dense(v), _dense(out), lse.contiguous(), None, None,
        q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale,
    )  # fmt: skip


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -inf)
    return scores


def _math_attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    big = wide(q.dtype)
    scores = _scores(q.to(big), k.to(big), causal, scale)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v.to(big)).to(q.dtype), lse


def _math_differentiate(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    big = wide(q.dtype)
    wide_q, wide_k, wide_grad = q.to(big), k.to(big), grad.to(big)
    weights = (_scores(wide_q, wide_k, causal, scale) - lse.unsqueeze(-1)).exp()
    of_weights = wide_grad @ v.to(big).transpose(-1, -2)
    mean = (wide_grad * out.to(big)).sum(-1, keepdim=True)
    of_scores = weights * (of_weights - mean) * scale
    return of_scores @ wide_k, of_scores.transpose(-1, -2) @ wide_q, weights.transpose(-1, -2) @ wide_grad


CPU_FLASH = Kernel("flash on the CPU", _cpu_attend, _cpu_differentiate)
CUDA_FLASH = Kernel("flash on CUDA", _cuda_attend, _cuda_differentiate)
MATH = Kernel("plain products", _math_attend, _math_differentiate)
FLASH: Mapping[str, Kernel] = {"cpu": CPU_FLASH, "cuda": CUDA_FLASH}
"""By type of device."""
