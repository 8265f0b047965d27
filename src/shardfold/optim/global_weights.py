"""The weights that all groups of ranks share, and how outer steps change them.

Of each segment's master shard a rank keeps the last global weights, as the groups train away from them, and of the
outer momentum only its group's part, as each group takes the outer step on another part of the shard:

    diff     outer = global - master                    (length / parts,)
    push     the groups' outer gradients are summed; each group has the sum of one part of them
    step     outer = - lr * (mean + beta * momentum), with momentum = beta * momentum + mean, on that part
    pull     the parts of all groups
    mix      global += outer;  master = alpha * master + (1 - alpha) * global

Where groups may be away, each has all of the momentum: the parts of the mean are pulled, weighed by what each group
that is there has learned from, and ``step`` comes with ``mix``, on all of the shard.

So all groups add the same numbers to the same global weights, whatever the format was that these travelled in, and the
global weights stay equal to the bit. Sources: arXiv 2311.08105 (algorithm 1), 2501.18512 (sections 2.2 and 2.3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product

import torch
from torch import Tensor

from shardfold.comm.run_pairs import RunPairs
from shardfold.comm.transport import Pending, drain
from shardfold.errors import ConfigError
from shardfold.optim.present_groups import OuterMeeting, PresentGroups, PresentRuns
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
        self.pairs = _pairs(outer, model) if outer.runs is not None else None
        self.groups = outer.runs.count if outer.runs is not None else self._comm.mesh.parts((outer.axis,))
        self._whole = False  # nothing of a group's own weights stays, whatever ``alpha`` says
        self.group = outer.runs.number if outer.runs is not None else self._comm.mesh.coords[outer.axis]
        self._changes: dict[int, Tensor] = {}  # by segment: its outer gradient, and then the change; (length / parts,)
        self._sums: dict[int, Tensor] = {}  # by segment: the sum of this group's part
        self._pending: dict[str, list[Pending]] = {}  # by unit
        #: Groups may be away; None: all take part in each outer step.
        self.present: PresentGroups | None = None
        if self.pairs is not None:
            self.present = PresentRuns(self._comm, self.pairs)
        elif outer.quorum is not None and self.groups > 1:
            self.present = PresentGroups(self._comm, outer.axis)
        model.rows.append(self._memory)

    def own(self, segment: Segment) -> slice:
        """This group's part of a shard, which no other group of this run has; of a run that is a group, all of it."""
        if self.pairs is not None:
            return slice(0, segment.shard_numel)
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
            if self.present is not None:
                self._pending.setdefault(unit.name, []).append(self._push_parts(self.present, one, segment))
                continue
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
            if self.present is not None:
                if self.pairs is not None:  # across no axis of the mesh, so the program sends nothing
                    self._push_parts(self.present, Op("PUSH", unit.name, (self.outer.axis,)), segment)
                self._weigh(segment, outer)
                if self.pairs is not None:
                    self._pull_parts(self.present, Op("PULL", unit.name, (self.outer.axis,)), segment)
                continue
            mean = self._sums.pop(id(segment), outer).div_(self.groups)
            self._gain_momentum(segment, mean)
            torch.mul(mean, -self.outer.rate, out=outer[self.own(segment)])
            if mean is not outer:
                self._comm.memory.recycle(mean)

    def _gain_momentum(self, segment: Segment, mean: Tensor) -> None:
        """What rests of a segment's momentum gains the mean, and is then added to that."""
        if not self.outer.beta:
            return
        region = segment.regions["momentum"]
        momentum = region.values()
        momentum.mul_(self.outer.beta).add_(mean.to(momentum.device))
        mean.add_(momentum.to(mean.device), alpha=self.outer.beta)
        region.store(momentum)

    def pull(self, units: Sequence[Unit], op: Op) -> None:
        """Begins to bring the changes of the other groups' parts."""
        for unit, segment, one in _each(units, op):
            pending, change = self._pending.setdefault(unit.name, []), self._changes[id(segment)]
            if self.present is not None:
                pending.append(self._pull_parts(self.present, one, segment))
            else:
                self._comm.collective(one, change, pending=pending)

    @torch.no_grad()
    def mix(self, unit: Unit) -> None:
        """The global weights change, and this group's weights become them, or come nearer."""
        for segment in unit.trainable:
            change, region = self._changes.pop(id(segment)), segment.regions["global"]
            if self.present is not None:
                self._follow(segment, change)
            weights = region.values()
            weights.add_(change.to(weights.device))
            region.store(weights)
            self._comm.memory.recycle(change)
            master = _master(segment)
            new = weights.to(master.device)
            if self.outer.stays and not self._whole:
                new = torch.lerp(new, master.to(new.dtype), self.outer.stays)
            _take(segment, new)

    # -- where groups may be away

    @property
    def is_whole(self) -> bool:
        """Whether the outer step that is under way may be taken, as far as this rank knows."""
        return self.present is None or self.present.is_whole

    def _push_parts(self, present: PresentGroups, op: Op, segment: Segment) -> Pending:
        """Each group is sent its part of the outer gradient."""
        outer = self._changes[id(segment)]
        parts = present.parts(outer.numel())
        rows = self._rows(segment, len(outer[parts[self.group]]), outer.dtype)
        rows[self.group].copy_(outer[parts[self.group]])
        return present.swap(op, {group: outer[part] for group, part in parts.items()}, rows)

    def _pull_parts(self, present: PresentGroups, op: Op, segment: Segment) -> Pending:
        """Each group is sent this one's part of the mean."""
        change = self._changes[id(segment)]
        parts = present.parts(change.numel())
        goes = dict.fromkeys(parts, change[parts[self.group]])
        return present.swap(op, goes, {group: change[part] for group, part in parts.items()})

    def _rows(self, segment: Segment, size: int, dtype: torch.dtype) -> dict[int, Tensor]:
        """Room for each group's outer gradients of this group's part."""
        assert self.present is not None and self.present.meeting is not None
        groups = self.present.meeting.groups
        self._sums[id(segment)] = flat = self._comm.memory.empty(size * len(groups), dtype)
        return dict(zip(groups, flat.view(len(groups), size).unbind(), strict=True))

    def _weigh(self, segment: Segment, outer: Tensor) -> None:
        """The weighted mean takes the place of this group's part; summed in the order of the groups."""
        assert self.present is not None and self.present.meeting is not None
        mine, flat = outer[self.present.parts(outer.numel())[self.group]], self._sums.pop(id(segment))
        shares = self.present.meeting.shares
        mine.zero_()
        for row, share in zip(flat.view(len(shares), -1), shares, strict=True):
            mine.add_(row, alpha=share)
        self._comm.memory.recycle(flat)

    def _follow(self, segment: Segment, mean: Tensor) -> None:
        """The outer optimizer's step on all of a shard, as each group has all of the momentum: the change takes the
        place of the mean."""
        self._gain_momentum(segment, mean)
        mean.mul_(-self.outer.rate)

    @torch.no_grad()
    def catch_up(self, meeting: OuterMeeting) -> None:
        """Groups that have missed outer steps take global weights and momentum of one that has not; their own weights
        move as far as the global ones do, so what they have learned meanwhile counts."""
        if self.present is None:
            return
        self.present.begin(meeting)
        if self.group != meeting.source and self.group not in meeting.behind:
            return
        behind = self.group in meeting.behind
        for unit in self._model.units:
            op = Op("PULL", unit.name, (self.outer.axis,))
            for segment, name in product(unit.trainable, ("global", "momentum") if self.outer.beta else ("global",)):
                region = segment.regions[name]
                before = region.values().clone()
                values = torch.empty_like(before) if behind else before
                goes, comes = ({}, {meeting.source: values}) if behind else (dict.fromkeys(meeting.behind, values), {})
                self.present.swap(op, goes, comes).wait(self._comm.job.wait)
                if not (behind and self.is_whole):
                    continue
                region.store(values)
                if name == "global":
                    master = _master(segment)
                    _take(segment, master.to(values.dtype) + (values - before).to(master.device))

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


def _pairs(outer: Outer, model: ShardedModel) -> RunPairs:
    """
    Raises:
        ConfigError: groups are runs of their own and ranks of one along an axis, or on a device without Gloo.
    """
    assert outer.runs is not None and outer.deadline is not None
    if (size := model.comm.mesh.sizes[outer.axis]) > 1:
        raise ConfigError(
            f"Outer.runs is given and {outer.axis!r}, the axis of the groups, has {size} ranks in this run: give "
            f"parallel={{{outer.axis!r}: 1, ...}}, as each group is a run of its own."
        )
    if model.device.type != "cpu":
        raise ConfigError(f"Outer.runs goes over Gloo between CPUs, and the model is on {model.device}: leave it out.")
    return RunPairs(outer.runs, model.comm.mesh.rank, float(outer.deadline))


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
