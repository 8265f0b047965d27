"""``deepspeed.moe.sharded_moe``: the gate that says which experts each token goes to."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.compat.deepspeed.lazy import attach
from shardfold.compat.deepspeed.refused import WrongArgument

__all__ = ["TopKGate"]


class TopKGate(nn.Module):
    """A linear layer without bias, in fp32, whose softmax weighs ``k`` experts of each token.

    Args:
        model_dim: of tokens.
        num_experts: on all ranks.
        k: experts of each token.
        capacity_factor, eval_capacity_factor: an expert takes ``ceil(k * tokens / experts * factor)`` of this rank's
            tokens, at least ``min_capacity``.
        noisy_gate_policy: ``"Jitter"`` multiplies what the gate reads by numbers near 1, ``"RSample"`` chooses by
            logits with Gumbel noise; of one expert only. None: neither.
        drop_tokens: False: experts take all.
        use_rts: of one expert, those that are taken are drawn, in place of the first ones.
        top2_2nd_expert_sampling: the second of two experts is chosen by logits with Gumbel noise.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise WrongArgument(f"noisy_gate_policy={noisy_gate_policy!r}: it is 'Jitter', 'RSample' or None.")
        if not 1 <= k <= num_experts:
            raise WrongArgument(f"k={k} of {num_experts} experts: each token goes to 1 to {num_experts} of them.")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.num_experts, self.min_capacity = k, num_experts, min_capacity
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        self.drop_tokens, self.use_rts, self.top2_2nd_expert_sampling = drop_tokens, use_rts, top2_2nd_expert_sampling

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The loss of balance, chosen experts ``(T, k)``, -1 for none, their weights, and choices by expert."""
        wide = torch.float64 if input.dtype == torch.float64 else torch.float32
        x = input.to(wide)
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = x * torch.empty_like(x).uniform_(1 - 1e-2, 1 + 1e-2)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x, self.wg.weight.to(wide))
        gates = logits.softmax(-1)
        chosen = self._chosen(logits.detach())
        if used_token is not None:
            chosen = chosen.where(used_token.reshape(-1, 1).bool(), -1)
        mask = nn.functional.one_hot(chosen + 1, self.num_experts + 1)[..., 1:].sum(1)
        first = nn.functional.one_hot(chosen[:, 0] + 1, self.num_experts + 1)[..., 1:] if self.k == 2 else mask
        share = first.to(wide).mean(0) / (1 if self.k <= 2 else self.k)
        loss = (gates.mean(0) * share).sum() * self.num_experts
        kept = self._kept(chosen, gates.detach()) if self.drop_tokens else chosen
        weights = gates.gather(1, kept.clamp(min=0)) * (kept >= 0)
        if self.k > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(wide).eps)
        return loss, kept, weights, mask.sum(0).detach().to("cpu")

    def _chosen(self, logits: Tensor) -> Tensor:
        def noisy(values: Tensor) -> Tensor:
            return values - torch.empty_like(values).exponential_().log()

        if self.k == 1:
            return (noisy(logits) if self.noisy_gate_policy == "RSample" and self.training else logits).topk(1).indices
        if self.k == 2 and self.top2_2nd_expert_sampling:
            first = logits.argmax(-1, keepdim=True)
            second = noisy(logits).scatter(1, first, float("-inf")).argmax(-1, keepdim=True)
            return torch.cat([first, second], 1)
        return logits.topk(self.k).indices

    def _kept(self, chosen: Tensor, gates: Tensor) -> Tensor:
        """``chosen`` without those over capacity: of one expert, by draw; of two, first choices first; of more, the
        largest weights."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        most = max(ceil(self.k * len(chosen) / self.num_experts * factor), self.min_capacity)
        flat = chosen.t().reshape(-1)
        if self.k == 1 and self.use_rts:
            before = torch.rand(len(flat), device=flat.device)
        elif self.k <= 2:
            before = torch.arange(len(flat), device=flat.device)
        else:
            before = -gates.gather(1, chosen.clamp(min=0)).t().reshape(-1)
        order = before.argsort(stable=True)
        order = order[flat[order].argsort(stable=True)]  # by expert, and then as above
        counts = torch.bincount(flat + 1, minlength=self.num_experts + 1)
        place = torch.empty_like(flat)
        place[order] = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order] + 1]
        return flat.where(place < most, -1).view(self.k, -1).t()


__getattr__, __dir__ = attach(__name__)
