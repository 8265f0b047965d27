"""The collectives of split layers, as autograd sees them: in pairs, each of which is the other's backward.

    forward                              backward
    copy       nothing                   reduce     the sum over the ranks
    scatter    this rank's part          gather     the ranks' parts, side by side
    spread     a part of the sum         collect    the ranks' parts, side by side

``copy`` and ``reduce`` are f and g of Megatron-LM (arXiv 1909.08053), ``spread`` and ``collect`` those of its sequence
parallelism (2205.05198). ``copy``, ``reduce``, ``scatter`` and ``gather`` stand where a tensor is the same on all ranks
on one side, and so is its gradient; ``spread`` and ``collect`` where each rank has a part, with its own gradient.

``gather`` and then ``copy`` would sum gradients of which backward takes a part: together they are ``collect`` in
backward, which sends half as much. What ranks exchanged is no view, so a model may change it in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from shardfold.parallel.link import Link
from shardfold.torch_internals import storage_key, untraced_from_call

__all__ = ["collect", "copy", "gather", "reduce", "scatter", "spread"]


def _place(x: Tensor) -> Any:
    return storage_key(x.untyped_storage()), x.storage_offset(), x.shape, x.stride()


@untraced_from_call
def copy(x: Tensor, link: Link) -> Tensor:
    """``x``, which is the same on all ranks and goes on into parts of a layer: its gradients are summed."""
    if link.size == 1:
        return x
    gathered = _gathered(x, link)
    if gathered is not None:
        return _CollectAgain.apply(gathered.part, x.detach(), link, gathered.dim)  # pyright: ignore[reportReturnType]
    return _Copy.apply(x, link)  # pyright: ignore[reportReturnType]


@untraced_from_call
def reduce(x: Tensor, link: Link) -> Tensor:
    """The sum of ``x``, of which each rank has a summand; the sum's gradient is each summand's."""
    return x if link.size == 1 else _Reduce.apply(x, link)  # pyright: ignore[reportReturnType]


@untraced_from_call
def scatter(x: Tensor, link: Link, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along ``dim`` of what is the same on all ranks; ``sizes`` of the parts, None: equal ones."""
    return x if link.size == 1 else _Scatter.apply(x, link, dim, sizes)  # pyright: ignore[reportReturnType]


@untraced_from_call
def gather(x: Tensor, link: Link, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' parts side by side along ``dim``, used alike on all ranks: the gradient is this rank's part of it."""
    if link.size == 1:
        return x
    y: Any = _Gather.apply(x, link, dim, sizes)
    if y.grad_fn is not None and sizes is None:
        y.grad_fn.part, y.grad_fn.whole = x, ref(y)
    return y


@untraced_from_call
def spread(x: Tensor, link: Link, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum of ``x``, of which each rank has a summand."""
    return x if link.size == 1 else _Spread.apply(x, link, dim)  # pyright: ignore[reportReturnType]


@untraced_from_call
def collect(x: Tensor, link: Link, dim: int) -> Tensor:
    """The ranks' parts side by side along ``dim``, which go on into parts of a layer: their gradients are summed."""
    return x if link.size == 1 else _Collect.apply(x, link, dim)  # pyright: ignore[reportReturnType]


def _part(x: Tensor, link: Link, dim: int, sizes: Sequence[int] | None) -> Tensor:
    return x.split(list(sizes) if sizes is not None else x.shape[dim] // link.size, dim)[link.rank].contiguous()


_VIEWS = ("AliasBackward0", "SliceBackward0", "UnsafeViewBackward0", "ViewBackward0")


def _gathered(x: Tensor, link: Link) -> Any:
    """The node of the graph that gathered ``x`` in equal parts over ``link``, if nothing but views that keep its shape
    lies between, and no hook wants the gradient of what was gathered."""
    node: Any = x.grad_fn
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    if type(node).__name__ != "_GatherBackward" or node.sizes is not None or node.link.axis != link.axis:
        return None
    whole = node.whole()
    if whole is None or whole._backward_hooks:
        return None
    alike = _place(whole) == _place(x)
    return node if alike else None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return reduce(grads[0], ctx.link), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link) -> Tensor:
        ctx.link = link
        return link.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grads[0], None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.link, ctx.dim, ctx.sizes = link, dim, sizes
        return _part(x, link, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gather(grads[0], ctx.link, ctx.dim, ctx.sizes), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int, sizes: Sequence[int] | None) -> Tensor:
        ctx.link, ctx.dim, ctx.sizes = link, dim, sizes
        return link.all_gather(x, dim, sizes).data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scatter(grads[0], ctx.link, ctx.dim, ctx.sizes), None, None, None


class _CollectAgain(torch.autograd.Function):
    """As ``collect`` of the part, whose ``whole`` was gathered already."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, link: Link, dim: int) -> Tensor:
        ctx.link, ctx.dim = link, dim
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return spread(grads[0], ctx.link, ctx.dim), None, None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int) -> Tensor:
        ctx.link, ctx.dim = link, dim
        return link.reduce_scatter(x, dim).data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return collect(grads[0], ctx.link, ctx.dim), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Link, dim: int) -> Tensor:
        ctx.link, ctx.dim = link, dim
        return link.all_gather(x, dim).data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return spread(grads[0], ctx.link, ctx.dim), None, None
