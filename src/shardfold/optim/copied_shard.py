"""What a rank holds for another one: the copy of a segment's master range and moments there, and their next gradients.

It is to its update what a segment is to that of the rank's own range (see ``fused.FusedShard``), and has nothing else
of one: no parameter is a view of it, and no pass reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardfold.plan.axes import Sizes
from shardfold.plan.placement import shard_range
from shardfold.sharding.segment import Segment
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers

__all__ = ["CopiedShard"]


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
        master: ``(length / parts,)``.
        update_grads: the log of that rank, ``(length / parts,)`` in the dtype of gradients.
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
        made: dict[str, Any] = {"copies": segment.dtypes["master"], "log": segment.dtypes["grads"]}
        self.regions: dict[str, Region] = {
            name: tiers.device.allocate((self.shard_numel,), dtype, zero=True, rests=True)
            for name, dtype in made.items()
        }

    @property
    def shard_numel(self) -> int:
        return self.master_range[1] - self.master_range[0]

    @property
    def master(self) -> Tensor:
        return self.regions["copies"].get()

    @property
    def update_grads(self) -> Tensor:
        return self.regions["log"].get()

    def own_piece(self, slot: int) -> tuple[slice, slice]:
        """Where it meets a parameter: in the copy, and in the parameter; both may be empty."""
        (low, high), place = self.master_range, self.spec.slots[slot]
        a = min(max(place.offset, low), high)
        b = max(min(place.offset + place.numel, high), a)
        return slice(a - low, b - low), slice(a - place.offset, b - place.offset)
