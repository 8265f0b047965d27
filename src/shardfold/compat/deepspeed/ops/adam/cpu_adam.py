"""``DeepSpeedCPUAdam``: the CPU update of the engine, which is fused and vectorized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardfold.compat.deepspeed.ops.adam.arithmetic import DeepSpeedAdam
from shardfold.compat.deepspeed.ops.wide import step_in_fp32

__all__ = ["DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(DeepSpeedAdam):
    """AdamW, or Adam where ``adamw_mode`` is False.

    Args:
        model_params: parameters or groups of them.
        lr, betas, eps, weight_decay: as of ``torch.optim.Adam``.
        bias_correction: whether moments are divided by ``1 - beta ** step``.
        amsgrad: is refused.
        adamw_mode: weight decay that is decoupled from the gradient.
        fp32_optimizer_states: of 16-bit parameters, whose update is computed in fp32: whether moments stay fp32. False:
            they are rounded to the parameters' dtype behind each step. Under an engine its precision says their dtype.

    Raises:
        UsageError: ``amsgrad`` is asked for.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(model_params, defaults, adamw_mode, bias_correction, amsgrad)
        self.fp32_optimizer_states = fp32_optimizer_states

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters that have gradients; gives what ``closure`` gives."""
        return step_in_fp32(self, super().step, closure, fp32_states=self.fp32_optimizer_states)
