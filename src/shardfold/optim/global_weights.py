"""The weights that all groups of ranks share, and how outer steps change them.

Of each segment's master shard a rank keeps the last global weights, as the groups train away from them, and of the
outer momentum only its group's part, as each group takes the outer step on another part of the shard:

    diff     outer = global - master                    (length / parts,)
    push     the groups' outer gradients are summed; each group has the sum of one part of them
    step     outer = - lr * (mean + beta * momentum), with momentum = beta * momentum + mean, on that part
    pull     the parts of all groups
    mix      global += outer;  master = alpha * master + (1 - alpha) * global

So all groups add the same numbers to the same global weights, whatever the format was that these travelled in, and the
global weights stay equal to the bit. Sources: arXiv 2311.08105 (algorithm 1), 2501.18512 (sections 2.2 and 2.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shardfold.comm.transport import Pending, drain
from shardfold.plan.outer import Outer
from shardfold.plan.program import Op
from shardfold.plan.report import MemoryRow
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.unit import Unit

__all__ = ["GlobalWeights"]


class GlobalWeights:
    """What the operations of a round do on one rank.

    Args:
        outer: how.
        model: whose weights they are.
    """

    def __init__(self, outer: Outer, model: ShardedModel) -> None:
        self.outer, self._model, self._comm = outer, model, model.comm
        self.groups = self._comm.mesh.parts((outer.axis,))
        self._whole = False  # nothing of a group's own weights stays, whatever ``alpha`` says
        self.group = self._comm.mesh.coords[outer.axis]
        self._changes: dict[int, Tensor] = {}  # by segment: its outer gradient, and then the change; (length / parts,)
        self._sums: dict[int, Tensor] = {}  # by segment: the sum of this group's part
        self._pending: dict[str, list[Pending]] = {}  # by unit
        model.rows.append(self._memory)

    def own(self, segment: Segment) -> slice:
        """This group's part of a shard."""
        size = segment.shard_numel // self.groups
        return slice(self.group * size, (self.group + 1) * size)

    @contextmanager
    def taken_whole(self) -> Iterator[None]:
        """Inside, nothing of a group's own weights stays."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    # -- a round, unit by unit

    @torch.no_grad()
    def diff(self, unit: Unit) -> None:
        """Makes the outer gradients of a unit."""
        for segment in unit.trainable:
            weights = segment.regions["global"].values()
            outer = self._comm.memory.empty(segment.shard_numel, weights.dtype)
            outer.copy_(weights)
            outer.sub_(_master(segment).to(outer.device))
            self._changes[id(segment)] = outer

    def push(self, units: Sequence[Unit], op: Op) -> None:
        """Begins to sum them over the groups."""
        for unit, segment, one in _each(units, op):
            outer = self._changes[id(segment)]
            mine = self._comm.memory.empty(outer.numel() // self.groups, outer.dtype)
            self._sums[id(segment)] = mine
            self._comm.collective(one, outer, pending=self._pending.setdefault(unit.name, []), out=mine)

    def arrive(self, units: Sequence[Unit]) -> None:
        """What is on its way of units is there."""
        for unit in units:
            drain(self._pending.get(unit.name, []), self._comm.job.wait)

    @torch.no_grad()
    def step(self, unit: Unit) -> None:
        """The outer optimizer's step on this group's part, whose change takes the place of the outer gradient there."""
        for segment in unit.trainable:
            outer = self._changes[id(segment)]
            mean = self._sums.pop(id(segment), outer).div_(self.groups)
            if self.outer.beta:
                region = segment.regions["momentum"]
                momentum = region.values()
                momentum.mul_(self.outer.beta).add_(mean.to(momentum.device))
                mean.add_(momentum.to(mean.device), alpha=self.outer.beta)
                region.store(momentum)
            torch.mul(mean, -self.outer.rate, out=outer[self.own(segment)])
            if mean is not outer:
                self._comm.memory.recycle(mean)

    def pull(self, units: Sequence[Unit], op: Op) -> None:
        """Begins to bring the changes of the other groups' parts."""
        for unit, segment, one in _each(units, op):
            pending = self._pending.setdefault(unit.name, [])
            self._comm.collective(one, self._changes[id(segment)], pending=pending)

    @torch.no_grad()
    def mix(self, unit: Unit) -> None:
        """The global weights change, and this group's weights become them, or come nearer."""
        for segment in unit.trainable:
            change, region = self._changes.pop(id(segment)), segment.regions["global"]
            weights = region.values()
            weights.add_(change.to(weights.device))
            region.store(weights)
            self._comm.memory.recycle(change)
            master = _master(segment)
            new = weights.to(master.device)
            if self.outer.stays and not self._whole:
                new = torch.lerp(new, master.to(new.dtype), self.outer.stays)
            _take(segment, new)

    # -- beside the rounds

    @torch.no_grad()
    def begin_anew(self, segment: Segment) -> None:
        """A segment was given other values: they are the global ones, and nothing is known of how they move."""
        segment.regions["global"].store(_master(segment).to(segment.regions["global"].dtype))
        if "momentum" in segment.regions:
            segment.regions["momentum"].values().zero_()

    def in_flight(self, segment: Segment) -> Tensor | None:
        """The change that is still to be taken in, where there is one; once :meth:`arrive` was behind :meth:`pull`."""
        return self._changes.get(id(segment))

    def put_in_flight(self, segment: Segment) -> Tensor:
        """Room for such a change, that a checkpoint has."""
        region = segment.regions["global"]
        self._changes[id(segment)] = self._comm.memory.empty(segment.shard_numel, region.dtype)
        return self._changes[id(segment)]

    def forget(self) -> None:
        """Nothing is in flight; what is on its way has come first."""
        for unit in self._model.units:
            self.arrive((unit,))
        self._changes.clear()
        self._sums.clear()

    def _memory(self) -> MemoryRow:
        """Outer gradients between their steps; with ``delay`` they are there for longer than a step."""
        held = sum(flat.nbytes for flat in (*self._changes.values(), *self._sums.values()))
        return MemoryRow("outer", "device", held, 0.0, held)


def _each(units: Sequence[Unit], op: Op) -> Iterator[tuple[Unit, Segment, Op]]:
    """The trainable segments of units, with their operation."""
    for unit in units:
        for segment, one in zip(unit.trainable, op.each(len(unit.trainable)), strict=True):
            yield unit, segment, one


def _master(segment: Segment) -> Tensor:
    shard = segment.shard("master")
    assert shard is not None
    return shard.read()


def _take(segment: Segment, values: Tensor) -> None:
    """Master, and its copy in the compute dtype, become these values."""
    master = segment.shard("master")
    assert master is not None
    master.write(values.to(master.dtype))
    if segment.keeps_copy and (copy := segment.compute_range) is not None:
        copy.copy_(values)
