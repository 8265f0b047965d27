"""Any element-wise ``torch.optim`` optimizer on shards.

The user's optimizer object stays what it is: its class, its parameter groups (the same dicts, so a learning-rate
schedule made before or after keeps working), its hyper-parameters. Only the tensors in its groups change: each
parameter is replaced by the piece of it that this rank owns, a 1-D view of the master shard. What it keeps, and how it
is updated, is of one of three kinds (``shard_optimizer`` chooses):

    FusedOptimizer   AdamW, Adam and SGD: kept in shards, updated by the fused pass of ``fused``
    PartsOptimizer   optimizers of ours (``parts``), which are told where their pieces lie and may ask other ranks
    ClassOptimizer   any other class, by its own ``step`` on the pieces
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardfold.errors import ConfigError
from shardfold.optim.fused import fused_moments
from shardfold.optim.guard import Guard
from shardfold.optim.master_ranks import MasterRanks
from shardfold.optim.speculation import Snapshots
from shardfold.plan.axes import Axes
from shardfold.plan.cost import Sent
from shardfold.plan.layout import Tier
from shardfold.plan.placement import SegmentSpec
from shardfold.plan.report import MemoryRow
from shardfold.sharding.model import HeldCopy, Updater
from shardfold.sharding.segment import Segment
from shardfold.sharding.unit import Unit
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers
from shardfold.torch_internals import step_pre_hooks

__all__ = ["MasterPiece", "ShardedOptimizer", "factor_of"]


@dataclass(frozen=True)
class MasterPiece:
    """This rank's part of one parameter: ``start`` is its place in the master shard of the segment."""

    segment: Segment
    slot: int
    start: int
    tensor: nn.Parameter

    @property
    def range(self) -> slice:
        """Its elements of the master shard."""
        return slice(self.start, self.start + self.tensor.numel())


