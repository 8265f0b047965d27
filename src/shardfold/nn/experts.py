"""Experts: feed-forward layers of which each token goes through some, their weights stacked in one parameter each.

Rows of tokens are sorted by expert, go through grouped products, and come back weighed:

    tokens (T, width), chosen (T, k), weights (T, k)
    -> rows (T * k, width), by expert           sorted_rows
    -> rows (T * k, width)                      Experts.of_rows
    -> tokens (T, width), the weighed sums      combined

What ``forward`` is given is all that ranks have to know to share the experts out: see ``parallel.experts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.errors import ConfigError, did_you_mean
from shardfold.nn._grouped import grouped_linear
from shardfold.plan.checks import known_arguments

__all__ = ["ACTIVATIONS", "ByRows", "Experts", "FeedForward", "Sorted", "combined", "sorted_rows"]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}
INIT_STD = 0.02


class Sorted(NamedTuple):
    """Which rows experts get.

    Attributes:
        order: ``(rows,)``: of each row, by expert, the number of its token's choice, token * k + choice.
        counts: rows by expert.
    """

    order: Tensor
    counts: list[int]


def sorted_rows(chosen: Tensor, experts: int) -> Sorted:
    """Choices by expert, in the order of tokens; ``chosen`` ``(T, k)`` is -1 where a token goes to none."""
    flat = chosen.reshape(-1)
    order = flat.argsort(stable=True)
    dropped, *counts = torch.bincount(flat + 1, minlength=experts + 1).tolist()
    return Sorted(order[dropped:], counts)


def combined(rows: Tensor, order: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Of what became of each row, the weighed sums by token: ``(T, width)``, in ``dtype``; summed before that is
    rounded.

    Args:
        rows: ``(len(order), width)``.
        order: see :class:`Sorted`.
        weights: ``(T, k)``.
    """
    tokens, choices = weights.shape
    wide = torch.promote_types(rows.dtype, weights.dtype)
    weighed = rows.to(wide) * weights.reshape(-1)[order].to(wide).unsqueeze(1)
    out = weighed.new_zeros(tokens * choices, rows.shape[1]).index_copy(0, order, weighed)
    return out.view(tokens, choices, rows.shape[1]).sum(1).to(dtype)


def check_activation(name: str) -> None:
    """
    Raises:
        ConfigError: there is no such function.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(f"activation={name!r} is unknown.{did_you_mean(name, ACTIVATIONS)}")


def _acted(made: Tensor, activation: str, gated: bool) -> Tensor:
    act = ACTIVATIONS[activation]
    if not gated:
        return act(made)
    gate, up = made.chunk(2, dim=-1)
    return act(gate) * up


class FeedForward(nn.Module):
    """One expert that all tokens go through; arguments as of :class:`Experts`."""

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        std: float = INIT_STD,
        down_std: float | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        self.activation, self.gated, self.std, self.down_std = activation, gated, std, down_std or std
        self.gate_up_proj = nn.Parameter(torch.empty(hidden * (2 if gated else 1), width))
        self.down_proj = nn.Parameter(torch.empty(width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.down_std)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_acted(F.linear(x, self.gate_up_proj), self.activation, self.gated), self.down_proj)


class ByRows(nn.Module):
    """Experts in parameters that have a row for each.

    Attributes:
        num_experts: how many there are, here.
    """

    num_experts: int

    def of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """``(rows, width)`` of rows by expert, ``counts`` of each; in the graph is each parameter."""
        raise NotImplementedError

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """
        Args:
            x: ``(T, width)``.
            chosen: ``(T, k)``, numbers of experts; -1: none.
            weights: ``(T, k)``, of what these give.

        Returns:
            ``(T, width)``.
        """
        if x.is_meta:
            return x * weights.sum().to(x.dtype)
        order, counts = sorted_rows(chosen, self.num_experts)
        made = self.of_rows(x[order // chosen.shape[1]], counts)
        return combined(made, order, weights, x.dtype)


@known_arguments
class Experts(ByRows):
    """``down(act(gate(x)) * up(x))`` of each token's experts, weighed and summed.

    Args:
        width: of tokens.
        hidden: of each expert.
        count: how many experts there are.
        activation: ``"silu"``, ``"gelu"`` or ``"relu"``.
        gated: without: ``down(act(up(x)))``.
        std: of the first values of weights; of ``down`` another may be given.
        down_std: the same of ``down``; None: as ``std``.

    Examples:
        >>> experts = sf.nn.Experts(8, 16, count=4)
        >>> chosen = torch.tensor([[0, 1], [2, 3], [0, 3], [1, 2]])  # of each token
        >>> tuple(experts(x, chosen, torch.full((4, 2), 0.5)).shape)
        (4, 8)
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        count: int,
        *,
        activation: str = "silu",
        gated: bool = True,
        std: float = INIT_STD,
        down_std: float | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        self.width, self.hidden, self.num_experts = width, hidden, count
        self.activation, self.gated, self.std, self.down_std = activation, gated, std, down_std or std
        self.gate_up_proj = nn.Parameter(torch.empty(count, hidden * (2 if gated else 1), width))
        self.down_proj = nn.Parameter(torch.empty(count, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.std)
        nn.init.normal_(self.down_proj, std=self.down_std)

    def extra_repr(self) -> str:
        return f"width={self.width}, hidden={self.hidden}, count={self.num_experts}, activation={self.activation!r}"

    def of_rows(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """``(rows, width)`` of rows by expert, ``counts`` of each."""
        made = grouped_linear(rows, self.gate_up_proj, counts)
        return grouped_linear(_acted(made, self.activation, self.gated), self.down_proj, counts)
