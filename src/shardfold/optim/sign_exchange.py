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
from logging import getLogger
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

LOG = getLogger("shardfold")
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
        self,
        signs: Signs,
        model: ShardedModel,
        optimizer: SignOptimizer,
        coefficient: Callable[[torch.device], Tensor | None],
        used: Callable[[], Used],
    ) -> None:
        self.signs, self._model, self._comm = signs, model, model.comm
        self.optimizer, self._coefficient, self._used = optimizer, coefficient, used
        self.groups = self._comm.mesh.parts((signs.axis,))
        self.group = self._comm.mesh.coords[signs.axis]
        self._values: dict[int, Tensor] = {}  # by segment: x, and then m; fp32, (length / parts,)
        self._alive: dict[int, Tensor] = {}  # by segment: ones, bit by bit, of what has a variance; zeros; int32
        self._parts: dict[int, Tensor] = {}  # by segment: y, before it is sent
        self._aside: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by segment: errors of what is not sent, and copies
        self._taken: dict[int, list[tuple[dict[str, Any], Tensor, slice]]] = {}  # by segment: what is not updated
        self._pending: dict[str, list[Pending]] = {}  # by the first of the units that travel together
        self._means: dict[int, Tensor] = {}  # by segment: of what workers have lost, for a save
        model.run.send_signs(self)

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
            has = self._comm.memory.empty(segment.shard_numel, torch.float32).zero_()  # nor has padding
            factor, unscale, grads = self._coefficient(values.device), segment.unscale, segment.master_grads
            for (tensor, group, place), used in zip(self._model.updater.pieces(segment), flags, strict=True):
                grad: Tensor | None = None
                if used:
                    grad = grads[place].to(tensor.dtype)
                    if unscale != 1.0:
                        grad = grad * unscale
                    if factor is not None:
                        grad = grad * factor.to(grad.device)
                blended = self.optimizer.blend(group, tensor, grad)
                if blended is None:
                    aside += self._lay_aside(segment, place)
                    continue
                if not used:
                    taken.append((group, tensor, place))
                values[place].copy_(blended[0])
                torch.ne(blended[1], 0, out=has[place])
            segment.count_as_summed()  # until the step is over
            alive = self._alive[id(segment)] = has.view(torch.int32)
            alive.ne_(0).neg_()
            self._values[id(segment)] = _only(values, alive)

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

    def push(self, units: Sequence[Unit], op: Op) -> None:
        """Begins to send signs of several units to be averaged."""
        segments = [segment for unit in units for segment in unit.trainable]
        values = [self._values[id(segment)] for segment in segments]
        parts = [self._comm.memory.empty(each.numel() // self.groups, each.dtype) for each in values]
        self._parts.update(zip(map(id, segments), parts, strict=True))
        states = [self._error(segment, "worker") if self.signs.error else None for segment in segments]
        self._comm.bundle(op, values, pending=self._on_their_way(units), outs=parts, states=states)

    def arrive(self, units: Sequence[Unit]) -> None:
        """What is on its way of these units is there."""
        drain(self._on_their_way(units), self._comm.job.wait)

    def _on_their_way(self, units: Sequence[Unit]) -> list[Pending]:
        return self._pending.setdefault(units[0].name, [])

    @torch.no_grad()
    def step(self, unit: Unit) -> None:
        """Averages this rank's part."""
        if self.groups == 1:
            return
        for segment in unit.trainable:
            own, part = self.own(segment), self._parts[id(segment)].div_(self.groups)
            if self.signs.error:
                part.add_(self._error(segment, "server"))
            self._values[id(segment)][own] = _only(part, self._alive[id(segment)][own])

    def pull(self, units: Sequence[Unit], op: Op) -> None:
        """Begins to bring the signs of all parts of several units."""
        values = [self._values[id(segment)] for unit in units for segment in unit.trainable]
        self._comm.bundle(op, values, pending=self._on_their_way(units))

    @torch.no_grad()
    def mix(self, unit: Unit) -> None:
        """The averaged momentum takes the place of the gradients."""
        for segment in unit.trainable:
            values, alive = self._values.pop(id(segment)), self._alive.pop(id(segment))
            part = self._parts.pop(id(segment), None)
            if part is not None:
                if self.signs.error:
                    error = self._error(segment, "server")
                    torch.sub(part, values[self.own(segment)], out=error)
                    _only(error, alive[self.own(segment)])
                    _only(self._error(segment, "worker"), alive)
                self._comm.memory.recycle(part)
            for error, kept in self._aside.pop(id(segment)):
                error.copy_(kept)
            _only(values, alive)
            taken = self._taken.pop(id(segment))
            for group, tensor, place in taken:
                self.optimizer.give(group, tensor, values[place].to(tensor.dtype))
            if taken and segment.keeps_copy and segment.compute_range is not None and segment.master is not None:
                segment.compute_range.copy_(segment.master)
            if unit.name in self._used():  # it is a step, which updates with them
                segment.master_grads.copy_(values)
            self._comm.memory.recycle(alive.view(torch.float32))
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


def _only(values: Tensor, alive: Tensor) -> Tensor:
    """What is not alive is 0, whatever it was; in place. (Filling by a mask takes ten times as long on a CPU.)"""
    values.view(torch.int32).bitwise_and_(alive)
    return values


def sign_exchange(
    model: ShardedModel, coefficient: Callable[[torch.device], Tensor | None], used: Callable[[], Used]
) -> SignExchange | None:
    """That of a table with signs; None: it has none.

    Raises:
        ConfigError: the optimizer has no momentum that can be sent so, or the table keeps it elsewhere.
    """
    signs, optimizer = model.layout.signs, model.optimizer
    if signs is None:
        if isinstance(optimizer, SignOptimizer) and model.comm.mesh.world > 1 and model.rank == 0:
            LOG.warning(
                "%s without Signs: gradients travel as the layout says, and no signs of momentum are sent; only the "
                "variance is frozen. Give layout.replace(signs=Signs(axis=...)) to send signs over an axis.",
                type(optimizer).__name__,
            )
        return None
    if not isinstance(optimizer, SignOptimizer):
        raise ConfigError(
            "signs=Signs(...) is for an optimizer that freezes its variance: give shardfold.optim.OneBitAdam, "
            f"OneBitLamb or ZeroOneAdam, not {type(optimizer).__name__}."
        )
    if model.layout.updates_on is not Tier.DEVICE:
        raise ConfigError("signs=Signs(...) with master in a slower tier: let master and moments rest on the device.")
    return SignExchange(signs, model, optimizer, coefficient, used)
