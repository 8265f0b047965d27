"""Attention over an axis of sequence as one operation of a graph, which so has the whole block around it.

    forward    queries, keys, values -> output, and what backward needs: for the ring the logsumexp of scores, for
               Ulysses what came by heads besides, in flat memory of a size that does not depend on how tokens are cut
    backward   of these and the output's gradient -> gradients of queries, keys, values

The batch is looked up as it runs: one that is packed in another way goes through the same graph. Dropout draws
numbers, and is left to the way without graphs. What an operation gives is contiguous, as a compiler takes it to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardfold.nn.axis_group import AxisGroup, OneRank
from shardfold.parallel.cut import CutBatch
from shardfold.parallel.kernels import kernel_for, wide
from shardfold.parallel.ring import RingCall, ring_gradients, ring_outputs
from shardfold.parallel.ulysses import TokenExchange, by_heads, check_heads, repeated_for_ranks

__all__ = ["attend_in_graph", "register_axis"]

KNOWN = 4096
"""Calls whose backward may still come."""


class Crossed(Protocol):
    """An axis of sequence, as an operation of a graph finds it by its number."""

    choice: str
    group: AxisGroup

    def cut_for(
        self, query: Tensor, key: Tensor, causal: bool, window: int | None, softcap: float | None, *, grads: bool
    ) -> tuple[CutBatch, int | None]: ...


class GraphCall(NamedTuple):
    """What a backward has to know of its forward: the number of the axis, and what :class:`RingCall` has."""

    axis: int
    cut: CutBatch
    causal: bool
    scale: float
    window: int | None
    softcap: float | None

    def ring(self, query: Tensor, value: Tensor, group: AxisGroup) -> RingCall:
        """Over ``group``, or over one rank that has all tokens."""
        cut = self.cut if group.size > 1 else self.cut.joined
        return RingCall(group, cut, self.causal, self.scale, self.window, kernel_for(query, value, self.softcap))


class _CallNumbers:
    """Calls by numbers, which a graph can hand from a forward to its backward."""

    def __init__(self) -> None:
        self._known: dict[int, GraphCall] = {}

    def number(self, call: GraphCall) -> int:
        """By which :meth:`call` finds it, while no more than :data:`KNOWN` others were numbered since."""
        number = hash(call)
        while self._known.get(number, call) != call:
            number += 1
        self._known.pop(number, None)
        self._known[number] = call
        if len(self._known) > KNOWN:
            del self._known[next(iter(self._known))]
        return number

    def call(self, number: int) -> GraphCall:
        """The one of that number."""
        return self._known[number]


_CALLS = _CallNumbers()
_AXES: WeakValueDictionary[int, Any] = WeakValueDictionary()


def register_axis(axis: Crossed) -> int:
    """The number by which graphs find the axis, while somebody has it."""
    number = axis.group.number
    _AXES[number] = axis
    return number


def attend_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: int,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """As :meth:`SequenceAxis.attend` of the axis with that number, without dropout; ``torch.compile`` takes it as it
    is."""
    grads = torch.is_grad_enabled()
    return attend(query, key, value, axis, causal, scale, window, softcap, grads)[0]


def _by_heads_shapes(query: Sequence[int], key: Sequence[int], value_dim: int, ranks: int) -> list[tuple[int, ...]]:
    """Of queries, keys, values and output of this rank's heads, with more tokens than there can be of all ranks."""
    heads, own = query[1] // ranks, lcm(key[1], ranks) // ranks
    tokens = ranks * (query[2] + 1)
    sides = [(heads, query[3]), (own, key[3]), (own, value_dim), (heads, value_dim)]
    return [(query[0], number, tokens, dim) for number, dim in sides]


def _numel(shape: Sequence[int]) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


