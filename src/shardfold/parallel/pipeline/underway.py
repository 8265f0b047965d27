"""Micro-batches that are under way, also from one batch to the next where an order asks for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from shardfold.parallel.batch import Sharded
from shardfold.parallel.pipeline.action import Action
from shardfold.parallel.pipeline.flow import TensorOrigin
from shardfold.parallel.pipeline.point_to_point import Parcel
from shardfold.parallel.pipeline.stages import Borders
from shardfold.parallel.pipeline.stash import Stash, Version

__all__ = ["StageActivations", "UnderWay"]


class StageActivations(NamedTuple):
    """What a forward leaves for its backward: what it received and what it sent, or the loss; how it was cut, and of
    which version the weights were that it read."""

    received: Mapping[TensorOrigin, Tensor]
    sent: Sequence[Tensor]
    loss: Tensor | None
    cut: Sharded | None
    version: Version | None = None


class UnderWay:
    """What one rank keeps of micro-batches whose backward is not done; their numbers count from the first of the batch
    that runs, or will run next, so those of batches before are negative.

    Args:
        stash: of weights; None: nothing outlasts a batch.

    Attributes:
        kept: by stage and micro-batch.
        parcels: what has come, or is about to go.
        borders: by micro-batch what crosses them.
    """

    def __init__(self, stash: Stash | None) -> None:
        self.stash = stash
        self.kept: dict[tuple[int, int], StageActivations] = {}
        self.parcels: dict[Parcel, list[Tensor]] = {}
        self.borders: dict[int, Borders] = {}
        self._before = self._count = 0  # micro-batches of batches before that may be under way, and of the last

    def begin(self, order: Sequence[Sequence[Action]], borders: Sequence[Borders]) -> list[list[Action]]:
        """A batch begins; the actions of it that there is something to do for."""
        if self.stash is None or len(borders) != self._count:
            self.drop()
        if self.stash is not None:
            self.stash.begin()
        self._count = len(borders)
        self.borders.update(enumerate(borders))
        return [[action for action in row if action.batch >= -self._before] for row in order]

    def end(self, count: int) -> None:
        """A batch of so many micro-batches has run."""
        if self.stash is None:
            return
        self._before += count
        self.kept = {(stage, batch - count): kept for (stage, batch), kept in self.kept.items()}
        self.parcels = {parcel._replace(batch=parcel.batch - count): each for parcel, each in self.parcels.items()}
        needed = {batch for _, batch in self.kept}
        self.borders = {batch - count: each for batch, each in self.borders.items() if batch - count in needed}

    def take(self, stage: int, batch: int) -> StageActivations:
        """For its backward."""
        return self.kept.pop((stage, batch))

    def done(self, kept: StageActivations) -> None:
        """Its backward is over."""
        if self.stash is not None and kept.version is not None:
            self.stash.done(kept.version)

    def drop(self) -> None:
        """Nothing is under way any more."""
        self.kept.clear()
        self.parcels.clear()
        self.borders.clear()
        self._before = 0
        if self.stash is not None:
            self.stash.forget()
