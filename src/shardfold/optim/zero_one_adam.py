"""0/1 Adam: the variance is looked at ever more rarely, and signs of momentum cross a link ever more rarely."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from shardfold.errors import ConfigError
from shardfold.optim.parts import ShardPlacement, Use, check_betas, check_number
from shardfold.optim.signed import SignOptimizer
from shardfold.plan.checks import described, is_integer, known_arguments

__all__ = ["ZeroOneAdam"]


@known_arguments
class ZeroOneAdam(SignOptimizer):
    """0/1 Adam (Lu et al., arXiv 2202.06009, algorithm 1), with both moments corrected for their start at 0.

    Up to ``freeze_step`` the variance follows the gradient in some steps, in which it is summed over all ranks: the
    distance of one to the next is ``2 ** (j // variance_scaler)`` for the ``j``-th. In the others the signs of momentum
    are sent, as of 1-bit Adam. From ``freeze_step`` on the variance stays, and ranks go their own way: ``u`` is the sum
    of ``lr * m`` of the steps since they met, and every so many steps they meet. Then the signs of ``u`` are sent, the
    weights are those of the last meeting minus the averaged ``u / (sqrt(v) + eps)``, and the momentum is the averaged
    ``u`` over the sum of ``lr``. So many steps are 1 at first, twice as many after each ``local_scaler`` steps, and at
    most ``local_clipper``.

    Needs an engine with :class:`shardfold.Signs` to send signs. State: 4 values per element. Decay is
    ``lr * weight_decay * x`` beside the direction; of steps between meetings that of the weights at the last one.

    Args:
        params: parameters or groups of them.
        lr: learning rate.
        freeze_step: the last step in which the variance may change; the paper takes the end of the rate's warm-up.
        betas: of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: part of the direction.
        bias_correction: False: none, as in the paper; see :class:`OneBitAdam`.
        variance_scaler: how many times the variance changes before its steps are twice as far from each other.
        local_scaler: steps until meetings are twice as far from each other.
        local_clipper: how far they are from each other at most; 1: ranks meet in every step.

    Raises:
        ConfigError: a hyper-parameter is out of its range.

    Examples:
        >>> rare = sf.Engine(nn.Linear(8, 8), optimizer=partial(sf.optim.ZeroOneAdam, lr=1e-3, freeze_step=100))
        >>> rare.close()
    """

    per_element = ("exp_avg", "exp_avg_sq")
    per_parameter = ("step", "variance_steps")
    elementwise = True
    parts_ways = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        freeze_step: int = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        variance_scaler: int = 16,
        local_scaler: int = 32_768,
        local_clipper: int = 16,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            check_number(ZeroOneAdam, name, value)
        check_betas(ZeroOneAdam, betas)
        counts = {"freeze_step": freeze_step, "variance_scaler": variance_scaler, "local_scaler": local_scaler}
        for name, value in {**counts, "local_clipper": local_clipper}.items():
            if not is_integer(value, 1):
                raise ConfigError(f"ZeroOneAdam({name}={described(value)}): it is a number of steps, 1 or more.")
        self.variance_scaler, self.local_scaler, self.local_clipper = variance_scaler, local_scaler, local_clipper
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, defaults, freeze_step)

    def new_state(self, group: dict[str, Any], tensor: Tensor, place: ShardPlacement) -> dict[str, Any]:
        names = (*self.per_element, "drift", "anchor")
        return {"step": 0, "variance_steps": 0, "rates": 0.0, **{name: torch.zeros_like(tensor) for name in names}}

    def state_bytes(self, group: dict[str, Any], place: ShardPlacement, itemsize: int) -> int:
        return 4 * itemsize * place.part_numel

    def meeting(self, steps: int) -> Literal["dense", "signs", "local"]:
        if steps < self.freeze_step:
            return "dense" if self._changes(steps) else "signs"
        since = steps - self.freeze_step
        every = min(self.local_clipper, 2 ** min(since // self.local_scaler, 62))
        return "local" if (since + 1) % every else "signs"

    def _changes(self, steps: int) -> bool:
        """Whether the variance changes in the step behind so many."""
        times, first = 0, 0
        while first + (length := self.variance_scaler * 2**times) <= steps:
            times, first = times + 1, first + length
        return (steps - first) % 2**times == 0

    @property
    def apart(self) -> bool:
        return any(self.state[tensor].get("rates") for _, tensor, _ in self.parts())

    def rejoin(self) -> None:
        for _, tensor, _ in self.parts():
            if self.state[tensor]:
                self.state[tensor]["rates"] = 0.0
                self.state[tensor]["drift"].zero_()

    def blend(self, group: dict[str, Any], tensor: Tensor, grad: Tensor | None) -> tuple[Tensor, Tensor] | None:
        state, rate = self.state[tensor], float(group["lr"])
        squares = state["exp_avg_sq"]
        if grad is None:
            return (state["drift"] / self.root(group, state), squares) if state["rates"] else None
        if not state["rates"] + rate:  # nothing has moved, and nothing will
            return None
        momentum = state["exp_avg"].lerp(grad, 1 - group["betas"][0])
        return state["drift"].add(momentum, alpha=rate).div_(self.root(group, state)), squares

    def give(self, group: dict[str, Any], tensor: Tensor, values: Tensor) -> None:
        self._meet(group, tensor, values, 0.0)

    def _meet(self, group: dict[str, Any], tensor: Tensor, values: Tensor, rate: float) -> None:
        """Goes on from the last meeting by the averaged ``u`` over the root, of which ``rate`` is this step's share."""
        state = self.state[tensor]
        rates = state["rates"] + rate
        if not rates:
            return
        last = state["anchor"] if state["rates"] else tensor
        step = values / self.corrections(group, state)[0]
        tensor.copy_(last.mul(1 - rates * group["weight_decay"]).sub_(step))
        torch.div(values, rates, out=state["exp_avg"]).mul_(self.root(group, state))
        state["drift"].zero_()
        state["rates"] = 0.0

    def update(self, uses: list[Use]) -> None:
        how = self.how
        for use in uses:
            state, average, rate = use.state, use.state["exp_avg"], float(use.group["lr"])
            state["step"] += 1
            if self.meets == "signs":
                self._meet(use.group, use.tensor, use.grad, rate)
                continue
            if self.meets == "local":
                if not rate:
                    continue
                if not state["rates"]:
                    state["anchor"].copy_(use.tensor)
            self.follow(use, dense=how == "dense")
            if self.meets == "local":
                state["drift"].add_(average, alpha=rate)
                state["rates"] += rate
            direction = (average / self.root(use.group, state)).div_(self.corrections(use.group, state)[0])
            use.tensor.sub_(direction.add_(use.tensor, alpha=use.group["weight_decay"]).mul_(rate))
