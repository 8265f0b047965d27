"""What a rank holds for another one: the copy of a segment's master range and moments there, and their next gradients.

It is to its update what a segment is to that of the rank's own range (see ``fused.FusedShard``), and has nothing else
of one: no parameter is a view of it, and no pass reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from shardfold.plan.axes import Sizes
from shardfold.plan.placement import shard_range
from shardfold.sharding.segment import Segment
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers

__all__ = ["CopiedShard"]


class Borrower(Protocol):
    """Of memory that is lent."""

    def give_back(self) -> None:
        """The memory is about to be written."""
        ...


class CopiedShard:
    """The copy of one segment.

    Args:
        segment: this rank's.
        sizes: of the mesh.
        coords: this rank's on it.
        tiers: what it rests in.

    Attributes:
        axis: along which the rank that it is of is the one before this.
        master_range: of that rank, in elements of the segment.
        rests: the tier, and the folder, of its master and moments.
        moments_come: whether these are fetched to where the update is, and stored behind it.
        regions: what ``copies``, without moments, and ``log`` rest in.
    """

    under_way = None
    adopted: Mapping[int, Tensor] = {}
    keeps_copy = master_is_rest = False

    def __init__(self, segment: Segment, sizes: Sizes, coords: Mapping[str, int], tiers: Tiers) -> None:
        self.spec, self.table, self.dtypes, self.dtype = segment.spec, segment.table, segment.dtypes, segment.dtype
        copies = segment.table.copies
        assert copies is not None
        self.axis = copies.to
        self.master_range = shard_range(
            segment.spec.length, segment.table.master.over, sizes, copies.held_at(coords, sizes)
        )
        cell, on = segment.table.copies_rest(trainable=True), segment.table.updates_on
        self.rests, self.moments_come = (cell.tier, cell.folder), cell.tier is not on
        made: dict[str, Any] = {"copies": (self.rests, "master"), "log": ((on, None), "grads")}
        self.regions: dict[str, Region] = {
            name: tiers.named(*where).allocate((self.shard_numel,), segment.dtypes[of], zero=True, rests=True)
            for name, (where, of) in made.items()
        }
        self._here: Tensor | None = None  # its master where it is updated, from when it was fetched until it is stored
        self._readers: list[Borrower] = []  # of a save, which reads what rests here
        self._receives: Tensor | None = None  # what comes of a log, on its way to host memory

    @property
    def shard_numel(self) -> int:
        return self.master_range[1] - self.master_range[0]

    @property
    def master(self) -> Tensor:
        """``(length / parts,)``, where the update is."""
        if self._here is not None:
            return self._here
        region = self.regions["copies"]
        return region.get() if self.moments_come else region.values()

    @property
    def update_grads(self) -> Tensor:
        """The log of that rank, ``(length / parts,)`` in the dtype of gradients."""
        return self.regions["log"].values()

    def lend(self, reader: Borrower) -> None:
        """Somebody reads what rests here beside the training."""
        self._readers.append(reader)

    def take_back(self) -> None:
        """It is about to be written: nobody reads it any more."""
        while self._readers:
            self._readers.pop().give_back()

    def fetch(self, empty: Callable[[int, torch.dtype], Tensor]) -> None:
        """Its master begins to come to memory that ``empty`` gives, ahead of its update."""
        region = self.regions["copies"]
        region.fetch(empty(self.shard_numel, region.dtype))

    def bring(self) -> None:
        """What :meth:`fetch` began is where the update is.

        Raises:
            OSError: it could not be read.
        """
        if self.moments_come:
            self._here = self.regions["copies"].get()

    def leave(self) -> tuple[Region, Tensor]:
        """The master is not there any more: the region that is to take it, and its values."""
        here, self._here = self._here, None
        assert here is not None
        return self.regions["copies"], here

    def receives(self, device: torch.device) -> Tensor:
        """Where the log comes to, ``(length / parts,)``: where it rests, if that is memory of the device that sends."""
        region = self.regions["log"]
        if (resting := region.resting) is not None and resting.device == device:
            return region.values()
        self._receives = torch.empty(self.shard_numel, dtype=region.dtype, device=device)
        return self._receives

    def store_log(self) -> None:
        """What has come goes to host memory."""
        came, self._receives = self._receives, None
        if came is not None:
            self.regions["log"].store(came)

    def own_piece(self, slot: int) -> tuple[slice, slice]:
        """Where it meets a parameter: in the copy, and in the parameter; both may be empty."""
        (low, high), place = self.master_range, self.spec.slots[slot]
        a = min(max(place.offset, low), high)
        b = max(min(place.offset + place.numel, high), a)
        return slice(a - low, b - low), slice(a - place.offset, b - place.offset)
