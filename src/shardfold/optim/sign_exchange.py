"""Momentum that the ranks of an axis average by signs, with an error on each side.

Of each segment's master shard, on each of N ranks (algorithm 1 of arXiv 2102.02888):

    blend    x = beta m + (1 - beta) g              this rank's momentum, of the m that all have
    push     signs of x + worker are sent, each part of the shard to the rank that averages it;
             worker = x + worker - what was sent
    serve    y = mean over ranks of what came + server, of this rank's part
    pull     signs of y come to all;  server = y - what was sent
    give     m = what came, in place of the gradient, for the optimizer to use

All ranks decode the same bytes, so momentum and weights stay equal to the bit. An element that has no variance (its
gradient was 0 as long as that was looked at) is 0 throughout, and so are its errors. Of a parameter that no rank used
in a step nothing is sent and nothing is updated, so its errors stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm.transport import Pending, drain
from shardfold.errors import ConfigError
from shardfold.optim.signed import SignOptimizer
from shardfold.plan.layout import Tier
from shardfold.plan.program import Op
from shardfold.plan.signs import Signs
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.unit import Unit

__all__ = ["SignExchange", "sign_exchange"]

Used = Mapping[str, Sequence[Sequence[bool]]]


class SignExchange:
    """What the operations of a step do on one rank once the variance is frozen.

    Args:
        signs: how.
        model: whose momentum it is.
        optimizer: that keeps it.
        coefficient: what gradients are multiplied by to be clipped, on that device; None: nothing.
        used: of each unit, by trainable segment and slot, which parameters some rank used in the step.
    """

    def __init__(
        self, signs: Signs, model: ShardedModel, optimizer: SignOptimizer,
        coefficient: Callable[[torch.device], Tensor | None], used: Callable[[], Used],
    ) -> None:  # fmt: skip
        self.signs, self._model, self._comm = signs, model, model.comm
        self.optimizer, self._coefficient, self._used = optimizer, coefficient, used
        self.groups = self._comm.mesh.parts((signs.axis,))
        self.group = self._comm.mesh.coords[signs.axis]
        self._values: dict[int, Tensor] = {}  # by segment: x, and then m; fp32, (length / parts,)
        self._dead: dict[int, Tensor] = {}  # by segment: what has no variance
        self._parts: dict[int, Tensor] = {}  # by segment: y, before it is sent
        self._aside: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by segment: errors of what is not sent, and copies
        self._taken: dict[int, list[tuple[dict[str, Any], Tensor, slice]]] = {}  # by segment: what is not updated
        self._pending: dict[str, list[Pending]] = {}  # by unit
        self._means: dict[int, Tensor] = {}  # by segment: of what workers have lost, for a save
        model.run.signs = self

    def own(self, segment: Segment) -> slice:
        """This rank's part of a shard."""
        size = segment.shard_numel // self.groups
        return slice(self.group * size, (self.group + 1) * size)

    @torch.no_grad()
    def diff(self, unit: Unit) -> None:
        """Blends a unit's gradients into momentum."""
        assert self._model.updater is not None
        every = self._used().get(unit.name)
        for number, segment in enumerate(unit.trainable):
            flags = every[number] if every is not None else [False] * len(segment.spec.slots)
            aside, taken = self._aside[id(segment)], self._taken[id(segment)] = [], []
            values = self._comm.memory.empty(segment.shard_numel, torch.float32).zero_()
            dead = torch.ones(segment.shard_numel, dtype=torch.bool, device=values.device)  # and so is padding
            factor = self._coefficient(values.device)
            for (tensor, group, place), used in zip(self._model.updater.pieces(segment), flags, strict=True):
                grad: Tensor | None = None
                if used:
                    grad = segment.master_grads[place].to(tensor.dtype) * segment.unscale
                    if factor is not None:
                        grad.mul_(factor.to(grad.device))
                blended = self.optimizer.blend(group, tensor, grad)
                if blended is None:
                    aside += self._lay_aside(segment, place)
                    continue
                if not used:
                    taken.append((group, tensor, place))
                values[place], dead[place] = blended[0].to(values.dtype), blended[1]
            segment.unscale = 1.0  # until the step is over
            values.masked_fill_(dead, 0.0)
            self._values[id(segment)], self._dead[id(segment)] = values, dead

    def _lay_aside(self, segment: Segment, place: slice) -> list[tuple[Tensor, Tensor]]:
        """Takes the errors of a piece out of this exchange, which leaves it out."""
        if not self.signs.error or self.groups == 1:
            return []
        own = self.own(segment)
        low, high = (min(max(at, own.start), own.stop) - own.start for at in (place.start, place.stop))
        errors = [self._error(segment, "worker")[place], self._error(segment, "server")[low:high]]
        kept = [(error, error.clone()) for error in errors]
        for error in errors:
            error.zero_()
        return kept

    def push(self, unit: Unit, ops: Sequence[Op]) -> None:
        """Begins to send signs to be averaged."""
        pending = self._pending.setdefault(unit.name, [])
        for segment, op in zip(unit.trainable, ops, strict=True):
            values = self._values[id(segment)]
            mine = self._comm.memory.empty(values.numel() // self.groups, values.dtype)
            self._parts[id(segment)] = mine
            state = self._error(segment, "worker") if self.signs.error else None
            self._comm.collective(op, values, pending=pending, out=mine, state=state)

    def arrive(self, unit: Unit) -> None:
        """What is on its way of a unit is there."""
        drain(self._pending.get(unit.name, []), self._comm.job.wait)

    @torch.no_grad()
    def step(self, unit: Unit) -> None:
        """Averages this rank's part."""
        if self.groups == 1:
            return
        for segment in unit.trainable:
            own, part = self.own(segment), self._parts[id(segment)].div_(self.groups)
            if self.signs.error:
                part.add_(self._error(segment, "server"))
            part.masked_fill_(self._dead[id(segment)][own], 0.0)
            self._values[id(segment)][own] = part

    def pull(self, unit: Unit, ops: Sequence[Op]) -> None:
        """Begins to bring the signs of all parts."""
        pending = self._pending.setdefault(unit.name, [])
        for segment, op in zip(unit.trainable, ops, strict=True):
            self._comm.collective(op, self._values[id(segment)], pending=pending)

    @torch.no_grad()
    def mix(self, unit: Unit) -> None:
        """The averaged momentum takes the place of the gradients."""
        for segment in unit.trainable:
            values, dead = self._values.pop(id(segment)), self._dead.pop(id(segment))
            part = self._parts.pop(id(segment), None)
            if part is not None:
                if self.signs.error:
                    error = self._error(segment, "server")
                    torch.sub(part, values[self.own(segment)], out=error)
                    error.masked_fill_(dead[self.own(segment)], 0.0)
                    self._error(segment, "worker").masked_fill_(dead, 0.0)
                self._comm.memory.recycle(part)
            for error, kept in self._aside.pop(id(segment)):
                error.copy_(kept)
            values.masked_fill_(dead, 0.0)
            taken = self._taken.pop(id(segment))
            for group, tensor, place in taken:
                self.optimizer.give(group, tensor, values[place].to(tensor.dtype))
            if taken and segment.keeps_copy and segment.compute_range is not None and segment.master is not None:
                segment.compute_range.copy_(segment.master)
            if unit.name in self._used():  # it is a step, which updates with them
                segment.master_grads.copy_(values)
            self._comm.memory.recycle(values)

    def hold_still(self) -> None:
        """Before a save: finds the mean of what the ranks have lost in sending. All ranks call it."""
        self._means.clear()
        axes, job = (self.signs.axis,), self._comm.job
        for segment in self._model.trainable():
            if "worker" in segment.regions:
                mean = self._means[id(segment)] = self._error(segment, "worker").clone()
                op = Op("ALL_REDUCE", axes=axes)
                with job.uninterrupted():
                    job.issue(f"{op} of what signs have lost")
                    job.wait(dist.all_reduce(mean, group=self._comm.mesh.group(axes), async_op=True))
                self._comm.meter.ask(op.verb, axes, mean.nbytes)
                mean.div_(self.groups)

    def mean(self, segment: Segment) -> Tensor:
        """What :meth:`hold_still` has found."""
        return self._means[id(segment)]

    def _error(self, segment: Segment, side: str) -> Tensor:
        return segment.regions[side].values()


def sign_exchange(
    model: ShardedModel, coefficient: Callable[[torch.device], Tensor | None], used: Callable[[], Used]
) -> SignExchange | None:
    """That of a table with signs; None: it has none.

    Raises:
        ConfigError: the optimizer has no momentum that can be sent so, or the table keeps it elsewhere.
    """
    signs, optimizer = model.layout.signs, model.optimizer
    if signs is None:
        return None
    if not isinstance(optimizer, SignOptimizer):
        raise ConfigError(
            "outer=Signs(...) is for an optimizer that freezes its variance: give shardfold.optim.OneBitAdam, "
            f"OneBitLamb or ZeroOneAdam, not {type(optimizer).__name__}."
        )
    if model.layout.updates_on is not Tier.DEVICE:
        raise ConfigError("outer=Signs(...) with master in a slower tier: let master and moments rest on the device.")
    return SignExchange(signs, model, optimizer, coefficient, used)
