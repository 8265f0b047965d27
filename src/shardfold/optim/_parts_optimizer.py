"""An optimizer of ours (``parts``) on shards: it is told where its pieces lie, and says itself what it keeps.

It has a piece of every parameter on every rank, and may ask other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from shardfold.optim.class_optimizer import ClassOptimizer
from shardfold.optim.master_ranks import MasterRanks
from shardfold.optim.parts import PartOptimizer, ShardPlacement
from shardfold.optim.sharded import MasterPiece
from shardfold.plan.axes import Axes
from shardfold.plan.cost import Sent
from shardfold.plan.placement import SegmentSpec
from shardfold.sharding.segment import Segment
from shardfold.tiers.tiers import Tiers

__all__ = ["PartsOptimizer"]


class PartsOptimizer(ClassOptimizer):
    """See :class:`ShardedOptimizer` for arguments."""

    whole = True

    def __init__(self, optimizer: PartOptimizer, tiers: Tiers) -> None:
        super().__init__(optimizer, tiers)
        self._ours = optimizer

    def connect(self, ranks: MasterRanks, axes: Axes) -> None:
        self._ours.connect(ranks, ranks.product_dtype() if self._ours.multiplies else None)
        for axis in axes if self._ours.exchanges else ():
            ranks.join((axis,))

    def _begin(self, segment: Segment) -> None:
        for piece in self._pieces[id(segment)]:
            self._ours.places[piece.tensor] = _place(segment, piece.slot)
            self._prepare(piece)

    def _end(self, segment: Segment) -> None:
        for piece in self._pieces.get(id(segment), ()):
            del self._ours.places[piece.tensor]

    def begin_anew(self, piece: MasterPiece) -> None:
        super().begin_anew(piece)
        self._prepare(piece)

    def _prepare(self, piece: MasterPiece) -> None:
        self._ours.prepare(self._group(piece.segment), piece.tensor, self._ours.places[piece.tensor])

    def kept_bytes(self) -> Callable[[SegmentSpec], float] | None:
        kept: dict[SegmentSpec, float] = {}
        for piece in self._every_piece():
            spec, place = piece.segment.spec, self._ours.places[piece.tensor]
            num_bytes = self._ours.kept_bytes(self._group(piece.segment), piece.tensor, place)
            kept[spec] = kept.get(spec, 0.0) + num_bytes
        return lambda spec: kept.get(spec, 0.0)

    def traffic(self) -> dict[Sent, tuple[int, float]]:
        return dict(self._ours.traffic())

    def dtypes(self, piece: MasterPiece) -> dict[str, torch.dtype]:
        return self._ours.dtypes(piece.tensor)

    def describe(self, segment: Segment) -> dict[int, tuple[int, dict[str, Any]]]:
        said = super().describe(segment)
        for piece in self._pieces[id(segment)]:
            if owned := self._ours.owned(piece.tensor):  # it knows more than any rank with a part
                said[piece.slot] = (self._ours.places[piece.tensor].numel + 1, {**said[piece.slot][1], **owned})
        return said

    def owned(self, segment: Segment, slot: int) -> dict[str, Tensor]:
        return {
            n: value for piece in self._pieces_of(segment, slot) for n, value in self._ours.owned(piece.tensor).items()
        }

    def elsewhere(self, segment: Segment, slot: int) -> Collection[str]:
        return {name for piece in self._pieces_of(segment, slot) for name in self._ours.elsewhere(piece.tensor)}

    def value(self, piece: MasterPiece, name: str) -> Tensor:
        return self._ours.value(piece.tensor, name)

    def once(self, piece: MasterPiece) -> dict[str, Any]:
        return self._ours.once(piece.tensor)

    def _stored(self, piece: MasterPiece) -> Iterator[tuple[str, int, Tensor]]:
        return ((name, *kept) for name, kept in self._ours.stored(piece.tensor).items())

    def make(self, piece: MasterPiece, name: str, values: Tensor) -> None:
        self._ours.take_value(piece.tensor, name, values)

    def take(self, piece: MasterPiece, name: str, values: Tensor) -> None:
        self._ours.take_value(piece.tensor, name, values)

    def take_once(self, piece: MasterPiece, name: str, value: Any) -> None:
        self._ours.take_once(piece.tensor, name, int(value) if name == "step" else value)

    def needs(self, segment: Segment, slot: int) -> set[str] | None:
        return {name for piece in self._pieces_of(segment, slot) for name in self._ours.dtypes(piece.tensor)}


def _place(segment: Segment, slot: int) -> ShardPlacement:
    """Where the pieces of a parameter lie on all ranks that its master is split over."""
    spec, (a, b) = segment.spec, segment.master_range
    offset, numel = spec.slots[slot].offset, spec.slots[slot].numel
    shares: list[tuple[int, int]] = []
    for low in range(0, spec.length, b - a):
        start, stop = max(low - offset, 0), min(low + b - a - offset, numel)
        shares.append((start, stop) if start < stop else (0, 0))
    own = spec.slots[slot]
    return ShardPlacement(own.shape, tuple(shares), a // (b - a), own.larger, own.box, spec.distinct if own.box else ())
