"""1-bit Adam: Adam until its variance is steady, then momentum by signs over a variance that stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.optim.parts import PartOptimizer, Place, Use, check_betas, check_number
from shardfold.plan.arguments import known_arguments
from shardfold.plan.checks import described, is_integer

__all__ = ["OneBitAdam"]


@known_arguments
class OneBitAdam(PartOptimizer):
    """1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1): ``x -= lr * (m / (sqrt(v) + eps) + weight_decay * x)``,
    without bias correction, as in the paper. From step ``freeze_step`` on ``v`` stays.

    Under an engine with :class:`shardfold.Signs` the ranks along its axis send gradients up to there, and signs of
    momentum from there on. Elements whose gradient was 0 until then have no variance, and stay as they are.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        freeze_step: steps until the variance is frozen; the paper takes 15 to 25 % of all.
        betas: of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: part of the direction.

    Attributes:
        given_momentum: the gradients of this step are the averaged momentum, which an engine's exchange has made.

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> warm = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.OneBitAdam, lr=1e-3, freeze_step=100))
        >>> warm.close()
    """

    per_element = ("exp_avg", "exp_avg_sq")
    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_number(OneBitAdam, name, value)
        check_betas(OneBitAdam, betas)
        if not is_integer(freeze_step, 1):
            raise ConfigError(f"OneBitAdam(freeze_step={described(freeze_step)}): it is a number of steps, 1 or more.")
        self.freeze_step, self.given_momentum = int(freeze_step), False
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: Place) -> dict[str, Any]:
        return {"step": 0, "exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}

    def state_bytes(self, group: dict[str, Any], place: Place, itemsize: int) -> int:
        return 2 * itemsize * place.held

    def blend(self, group: dict[str, Any], tensor: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank's momentum would be with a gradient of its own, and which elements have no variance."""
        average, squares = self.value(tensor, "exp_avg"), self.value(tensor, "exp_avg_sq")
        return average.lerp(grad, 1 - group["betas"][0]), squares == 0

    def update(self, uses: list[Use]) -> None:
        for use in uses:
            (beta1, beta2), state = use.group["betas"], use.state
            state["step"] += 1
            average, squares = state["exp_avg"], state["exp_avg_sq"]
            if self.given_momentum:
                average.copy_(use.grad)
            else:
                average.lerp_(use.grad, 1 - beta1)
                if state["step"] <= self.freeze_step:
                    squares.mul_(beta2).addcmul_(use.grad, use.grad, value=1 - beta2)
            direction = average / squares.sqrt().add_(use.group["eps"])
            use.tensor.sub_(direction.add_(use.tensor, alpha=use.group["weight_decay"]).mul_(use.group["lr"]))
