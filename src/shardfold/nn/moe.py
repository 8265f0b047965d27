"""A mixture of experts: a router, experts, and experts that all tokens go through.

The loss that keeps experts in use (Switch Transformer, arXiv 2101.03961; GShard, 2006.16668) is

    balance * experts * sum over experts of f * P

f: the expert's share of all choices, P: the mean of its scores, both over the tokens of **all ranks** that read other
things, in this micro-batch: what one process would have of the whole batch. (With ``balance_over="rank"``: over this
rank's tokens; the mean over ranks of that is another number, and another gradient.) It is ``balance`` where all
experts are chosen alike. The loss of logits is ``z * mean(logsumexp(logits) ** 2)`` (ST-MoE, 2202.08906).
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfold.errors import ConfigError
from shardfold.nn.axis_group import Everyone
from shardfold.nn.experts import Experts, FeedForward
from shardfold.nn.router import Router, Routing
from shardfold.plan.checks import known_arguments

__all__ = ["Mixed", "MoE", "within_capacity"]


class Mixed(NamedTuple):
    """What a mixture gives.

    Attributes:
        out: in the shape of its input.
        loss: ``()``, in fp32 or fp64: to be added to the model's loss; 0 where nothing was asked for.
    """

    out: Tensor
    loss: Tensor


@known_arguments
class MoE(nn.Module):
    """A feed-forward layer of ``experts`` experts, of which each token goes through ``top_k``.

    Args:
        width: of tokens.
        hidden: of each expert.
        experts: how many there are. An axis of experts has to divide them.
        top_k, scores, normalize, scale, bias_rate: see :class:`~shardfold.nn.router.Router`; ``bias_rate=0.001``
            balances without a loss.
        shared: the hidden width of an expert that all tokens go through; 0: there is none.
        balance: the factor of the loss that keeps experts in use; 0: none.
        balance_over: ``"all"`` ranks' tokens, or each ``"rank"``'s own.
        z: the factor of the loss of logits; 0: none.
        capacity: an expert takes of this rank's tokens at most ``ceil(capacity * tokens * top_k / experts)``: first
            choices first, then in the order of tokens; the others go past it. None: it takes all.
        eval_capacity: the same outside of training; None: as ``capacity``.
        activation, gated, std, down_std: see :class:`~shardfold.nn.experts.Experts`.

    Raises:
        ConfigError: an argument is out of range.

    Examples:
        >>> layer = sf.nn.MoE(8, 16, experts=4, top_k=2)
        >>> out, loss = layer(x)  # tokens, and the loss that balances experts
        >>> tuple(out.shape)
        (4, 8)
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        top_k: int = 2,
        scores: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias_rate: float | None = None,
        shared: int = 0,
        balance: float = 0.0,
        balance_over: str = "all",
        z: float = 0.0,
        capacity: float | None = None,
        eval_capacity: float | None = None,
        activation: str = "silu",
        gated: bool = True,
        std: float = 0.02,
        down_std: float | None = None,
    ) -> None:
        super().__init__()
        if balance_over not in ("all", "rank"):
            raise ConfigError(f"balance_over={balance_over!r} is unknown: it is 'all' or 'rank'.")
        for name, value in (("capacity", capacity), ("eval_capacity", eval_capacity)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r}: it is a factor above 0, or None.")
        self.balance, self.balance_over, self.z = balance, balance_over, z
        self.capacity, self.eval_capacity = capacity, capacity if eval_capacity is None else eval_capacity
        self.router = Router(
            width, experts, top_k, scores=scores, normalize=normalize, scale=scale, bias_rate=bias_rate, std=std
        )
        like: dict[str, Any] = {"activation": activation, "gated": gated, "std": std, "down_std": down_std}
        self.shared = FeedForward(width, shared, **like) if shared else None
        self.experts = Experts(width, hidden, experts, **like)
        self.everyone = Everyone()

    def extra_repr(self) -> str:
        return f"balance={self.balance}, z={self.z}, capacity={self.capacity}"

    def forward(self, x: Tensor) -> Mixed:
        """``x``: ``(..., width)``."""
        tokens = x.reshape(-1, x.shape[-1])
        routing = self.router(tokens)
        if x.is_meta:  # where each token goes is not known without values: shapes, and what has gradients
            loss = routing.logits.sum() if self.balance or self.z else routing.logits.new_zeros(())
            return Mixed(x * routing.weights.sum().to(x.dtype), loss)
        loss = self._loss(routing)
        chosen, factor = routing.chosen, self.capacity if self.training else self.eval_capacity
        if factor is not None:
            most = ceil(factor * chosen.numel() / self.router.experts)
            chosen = within_capacity(chosen, self.router.experts, most)
        out = self.experts(tokens, chosen, routing.weights)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return Mixed(out.view(x.shape), loss)

    def _loss(self, routing: Routing) -> Tensor:
        scores, chosen, logits = routing.scores, routing.chosen, routing.logits
        loss = logits.new_zeros(())
        if self.balance:
            experts, everyone = self.router.experts, self.everyone if self.balance_over == "all" else Everyone()
            counts = torch.bincount(chosen.reshape(-1), minlength=experts).to(scores.dtype)
            sums = everyone.total(torch.cat([scores.sum(0), counts, counts.new_tensor([len(scores)])]))
            total, counted, tokens = sums[:experts], sums[experts:-1].detach(), sums[-1].detach().clamp(min=1)
            share = counted / (tokens * chosen.shape[1])
            loss = loss + self.balance * experts * (share * total / tokens).sum()
        if self.z:
            loss = loss + self.z * logits.logsumexp(-1).square().sum() / max(1, len(logits))
        return loss


def within_capacity(chosen: Tensor, experts: int, most: int) -> Tensor:
    """``chosen`` ``(T, k)`` with -1 where an expert would get more than ``most``: all first choices are before all
    second ones, and each in the order of tokens."""
    flat = chosen.t().reshape(-1)  # by choice
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts)
    begins = counts.cumsum(0) - counts
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=flat.device) - begins[flat[order]]
    return flat.where(place < most, -1).view(chosen.shape[1], -1).t()
