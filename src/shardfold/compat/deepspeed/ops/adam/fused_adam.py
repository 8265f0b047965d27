"""``FusedAdam``: on the engine's shards the update is fused anyway."""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.ops.adam.arithmetic import DeepSpeedAdam

__all__ = ["FusedAdam"]


class FusedAdam(DeepSpeedAdam):
    """AdamW, or Adam where ``adam_w_mode`` is False.

    Args:
        params: parameters or groups of them.
        lr, betas, eps, weight_decay: as of ``torch.optim.Adam``.
        bias_correction: whether moments are divided by ``1 - beta ** step``.
        adam_w_mode: weight decay that is decoupled from the gradient.
        amsgrad: is refused.
        set_grad_none: whether ``zero_grad`` sets gradients to None.

    Raises:
        UsageError: ``amsgrad`` is asked for.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults, adam_w_mode, bias_correction, amsgrad)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets gradients; None: as the constructor was told."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
