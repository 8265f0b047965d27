"""Which experts each token goes to, and with what weights.

    scores    softmax over the experts, or a sigmoid of each; in fp32 (fp64 of fp64), whatever the model computes in
    chosen    the ``top_k`` experts with the largest scores, or with the largest scores + bias
    weights   their scores, divided by their sum where ``normalize``, times ``scale``

The bias (DeepSeek-V3, arXiv 2412.19437; 2408.15664) is in no gradient: after each step it grows by ``bias_rate`` for
experts that had fewer tokens than the mean, and falls for those that had more. All ranks' tokens of the step count.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardfold.errors import ConfigError
from shardfold.nn.axis_group import Everyone
from shardfold.plan.checks import known_arguments
from shardfold.torch_internals import in_backward

__all__ = ["Router", "Routing"]


class Routing(NamedTuple):
    """What a router says of ``T`` tokens.

    Attributes:
        chosen: ``(T, k)``: numbers of experts.
        weights: ``(T, k)``.
        scores: ``(T, experts)``: of each token they sum up to 1.
        logits: ``(T, experts)``.
    """

    chosen: Tensor
    weights: Tensor
    scores: Tensor
    logits: Tensor


@known_arguments
class Router(nn.Module):
    """See the module's docstring.

    Args:
        width: of tokens.
        experts: how many there are.
        top_k: how many each token goes to.
        scores: ``"softmax"`` or ``"sigmoid"``.
        normalize: whether the weights of a token sum up to ``scale``.
        scale: of weights.
        bias_rate: how much the bias changes in a step; None: there is no bias.
        std: of the first values of the weight.

    Examples:
        >>> routing = sf.nn.Router(8, experts=4, top_k=2)(x)
        >>> tuple(routing.chosen.shape)
        (4, 2)
    """

    bias: Tensor

    def __init__(
        self,
        width: int,
        experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalize: bool = True,
        scale: float = 1.0,
        bias_rate: float | None = None,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        if scores not in ("softmax", "sigmoid"):
            raise ConfigError(f"scores={scores!r} is unknown: it is 'softmax' or 'sigmoid'.")
        if not 1 <= top_k <= experts:
            raise ConfigError(f"top_k={top_k} of {experts} experts: each token goes to 1 to {experts} of them.")
        self.experts, self.top_k, self.kind = experts, top_k, scores
        self.normalize, self.scale, self.bias_rate, self.std = normalize, scale, bias_rate, std
        self.weight = nn.Parameter(torch.empty(experts, width))
        if bias_rate is not None:
            self.register_buffer("bias", torch.zeros(experts))
        self.everyone = Everyone()
        self._seen: Tensor | None = None  # tokens by expert, since the bias changed
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def extra_repr(self) -> str:
        return f"experts={self.experts}, top_k={self.top_k}, scores={self.kind!r}"

    def forward(self, x: Tensor) -> Routing:
        """``x``: ``(T, width)``."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(wide), self.weight.to(wide))
        raw = logits.softmax(-1) if self.kind == "softmax" else logits.sigmoid()
        ranked = raw if self.bias_rate is None else raw.detach() + self.bias
        chosen = ranked.topk(self.top_k, dim=-1).indices
        weights = raw.gather(-1, chosen)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        scores = raw if self.kind == "softmax" else raw / raw.sum(-1, keepdim=True).clamp(min=1e-20)
        # A recomputation counts nothing.
        if self.bias_rate is not None and self.training and not x.is_meta and not in_backward():
            seen = torch.bincount(chosen.detach().reshape(-1), minlength=self.experts)
            self._seen = seen if self._seen is None else self._seen + seen
        return Routing(chosen, weights * self.scale, scores, logits)

    def rebalance(self) -> None:
        """Changes the bias by the tokens of all ranks since it changed last; an engine does so after each step, a loop
        of your own calls it behind ``optimizer.step()``."""
        if self.bias_rate is None:
            return
        seen = self._seen if self._seen is not None else torch.zeros(self.experts, dtype=torch.int64)
        seen, self._seen = self.everyone.sum(seen.to(self.bias.device)), None
        mean = seen.sum() / self.experts
        with torch.no_grad():
            self.bias += self.bias_rate * torch.sign(mean - seen).to(self.bias.dtype)
