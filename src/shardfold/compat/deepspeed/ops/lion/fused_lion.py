"""``FusedLion``, done by the engine's Lion."""

from __future__ import annotations

from typing import Any

from shardfold.optim import Lion

__all__ = ["FusedLion"]


class FusedLion(Lion):
    """Lion (arXiv 2302.06675).

    Args:
        params: parameters or groups of them.
        lr, betas, weight_decay: as of :class:`shardfold.optim.Lion`.
        set_grad_none: whether ``zero_grad`` sets gradients to None.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets gradients; None: as the constructor was told."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
