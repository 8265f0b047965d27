"""A class of the user's, torch's or another, on shards: it is updated by its own step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardfold.optim.piece_optimizer import PieceOptimizer
from shardfold.optim.sharded import MasterPiece

__all__ = ["ClassOptimizer"]


class ClassOptimizer(PieceOptimizer):
    """What has the shape of a piece has a value for each of its elements; only the class knows what there will be."""

    def dtypes(self, piece: MasterPiece) -> dict[str, torch.dtype]:
        state, shape = self.torch_optimizer.state.get(piece.tensor, {}), piece.tensor.shape
        return {name: v.dtype for name, v in state.items() if isinstance(v, Tensor) and v.shape == shape}

    def value(self, piece: MasterPiece, name: str) -> Tensor:
        return self.torch_optimizer.state[piece.tensor][name]

    def once(self, piece: MasterPiece) -> dict[str, Any]:
        each = self.dtypes(piece)
        return {n: value for n, value in self.torch_optimizer.state.get(piece.tensor, {}).items() if n not in each}

    def _stored(self, piece: MasterPiece) -> Iterator[tuple[str, int, Tensor]]:
        return ((name, 1, self.value(piece, name).reshape(-1)) for name in self.dtypes(piece))

    def make(self, piece: MasterPiece, name: str, values: Tensor) -> None:
        self.torch_optimizer.state[piece.tensor][name] = values.clone()

    def take(self, piece: MasterPiece, name: str, values: Tensor) -> None:
        if name in self.dtypes(piece):
            self.value(piece, name).copy_(values)
        else:
            self.make(piece, name, values)

    def take_once(self, piece: MasterPiece, name: str, value: Any) -> None:
        if name == "step" and isinstance(value, int):  # as torch's classes count
            value = torch.tensor(float(value))
        group = self._group(piece.segment)
        if isinstance(value, Tensor) and (name != "step" or group.get("capturable") or group.get("fused")):
            value = value.to(piece.tensor.device)
        self.torch_optimizer.state[piece.tensor][name] = copy.deepcopy(value)
