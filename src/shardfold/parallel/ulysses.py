"""Ulysses (2309.14509): an all-to-all gives each rank some heads of all tokens, another one gives them back.

    queries, keys, values (batch, heads, tokens / N, dim)   -> (batch, heads / N, tokens, dim)
    attention of whole sequences
    output (batch, heads / N, tokens, dim)                  -> (batch, heads, tokens / N, dim)

Of four tensors, each way, a rank sends (N - 1) / N of what it has. Where they are of one shape, queries, keys and
values travel together. Keys of fewer heads than ranks are repeated first, as often as it takes to give each rank its.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.nn.axis_group import AxisGroup, OneRank
from shardfold.parallel.adjoint import paired
from shardfold.parallel.cut import CutBatch
from shardfold.parallel.ring import ring_attention
from shardfold.torch_internals import untraced

__all__ = ["TokenExchange", "across_heads", "by_heads", "check_heads", "repeated_for_ranks", "ulysses_attention"]


class TokenExchange(NamedTuple):
    """Tokens of all ranks for heads of this one, or the way back."""

    group: AxisGroup
    split: int
    concat: int
    sizes: Sequence[int]
    """Tokens by rank."""

    def send(self, tensor: Tensor) -> Tensor:
        """What comes for it; autograd does not see it."""
        if self.split == 1:
            return self.group.all_to_all(tensor, 1, 2, concat_sizes=self.sizes)
        return self.group.all_to_all(tensor, 2, 1, split_sizes=self.sizes)

    @property
    def back(self) -> TokenExchange:
        return self._replace(split=self.concat, concat=self.split)


def check_heads(heads: int, ranks: int) -> None:
    """
    Raises:
        ConfigError: heads cannot be shared out.
    """
    if heads % ranks:
        raise ConfigError(
            f"Parallel(attention='ulysses') gives each rank as many heads, but {heads} heads are not divisible by "
            f"{ranks} ranks of sequence: choose Parallel(attention='ring'), or a number of ranks that divides them."
        )


@untraced
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    cut: CutBatch,
    *,
    causal: bool,
    scale: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """As :func:`ring_attention`, of tokens that are cut into one range for each rank; all ranks call it.

    ``dropout`` is that of ``F.scaled_dot_product_attention``; packed documents, windows and soft caps have none.

    Raises:
        ConfigError: the heads do not divide by the ranks, or ``dropout`` beside packed documents, a window or a cap.
    """
    tiles = cut.packed or window is not None or softcap is not None
    if tiles and dropout:
        what = "with a sliding window" if window is not None else "with a soft cap"
        what = "of packed documents" if cut.packed else what
        raise ConfigError(f"attention {what} has no dropout: set the model's dropout of attention to 0.")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if tiles:
            one = OneRank(group.axis)
            return ring_attention(
                query, key, value, one, cut.joined, causal=causal, scale=scale, window=window, softcap=softcap
            )
        grouped = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    return across_heads(query, key, value, group, cut.sizes, attend)


def across_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    sizes: Sequence[int],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """What ``attend`` makes of some heads of all tokens, given back as all heads of this rank's; all ranks call it.

    Args:
        query: ``(batch, heads, tokens, dim)``.
        key, value: ``(batch, key_heads, tokens, dim)``.
        group: the ranks that have the other tokens.
        sizes: tokens by rank.
        attend: of ``(batch, heads / N, all tokens, dim)`` in that shape.

    Raises:
        ConfigError: the heads do not divide by the ranks.
    """
    check_heads(query.shape[1], group.size)
    key, value = (repeated_for_ranks(each, group.size) for each in (key, value))
    there = TokenExchange(group, 1, 2, sizes)
    query, key, value = by_heads([query, key, value], there, _sent)
    return _sent(attend(query, key, value), there.back)


def repeated_for_ranks(tensor: Tensor, ranks: int) -> Tensor:
    """With heads repeated until ranks divide them."""
    own = tensor.shape[1]
    return tensor if own % ranks == 0 else tensor.repeat_interleave(lcm(own, ranks) // own, dim=1)


def _sent(tensor: Tensor, way: TokenExchange) -> Tensor:
    return paired(tensor, way.send, way.back.send)


def by_heads(
    tensors: Sequence[Tensor], way: TokenExchange, send: Callable[[Tensor, TokenExchange], Tensor]
) -> list[Tensor]:
    """Each by heads, in one exchange if it can be; ``send`` sends a tensor that way."""
    ranks = way.group.size
    if len({(tensor.dtype, tensor.shape[3]) for tensor in tensors}) > 1:
        return [send(tensor, way) for tensor in tensors]
    each = [tensor.unflatten(1, (ranks, tensor.shape[1] // ranks)) for tensor in tensors]
    together = send(torch.cat(each, dim=2).flatten(1, 2), way)
    return list(together.split([part.shape[2] for part in each], dim=1))
