"""Keeps the copies that ranks hold of each other's states what their originals are (see ``plan/copies``).

A step updates both alike, so nothing is sent but the log. Where something else has written an original, as a load, or a
user in a parameter, the copies come anew, once, in front of the next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.tiers.tier import Region

__all__ = ["Copying", "copies_of"]

WHAT = "the copies of states"


class Copying:
    """Of one engine.

    Args:
        model: whose states they are of.
        updater: of both.

    Attributes:
        renewals: how often the copies came anew.
    """

    def __init__(self, model: ShardedModel, updater: ShardedOptimizer) -> None:
        self._model, self._updater = model, updater
        self.renewals = 0
        self._torn = False  # a part of them came anew, and others may not have
        self._known: Hashable = None  # of the originals that the copies are of

    @property
    def changed(self) -> bool:
        """Whether anything but a step has written originals of this rank since the copies were made."""
        return self._known != self._seen()

    @property
    def whole(self) -> bool:
        """Whether the copies are what their originals are on the other ranks, as far as this one knows."""
        return not self._torn and not self.changed

    @property
    def lends(self) -> bool:
        """Whether a save can read the copies in place of originals: they are alike, in memory of the host, and each
        is held once."""
        mesh, memory = self._model.comm.mesh, self._model.comm.memory
        rest = (segment.table for segment in self._model.trainable())
        alone = mesh.data_ranks == mesh.world
        alone &= all(mesh.parts(set(mesh.data) - set(table.master.over)) == 1 and table.copied for table in rest)
        here = all(each.resting is not None for regions in self._updater.copied_regions().values() for each in regions)
        return self.whole and alone and here and not accelerator.has_streams(memory.device)

    def follow(self) -> None:
        """Originals and copies are of the same step, and nothing else has written them."""
        self._known = self._seen()

    def refresh(self) -> None:
        """The copies come anew; every rank calls it.

        Raises:
            CollectiveError: a rank is gone.
        """
        comm = self._model.comm
        self._torn = True
        self._updater.take_back_copies()
        device, direct = comm.memory.device, defaultdict[str, list[tuple[Tensor, Tensor]]](list)
        for original, copy, axis in self.pairs():
            here, there = original.memory, copy.memory
            if here is not None and there is not None and here.device == there.device == device:
                direct[axis].append((here, there))
                continue
            sent = original.read().to(device)
            comm.pass_on([(sent, came := torch.empty_like(sent))], (axis,), WHAT)
            copy.write(came)
        for axis, several in direct.items():
            comm.pass_on(several, (axis,), WHAT)
        for segment in self._model.trainable():
            if self._updater.copied(segment) is not None:
                self._updater.count_copy(segment)
        self._torn = False
        self.renewals += 1
        self.follow()

    def take_back(self) -> None:
        """Copies are about to be written."""
        self._updater.take_back_copies()

    def pairs(self) -> Iterator[tuple[Shard, Shard, str]]:
        """What of this rank another one has a copy of, the copy that it has of the same of the rank before, and along
        which axis that is."""
        for segment in self._model.segments():
            copies = segment.table.copies
            if copies is None:
                continue
            if segment.copied_range is not None:
                yield _whole(segment.regions["params"]), _whole(segment.regions["copies"]), copies.to
            elif segment.spec.trainable and (held := self._updater.copied(segment)) is not None:
                master = segment.shard("master")
                assert master is not None
                yield master, _whole(held.segment.regions["copies"]), copies.to
                for name, region in held.moments.items():
                    own = self._updater.moment(segment, name)
                    assert own is not None
                    yield _whole(own), _whole(region), copies.to

    def _seen(self) -> Hashable:
        """What changes when something is written."""
        model = self._model
        whole = (segment for segment in model.trainable() if not segment.split)
        versions = tuple(version for segment in whole for version in segment.versions())
        taken = sum(segment.taken for segment in model.segments())
        return tuple(map(id, model.units)), model.run.mended, taken, self._updater.written, versions


def copies_of(updater: ShardedOptimizer, segment: Segment) -> list[Region]:
    """What copies of a segment rest in on this rank."""
    if segment.copied_range is not None:
        return [segment.regions["copies"]]
    held = updater.copied(segment) if segment.spec.trainable else None
    return [] if held is None else [held.segment.regions["copies"], *held.moments.values()]


def _whole(region: Region) -> Shard:
    return Shard(region, 0, region.nbytes // region.dtype.itemsize)
