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

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from shardfold.nn.axis_group import AxisGroup, numbered
from shardfold.parallel.adjoint import paired
from shardfold.torch_internals import storage_key, untraced

__all__ = ["collect", "copy", "gather", "reduce", "scatter", "spread"]


@torch.library.custom_op("shardfold::over_ranks", mutates_args=())
def over_ranks(x: Tensor, verb: str, group: int, dim: int) -> Tensor:
    """What ``verb`` makes of ``x``, as an operation that a graph has as a whole."""
    ranks = numbered(group)
    if verb == "reduce":
        return ranks.all_reduce(x)
    if verb == "spread":
        return ranks.reduce_scatter(x, dim)
    if verb == "scatter":
        return _part(x, ranks, dim, None).clone()
    return ranks.all_gather(x, dim)


@over_ranks.register_fake
def _(x: Tensor, verb: str, group: int, dim: int) -> Tensor:
    shape, size = list(x.shape), numbered(group).size
    if verb in ("spread", "scatter"):
        shape[dim] = shape[dim] // size
    elif verb != "reduce":
        shape[dim] = shape[dim] * size
    return x.new_empty(shape)


class _InGraph(torch.autograd.Function):
    """Two verbs, as ``torch.compile`` can look into them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: str, back: str, group: int, dim: int) -> Tensor:
        ctx.back = back, group, dim
        return _do(x, there, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _do(grads[0], *ctx.back), None, None, None, None


def _do(x: Tensor, verb: str, group: int, dim: int) -> Tensor:
    return x.view_as(x) if verb == "copy" else over_ranks(x, verb, group, dim)


def _traced(back: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """For a function of ``x`` and a group, whose name is its verb in a graph: ``back`` is that of its backward. Where
    parts are not equal, it is hidden from the compiler."""

    def decorate(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        verb, hidden = function.__name__, untraced(function)

        @wraps(function)
        def run(x: Tensor, group: AxisGroup, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
            if torch.compiler.is_compiling() and sizes is None:
                return x if group.size == 1 else _InGraph.apply(x, verb, back, group.number, dim)  # pyright: ignore
            more = () if verb in ("copy", "reduce") else (dim,) if sizes is None else (dim, sizes)
            return hidden(x, group, *more)

        return run

    return decorate


def _place(x: Tensor) -> Any:
    return storage_key(x.untyped_storage()), x.storage_offset(), x.shape, x.stride()


@_traced("reduce")
def copy(x: Tensor, group: AxisGroup) -> Tensor:
    """``x``, which is the same on all ranks and goes on into parts of a layer: its gradients are summed."""
    if group.size == 1:
        return x
    gathered = _gathered(x, group)
    if gathered is None or gathered.part is None:
        return paired(x, _same, partial(reduce, group=group))
    whole = x.detach()  # as collect() of the part gives it, which was gathered already
    return paired(gathered.part, lambda part: _same(whole), partial(spread, group=group, dim=gathered.dim))


@_traced("copy")
def reduce(x: Tensor, group: AxisGroup) -> Tensor:
    """The sum of ``x``, of which each rank has a summand; the sum's gradient is each summand's."""
    return x if group.size == 1 else paired(x, group.all_reduce, lambda grad: grad)


@_traced("gather")
def scatter(x: Tensor, group: AxisGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along ``dim`` of what is the same on all ranks; ``sizes`` of the parts, None: equal ones."""
    if group.size == 1:
        return x
    there = partial(_part, group=group, dim=dim, sizes=sizes)
    return paired(x, there, partial(gather, group=group, dim=dim, sizes=sizes))


@_traced("scatter")
def gather(x: Tensor, group: AxisGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' parts side by side along ``dim``, used alike on all ranks: the gradient is this rank's part of it."""
    if group.size == 1:
        return x
    back = _Cutting(x, group, dim, sizes)
    return back.of(paired(x, lambda x: group.all_gather(x, dim, sizes).data, back))


@_traced("collect")
def spread(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum of ``x``, of which each rank has a summand."""
    if group.size == 1:
        return x
    return paired(x, lambda x: group.reduce_scatter(x, dim).data, partial(collect, group=group, dim=dim))


@_traced("spread")
def collect(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """The ranks' parts side by side along ``dim``, which go on into parts of a layer: their gradients are summed."""
    if group.size == 1:
        return x
    return paired(x, lambda x: group.all_gather(x, dim).data, partial(spread, group=group, dim=dim))


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _part(x: Tensor, group: AxisGroup, dim: int, sizes: Sequence[int] | None) -> Tensor:
    return x.split(list(sizes) if sizes is not None else x.shape[dim] // group.size, dim)[group.rank].contiguous()


class _Cutting:
    """The way back through :func:`gather`. Of equal parts it knows this rank's, and the whole as long as that lives."""

    def __init__(self, part: Tensor, group: AxisGroup, dim: int, sizes: Sequence[int] | None) -> None:
        self.group, self.dim, self._sizes = group, dim, sizes
        self.part = part if sizes is None else None
        self.whole: Callable[[], Tensor | None] = lambda: None

    def __call__(self, grad: Tensor) -> Tensor:
        return scatter(grad, self.group, self.dim, self._sizes)

    def of(self, whole: Tensor) -> Tensor:
        """``whole``, which was gathered."""
        if self.part is not None:
            self.whole = ref(whole)
        return whole


_VIEWS = ("AliasBackward0", "SliceBackward0", "UnsafeViewBackward0", "ViewBackward0")


def _gathered(x: Tensor, group: AxisGroup) -> _Cutting | None:
    """How ``x`` was gathered in equal parts over ``group``, if nothing but views that keep its shape lies between, and
    no hook wants the gradient of what was gathered."""
    node: Any = x.grad_fn
    while type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    back = getattr(node, "back", (None,))[0]
    if not isinstance(back, _Cutting) or back.group.axis != group.axis:
        return None
    whole = back.whole()
    if whole is None or whole._backward_hooks:
        return None
    return back if _place(whole) == _place(x) else None
