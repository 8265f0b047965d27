"""``DeepSpeedCPUAdam``: the CPU update of the engine, which is fused and vectorized."""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.ops.adam.arithmetic import DeepSpeedAdam

__all__ = ["DeepSpeedCPUAdam"]


class DeepSpeedCPUAdam(DeepSpeedAdam):
    """AdamW, or Adam where ``adamw_mode`` is False.

    Args:
        model_params: parameters or groups of them.
        lr, betas, eps, weight_decay: as of ``torch.optim.Adam``.
        bias_correction: whether moments are divided by ``1 - beta ** step``.
        amsgrad: is refused.
        adamw_mode: weight decay that is decoupled from the gradient.
        fp32_optimizer_states: the engine's moments have the dtype that its precision says, whatever this is.

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
