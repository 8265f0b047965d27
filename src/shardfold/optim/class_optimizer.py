"""Any class on shards, torch's or another: it steps by itself, once over all units, and keeps its state by piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from shardfold.optim.sharded import MasterPiece, ShardedOptimizer, factor_of
from shardfold.plan.layout import Tier
from shardfold.sharding.model import PerElement
from shardfold.sharding.segment import Segment
from shardfold.sharding.unit import Unit
from shardfold.tiers.tier import Region

__all__ = ["ClassOptimizer"]


class ClassOptimizer(ShardedOptimizer):
    """What has the shape of a piece has a value for each of its elements; only the class knows what there will be."""

    def _move(self, before: Tier, tier: Tier) -> None:
        for piece in self._every_piece():
            if piece.segment.table.moments.tier is not Tier.DEVICE:
                continue
            for value in self.torch_optimizer.state.get(piece.tensor, {}).values():
                if isinstance(value, Tensor) and value.dim():
                    region = self._tiers.moved(self._tiers.over(str(before), value.data), tier)
                    value.data = region.get() if tier is Tier.DEVICE else region.values().view(value.shape)

    # -- the update

    def step_whole(
        self,
        units: Sequence[Unit],
        used: dict[str, list[list[bool]]],
        coefficient: Callable[[torch.device], Tensor | None],
        begun: Callable[[], None],
    ) -> None:
        flags = {id(s): row for unit in units for s, row in zip(unit.trainable, used[unit.name], strict=True)}
        for pieces in filter(None, self._pieces.values()):
            segment, device = pieces[0].segment, pieces[0].tensor.device
            if not any(flags[id(segment)]):
                continue
            grads, factor = segment.update_grads, factor_of(segment, coefficient(device))
            for piece in pieces:
                if flags[id(segment)][piece.slot]:
                    grad = grads[piece.range].to(device, piece.tensor.dtype)
                    piece.tensor.grad = grad if factor is None else grad * factor.to(device)
        # What users put there is trained from the next forward on; its gradient here is this rank's own.
        for _, stranger in self.strangers():
            stranger.grad = None
        # An optimizer that wraps another may take no hooks: those of the one inside then run behind `begun`.
        hook = None
        if self._own_hooks() is None:
            begun()
        else:
            hook = self.torch_optimizer.register_step_pre_hook(lambda *_: begun())  # the last of them
        try:
            with self._guard.stepping() if self._guard is not None else nullcontext():
                self.torch_optimizer.step()
        finally:
            if hook is not None:
                hook.remove()
            for piece in self._every_piece():
                piece.tensor.grad = None

    def _update(self, segment: Segment, used: Sequence[bool], coefficient: Tensor | None) -> None:
        if segment.compute_range is not None and segment.keeps_copy:
            assert segment.master is not None
            segment.compute_range.copy_(segment.master)

    # -- what is kept

    def num_moments(self) -> int:
        return max((len(self.dtypes(piece)) for piece in self._every_piece()), default=0)

    def regions(self) -> list[Region]:
        return self._regions(self._every_piece())

    def regions_of(self, segment: Segment) -> list[Region]:
        return self._regions(piece for piece in self._every_piece() if piece.segment is segment)

    def _regions(self, pieces: Iterable[MasterPiece]) -> list[Region]:
        return [
            self._tiers.over(str(self._tier_of(piece.segment)), value)
            for piece in pieces
            for value in self.torch_optimizer.state.get(piece.tensor, {}).values()
            if isinstance(value, Tensor)
        ]

    def state_dtypes(self) -> dict[str, torch.dtype]:
        return {name: dtype for piece in self._every_piece() for name, dtype in self.dtypes(piece).items()}

    def describe(self, segment: Segment) -> dict[int, tuple[int, dict[str, Any]]]:
        said: dict[int, tuple[int, dict[str, Any]]] = {}
        for piece in self._pieces[id(segment)]:
            each = {name: PerElement(dtype) for name, dtype in self.dtypes(piece).items()}
            said[piece.slot] = (piece.tensor.numel(), {**self.once(piece), **each})
        return said

    def has_state(self, segment: Segment, slot: int, name: str) -> bool:
        return any(name in self.dtypes(piece) for piece in self._pieces_of(segment, slot))

    def stored(self, segment: Segment, slot: int) -> Iterator[tuple[str, int, Tensor]]:
        for piece in self._pieces_of(segment, slot):
            yield from self._stored(piece)

    def kept_once(self, segment: Segment, slot: int) -> dict[str, Any]:
        return {n: value for piece in self._pieces_of(segment, slot) for n, value in self.once(piece).items()}

    def state_shard(self, segment: Segment, name: str, dtype: torch.dtype) -> Tensor:
        shard = torch.zeros(segment.shard_numel, dtype=dtype, device=segment.update_device)
        for piece in self._pieces[id(segment)]:
            if name in self.dtypes(piece):
                shard[piece.range].copy_(self.value(piece, name))
        return shard

    def needs(self, segment: Segment, slot: int) -> set[str] | None:
        return None

    def take_state(self, segment: Segment, slot: int, name: str, values: Tensor, *, changed: bool = False) -> None:
        part = segment.own_piece(slot)[1]
        for piece in self._pieces_of(segment, slot):
            self.take(piece, name, values[part])

    def take_value(self, segment: Segment, slot: int, name: str, value: Any) -> None:
        for piece in self._pieces_of(segment, slot):
            self.take_once(piece, name, value)

    def take_piece(self, segment: Segment, slot: int, name: str, shard: Tensor) -> None:
        for piece in self._pieces_of(segment, slot):
            self.make(piece, name, shard[piece.range])

    def forget(self, segment: Segment, slots: Collection[int]) -> None:
        for piece in self._pieces[id(segment)]:
            if piece.slot in slots:
                self.begin_anew(piece)

    # -- of one piece

    def dtypes(self, piece: MasterPiece) -> dict[str, torch.dtype]:
        """Of what is kept with a value for each element, by name."""
        state, shape = self.torch_optimizer.state.get(piece.tensor, {}), piece.tensor.shape
        return {name: v.dtype for name, v in state.items() if isinstance(v, Tensor) and v.shape == shape}

    def value(self, piece: MasterPiece, name: str) -> Tensor:
        """One of these."""
        return self.torch_optimizer.state[piece.tensor][name]

    def once(self, piece: MasterPiece) -> dict[str, Any]:
        """What is kept of the parameter once, by name."""
        each = self.dtypes(piece)
        return {n: value for n, value in self.torch_optimizer.state.get(piece.tensor, {}).items() if n not in each}

    def _stored(self, piece: MasterPiece) -> Iterator[tuple[str, int, Tensor]]:
        return ((name, 1, self.value(piece, name).reshape(-1)) for name in self.dtypes(piece))

    def make(self, piece: MasterPiece, name: str, values: Tensor) -> None:
        """What has a value for each element has these from now on; 16-bit values stay so."""
        self.torch_optimizer.state[piece.tensor][name] = values.clone()

    def take(self, piece: MasterPiece, name: str, values: Tensor) -> None:
        """Writes what has a value for each element, or makes it."""
        if name in self.dtypes(piece):
            self.value(piece, name).copy_(values)
        else:
            self.make(piece, name, values)

    def take_once(self, piece: MasterPiece, name: str, value: Any) -> None:
        """Sets one of :meth:`once`."""
        if name == "step" and isinstance(value, int):  # as torch's classes count
            value = torch.tensor(float(value))
        group = self._group(piece.segment)
        if isinstance(value, Tensor) and (name != "step" or group.get("capturable") or group.get("fused")):
            value = value.to(piece.tensor.device)
        self.torch_optimizer.state[piece.tensor][name] = copy.deepcopy(value)

    def begin_anew(self, piece: MasterPiece) -> None:
        """The state is what it is before a first step."""
        self.torch_optimizer.state.pop(piece.tensor, None)
