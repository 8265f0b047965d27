"""``DeepSpeedCPULion``, done by the engine's Lion."""

from __future__ import annotations

from typing import Any

from shardfold.optim import Lion

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(Lion):
    """Lion (arXiv 2302.06675), with the defaults of DeepSpeed's CPU version.

    Args:
        model_params: parameters or groups of them.
        lr, betas, weight_decay: as of :class:`shardfold.optim.Lion`.
        fp32_optimizer_states: the engine's moments have the dtype that its precision says, whatever this is.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states
