"""From a loss to gradients: its weight, the loss scale, and what errors of autograd mean here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardfold.engine.arguments import check_begins, check_loss
from shardfold.engine.runner import Runner
from shardfold.errors import ShardfoldError, UsageError
from shardfold.numerics.alarm import Alarm
from shardfold.numerics.scaling import Scaler, scaled
from shardfold.numerics.token_weights import Shares
from shardfold.parallel.pipeline.deferred import DeferredWeightGrads
from shardfold.sharding.model import ShardedModel

__all__ = ["Backward"]

_READS_FREED = ("modified by an inplace operation", "out of bounds for storage of size 0")
"""What autograd says of a weight that is freed. Under ``torch.autograd.graph.saved_tensors_hooks`` it compares no
versions, and finds that there is no memory."""


class Backward:
    """Runs the backwards of one engine.

    Args:
        model: that forward ran.
        runner: its passes.
        scaler: of the loss, or None.
        alarm: notes the losses.
        shares: notes their weights.
    """

    def __init__(
        self, model: ShardedModel, runner: Runner, scaler: Scaler | None, alarm: Alarm, shares: Shares
    ) -> None:
        self._model, self._runner, self._scaler, self._alarm, self._shares = model, runner, scaler, alarm, shares

    @property
    def weights(self) -> Shares:
        """Of this rank's micro-batches."""
        return self._shares

    def run(self, loss: Tensor, weight: float | None, retain_graph: bool, *, counts: bool = False) -> None:
        """See :meth:`Engine.backward`. ``counts``: it is a micro-batch whether gradients come or not."""
        check_loss("engine.backward()", loss)
        run, runner = self._model.run, self._runner
        runner.drop_interrupted()
        self._check_begins("engine.backward()", loss)
        if weight != 0:
            self._alarm.note(loss)
        loss, number = self._shares.weighed(loss, weight, runner.accumulate)
        loss, before = self._times_scale(loss), run.micro_batch
        self._run(lambda: loss.backward(retain_graph=retain_graph), number)
        if counts or run.micro_batch > before:
            self._shares.note(number, runner.accumulate)

    def run_from(self, sent: Sequence[Tensor], grads: Sequence[Tensor], weight: float | None, *, counts: bool) -> None:
        """The backward of a stage, from what it sent and the gradients of that, which are scaled as the loss is, and
        times its ``weight``. ``counts``: it is the first one of its micro-batch on this rank."""
        self._renew_scale()
        if counts:
            self._shares.note(weight, self._runner.accumulate)
        if sent:
            self._run(lambda: torch.autograd.backward(list(sent), list(grads)))

    def run_weights(self, deferred: DeferredWeightGrads, begin: Callable[[Tensor], None]) -> None:
        """The second part of a backward: the gradients of weights that the first has left."""
        roots = deferred.roots(self._runner.orders.numbers, self._model.device)
        roots[0].register_hook(begin)
        self._run(lambda: torch.autograd.backward(roots, [torch.ones_like(root) for root in roots]))

    def _run(self, backward: Callable[[], object], weight: float | None = None) -> None:
        try:
            with self._runner.of_scaled_loss(), self._shares.of(weight):
                backward()
        except BaseException as error:
            if not isinstance(error, ShardfoldError):  # which all ranks raise, or what goes on is as it was
                self._runner.note_caught()
            split = any(unit.split for unit in self._model.units)
            reads_freed = isinstance(error, RuntimeError) and any(text in str(error) for text in _READS_FREED)
            if not split or not reads_freed:
                raise
            raise RuntimeError(
                f"{error} Under a layout that splits parameters this also happens when backward reaches a unit by a "
                "tensor that its forward did not return (kept on the side, or made under engine.gathered()): return "
                "it from the unit's forward, or choose Init(units=...) so that the unit contains its use."
            ) from error

    def scale(self, loss: Tensor) -> Tensor:
        """See :meth:`Engine.scale`."""
        check_loss("engine.scale()", loss)
        if self._scaler is None:
            return loss
        self._check_begins("engine.scale()", loss)
        self._alarm.note(loss)
        loss, runner = self._times_scale(loss), self._runner
        loss.register_hook(lambda _: runner.begin_scaled())
        return loss

    def _check_begins(self, call: str, loss: Tensor) -> None:
        """
        Raises:
            UsageError: no backward can begin at it; to other ranks, which may have one, this one has dropped its own.
        """
        try:
            check_begins(call, loss, self._model.module)
        except UsageError:
            self._runner.note_caught()
            raise

    def _times_scale(self, loss: Tensor) -> Tensor:
        self._renew_scale()
        return loss if self._scaler is None else scaled(loss, self._runner.handlers.lifted)

    def _renew_scale(self) -> None:
        """Before the first backward of a step: the scale may have moved."""
        handlers = self._runner.handlers
        if self._scaler is None:
            return
        if not self._model.run.micro_batch and handlers.lifted != self._scaler.scale:
            handlers.set_factors()
