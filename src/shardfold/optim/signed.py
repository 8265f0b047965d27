"""What optimizers have in common whose momentum may be averaged by signs (see ``sign_exchange``).

How the ranks along an axis meet is another one from step to step (:meth:`SignOptimizer.meeting`):

    dense   gradients are summed, and the variance follows them
    signs   what :meth:`SignOptimizer.blend` makes of each rank's own gradient is averaged by signs, and comes to
            ``update`` in place of gradients; the variance stays
    local   nothing crosses the axis; the variance stays, and each rank goes its own way up to the next signs
"""

from __future__ import annotations

from math import ceil
from typing import Any, ClassVar

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.optim.parts import PartOptimizer, Use
from shardfold.plan.checks import described, is_integer, is_number

__all__ = ["STABLE", "SignOptimizer"]

STABLE = "stable"


class SignOptimizer(PartOptimizer):
    """An optimizer that keeps its variance from some step on.

    Args:
        params, defaults: as of any optimizer.
        freeze_step: steps until the variance is frozen; ``"stable"``: until it changes little.
        stable: by how little: the sums of all variances now and ``1 / (1 - beta2)`` steps ago are in this ratio, or
            nearer to 1.

    Attributes:
        meets: how the next step meets, as an engine's exchange says; None: there is none, and gradients are those of
            all that there is.
        proposed: whether the step that was is the last one of the warm-up, where it looked; an exchange lets all ranks
            agree and calls :meth:`settle`.

    Raises:
        ConfigError: a hyper-parameter is out of its range.
    """

    parts_ways: ClassVar[bool] = False  # in some steps nothing crosses the axis

    def __init__(self, params: Any, defaults: dict[str, Any], freeze_step: Any, stable: float = 0.96) -> None:
        kind = type(self).__name__
        if not isinstance(defaults["bias_correction"], bool):
            raise ConfigError(f"{kind}(bias_correction={described(defaults['bias_correction'])}): it is True or False.")
        if freeze_step != STABLE and not is_integer(freeze_step, 1):
            raise ConfigError(
                f"{kind}(freeze_step={described(freeze_step)}): it is a number of steps, 1 or more, or 'stable'."
            )
        if not is_number(stable, 0, 1) or not 0 < stable < 1:
            raise ConfigError(f"{kind}(stable={described(stable)}): it is a ratio above 0 and below 1.")
        self.freeze_step: Any = freeze_step
        self.stable = float(stable)
        self.meets: str | None = None
        self.proposed: bool | None = None
        super().__init__(params, defaults)

    def blend(self, group: dict[str, Any], tensor: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """What this rank has to be averaged, over :meth:`root`, with a gradient of its own, and the variance; None:
        nothing of this part. ``grad`` is None where no rank used the parameter in this step."""
        if grad is None:
            return None
        state = self.state[tensor]
        momentum = state["exp_avg"].lerp(grad, 1 - group["betas"][0])
        return momentum.div_(self.root(group, state)), state["exp_avg_sq"]

    def follow(self, use: Use, *, dense: bool) -> None:
        """Momentum follows a gradient, and, in a ``dense`` step, the variance; else what has none has no momentum."""
        (beta1, beta2), state = use.group["betas"], use.state
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        average.lerp_(use.grad, 1 - beta1)
        if dense:
            squares.mul_(beta2).addcmul_(use.grad, use.grad, value=1 - beta2)
            state["variance_steps"] += 1
        else:
            average.masked_fill_(squares == 0, 0.0)

    def give(self, group: dict[str, Any], tensor: Tensor, values: Tensor) -> None:
        """Takes the average of what :meth:`blend` gave without a gradient."""
        raise NotImplementedError

    def meeting(self, steps: int) -> str:
        """How ranks meet in the step behind so many steps."""
        return "signs" if self.frozen(steps) else "dense"

    def corrections(self, group: dict[str, Any], state: dict[str, Any]) -> tuple[float, float]:
        """What momentum and variance are divided by, as both began at 0: ``1 - beta ** n`` for the ``n`` gradients that
        each has followed, which for the variance are those of dense steps; 1 without ``bias_correction``."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        beta1, beta2 = group["betas"]
        return 1 - beta1 ** state["step"], 1 - beta2 ** state["variance_steps"] or 1.0

    def root(self, group: dict[str, Any], state: dict[str, Any]) -> Tensor:
        """``sqrt(v) + eps`` of a part, with ``v`` corrected, a new tensor. What is averaged by signs is divided by it:
        all ranks have the same, and numbers of one size lose least where a block of them has one magnitude."""
        _, smaller = self.corrections(group, state)
        return state["exp_avg_sq"].sqrt().mul_(smaller**-0.5).add_(group["eps"])

    @property
    def apart(self) -> bool:
        """Whether ranks have gone their own ways since they met."""
        return False

    def rejoin(self) -> None:
        """All ranks were given the same values: nothing is left of their ways."""

    def begin_meeting(self, steps: int) -> str:
        """How the step behind so many meets, as all ranks do from here on."""
        self.meets = self.meeting(steps)
        return self.meets

    def frozen(self, steps: int) -> bool:
        """Whether the variance stays, behind so many steps."""
        if self.freeze_step == STABLE:
            return any(self.state[tensor].get("frozen") for _, tensor, _ in self.parts())
        return steps >= self.freeze_step

    @property
    def how(self) -> str:
        """How this step meets, as its update begins."""
        if self.meets is not None:
            return self.meets
        return self.meeting(max((self.state[tensor].get("step", 0) for _, tensor, _ in self.parts()), default=0))

    def watched(self) -> dict[str, Any]:
        """What a new state has besides, to find out when the variance is stable: its sum and the step when that was
        last looked at, and the step from which on it stays."""
        if self.freeze_step != STABLE:
            return {}
        return {"size": 0.0, "looked": 0, "frozen": 0}

    def watch(self) -> None:
        """Behind the update of the variance: whether it is stable."""
        self.proposed = None
        if self.freeze_step != STABLE:
            return
        rows = [row for row in self.parts() if row[2].whole_numel and self.state[row[1]]]
        states = [self.state[tensor] for _, tensor, _ in rows]
        every = max((ceil(1 / (1 - group["betas"][1])) for group, _, _ in rows), default=1)
        steps = max((state["step"] for state in states), default=0)
        if steps - max((state["looked"] for state in states), default=0) < every:
            return
        uses = [Use(group, t, t, state, place) for (group, t, place), state in zip(rows, states, strict=True)]
        sums = self.summed(uses, [state["exp_avg_sq"].sum(dtype=torch.float64).reshape(1) for state in states])
        sizes = torch.cat(sums).tolist()
        now, before = sum(sizes), sum(state["size"] for state in states)
        for state, size in zip(states, sizes, strict=True):
            state["size"], state["looked"] = size, steps
        self.proposed = before > 0 and min(now, before) >= self.stable * max(now, before)
        if self.meets is None:
            self.settle(agreed=self.proposed)

    def settle(self, *, agreed: bool) -> None:
        """All ranks agree whether the variance stays from now on."""
        self.proposed = None
        for _, tensor, _ in self.parts() if agreed else ():
            if state := self.state[tensor]:
                state["frozen"] = state["looked"]