class ShardedOptimizer(Updater):
    """Updates the master shards of units with a torch optimizer whose groups now hold this rank's pieces: what all
    kinds have in common, and what one that steps by itself has nothing of.

    Args:
        optimizer: its groups are re-pointed in place.
        tiers: what its state rests in.

    Attributes:
        fused: whether the cache-blocked update is used.
        whole: whether every rank has a piece of every parameter, which may be empty.
        delayed: whether updates go on behind their step (see :meth:`hold`).
        written: how often something else than an update has written moments.
    """

    fused = False
    whole = False
    written = 0

    def __init__(self, optimizer: Optimizer, tiers: Tiers, *, delayed: bool = False) -> None:
        self.torch_optimizer, self._tiers, self.delayed = optimizer, tiers, delayed
        self._guard: Guard | None = None  # against calls of users'
        self.snapshots = Snapshots(tiers.device.device)
        self._away: Tier | None = None  # where the state rests for a while, in place of its own tiers
        self._pieces: dict[int, list[MasterPiece]] = {}  # by segment
        self._nothing: list[nn.Parameter] = []  # for groups that this rank has no piece of

    @property
    def compiled(self) -> bool:
        """Whether a compiled pass updates any segment."""
        return False

    def close(self) -> None:
        """The optimizer is its user's again."""
        self.withdraw()
        self.snapshots.close()
        if self._guard is not None:
            self._guard.close()

    def guard_by(self, zero_grad: Callable[[bool], None]) -> None:
        """From now on calls of users' are refused, but for ``zero_grad()``, which calls that method."""
        self._guard = Guard(self.torch_optimizer, zero_grad)

    def connect(self, ranks: MasterRanks, axes: Axes) -> None:
        """The ranks that hold the other pieces, for an optimizer that asks them, and the axes of the mesh on which
        parameters may be cut; all ranks call it."""

    # -- the update

    def around(self, update: Callable[[], None]) -> None:
        """Does the update of one step; what users registered by ``register_step_pre_hook`` and
        ``register_step_post_hook`` is called around it, as the ``step`` of a class calls it."""
        update()  # its own step is called

    def fetch(self, unit: Unit) -> None:
        """The state of a unit begins to come to where it is updated, ahead of that."""

    def store(self, unit: Unit) -> None:
        """The state of a unit that was updated begins to go back to its tier.

        Raises:
            OSError: what was stored earlier is not there; all of this unit's is taken (see ``Region.store``).
        """

    def moved_bytes(self, unit: Unit) -> int:
        """Of the state that :meth:`fetch` and :meth:`store` bring."""
        return 0

    def speculate(self, unit: Unit, name: str) -> None:
        """Begins to update a unit's master ranges as its gradients are now, for a step whose norm is not known yet; the
        next :meth:`update` keeps or undoes that. What has no room for its snapshot is left to that one.

        Args:
            unit: whose gradients are summed.
            name: of the operation, for a trace.
        """

    def hold(self, units: Sequence[Unit], used: Mapping[str, Sequence[Sequence[bool]]], factor: Tensor | None) -> None:
        """The next updates, which go on behind the step, are with hyper-parameters and factors as they are now: users
        may change them meanwhile. What they make of ``params`` has its memory from now on. Arguments are as of
        :meth:`update`."""

    def take_updated(self) -> None:
        """What updates behind their step made of parameters that rest in host memory is there."""

    def updated_row(self) -> MemoryRow:
        """Of what updates behind their step make of ``params``, for a report of memory: it is there from a step until
        the next one, but of what no rank used."""
        return MemoryRow("updated", "host", 0, 0.0, 0)

    def withdraw(self, units: Iterable[Unit] | None = None) -> None:
        """What was updated before its step, of these units or all, is as it was before: its gradients change, or are
        dropped."""

    def has_pre_hooks(self) -> bool:
        """Whether something of the user's is called before each step."""
        return bool(step_pre_hooks or self._own_hooks())

    def _own_hooks(self) -> dict[int, Any] | None:
        """What is called before each step of this optimizer; None for one that wraps another and has not initialized
        its base class, as Accelerate's: it takes no hooks of its own."""
        return getattr(self.torch_optimizer, "_optimizer_step_pre_hooks", None)

    def update(self, unit: Unit, used: Sequence[Sequence[bool]], coefficient: Tensor | None) -> None:
        """The step for one unit's master ranges; the compute copy of what changed is written too.

        All that a unit's update needs is its own summed gradients, its state on the device, and these two. (Where not
        :attr:`fused`, :meth:`step_whole` has come before: then only the copy is left.)

        Args:
            unit: one of those that were added.
            used: by trainable segment and slot, which parameters some rank used, as all ranks agreed.
            coefficient: 0-d, what gradients are multiplied by to be clipped, which needs the norm of all; None: by
                nothing.
        """
        for segment, flags in zip(unit.trainable, used, strict=True):
            self._update(segment, flags, coefficient)
            segment.drop_sent_grads()

    def _update(self, segment: Segment, used: Sequence[bool], coefficient: Tensor | None) -> None:
        raise NotImplementedError

    def step_whole(
        self,
        units: Sequence[Unit],
        used: dict[str, list[list[bool]]],
        coefficient: Callable[[torch.device], Tensor | None],
        begun: Callable[[], None],
    ) -> None:
        """A class that is not :attr:`fused` steps once, over all units: its ``step`` may count, and ask other ranks.
        Unused parameters have no gradient, as in PyTorch. ``coefficient``: as of :meth:`update`, on that device;
        ``begun``: called behind the hooks that users have before the step; if one raises, nothing has changed."""
        raise NotImplementedError

    # -- copies of other ranks' states

    def copied(self, segment: Segment) -> HeldCopy | None:
        return None

    def mirror(self, unit: Unit, used: Sequence[Sequence[bool]], coefficient: Tensor | None) -> None:
        """The step for the copies that this rank holds of a unit, with the logs that have come; arguments are as of
        :meth:`update`."""

    def log_of(self, segment: Segment, device: torch.device) -> Tensor:
        """Where the log of another rank comes to on that device, ``(length / parts,)``."""
        raise NotImplementedError

    def store_log(self, unit: Unit) -> None:
        """What has come of it goes to where the host updates."""

    def fetch_copies(self, unit: Unit) -> None:
        """As :meth:`fetch`, of the copies that this rank holds: their master too."""

    def store_copies(self, unit: Unit) -> None:
        """As :meth:`store`, of these."""

    def copied_bytes(self, unit: Unit) -> int:
        """Of the copies of a unit that this rank holds."""
        return 0

    def take_back_copies(self) -> None:
        """All copies are about to be written: no save reads them any more."""

    def count_copy(self, segment: Segment) -> None:
        """The copy is as many updates old as this rank's own part."""

    def copied_regions(self) -> dict[str, list[Region]]:
        """What the copies rest in, by state."""
        return {}

    # -- pieces come and go

    def add(self, unit: Unit) -> None:
        """Makes this rank's pieces of a unit, with no state yet; :meth:`point_groups` shows them to the optimizer."""
        for segment in unit.trainable:
            master = segment.master
            if master is None:  # in a file: its pieces say of which shape they are
                master = torch.empty(segment.shard_numel, dtype=segment.dtypes["master"], device="meta")
            places = [(slot, segment.own_piece(slot)[0]) for slot in range(len(segment.spec.slots))]
            self._pieces[id(segment)] = [
                MasterPiece(segment, slot, place.start, nn.Parameter(master[place]))
                for slot, place in places
                if place.start < place.stop or self.whole
            ]
            self._begin(segment)

    def _begin(self, segment: Segment) -> None:
        """A segment has its pieces: it gets its state."""

    def drop(self, unit: Unit) -> None:
        """Forgets a unit that is no more, and its state."""
        self.withdraw([unit])
        for segment in unit.trainable:
            self._end(segment)
            for piece in self._pieces.pop(id(segment), ()):
                self.torch_optimizer.state.pop(piece.tensor, None)

    def _end(self, segment: Segment) -> None:
        """A segment is no more: nor is what is kept of it besides the optimizer's own."""

    def pieces(self, segment: Segment) -> Iterator[tuple[Tensor, dict[str, Any], slice]]:
        """This rank's pieces of a segment, as the optimizer has them, with their groups and places in the shard."""
        group = self._group(segment)
        return ((piece.tensor, group, piece.range) for piece in self._pieces[id(segment)])

    def point_pieces(self, segment: Segment) -> None:
        """The pieces of a segment whose master lies elsewhere now are views of that."""
        if (master := segment.master) is not None:
            for piece in self._pieces[id(segment)]:
                piece.tensor.data = master[piece.range]

    def point_groups(self, units: Sequence[Unit]) -> None:
        """Gives every group this rank's pieces of its parameters; the groups themselves stay the same dicts.

        One of which this rank has no piece gets a parameter without elements: which groups are empty must not depend on
        the rank, as users look at ``group["params"][0]``, and leave out groups that have nothing."""
        by_group: list[list[nn.Parameter]] = [[] for _ in self.torch_optimizer.param_groups]
        first: dict[int, Segment] = {}
        for unit in units:
            for segment in unit.trainable:
                by_group[segment.spec.group].extend(piece.tensor for piece in self._pieces[id(segment)])
                first.setdefault(segment.spec.group, segment)
        self._nothing = []
        for number, segment in first.items():
            if not by_group[number]:
                nothing = torch.empty(0, dtype=segment.dtypes["master"], device=segment.update_device)
                by_group[number] = [nn.Parameter(nothing)]
                self._nothing += by_group[number]
        for group, pieces in zip(self.torch_optimizer.param_groups, by_group, strict=True):
            group["params"] = pieces

    def strangers(self) -> list[tuple[int, nn.Parameter]]:
        """What users put into the groups since :meth:`point_groups`, each with the number of its group."""
        groups = self.torch_optimizer.param_groups
        if sum(len(group["params"]) for group in groups) == sum(map(len, self._pieces.values())) + len(self._nothing):
            return []
        own = {id(piece.tensor) for piece in self._every_piece()} | set(map(id, self._nothing))
        return [(i, p) for i, group in enumerate(groups) for p in group["params"] if id(p) not in own]

    def adapt(self) -> None:
        names = fused_moments(self.torch_optimizer)
        if (names is not None) != self.fused:
            raise ConfigError(
                f"a group added to {type(self.torch_optimizer).__name__} has options (amsgrad, differentiable or a "
                "tensor as lr) that its other groups do not have: give them to the optimizer from the start."
            )
        self._adapt(names or ())

    def _adapt(self, names: tuple[str, ...]) -> None:
        """These are the moments of the fused update from now on."""

    def _group(self, segment: Segment) -> dict[str, Any]:
        """The group of a segment's parameters."""
        return self.torch_optimizer.param_groups[segment.spec.group]

    def _every_piece(self) -> Iterator[MasterPiece]:
        return (piece for pieces in self._pieces.values() for piece in pieces)

    def _pieces_of(self, segment: Segment, slot: int) -> Iterator[MasterPiece]:
        return (piece for piece in self._pieces[id(segment)] if piece.slot == slot)

    # -- the state; see Updater for the rest

    def rest_in(self, tier: Tier) -> None:
        """What of the optimizer's state rests on the device by its table moves to memory of that tier, the device's or
        the host's, for as long as nothing is updated."""
        before, self._away = self._away or Tier.DEVICE, None if tier is Tier.DEVICE else tier
        self._move(before, tier)

    def _move(self, before: Tier, tier: Tier) -> None:
        raise NotImplementedError

    def _tier_of(self, segment: Segment) -> Tier:
        """Where the optimizer's state of a segment rests now."""
        home = segment.table.moments.tier
        return self._away or home if home is Tier.DEVICE else home

    def kept_bytes(self) -> Callable[[SegmentSpec], float] | None:
        """Of an optimizer of ours: bytes that it keeps of a segment on this rank. None: a number of moments says it."""
        return None

    def traffic(self) -> dict[Sent, tuple[int, float]]:
        """Collectives of the optimizer's own in a step, and bytes this rank sends in them, by kind."""
        return {}

    def owned(self, segment: Segment, slot: int) -> dict[str, Tensor]:
        return {}

    def elsewhere(self, segment: Segment, slot: int) -> Collection[str]:
        return ()

    def regions(self) -> list[Region]:
        """What the optimizer's own state rests in."""
        raise NotImplementedError

    def regions_of(self, segment: Segment) -> list[Region]:
        """Those of one segment."""
        raise NotImplementedError

    def fetched(self) -> list[Tensor]:
        """Of a state that rests elsewhere, what is on the device for an update now."""
        return []

    def moment(self, segment: Segment, name: str) -> Region | None:
        return None


def factor_of(segment: Segment, coefficient: Tensor | None) -> Tensor | None:
    """What a step multiplies a segment's gradients by, 0-d; None: nothing."""
    if segment.unscale == 1.0:
        return coefficient
    # In fp64, whatever gradients are in: the factor of weights is no power of two, and fp32 would round it.
    unscale = torch.full((), segment.unscale, dtype=torch.float64, device=segment.update_device)
    return unscale if coefficient is None else coefficient.to(unscale.device) * unscale
