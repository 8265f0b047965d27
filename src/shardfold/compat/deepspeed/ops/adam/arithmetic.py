"""Adam with the options of DeepSpeed's, as a ``torch.optim`` optimizer that the engine knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam

from shardfold.errors import UsageError

__all__ = ["DeepSpeedAdam"]


class DeepSpeedAdam(Adam):
    """Adam (arXiv 1412.6980), or AdamW (arXiv 1711.05101), whose moments may be left without bias correction.

    Args:
        params: parameters or groups of them.
        defaults: ``lr``, ``betas``, ``eps``, ``weight_decay``.
        decoupled: AdamW's weight decay.
        bias_correction: whether moments are divided by ``1 - beta ** step``.
        amsgrad: is refused.

    Raises:
        UsageError: ``amsgrad`` is asked for.
    """

    def __init__(
        self, params: Any, defaults: dict[str, Any], decoupled: bool, bias_correction: bool, amsgrad: bool
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        super().__init__(params, **defaults, decoupled_weight_decay=decoupled)
        self.adam_w_mode = decoupled
        self.defaults["bias_correction"] = bias_correction
        for group in self.param_groups:
            group.setdefault("bias_correction", bias_correction)

    def _refuse_amsgrad(self, amsgrad: bool) -> None:
        if amsgrad:
            raise UsageError(f"{type(self).__name__} does not support AMSGrad: use torch.optim.AdamW(amsgrad=True).")

    @property
    def same_as(self) -> type:
        """Whose update it has, which lets the engine take its own pass over a shard."""
        return Adam if self._corrected() else type(self)

    def _corrected(self) -> bool:
        return all(group.get("bias_correction", True) for group in self.param_groups)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer.

        Raises:
            UsageError: the group asks for AMSGrad.
        """
        self._refuse_amsgrad(param_group.get("amsgrad", False))
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters that have gradients; gives what ``closure`` gives."""
        if self._corrected():
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(group, parameter, parameter.grad)
        return loss

    def _update(self, group: dict[str, Any], parameter: Tensor, grad: Tensor) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        if group["decoupled_weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add(parameter, alpha=group["weight_decay"])
        average, squares = state["exp_avg"], state["exp_avg_sq"]
        average.lerp_(grad, 1 - beta1)
        squares.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = float(state["step"]) if group["bias_correction"] else float("inf")
        root = (squares / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(average, root, value=-group["lr"] / (1 - beta1**step))
