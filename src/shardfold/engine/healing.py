"""What has changed in a rank's memory by itself comes from a rank that has the same, where the checksum of that holds.

    a replica            from the rank before, which has the same parameters
    a shard              from the copy of it, on the next rank
    a copy               from its owner, the rank before
    cast parameters      from this rank's own master

Where that was read by a forward or backward, or bytes had changed in what was gathered, the gradients of the step are
not to be used. All ranks go through the same steps here: who sends does so whether or not its neighbour needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from shardfold.engine.copying import Copying
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard

__all__ = ["Healing"]

WHAT = "what has changed in memory by itself"


class Healing:
    """Of one engine.

    Args:
        model: whose states they are.
        copying: the copies.

    Attributes:
        healed: how many states of this rank have come from another one.
    """

    def __init__(self, model: ShardedModel, copying: Copying) -> None:
        self._model, self._copying = model, copying
        self.healed = 0

    def heal(self, broken: Collection[int] | None, gathered: bool) -> bool | None:
        """See ``checksums.Heal``."""
        pairs = list(self._copying.pairs())
        replicas = [
            (Shard(segment.regions["params"], 0, segment.spec.length), segment.table.copies.to)
            for segment in self._model.segments()
            if not segment.split and segment.table.copies is not None
        ]
        alike = {id(shard.region) for shard, _ in replicas}
        casts = {id(segment.regions["params"]): segment for segment in self._model.trainable() if _is_cast(segment)}
        there = frozenset(broken or ())

        def are_broken(shards: Sequence[Shard]) -> list[bool]:
            return [id(shard.region) in there for shard in shards]

        whole = are_broken([shard for shard, _ in replicas])
        own = [id(shard.region) in there - alike for shard, _, _ in pairs]
        copied = are_broken([copy for _, copy, _ in pairs])
        known = {*alike, *casts, *(id(shard.region) for own, copy, _ in pairs for shard in (own, copy))}
        along, around = [axis for *_, axis in pairs], [axis for _, axis in replicas]
        lost = broken is None or bool(there - known)
        lost |= any(map(all, zip(own, self._told(copied, along, back=True), strict=True)))
        lost |= any(map(all, zip(whole, self._told(whole, around), strict=True)))
        comm = self._model.comm
        if any(comm.anyone([lost], WHAT)):
            return None
        self._copying.take_back()
        every = iter(comm.anyone([*whole, *own, *copied], WHAT))
        for (shard, axis), mine in zip(replicas, whole, strict=True):
            self._bring(shard, shard, axis, mine=mine, any_rank=next(every))
        for (shard, copy, axis), mine in zip(pairs, own, strict=True):
            self._bring(copy, shard, axis, mine=mine, any_rank=next(every), back=True)
        for (shard, copy, axis), mine in zip(pairs, copied, strict=True):
            self._bring(shard, copy, axis, mine=mine, any_rank=next(every))
        for region in there & set(casts):
            self._cast(casts[region])
        reads = {id(segment.regions.get("params") or segment.regions["master"]) for segment in self._model.segments()}
        return not any(comm.anyone([gathered or bool(there & reads)], WHAT))

    def _told(self, flags: Sequence[bool], axes: Sequence[str], *, back: bool = False) -> list[bool]:
        """What the rank before this one along the axis of each says of it, or ``back`` the next one."""
        found = list(flags)
        for axis in sorted(set(axes)):
            sent = torch.tensor([float(flag) for flag in flags], device=self._model.comm.memory.device)
            self._model.comm.pass_on([(sent, came := torch.empty_like(sent))], (axis,), WHAT, back=back)
            found = [bool(new) if axis == of else old for new, old, of in zip(came.tolist(), found, axes, strict=True)]
        return found

    def _bring(
        self, source: Shard, target: Shard, axis: str, *, mine: bool, any_rank: bool, back: bool = False
    ) -> None:
        """What the neighbour has in ``source`` comes into ``target``, where that is broken on this rank."""
        if not any_rank:
            return
        comm = self._model.comm
        sent = source.read().to(comm.memory.device)
        comm.pass_on([(sent, came := torch.empty_like(sent))], (axis,), WHAT, back=back)
        if mine:
            target.write(came)
            self.healed += 1

    def _cast(self, segment: Segment) -> None:
        values = segment.compute_range
        assert values is not None and segment.master is not None
        values.copy_(segment.master)
        self.healed += 1


def _is_cast(segment: Segment) -> bool:
    """Whether its parameters, which are split as its master is, are a cast of that in memory of their own."""
    return segment.split and segment.keeps_copy and segment.rest_range == segment.master_range
