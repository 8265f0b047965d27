"""Ulysses (2309.14509) around an attention of one's own."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from shardfold.compat.deepspeed.crossing import axis_for
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.parallel.ulysses import across_heads

__all__ = ["DistributedAttention"]

HEADS = 2


class DistributedAttention(nn.Module):
    """An attention of whole sequences, called with some heads on each rank that has a part of the sequences.

    The engine of the model has to know of these ranks: by its ``mpu``, ``mesh_param`` or ``sequence_parallel_size``.

    Args:
        local_attention: of ``(tokens, batch, heads / N, dim)`` or, with batches first, ``(batch, tokens, heads / N,
            dim)``; returns the same shape.
        sequence_process_group: the ranks that share sequences.
        scatter_idx: the dimension of heads: 2.
        gather_idx: that of tokens: 0, or 1 where batches are first.
        sp_stream: has no effect: what is sent is waited for.
        num_kv_heads: of keys and values; they say it themselves.

    Raises:
        WrongArgument: dimensions are others.
    """

    def __init__(
        self,
        local_attention: nn.Module,
        sequence_process_group: Any,
        scatter_idx: int = HEADS,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != HEADS or gather_idx not in (0, 1):
            raise WrongArgument(
                f"DistributedAttention(scatter_idx={scatter_idx}, gather_idx={gather_idx}): heads are dimension 2, and "
                "tokens 0 or 1."
            )
        self.local_attn, self.spg = local_attention, sequence_process_group
        self.scatter_idx, self.gather_idx, self.num_kv_heads = scatter_idx, gather_idx, num_kv_heads

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """
        Args:
            query: ``(tokens / N, batch, heads, dim)``, or with ``batch_dim_idx`` 0 ``(batch, tokens / N, heads, dim)``.
            key, value: the same with heads of their own, which are repeated where ranks exceed them.
            batch_dim_idx: the dimension of batches: 1 or 0.
            rotary_pos_emb: None; apply positions to queries and keys before.
            args, kwargs: for the attention, behind these three.

        Returns:
            As ``query``.

        Raises:
            WrongArgument: ``rotary_pos_emb``, dimensions, or a group that is not the engine's.
            WrongCall: no engine has this module that knows of the ranks.
            ConfigError: the ranks do not divide the heads.
        """
        if rotary_pos_emb is not None:
            raise WrongArgument(
                "DistributedAttention(rotary_pos_emb=...) is not here: apply positions to queries and keys before."
            )
        if query.dim() != 4 or batch_dim_idx not in (0, 1):
            raise WrongArgument(
                f"DistributedAttention gets queries of shape {tuple(query.shape)} and batch_dim_idx={batch_dim_idx}: "
                "they are (tokens, batch, heads, dim) with 1, or (batch, tokens, heads, dim) with 0."
            )
        if self.spg is None or dist.get_world_size(self.spg) == 1:
            return self.local_attn(query, key, value, *args, **kwargs)
        there = (1, 2, 0, 3) if batch_dim_idx == 1 else (0, 2, 1, 3)  # to (batch, heads, tokens, dim)
        back = (2, 0, 1, 3) if batch_dim_idx == 1 else (0, 2, 1, 3)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = self.local_attn(*(each.permute(back).contiguous() for each in (q, k, v)), *args, **kwargs)
            return out.permute(there)

        axis = axis_for(self, self.spg)
        sizes = [query.shape[1 - batch_dim_idx]] * axis.size
        out = across_heads(*(each.permute(there) for each in (query, key, value)), axis, sizes, attend)  # pyright: ignore
        return out.permute(back).contiguous()
