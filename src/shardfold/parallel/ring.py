"""Ring attention (2310.01889): keys and values travel from rank to rank, queries stay.

    forward    N - 1 hops of keys and values. The next ones are under way while those that are here are computed with,
               and the outputs of tiles are merged by the logsumexp of their scores.
    backward   N - 1 hops of keys and values once more, and N - 1 of their gradients, which follow them one hop behind:
               each rank adds its share to what comes, and after the last hop they are where their keys are.

The gradients are exact: each tile gives its share for the output and the logsumexp over all keys (see ``kernels``).
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfold.errors import UsageError
from shardfold.nn.axis_group import AxisGroup, Shift
from shardfold.parallel.cut import CutBatch, Range, Tile
from shardfold.parallel.kernels import Kernel, kernel_for, wide
from shardfold.torch_internals import untraced

__all__ = ["RingCall", "ring_attention", "ring_gradients", "ring_outputs"]


class RingCall(NamedTuple):
    """What there is to know of one attention; see :func:`ring_attention`."""

    group: AxisGroup
    cut: CutBatch
    causal: bool
    scale: float
    window: int | None
    kernel: Kernel

    def tiles(self, source: int) -> tuple[Tile, ...]:
        return self.cut.tiles(self.group.rank, source, self.causal, self.window)


@untraced
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    cut: CutBatch,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of this rank's queries over the keys of all ranks; all ranks call it.

    Args:
        query: ``(batch, heads, tokens, head_dim)``, of this rank's tokens.
        key: ``(batch, key_heads, tokens, head_dim)``, where ``key_heads`` divides ``heads``.
        value: ``(batch, key_heads, tokens, value_dim)``.
        group: the ranks.
        cut: which tokens each of them has.
        causal: tokens see none behind them.
        scale: of the scores; None: ``head_dim ** -0.5``.
        window: tokens see the last so many, themselves included; keys that none of a rank's sees do not travel to it.
        softcap: scores are ``softcap * tanh(scores / softcap)``; None: as they are.

    Returns:
        ``(batch, heads, tokens, value_dim)``, in the dtype of ``query``.
    """
    of_scores = query.shape[-1] ** -0.5 if scale is None else scale
    apply: Any = _Ring.apply
    return apply(query, key, value, RingCall(group, cut, causal, of_scores, window, kernel_for(query, value, softcap)))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: RingCall) -> Tensor:
        out, lse = ring_outputs(ring, query, key, value)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise UsageError("ring attention has no gradients of its gradients (create_graph=True).")
        query, key, value, out, lse = ctx.saved_tensors
        return *ring_gradients(ctx.ring, outputs[0], query, [key, value], out, lse), None


