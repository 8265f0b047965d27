"""``deepspeed.moe.layer``: a mixture of experts, shared out over ``ep_size`` ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.compat.deepspeed.lazy import attach
from shardfold.compat.deepspeed.moe.sharded_moe import TopKGate
from shardfold.compat.deepspeed.refused import WrongArgument
from shardfold.nn.stacked import StackedExperts

__all__ = ["MoE"]


class _Mixture(nn.Module):
    def __init__(self, gate: TopKGate, experts: StackedExperts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts


class MoE(nn.Module):
    """See DeepSpeed's documentation of the arguments; those of the gate are :class:`TopKGate`'s.

    Args:
        hidden_size: of tokens.
        expert: of which each of ``num_experts`` begins as a copy.
        ep_size: ranks that share experts out: an axis of experts of the engine's mesh, the same for all layers.
        use_residual: ``expert`` is applied to each token too, and both are mixed (arXiv 2201.05596).
        use_tutel, enable_expert_tensor_parallelism: refused.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if num_experts % ep_size:
            raise WrongArgument(
                f"MoE(num_experts={num_experts}, ep_size={ep_size}): experts do not divide by the ranks that share "
                "them out."
            )
        if use_tutel or enable_expert_tensor_parallelism:
            what = "use_tutel" if use_tutel else "enable_expert_tensor_parallelism"
            raise WrongArgument(f"MoE({what}=True): that is not here; leave it out.")
        self.num_experts, self.ep_size = num_experts, ep_size
        self.enable_expert_tensor_parallelism = False
        self.num_local_experts, self.expert_group_name = num_experts // ep_size, f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        experts = StackedExperts(expert, num_experts)
        for parameter in experts.parameters():
            vars(parameter).update(allreduce=False, group_name=self.expert_group_name)
        self.deepspeed_moe = _Mixture(gate, experts)
        self.use_residual = use_residual
        if use_residual:
            self.mlp, self.coefficient = copy.deepcopy(expert), nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing: the engine connects its ranks."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``(output, loss of balance, choices by expert)``."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        loss, chosen, weights, counts = self.deepspeed_moe.gate(tokens, used_token)
        output = self.deepspeed_moe.experts(tokens, chosen, weights).reshape(hidden_states.shape)
        if self.use_residual:
            beside: Any = self.mlp(hidden_states)
            beside = beside[0] if isinstance(beside, tuple) else beside
            share = torch.softmax(self.coefficient(hidden_states), -1)
            output = output * share[..., 0:1] + beside * share[..., 1:]
        return output, loss, counts


__getattr__, __dir__ = attach(__name__)
