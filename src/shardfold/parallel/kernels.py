"""Attention of one tile: its output and the logsumexp of its scores, and the gradients, given both of *all* tiles.

Tensors are ``(batch, heads, tokens, head_dim)``, of as many heads each; a logsumexp is ``(batch, heads, queries)``, in
fp32, or fp64 for fp64. Gradients follow the FlashAttention-2 paper (2307.08691): with the output and the logsumexp of a
query over all keys, each tile gives its exact share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Kernel", "kernel_for", "wide"]

ATEN: Any = torch.ops.aten
FLASH_DIMS, FLASH_DIM = 256, 8  # the largest head_dim on CUDA, and what it is a multiple of
QUERIES = 128
"""Whose scores plain products hold at once: what they need grows with the tokens, not with their square."""

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


def kernel_for(query: Tensor, value: Tensor, softcap: float | None = None) -> Kernel:
    """The fastest that takes these: on the CPU PyTorch's flash kernel, in every dtype; on CUDA its twin in 16 bits;
    else, and where scores are capped, which PyTorch's kernels cannot, plain products, of some queries after the other.

    Args:
        softcap: scores are ``softcap * tanh(scores / softcap)``; None: as they are.
    """
    if softcap is not None:
        attend, differentiate = partial(_math_attend, softcap=softcap), partial(_math_differentiate, softcap=softcap)
        return Kernel("plain products", attend, differentiate)
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
        _dense(grad),
        _dense(q),
        _dense(k),
        _dense(v),
        _dense(out),
        lse.contiguous(),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        none,
        none,
        scale=scale,
    )


def _blocks(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, slice]]:
    """Consecutive queries, and the keys that any of them sees."""
    for start in range(0, q.shape[2], QUERIES):
        stop = min(start + QUERIES, q.shape[2])
        yield slice(start, stop), slice(0, stop if causal else k.shape[2])


def _scores(q: Tensor, k: Tensor, scale: float, softcap: float | None) -> Tensor:
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _hide(scores: Tensor, first: int, causal: bool, value: float) -> Tensor:
    """``value`` in place of those that queries from the ``first`` on do not see."""
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(first + 1)
    return scores.masked_fill_(hidden, value)


def _math_attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    big = wide(q.dtype)
    wide_k, wide_v = k.to(big), v.to(big)
    out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=big)
    for rows, seen in _blocks(q, k, causal):
        scores = _scores(q[:, :, rows].to(big), wide_k[:, :, seen], scale, softcap)
        _hide(scores, rows.start, causal, -torch.inf)
        total = lse[:, :, rows] = scores.logsumexp(-1)
        out[:, :, rows] = scores.sub_(total.unsqueeze(-1)).exp_() @ wide_v[:, :, seen]
    return out, lse


def _math_differentiate(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    big = wide(q.dtype)
    wide_k, wide_v = k.to(big), v.to(big)
    of_q, of_k, of_v = torch.empty_like(q, dtype=big), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for rows, seen in _blocks(q, k, causal):
        wide_q, wide_grad = q[:, :, rows].to(big), grad[:, :, rows].to(big)
        scores = _scores(wide_q, wide_k[:, :, seen], scale, softcap)
        weights = _hide((scores - lse[:, :, rows].unsqueeze(-1)).exp_(), rows.start, causal, 0.0)
        of_v[:, :, seen] += weights.transpose(-1, -2) @ wide_grad
        mean = (wide_grad * out[:, :, rows].to(big)).sum(-1, keepdim=True)
        of_scores = (wide_grad @ wide_v[:, :, seen].transpose(-1, -2)).sub_(mean).mul_(weights).mul_(scale)
        if softcap is not None:  # d (c tanh(s / c)) / ds = 1 - tanh(s / c) ** 2
            of_scores.mul_(scores.div_(softcap).square_().neg_().add_(1))
        of_q[:, :, rows] = of_scores @ wide_k[:, :, seen]
        of_k[:, :, seen] += of_scores.transpose(-1, -2) @ wide_q
    return of_q, of_k, of_v


CPU_FLASH = Kernel("flash on the CPU", _cpu_attend, _cpu_differentiate)
CUDA_FLASH = Kernel("flash on CUDA", _cuda_attend, _cuda_differentiate)
MATH = Kernel("plain products", _math_attend, _math_differentiate)
FLASH: Mapping[str, Kernel] = {"cpu": CPU_FLASH, "cuda": CUDA_FLASH}
"""By type of device."""