def _laid_flat(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Its elements at the front of memory for ``shape``."""
    flat = tensor.new_empty(_numel(shape))
    flat[: tensor.numel()].view(tensor.shape).copy_(tensor)
    return flat


def _taken(flat: Tensor, shape: Sequence[int], tokens: int) -> Tensor:
    """What :func:`_laid_flat` laid there, of so many tokens."""
    own = (shape[0], shape[1], tokens, shape[3])
    return flat[: _numel(own)].view(own)


@torch.library.custom_op("shardfold::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: int,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    grads: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output ``(batch, heads, tokens, value_dim)``; logsumexp of scores; for Ulysses queries, keys, values and output
    of this rank's heads and all tokens, else nothing; the number of the cut."""
    crossed: Crossed = _AXES[axis]
    cut, window = crossed.cut_for(query, key, causal, window, softcap, grads=grads)
    group, nothing = crossed.group, query.new_empty(0)
    call = GraphCall(axis, cut, causal, query.shape[-1] ** -0.5 if scale is None else scale, window, softcap)
    number = torch.tensor(_CALLS.number(call))
    if crossed.choice == "ring":
        out, lse = ring_outputs(call.ring(query, value, group), query, key, value)
        return out.contiguous(), lse, nothing, nothing.clone(), nothing.clone(), nothing.clone(), number
    check_heads(query.shape[1], group.size)
    there = TokenExchange(group, 1, 2, cut.sizes)
    given = [query, *(repeated_for_ranks(each, group.size) for each in (key, value))]
    mine = by_heads(given, there, lambda tensor, way: way.send(tensor))
    out, lse = ring_outputs(call.ring(mine[0], mine[2], OneRank(group.axis)), *mine)
    shapes = _by_heads_shapes(query.shape, key.shape, value.shape[3], group.size)
    kept = [_laid_flat(each, shape) for each, shape in zip((*mine, out), shapes, strict=True)]
    lse = _laid_flat(lse.unsqueeze(3), (*shapes[0][:3], 1))
    return there.back.send(out).contiguous(), lse, kept[0], kept[1], kept[2], kept[3], number


@attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: int,
    causal: bool,
    scale: Any,
    window: Any,
    softcap: Any,
    grads: Any,
) -> tuple[Tensor, ...]:
    crossed: Crossed = _AXES[axis]
    out = query.new_empty(*query.shape[:3], value.shape[3])
    number, dtype = torch.empty((), dtype=torch.int64, device="cpu"), wide(query.dtype)
    if crossed.choice == "ring":
        return out, query.new_empty(query.shape[:3], dtype=dtype), *(query.new_empty(0) for _ in range(4)), number
    shapes = _by_heads_shapes(query.shape, key.shape, value.shape[3], crossed.group.size)
    kept = [each.new_empty(_numel(shape)) for each, shape in zip((query, key, value, query), shapes, strict=True)]
    return out, query.new_empty(_numel((*shapes[0][:3], 1)), dtype=dtype), *kept, number


@torch.library.custom_op("shardfold::attend_backward", mutates_args=())
def attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor,
    kept: Sequence[Tensor],
    number: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; ``kept``: for the ring the output, else what :func:`attend` kept, and
    of ``query``, ``key`` and ``value`` nothing but their shapes is read."""
    call = _CALLS.call(int(number))
    crossed: Crossed = _AXES[call.axis]
    cut, group = call.cut, crossed.group
    if crossed.choice == "ring":
        of_query, of_key, of_value = ring_gradients(
            call.ring(query, value, group), grad, query, [key, value], kept[0], lse
        )
        return of_query.contiguous(), of_key.contiguous(), of_value.contiguous()
    there = TokenExchange(group, 1, 2, cut.sizes)
    shapes = _by_heads_shapes(query.shape, key.shape, value.shape[3], group.size)
    mine = [_taken(each, shape, cut.length) for each, shape in zip(kept, shapes, strict=True)]
    of_lse = _taken(lse, (*shapes[0][:3], 1), cut.length).squeeze(3)
    ring = call.ring(mine[0], mine[2], OneRank(group.axis))
    given = ring_gradients(ring, there.send(grad), mine[0], mine[1:3], mine[3], of_lse)
    of_query, of_key, of_value = by_tokens(given, there.back)
    return of_query.contiguous(), _summed(of_key, key), _summed(of_value, value)


@attend_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(each.new_empty(each.shape) for each in (query, key, value))  # pyright: ignore[reportReturnType]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, axis = inputs[:4]
    out, lse, *kept, number = output
    ring = _AXES[axis].choice == "ring"
    ctx.save_for_backward(query, key, value, lse, number, *([out] if ring else kept))


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    query, key, value, lse, number, *kept = ctx.saved_tensors
    given = attend_backward(grad.contiguous(), query, key, value, lse, kept, number)
    return *given, *[None] * 6


attend.register_autograd(_backward, setup_context=_setup)


def by_tokens(grads: Sequence[Tensor], back: TokenExchange) -> list[Tensor]:
    """Gradients of what :func:`by_heads` gave, on the way back: of all heads of this rank's tokens."""
    ranks = back.group.size
    if len({(each.dtype, each.shape[3]) for each in grads}) > 1:
        return [back.send(each) for each in grads]
    heads = [each.shape[1] for each in grads]
    together = back.send(torch.cat(list(grads), dim=1)).unflatten(1, (ranks, sum(heads)))
    return [each.flatten(1, 2) for each in together.split(heads, dim=2)]


def _summed(grad: Tensor, own: Tensor) -> Tensor:
    """The gradient of heads that were repeated for ranks."""
    times = grad.shape[1] // own.shape[1]
    return grad.contiguous() if times == 1 else grad.unflatten(1, (own.shape[1], times)).sum(2)
