"""LAMB: Adam's direction, scaled per parameter by the norm of its values over the norm of the direction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.numerics.clipping import square_sum
from shardfold.optim.parts import PartOptimizer, ShardPlacement, Use, check_betas, check_number
from shardfold.plan.checks import known_arguments

__all__ = ["LAMB"]


@known_arguments
class LAMB(PartOptimizer):
    """LAMB (You et al., arXiv 1904.00962, algorithm 2).

    With Adam's direction ``u = m / (sqrt(v) + eps) + weight_decay * x``, ``x -= lr * trust * u`` where ``trust`` is
    ``|x| / |u|``, both norms of the whole parameter, held inside of ``trust_range``; 1 where a norm is 0. On shards the
    squares of all parts are summed by one all-reduce of 16 bytes per parameter and step. State: 2 values per element.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: part of the direction, as in the paper.
        bias_correction: whether moments are divided by ``1 - beta ** step``.
        trust_range: least and largest trust ratio.
        adapt: False: the trust ratio is 1 (a group's own, for biases and norms).

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> large_batches = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.LAMB, lr=1e-3), layout="zero2")
        >>> large_batches.close()
    """

    per_element = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        trust_range: tuple[float, float] = (0.0, float("inf")),
        adapt: bool = True,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_number(LAMB, name, value)
        check_betas(LAMB, betas)
        if not 0 <= trust_range[0] <= trust_range[1]:
            raise ConfigError(f"LAMB(trust_range={trust_range!r}): it is the least and the largest ratio, from 0 up.")
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, {**defaults, "trust_range": trust_range, "adapt": adapt})

    def needs_whole(self, group: dict[str, Any]) -> bool:
        return group["adapt"]

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        return 2 * itemsize * place.part_numel

    def update(self, uses: list[Use]) -> None:
        if not uses:
            return
        parts: list[Tensor] = []
        for use in uses:
            beta1, beta2 = use.group["betas"]
            use.state["step"] += 1
            use.state["exp_avg"].lerp_(use.grad, 1 - beta1)
            use.state["exp_avg_sq"].mul_(beta2).addcmul_(use.grad, use.grad, value=1 - beta2)
            both = (use.tensor, _direction(use))
            parts.append(torch.stack([square_sum([each.reshape(-1)], each.device) for each in both]))
        norms = torch.stack(self.summed(uses, parts)).sqrt()
        ratios = torch.where((norms > 0).all(1), norms[:, 0] / norms[:, 1], 1.0)
        for use, ratio in zip(uses, ratios, strict=True):
            trust = ratio.clamp(*use.group["trust_range"]) if use.group["adapt"] else 1.0
            # The direction is made twice, as keeping it would take as much memory as one more moment.
            use.tensor.sub_(_direction(use).mul_(trust * use.group["lr"]))


def _direction(use: Use) -> Tensor:
    """Adam's direction and the decay, a new tensor."""
    group, step = use.group, use.state["step"]
    corrections = [1 - beta**step if group["bias_correction"] else 1.0 for beta in group["betas"]]
    root = (use.state["exp_avg_sq"] / corrections[1]).sqrt_().add_(group["eps"])
    return (use.state["exp_avg"] / corrections[0]).div_(root).add_(use.tensor, alpha=group["weight_decay"])
