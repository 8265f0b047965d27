"""Any element-wise ``torch.optim`` optimizer on shards.

The user's optimizer object stays what it is: its class, its parameter groups (the same dicts, so a learning-rate
schedule made before or after keeps working), its hyper-parameters. Only the tensors in its groups change: each
parameter is replaced by the piece of it that this rank owns, a 1-D view of the master shard. AdamW, Adam and SGD are
then updated by the fused pass of ``fused``; any other class by its own ``step`` on the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shardfold.errors import ConfigError
from shardfold.optim.fused import FusedShard, fused_moments
from shardfold.unit import TORCH_DTYPES, Segment, Unit

__all__ = ["ShardedOptimizer", "build", "group_numbers"]

#: Not element-wise: their update of one element reads others, which may lie on another rank.
NOT_ELEMENTWISE = ("LBFGS", "Muon", "Adafactor", "SparseAdam")


def build(optimizer: Any, model: nn.Module) -> Optimizer:
    """The optimizer object itself, or what a class, a ``partial`` or a function makes of the parameters.

    Raises:
        ConfigError: it is no optimizer, has stepped already, or its update is not element-wise.
    """
    parameters = list(model.parameters())
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            raise ConfigError(
                f"optimizer={optimizer!r} is neither a torch.optim.Optimizer nor something that makes one of "
                "parameters: pass e.g. partial(torch.optim.AdamW, lr=3e-4)."
            )
        optimizer = optimizer([parameter for parameter in parameters if parameter.requires_grad])
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer= made a {type(optimizer).__name__}, which is no torch.optim.Optimizer.")
    elif optimizer.state:
        raise ConfigError(
            f"the {type(optimizer).__name__} given as optimizer= has already stepped: "
            "its state belongs to whole parameters; build the engine before the first step."
        )
    known = {id(parameter) for parameter in parameters}
    foreign = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ConfigError(
            f"the {type(optimizer).__name__} given as optimizer= holds {foreign} tensors that are no parameters of the "
            "model: make it of the model's parameters, and update others with an optimizer of their own."
        )
    if type(optimizer).__name__ in NOT_ELEMENTWISE:
        raise ConfigError(
            f"{type(optimizer).__name__} is not element-wise: its update of a shard would need the other shards; "
            "use AdamW, Adam, SGD, Adagrad, RMSprop or another element-wise class."
        )
    return optimizer


def group_numbers(optimizer: Optimizer) -> dict[int, int]:
    """``{id(parameter): number of its group}``."""
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


class ShardedOptimizer:
    """Updates the master shards of units with a torch optimizer whose groups now hold this rank's pieces.

    Args:
        optimizer: from :func:`build`; its groups are re-pointed in place.
        units: with their states bound.
        moments_dtype: of the fused update's moments, as the table names it.
        block: elements per fused call, 0 for the default of the device.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[Unit], moments_dtype: str, block: int) -> None:
        self.torch_optimizer = optimizer
        self._block, self._moments_dtype = block, moments_dtype
        self._pieces: list[tuple[Segment, int, int, nn.Parameter]] = []  # segment, slot, start in shard, piece
        self._fused: dict[int, FusedShard] = {}
        self._used: dict[str, list[list[bool]]] = {}
        self._coefficient: Tensor | None = None
        names = fused_moments(optimizer)
        self._names = names
        by_group: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        for unit in units:
            for segment in unit.trainable:
                by_group[segment.spec.group].extend(self._own_pieces(segment))
                if names is not None:
                    assert segment.master is not None
                    dtype = segment.dtype_for(moments_dtype)
                    moments = {n: torch.zeros_like(segment.master, dtype=dtype) for n in names}
                    self._fused[id(segment)] = FusedShard(segment, type(optimizer), moments)
        for group, pieces in zip(optimizer.param_groups, by_group, strict=True):
            group["params"] = pieces

    @property
    def fused(self) -> bool:
        """Whether the cache-blocked update is used."""
        return self._names is not None

    def num_moments(self) -> int:
        """How many moments each element has; for a class of the user's, as seen in its state so far."""
        if self._names is not None:
            return len(self._names)
        sizes = (sum(t.numel() == p.numel() for t in self._tensors(p) if t.dim()) for *_, p in self._pieces)
        return max(sizes, default=0)

    def state_tensors(self) -> list[Tensor]:
        """Every tensor of the optimizer's own state."""
        if self._names is not None:
            return [moment for shard in self._fused.values() for moment in shard.moments.values()]
        return [tensor for *_, piece in self._pieces for tensor in self._tensors(piece)]

    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Names and dtypes of the state that has an element for each of a parameter's; of a class of the user's, what
        this rank's pieces have so far."""
        if self._names is not None:
            return dict.fromkeys(self._names, TORCH_DTYPES[self._moments_dtype])
        return {
            key: value.dtype
            for *_, piece in self._pieces
            for key, value in self.torch_optimizer.state.get(piece, {}).items()
            if isinstance(value, Tensor) and value.shape == piece.shape
        }

    def has_state(self, segment: Segment, slot: int, name: str) -> bool:
        """Whether this rank's piece of a parameter has that state; the fused update's is always there."""
        if self._names is not None:
            return name in self._names
        return bool(self._own_state(segment, slot, name))

    def state_shard(self, segment: Segment, name: str, dtype: torch.dtype) -> Tensor:
        """That state of this rank's master range, ``(length / parts,)``; zeros where a class of the user's has none."""
        if self._names is not None:
            return self._fused[id(segment)].moments[name]
        assert segment.master is not None
        shard = torch.zeros_like(segment.master, dtype=segment.master.dtype if segment.spec.own else dtype)
        for slot in range(len(segment.parameters)):
            for start, state in self._own_state(segment, slot, name):
                shard[start : start + state.numel()].copy_(state)
        return shard

    def take_state(self, segment: Segment, slot: int, name: str, values: Tensor, *, changed: bool) -> None:
        """Writes this rank's piece of a parameter's state from ``values`` ``(numel,)``."""
        piece, part = segment.own_piece(slot)
        if self._names is not None:
            shard = self._fused[id(segment)]
            shard.moments[name][piece].copy_(values[part])
            if changed and shard.kind is SGD:  # a first step would overwrite the momentum instead of reading it
                shard.steps[slot] = max(1, shard.steps[slot])
            return
        for _, state in self._own_state(segment, slot, name):
            state.copy_(values[part])

    def _own_state(self, segment: Segment, slot: int, name: str) -> list[tuple[int, Tensor]]:
        """``(start in the shard, state)`` of this rank's piece of a parameter, if there is any."""
        return [
            (start, state)
            for owner, number, start, piece in self._pieces
            if owner is segment
            and number == slot
            and isinstance(state := self.torch_optimizer.state.get(piece, {}).get(name), Tensor)
            and state.shape == piece.shape
        ]

    def begin(self, units: Sequence[Unit], used: dict[str, list[list[bool]]], coefficient: Tensor | None) -> None:
        """Before the updates of one step; ``used`` says by unit which parameters some rank used."""
        self._used, self._coefficient = used, coefficient
        if self._names is None:
            self._own_step(units)

    def update(self, unit: Unit) -> None:
        """The step for one unit's master ranges; the compute copy of what changed is written too."""
        for segment, used in zip(unit.trainable, self._used[unit.name], strict=True):
            if self._names is not None:
                group = self.torch_optimizer.param_groups[segment.spec.group]
                self._fused[id(segment)].update(group, used, self._coefficient, self._block)
            elif segment.compute_range is not None and not segment.master_is_rest:
                assert segment.master is not None
                segment.compute_range.copy_(segment.master)

    def _own_step(self, units: Sequence[Unit]) -> None:
        """The user's class steps once over all pieces; unused parameters have no gradient, as in PyTorch."""
        used = {id(s): flags for unit in units for s, flags in zip(unit.trainable, self._used[unit.name], strict=True)}
        for segment, slot, start, piece in self._pieces:
            if used[id(segment)][slot]:
                grad = segment.master_grads[start : start + piece.numel()].to(piece.dtype)
                piece.grad = grad if self._coefficient is None else grad * self._coefficient
        self.torch_optimizer.step()
        for *_, piece in self._pieces:
            piece.grad = None

    def _own_pieces(self, segment: Segment) -> list[nn.Parameter]:
        assert segment.master is not None
        a, b = segment.master_range
        own: list[nn.Parameter] = []
        for slot, start, stop in segment.spec.pieces(a, b):
            piece = nn.Parameter(segment.master[start - a : stop - a])
            self._pieces.append((segment, slot, start - a, piece))
            own.append(piece)
        return own

    def _tensors(self, piece: nn.Parameter) -> list[Tensor]:
        state = self.torch_optimizer.state.get(piece, {})
        return [value for value in state.values() if isinstance(value, Tensor)]
