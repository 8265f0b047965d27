"""The gate of an engine's passes (see ``sharding/model.Gate``): when something beside them may be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardfold.engine._step import Stepper
from shardfold.engine.hooks import Hooks
from shardfold.engine.runner import Runner
from shardfold.errors import ShardfoldError, UsageError
from shardfold.sharding import rebuild
from shardfold.sharding.changes import Changes
from shardfold.sharding.unit import Unit

__all__ = ["PassGate"]


class PassGate:
    """Between the passes of one engine.

    Args:
        runner: runs them.
        hooks: hear the model.
        changes: whether the model still is what its units were made of.
        stepper: takes the steps; None: nothing is trained.
    """

    def __init__(self, runner: Runner, hooks: Hooks, changes: Changes, stepper: Stepper | None) -> None:
        self._runner, self._hooks, self._changes, self._stepper = runner, hooks, changes, stepper
        self._model = runner.model

    def settle(self) -> None:
        """Finishes what the last step began."""
        if self._stepper is not None:
            self._stepper.settle()

    @property
    def under_way(self) -> bool:
        return self._runner.under_way

    def refuse_closed(self, call: str) -> None:
        """
        Raises:
            UsageError: the engine is closed.
            OrderError: it was given up.
        """
        if self._model.closed:
            raise UsageError(f"{call}: {self._model.closed}.")
        self._model.comm.agreement.refuse_given_up()

    def refuse_broken(self, call: str) -> None:
        """
        Raises:
            UsageError: the values are of no run.
        """
        if self._model.run.broken:
            raise UsageError(f"{call}: {self._model.run.broken}: load a checkpoint before going on.")

    def meet(
        self,
        what: str,
        *,
        follow: bool = False,
        settle: bool = False,
        buffers: bool = True,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.refuse_closed(what)
        self._runner.settle(what)
        self._runner.away.come_back("params")  # they may be gathered
        if follow:
            self.follow()
        error: ShardfoldError | None = None
        try:
            if check is not None:
                check()
        except ShardfoldError as raised:
            error = raised
        apart = buffers and self._runner.buffers.changed()
        changed, refused = self._runner.meet_all(what, flags=[apart, error is not None])[:2]
        if refused:
            self._model.comm.job.refuse(what, error)
        self._runner.buffers.synchronize(bool(changed), forward=False)
        if follow or settle:
            self.settle()

    def went_apart(self) -> None:
        self._runner.buffers.went_apart()

    def follow(self) -> None:
        if self._changes.needed():
            if self._model.layout.outer is not None:
                raise UsageError(
                    "the model's structure has changed, which this version does not follow under outer steps: save, "
                    "change the model, make an engine of it and load."
                )
            self.settle()
            rebuild.apply(self._changes)

    def secure(self) -> None:
        self._changes.secure()
        if not self._runner.under_way:
            for unit in self._model.units:
                unit.keep_written()

    def enter(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._hooks.enter(method, args, kwargs)

    def hold(self, units: Sequence[Unit]) -> bool:
        return self._runner.hold(units)

    def attach(self, units: Sequence[Unit]) -> None:
        self._hooks.attach(units)

    def take(self, units: Sequence[Unit]) -> None:
        self._runner.handlers.renew(units)
        self._model.comm.meter.forget_last()
        self._hooks.attach(units)
        self._runner.buffers.follow(self._model.module)
        self._runner.renew(units)

    def used(self) -> dict[str, list[list[bool]]]:
        used, _, _ = self._runner.handlers.agree_on_use()
        return used

    def sum_late(self) -> dict[str, list[list[bool]]]:
        visible, what = self._runner.visible, "gathered(of='grads')"
        refusal = visible.try_hide()
        try:
            used, late, [by_hand, refused, _] = self._runner.handlers.agree_on_use(visible.touched, refusal is not None)
            if refused:
                self._model.comm.agreement.refuse(what, refusal)
            if by_hand:
                self._runner.handlers.withdraw()
                visible.compare(what)
            self._runner.reduce_late(late)
            self._runner.sum_shared()
        finally:
            if refusal is None:
                visible.show()
        return used

    def zero_grad(self) -> None:
        self._runner.settle("engine.zero_grad()")
        self._runner.zero_grad()

    def gradients_hidden(self) -> AbstractContextManager[None]:
        return self._runner.visible.hidden()
