"""Weights of earlier steps, for micro-batches that are under way while weights are updated.

A forward saves weights for its backward: not their values, but where in the model's memory they are, and of which
version. As long as nothing was updated since, that memory has them. Before an update the memory of each unit is copied
(``STASH`` of the program) if a micro-batch under way has read it, so a backward finds what its forward read, and the
copy is gone with the last backward that may ask for it (PipeDream's weight stashing, arXiv 1806.03377; with one version
behind the present one, the double buffers of arXiv 2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardfold.plan.report import MemoryRow
from shardfold.sharding.autograd import Kept, keep
from shardfold.sharding.unit import Unit
from shardfold.torch_internals import storage_key

__all__ = ["Stash", "Version"]


class Version:
    """The weights of one step.

    Attributes:
        readers: micro-batches under way whose forward read them.
        copies: of units that were updated since, by what identifies their memory.
    """

    def __init__(self) -> None:
        self.readers = 0
        self.copies: dict[int, Tensor] = {}

    def read(self) -> None:
        """A micro-batch comes that reads them until :meth:`let_go`."""
        self.readers += 1

    def let_go(self) -> None:
        """A micro-batch does not read them any more; copies are gone with the last one."""
        self.readers -= 1
        if not self.readers:
            self.copies.clear()

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies.values())


class StashedWeight(NamedTuple):
    """Where a weight is that was saved for backward."""

    version: Version
    key: int
    at: int
    shape: Sequence[int]
    stride: Sequence[int]


class Stash:
    """The versions of one rank's weights.

    Args:
        units: of the model, as they are now; all are whole in memory.
        versions: how many behind the present one there are at most.
    """

    def __init__(self, units: Callable[[], Sequence[Unit]], versions: int) -> None:
        self._units, self._versions = units, versions
        self._now = Version()
        self._all: WeakSet[Version] = WeakSet()
        self._flats: dict[int, Tensor] = {}

    @property
    def planned(self) -> int:
        """Bytes of copies, where all versions are there."""
        return self._versions * sum(s.flat.nbytes for unit in self._units() for s in unit.trainable)

    def row(self) -> MemoryRow:
        """For a report of memory."""
        return MemoryRow("stash", "device", float(self.planned), 0.0, sum(each.nbytes for each in self._all))

    def begin(self) -> None:
        """A batch begins: what was updated since the last one is another version."""
        if self._now.copies:
            self._now = Version()
        self._flats = {storage_key(s.flat.untyped_storage()): s.flat for unit in self._units() for s in unit.trainable}

    def reading(self) -> tuple[Version, AbstractContextManager[object]]:
        """A forward begins; inside of what is returned, weights that it saves are those of that version until
        :meth:`done`."""
        version = self._now
        version.read()

        def pack(tensor: Tensor) -> Kept | StashedWeight:
            key = storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided else 0
            flat = self._flats.get(key)
            if flat is None or tensor.dtype is not flat.dtype:
                return keep(tensor)
            at = int(tensor.storage_offset() - flat.storage_offset())
            return StashedWeight(version, key, at, tuple(tensor.shape), tensor.stride())

        return version, saved_tensors_hooks(pack, self._unpack)

    def _unpack(self, saved: Kept | StashedWeight) -> Tensor:
        if isinstance(saved, Kept):
            return saved.get()
        base = saved.version.copies.get(saved.key)
        base = self._flats[saved.key] if base is None else base
        return base.as_strided(saved.shape, saved.stride, base.storage_offset() + saved.at)

    def done(self, version: Version) -> None:
        """A backward is over whose forward read these."""
        version.let_go()

    def keep(self, unit: Unit) -> None:
        """The unit is about to be updated."""
        if self._now.readers:
            self._all.add(self._now)
            for segment in unit.trainable:
                key = storage_key(segment.flat.untyped_storage())
                if key in self._flats:
                    self._now.copies.setdefault(key, segment.flat.clone())

    def forget(self) -> None:
        """Nothing is under way any more."""
        for version in self._all:
            version.copies.clear()
        self._now = Version()
