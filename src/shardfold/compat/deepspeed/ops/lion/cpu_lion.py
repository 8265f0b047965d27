"""``DeepSpeedCPULion``, done by the engine's Lion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardfold.compat.deepspeed.ops.wide import step_in_fp32
from shardfold.optim import Lion

__all__ = ["DeepSpeedCPULion"]


class DeepSpeedCPULion(Lion):
    """Lion (arXiv 2302.06675), with the defaults of DeepSpeed's CPU version.

    Args:
        model_params: parameters or groups of them.
        lr, betas, weight_decay: as of :class:`shardfold.optim.Lion`.
        fp32_optimizer_states: of 16-bit parameters, whose update is computed in fp32: whether moments stay fp32. False:
            they are rounded to the parameters' dtype behind each step. Under an engine its precision says their dtype.
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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters that have gradients; gives what ``closure`` gives."""
        return step_in_fp32(self, super().step, closure, fp32_states=self.fp32_optimizer_states)
