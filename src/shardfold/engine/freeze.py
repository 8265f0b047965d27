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
        handlers, mesh = self._runner.handlers, self._model.comm.mesh
        ranks = mesh.data_ranks * (1 if self._runner.orders.signed else self._groups)
        handlers.scale = 1.0 / (ranks * self._runner.accumulate)
        handlers.set_factors()
