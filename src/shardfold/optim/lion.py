"""Lion: the sign of an interpolation of gradient and momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.optim.parts import PartOptimizer, ShardPlacement, Use, check_betas, check_number
from shardfold.plan.checks import known_arguments

__all__ = ["Lion"]


@known_arguments
class Lion(PartOptimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2): ``x -= lr * (sign(b1 m + (1 - b1) g) + weight_decay * x)``,
    then ``m = b2 m + (1 - b2) g``. Element-wise: nothing is sent. State: 1 value per element.

    Args:
        params: parameters or groups of them.
        lr: learning rate; the paper takes 3 to 10 times less than for AdamW.
        betas: of the direction, and of the momentum.
        weight_decay: decoupled; the paper takes 3 to 10 times more than for AdamW.

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> signs = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.Lion, lr=1e-4), layout="zero3")
        >>> signs.close()
    """

    per_element = ("exp_avg",)
    elementwise = True
    per_parameter = ()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_number(Lion, "lr", lr)
        check_number(Lion, "weight_decay", weight_decay)
        check_betas(Lion, betas)
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        return {"exp_avg": torch.zeros_like(tensor)}

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        return itemsize * place.part_numel

    def update(self, uses: list[Use]) -> None:
        for use in uses:
            lr, (beta1, beta2), average = use.group["lr"], use.group["betas"], use.state["exp_avg"]
            use.tensor.mul_(1 - lr * use.group["weight_decay"])
            use.tensor.sub_(average.lerp(use.grad, 1 - beta1).sign_().mul_(lr))
            average.lerp_(use.grad, 1 - beta2)
