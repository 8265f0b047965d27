"""What ``activations="host"`` and ``"disk"`` move, on paper: the engine's own frames over regions without memory.

A frame, what it moves and when it brings that back are those of ``activations.offload``. The regions are others: where
the device computes on host memory, one of the host is a copy there, whose bytes count beside all else; elsewhere, and
on disk, what is stored is away until it is fetched, into memory of the device that is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from shardfold.activations.saved_tensors import Movers
from shardfold.planner.trace import Moves
from shardfold.torch_internals import FakeTensor, storage_key

__all__ = ["MOVED", "SMALLEST", "PaperMovers"]

MOVED = ("host", "disk")
"""Modes that move what autograd saves out of the device."""
SMALLEST = 64 * 1024
"""Bytes of the smallest tensor that is moved, as of ``Activations``."""


class PaperMovers(Movers):
    """Moves what autograd saves in forwards of a model that is traced.

    Args:
        model: that runs.
        mode: of :data:`MOVED`.
        streams: the device has memory of its own.
        smallest: bytes of the smallest tensor that is moved.
        quiet: while inside, what is done is not the model's.

    Attributes:
        level: bytes that are away now.
    """

    kinds = (Tensor, FakeTensor)

    def __init__(self, model: nn.Module, mode: str, *, streams: bool, smallest: int, quiet: Any = nullcontext) -> None:
        tier = SimpleNamespace(allocate=self._allocate)
        device: Any = SimpleNamespace(device=torch.device("cpu"))
        tiers: Any = SimpleNamespace(device=device, named=lambda mode, folder: tier)
        super().__init__(model, tiers)
        self._mode, self._smallest, self.quiet = mode, smallest, quiet
        self.beside = mode == "host" and not streams
        self.level, self._out, self._back, self._number, self._due = 0.0, 0.0, 0.0, 0.0, -1.0
        self.follow([storage_key(parameter.untyped_storage()) for parameter in model.parameters()])

    def apart(self) -> AbstractContextManager[object]:
        """Nothing: what counts bytes is to see them."""
        return nullcontext()

    def enter(self, unit: str, inputs: Any) -> Any:
        """From now on what autograd saves is moved; what :meth:`Movers.end` takes, or None inside of a checkpoint."""
        return self.begin(unit, self._mode, None, self._smallest, inputs)

    def taken(self) -> Moves:
        """What was moved since this was asked for last."""
        lag = self._number - self._due if self._due >= 0 else -1.0
        found = Moves(self._out, self._back, lag)
        self._out, self._back, self._due = 0.0, 0.0, -1.0
        return found

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> _PaperRegion:
        return _PaperRegion(self, shape, dtype)

    # -- what regions say

    def goes(self, num_bytes: int) -> None:
        """So much leaves the device."""
        self._out += num_bytes
        self.level += 0 if self.beside else num_bytes

    def comes(self, num_bytes: int) -> float:
        """So much begins to come back; the number of bytes that have to have come until it is there."""
        self._back += num_bytes
        self._number += num_bytes
        return self._number

    def waits(self, number: float) -> None:
        """So many bytes have to have come."""
        self._due = max(self._due, number)

    def ends(self, num_bytes: int) -> None:
        """So much is away no more."""
        self.level -= 0 if self.beside else num_bytes


class _PaperRegion:
    """See :class:`shardfold.tiers.tier.Region`."""

    def __init__(self, owner: PaperMovers, shape: Sequence[int], dtype: torch.dtype) -> None:
        self._owner, self._shape, self._dtype = owner, tuple(shape), dtype
        self.nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._made: Tensor | None = None
        self._number = -1.0
        self._there = True

    def _make(self) -> Tensor:
        with self._owner.quiet():
            return torch.empty(self._shape, dtype=self._dtype, device="cpu")

    def store(self, values: Tensor) -> None:
        self._owner.goes(self.nbytes)
        if self._owner.beside:
            self._made = self._make()

    def fetch(self, into: Tensor | None = None) -> None:
        if self._made is None:
            self._made = self._make()
            self._number = self._owner.comes(self.nbytes)

    def get(self) -> Tensor:
        self.fetch()
        made = self._made
        assert made is not None
        if not self._owner.beside:
            self._owner.waits(self._number)
            self._made = None
        return made

    def drop(self) -> None:
        if self._there:
            self._there, self._made = False, None
            self._owner.ends(self.nbytes)
