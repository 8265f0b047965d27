"""1-bit Adam: Adam until its variance is steady, then momentum by signs over a variance that stays as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfold.optim.parts import ShardPlacement, Use, check_betas, check_number
from shardfold.optim.signed import SignOptimizer
from shardfold.plan.checks import known_arguments

__all__ = ["OneBitAdam"]


@known_arguments
class OneBitAdam(SignOptimizer):
    """1-bit Adam (Tang et al., arXiv 2102.02888, algorithm 1): ``x -= lr * (m / (sqrt(v) + eps) + weight_decay * x)``,
    with both moments corrected for their start at 0. From step ``freeze_step`` on ``v`` and its correction stay. Up to
    there it is ``torch.optim.AdamW``.

    Under an engine with :class:`shardfold.Signs` the ranks along its axis send gradients up to there, and signs of
    ``m / (sqrt(v) + eps)`` from there on (the paper: of ``m``, whose elements differ in size by more). Elements whose
    gradient was 0 until then have no variance, and stay as they are.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        freeze_step: steps until the variance is frozen; the paper takes 15 to 25 % of all. ``"stable"``: until it
            changes little.
        betas: of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: part of the direction.
        bias_correction: False: none, as in the paper. A variance that is frozen after few steps is then too small for
            good (after 100 steps with a beta of 0.999, a tenth of what it would become), and steps are too long.
        stable: how little that is: the sum of all variances and that of ``1 / (1 - beta2)`` steps before are in this
            ratio, or nearer to 1 (section 7.1 of the paper).

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> warm = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.OneBitAdam, lr=1e-3, freeze_step=100))
        >>> warm.close()
    """

    per_element = ("exp_avg", "exp_avg_sq")
    per_parameter = ("step", "variance_steps", "size", "looked", "frozen")
    elementwise = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        freeze_step: int | str = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        stable: float = 0.96,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_number(OneBitAdam, name, value)
        check_betas(OneBitAdam, betas)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, defaults, freeze_step, stable)

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        moments = {"exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}
        return {"step": 0, "variance_steps": 0, **moments, **self.watched()}

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        return 2 * itemsize * place.part_numel

    def update(self, uses: list[Use]) -> None:
        how = self.how
        for use in uses:
            state, average = use.state, use.state["exp_avg"]
            state["step"] += 1
            if self.meets == "signs":  # what comes is the direction
                torch.mul(use.grad, self.root(use.group, state), out=average)
                direction = use.grad / self.corrections(use.group, state)[0]
            else:
                self.follow(use, dense=how == "dense")
                root = self.root(use.group, state)
                direction = torch.div(average, root, out=root).div_(self.corrections(use.group, state)[0])
            use.tensor.sub_(direction.add_(use.tensor, alpha=use.group["weight_decay"]).mul_(use.group["lr"]))
        if how == "dense":
            self.watch()