def ring_outputs(ring: RingCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the logsumexp of each query's scores over all keys, ``(batch, heads, tokens)``."""
    group, rank = ring.group, ring.group.rank
    sums = _Sums(query, value)
    pair = own = [key, value]
    steps = ring.cut.steps(ring.window)
    for step, following in zip_longest(steps, steps[1:]):
        source = (rank - step) % group.size
        coming = _next(ring, own, pair, source, following)
        for tile in ring.tiles(source):
            sums.add(tile, ring.kernel.attend(*_operands(query, pair, tile), tile.causal, ring.scale))
        pair = coming.wait() if coming is not None else pair
    return sums.out.to(query.dtype), sums.lse


def ring_gradients(
    ring: RingCall, grad: Tensor, query: Tensor, pair: list[Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values of this rank."""
    group, rank, big = ring.group, ring.group.rank, wide(query.dtype)
    dtypes = pair[0].dtype, pair[1].dtype
    of_query = torch.zeros_like(query, dtype=big)
    own: list[Tensor] = []
    moving: Shift | None = None
    keys, steps = pair, ring.cut.steps(ring.window)
    for step, following in zip_longest(steps, steps[1:]):
        source = (rank - step) % group.size
        coming = _next(ring, keys, pair, source, following)
        shares = [torch.zeros_like(each, dtype=big) for each in pair]
        for tile in ring.tiles(source):
            _add_gradients(ring, tile, (grad, query, out, lse), pair, (of_query, *shares))
        if step == 0:
            own = shares
        elif ring.window is not None:
            if moving is not None:
                _add(own, moving)
            moving = group.shift(shares, -step, [each.shape for each in own])
        else:
            if moving is not None:
                _add(shares, moving)
            moving = _send_on(group, shares, ring.cut, source)
        pair = coming.wait() if coming is not None else pair
    if moving is not None:
        _add(own, moving)
    return of_query.to(query.dtype), own[0].to(dtypes[0]), own[1].to(dtypes[1])


def _add(shares: list[Tensor], moving: Shift) -> None:
    for share, came in zip(shares, moving.wait(), strict=True):
        share += came


def _next(ring: RingCall, own: list[Tensor], pair: list[Tensor], source: int, following: int | None) -> Shift | None:
    """The keys and values of the rank ``following`` behind, on their way: through all ranks between, or with a window
    from there at once."""
    if following is None:
        return None
    if ring.window is None:
        return _send_on(ring.group, pair, ring.cut, source)
    tokens = ring.cut.tokens((ring.group.rank - following) % ring.group.size)
    return ring.group.shift(own, following, [(*each.shape[:2], tokens, each.shape[3]) for each in own])


def _send_on(group: AxisGroup, tensors: list[Tensor], cut: CutBatch, source: int) -> Shift:
    """Sends what is of the tokens of rank ``source`` to the next rank; the one before has those of the one before."""
    tokens = cut.tokens((source - 1) % group.size)
    return group.shift(tensors, 1, [(*each.shape[:2], tokens, each.shape[3]) for each in tensors])


def _at(tensor: Tensor, rows: Range, tokens: Range) -> Tensor:
    return tensor[rows[0] : rows[1], :, tokens[0] : tokens[1]]


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """``(batch, heads, tokens, dim)``: each head of keys beside the queries that see it."""
    batch, own, tokens, dim = tensor.shape
    if own == heads:
        return tensor
    return tensor.unsqueeze(2).expand(batch, own, heads // own, tokens, dim).reshape(batch, heads, tokens, dim)


def _operands(query: Tensor, pair: list[Tensor], tile: Tile) -> tuple[Tensor, Tensor, Tensor]:
    heads = query.shape[1]
    key, value = (_turned(_repeated(_at(each, tile.rows, tile.keys), heads), tile) for each in pair)
    return _turned(_at(query, tile.rows, tile.queries), tile), key, value


def _turned(tensor: Tensor, tile: Tile) -> Tensor:
    """``(batch, heads, tokens, ...)``, from behind where the tile is seen so: what kernels know as causal."""
    return tensor.flip(2) if tile.reverse else tensor


def _add_gradients(
    ring: RingCall, tile: Tile, of_queries: tuple[Tensor, ...], pair: list[Tensor], sums: tuple[Tensor, ...]
) -> None:
    """What one tile gives, into ``sums``: of queries, keys and values."""
    grad, query, out, lse = of_queries
    operands = _operands(query, pair, tile)
    of_out, of_lse = _turned(_at(out, tile.rows, tile.queries), tile), _turned(_at(lse, tile.rows, tile.queries), tile)
    given = ring.kernel.differentiate(
        _turned(_at(grad, tile.rows, tile.queries), tile), *operands, of_out, of_lse, tile.causal, ring.scale
    )
    _at(sums[0], tile.rows, tile.queries).add_(_turned(given[0], tile))
    for total, each in zip(sums[1:], (_turned(each, tile) for each in given[1:]), strict=True):
        batch, heads, tokens, dim = each.shape
        own = total.shape[1]
        share = each if own == heads else each.view(batch, own, heads // own, tokens, dim).sum(2, dtype=total.dtype)
        _at(total, tile.rows, tile.keys).add_(share)


class _Sums:
    """Outputs of tiles, merged: ``out`` is the mean of values by exp(scores), ``lse`` the log of their sum."""

    def __init__(self, query: Tensor, value: Tensor) -> None:
        big = wide(query.dtype)
        self.out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=big)
        self.lse = query.new_full(query.shape[:3], -torch.inf, dtype=big)

    def add(self, tile: Tile, given: tuple[Tensor, Tensor]) -> None:
        out = _at(self.out, tile.rows, tile.queries)
        lse = _at(self.lse, tile.rows, tile.queries)
        mine, its = (_turned(each, tile) for each in given)
        total = torch.logaddexp(lse, its)
        out.mul_((lse - total).exp_().unsqueeze(-1)).addcmul_(mine.to(out.dtype), (its - total).exp_().unsqueeze(-1))
        lse.copy_(total)
