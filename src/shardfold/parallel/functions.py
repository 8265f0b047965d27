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
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor

from shardfold.nn.axis_group import AxisGroup
from shardfold.parallel.adjoint import paired
from shardfold.torch_internals import storage_key, untraced_from_call

__all__ = ["collect", "copy", "gather", "reduce", "scatter", "spread"]


def _place(x: Tensor) -> Any:
    return storage_key(x.untyped_storage()), x.storage_offset(), x.shape, x.stride()


@untraced_from_call
def copy(x: Tensor, group: AxisGroup) -> Tensor:
    """``x``, which is the same on all ranks and goes on into parts of a layer: its gradients are summed."""
    if group.size == 1:
        return x
    gathered = _gathered(x, group)
    if gathered is None or gathered.part is None:
        return paired(x, _same, partial(reduce, group=group))
    whole = x.detach()  # as collect() of the part gives it, which was gathered already
    return paired(gathered.part, lambda part: _same(whole), partial(spread, group=group, dim=gathered.dim))


@untraced_from_call
def reduce(x: Tensor, group: AxisGroup) -> Tensor:
    """The sum of ``x``, of which each rank has a summand; the sum's gradient is each summand's."""
    return x if group.size == 1 else paired(x, group.all_reduce, lambda grad: grad)


@untraced_from_call
def scatter(x: Tensor, group: AxisGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """This rank's part along ``dim`` of what is the same on all ranks; ``sizes`` of the parts, None: equal ones."""
    if group.size == 1:
        return x
    there = partial(_part, group=group, dim=dim, sizes=sizes)
    return paired(x, there, partial(gather, group=group, dim=dim, sizes=sizes))


@untraced_from_call
def gather(x: Tensor, group: AxisGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The ranks' parts side by side along ``dim``, used alike on all ranks: the gradient is this rank's part of it."""
    if group.size == 1:
        return x
    back = _Cutting(x, group, dim, sizes)
    return back.of(paired(x, lambda x: group.all_gather(x, dim, sizes).data, back))


@untraced_from_call
def spread(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """This rank's part along ``dim`` of the sum of ``x``, of which each rank has a summand."""
    if group.size == 1:
        return x
    return paired(x, lambda x: group.reduce_scatter(x, dim).data, partial(collect, group=group, dim=dim))


@untraced_from_call
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
    back = getattr(node, "back", None)
    if not isinstance(back, _Cutting) or back.group.axis != group.axis:
        return None
    whole = back.whole()
    if whole is None or whole._backward_hooks:
        return None
    return back if _place(whole) == _place(x) else None
