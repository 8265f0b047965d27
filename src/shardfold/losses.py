"""From a loss to gradients: its weight, the loss scale, and what errors of autograd mean here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from shardfold.errors import UsageError
from shardfold.numerics.scaling import scaled

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["lift", "run_backward"]


def run_backward(engine: Engine, loss: Tensor, weight: float | None, retain_graph: bool) -> None:
    """See :meth:`Engine.backward`."""
    runner = engine._runner
    _check_loss("engine.backward()", loss)
    if weight != 0:
        engine.alarm.note(loss)
    loss = _times_scale(engine, engine.shares.weighed(loss, weight, first=not runner.micro))
    runner.scaled = True
    try:
        loss.backward(retain_graph=retain_graph)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error) or not any(unit.split for unit in engine.units):
            raise
        raise RuntimeError(
            f"{error} Under a layout that splits parameters this also happens when backward reaches a unit by a "
            "tensor that its forward did not return (kept on the side, or made under engine.gathered()): return "
            "it from the unit's forward, or choose units= so that the unit contains its use."
        ) from error
    finally:
        runner.scaled = False


def lift(engine: Engine, loss: Tensor) -> Tensor:
    """See :meth:`Engine.scale`."""
    _check_loss("engine.scale()", loss)
    if engine.loss_scale is None:
        return loss
    engine.alarm.note(loss)
    loss, runner = _times_scale(engine, loss), engine._runner

    def begin(_: Tensor) -> None:
        runner.scaled = True  # until this backward ends

    loss.register_hook(begin)
    return loss


def _check_loss(call: str, loss: object) -> None:
    """
    Raises:
        UsageError: it is no tensor.
    """
    if not isinstance(loss, Tensor):
        raise UsageError(f"{call}: the loss is of type {type(loss).__name__}: give a tensor.")


def _times_scale(engine: Engine, loss: Tensor) -> Tensor:
    if engine.loss_scale is None:
        return loss
    if not engine._runner.micro and engine.actions.lifted != engine.loss_scale.scale:
        engine.actions.set_factors()
    return scaled(loss, engine.actions.lifted)
