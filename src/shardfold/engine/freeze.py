"""When ranks sum gradients, and when they send the signs of their momentum, as their optimizer says of each step.

There are several programs. In the dense one the axis is one of data as any other. In the others gradients are summed
within the groups of ranks that differ on other axes, and momentum crosses the axis in the step, or nothing does. What
rests is the same, so whichever program a number of steps asks for is made when that number is known: behind a step,
and behind a load.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.autograd.graph import increment_version

from shardfold.engine.runner import Runner
from shardfold.optim.signed import SignOptimizer
from shardfold.sharding.changes import Changes
from shardfold.sharding.model import ShardedModel

__all__ = ["Freeze"]


class Freeze:
    """Of one engine.

    Args:
        model: whose steps are counted.
        runner: has the program.
        optimizer: says which step it is.
        groups: ranks along the axis.
        changes: told that parameters have new values.
    """

    def __init__(
        self, model: ShardedModel, runner: Runner, optimizer: SignOptimizer, groups: int, changes: Changes
    ) -> None:
        self._model, self._runner, self._optimizer, self._groups = model, runner, optimizer, groups
        self._changes = changes
        self._share = 1.0  # of what gradients are multiplied by, what is for the axis
        if optimizer.parts_ways:
            runner.orders.part_ways()

    @property
    def apart(self) -> bool:
        """Whether ranks have gone their own ways since they met."""
        return self._optimizer.apart

    def together(self) -> None:
        """Ranks that have gone their own ways meet now; all call it."""
        if not self._optimizer.apart:
            return
        self._runner.handlers.take_used({})  # it is no step
        self._model.let_go()
        self._model.comm.meter.ran("together")
        with self._runner.between(self._runner.orders.tracks["together"]) as track:
            track.finish()
        for segment in self._model.trainable():
            increment_version(segment.parameters)
        self._changes.updated()

    def forget(self) -> None:
        """All ranks were given the same values."""
        self._optimizer.rejoin()

    def follow(self) -> None:
        """The program for the next step."""
        if (proposed := self._optimizer.proposed) is not None:  # every rank has looked, at what all have alike
            said = self._model.comm.control([float(proposed)], dist.ReduceOp.MIN, group=True)
            self._optimizer.settle(agreed=bool(said[0]))
        self._runner.orders.meet(self._optimizer.begin_meeting(self._model.run.steps))
        self.scale()

    def scale(self) -> None:
        """Gradients are the mean over all ranks that they are summed over."""
        share = 1.0 / self._groups if self._runner.orders.meets == "dense" else 1.0
        if share != self._share:
            self._runner.handlers.set_scale(self._runner.handlers.scale * (share / self._share))
            self._share = share

    def renew(self) -> None:
        """What gradients are multiplied by is another number, without what is for the axis."""
        self._share = 1.0
        self.scale()
