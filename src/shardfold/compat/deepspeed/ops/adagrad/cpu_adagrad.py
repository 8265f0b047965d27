"""``DeepSpeedCPUAdagrad``, which is ``torch.optim.Adagrad``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Adagrad

from shardfold.compat.deepspeed.ops.wide import step_in_fp32
from shardfold.errors import UsageError

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(Adagrad):
    """Adagrad (Duchi et al., JMLR 12).

    Args:
        model_params: parameters or groups of them.
        lr, eps, weight_decay: as of ``torch.optim.Adagrad``.
        amsgrad: is refused.
        fp32_optimizer_states: of 16-bit parameters, whose update is computed in fp32: whether states stay fp32. False:
            they are rounded to the parameters' dtype behind each step. Under an engine its precision says their dtype.

    Raises:
        UsageError: ``amsgrad`` is asked for.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise UsageError("DeepSpeedCPUAdagrad(amsgrad=True) is not supported: leave amsgrad out.")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        self.fp32_optimizer_states = fp32_optimizer_states

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Updates the parameters that have gradients; gives what ``closure`` gives."""
        return step_in_fp32(self, super().step, closure, fp32_states=self.fp32_optimizer_states)
