"""When ranks stop to sum gradients and send the signs of their momentum: behind the step that freezes the variance.

There are two programs. In the first, the axis is one of data as any other. In the second gradients are summed within
the groups of ranks that differ on other axes, and momentum crosses the axis in the step. What rests is the same, so
whichever program a number of steps asks for is made when that number is known: behind a step, and behind a load.
"""

from __future__ import annotations

from shardfold.engine.runner import Runner
from shardfold.optim.onebit import OneBitAdam
from shardfold.sharding.model import ShardedModel

__all__ = ["Freeze"]


class Freeze:
    """Of one engine.

    Args:
        model: whose steps are counted.
        runner: has the program.
        optimizer: says which step it is.
        groups: ranks along the axis.
    """

    def __init__(self, model: ShardedModel, runner: Runner, optimizer: OneBitAdam, groups: int) -> None:
        self._model, self._runner, self._optimizer, self._groups = model, runner, optimizer, groups
        self._share = 1.0  # of what gradients are multiplied by, what is for the axis

    def follow(self) -> None:
        """The program for the next step."""
        signed = self._model.run.steps >= self._optimizer.freeze_step
        self._optimizer.given_momentum = False
        if signed != self._runner.orders.signed:
            self._runner.orders.signed = signed
            self._runner.orders.compile()
        self.scale()

    def scale(self) -> None:
        """Gradients are the mean over all ranks that they are summed over."""
        share = 1.0 if self._runner.orders.signed else 1.0 / self._groups
        if share != self._share:
            self._runner.handlers.scale *= share / self._share
            self._runner.handlers.set_factors()
            self._share = share

    def renew(self) -> None:
        """What gradients are multiplied by is another number, without what is for the axis."""
        self._share = 1.0
        self.scale()
