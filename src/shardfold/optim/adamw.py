"""One step of AdamW on one tensor, by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardfold.torch_internals import fused_adamw_

__all__ = ["adamw_"]


def adamw_(
    tensor: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, group: Mapping[str, Any], eps: float
) -> None:
    """AdamW (arXiv 1711.05101) in place; all tensors have one shape and dtype, ``step`` counts from 1."""
    fused_adamw_(
        [tensor],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), float(step), device=tensor.device)],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=None,
    )
