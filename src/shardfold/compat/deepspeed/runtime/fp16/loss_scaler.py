"""Loss scales of DeepSpeed's names, for loops that scale by themselves; an engine has its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardfold.errors import NonFiniteError
from shardfold.numerics.scaling import LossScale, Scaler

__all__ = ["CreateLossScaler", "DynamicLossScaler", "LossScaler", "LossScalerBase"]

INITIAL_LOSS_SCALE, SCALE_WINDOW = "init_scale", "scale_window"
DELAYED_SHIFT, CONSECUTIVE_HYSTERESIS, MIN_LOSS_SCALE = "delayed_shift", "consecutive_hysteresis", "min_scale"


class LossScalerBase:
    """A loss scale that stays.

    Attributes:
        cur_scale: what losses are multiplied by.
        dynamic: whether it moves.
    """

    dynamic = False

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = cur_scale

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss * self.loss_scale

    def scale_gradient(self, module: Any, grad_in: tuple[Tensor, ...], grad_out: Any) -> tuple[Tensor, ...]:
        """Each of ``grad_in`` times the scale; a module's backward hook."""
        return tuple(self.loss_scale * grad for grad in grad_in)

    def update_scale(self, overflow: bool) -> None:
        """After a step, done or skipped."""

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Of the scaled loss."""
        self.scale_loss(loss).backward(retain_graph=retain_graph)


class LossScaler(LossScalerBase):
    """A loss scale that stays."""

    def __init__(self, scale: float = 1) -> None:
        super().__init__(scale)

    def has_overflow(self, params: Any) -> bool:
        """False: a step is never skipped."""
        return False


class DynamicLossScaler(LossScalerBase):
    """A loss scale that halves at an overflow and grows after ``scale_window`` steps without one.

    Args:
        init_scale: the first.
        scale_window: steps without overflow until it grows.
        min_scale: it is never lower.
        delayed_shift: so many overflows lower it for the first time.
        consecutive_hysteresis: each step without overflow refills ``delayed_shift``.
        raise_error_at_min_scale: an overflow at ``min_scale`` is an error.
        dtype: of the gradients.
    """

    dynamic = True

    def __init__(
        self,
        init_scale: float,
        scale_window: int,
        min_scale: float,
        delayed_shift: int,
        consecutive_hysteresis: bool,
        raise_error_at_min_scale: bool = True,
        dtype: torch.dtype = torch.half,
    ) -> None:
        rule = LossScale(
            initial=init_scale,
            interval=scale_window,
            hysteresis=delayed_shift,
            refill=consecutive_hysteresis,
            delay=1,
            floor=min_scale,
            patience=1 if raise_error_at_min_scale else None,
        )
        self._scaler = Scaler(rule)
        self.scale_factor, self.scale_window, self.min_scale = rule.growth, scale_window, min_scale
        self.delayed_shift, self.consecutive_hysteresis = delayed_shift, consecutive_hysteresis
        self.raise_error_at_min_scale, self.dtype = raise_error_at_min_scale, dtype
        super().__init__(self._scaler.scale)

    def has_overflow_serial(self, params: Any) -> bool:
        """Whether a gradient of the parameters is inf or NaN."""
        return any(p.grad is not None and not bool(torch.isfinite(p.grad).all()) for p in params)

    def update_scale(self, overflow: bool) -> None:
        """After a step, done or skipped.

        Raises:
            NonFiniteError: an overflow at ``min_scale``.
        """
        if overflow and self._scaler.last_chance:
            raise NonFiniteError(
                f"the loss scale is at its minimum, {self.min_scale:g}, and gradients overflow still: look for inf or "
                "NaN in the loss."
            )
        self._scaler.update(overflow)
        self.cur_scale = self._scaler.scale


def CreateLossScaler(  # DeepSpeed's name
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: Mapping[str, Any] | None
) -> LossScalerBase:
    """The loss scale of fp16, dynamic or not; 1 of any other dtype."""
    if dtype == torch.half and dynamic_scaling:
        return DynamicLossScaler(dtype=dtype, **(dynamic_loss_args or {}))
    return LossScaler(static_loss_scale if dtype == torch.half else 1.0)
