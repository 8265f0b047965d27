"""``DeepSpeedCPUAdagrad``, which is ``torch.optim.Adagrad``."""

from __future__ import annotations

from typing import Any

from torch.optim import Adagrad

from shardfold.errors import UsageError

__all__ = ["DeepSpeedCPUAdagrad"]


class DeepSpeedCPUAdagrad(Adagrad):
    """Adagrad (Duchi et al., JMLR 12).

    Args:
        model_params: parameters or groups of them.
        lr, eps, weight_decay: as of ``torch.optim.Adagrad``.
        amsgrad: is refused.
        fp32_optimizer_states: the engine's states have the dtype that its precision says, whatever this is.

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
