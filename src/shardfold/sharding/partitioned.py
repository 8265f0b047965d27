"""Parameters that are split over the ranks while no engine holds them (how they come to be: ``sharded_init``).

    whole parameter     --scatter of rank 0's values-->    each rank's slice    (the whole is given back)

It stays the same ``nn.Parameter`` object: shape and dtype answer, anything else raises one sentence (see ``freed``). A
slice is ``ceil(numel / ranks)`` elements, the last ones padded with zeros, so that all are of one length. An engine
takes such parameters over one unit at a time; until then :func:`gather` makes some whole, and :func:`release` ends it.
Before anything is sent ranks say what they are about to do, and if that differs all of them raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfold.comm.coalesced import as_bytes, complete, spread
from shardfold.comm.comm import Comm, joined
from shardfold.comm.meter import Meter
from shardfold.comm.transport import GlooTransport, StreamTransport
from shardfold.errors import OrderError
from shardfold.plan.layout import DATA_AXES
from shardfold.plan.patience import USUAL
from shardfold.plan.placement import shard_index
from shardfold.sharding.freed import FreedParameter, outline, seal, unseal
from shardfold.tiers.device import DeviceTier
from shardfold.torch_internals import without_user_modes

__all__ = ["EarlyShard", "ShardRanks", "announce", "early_shard", "gather", "hand_over", "keep_mine", "release"]

_EARLY = "_shardfold_early"

TOUCHED: list[Callable[[nn.Parameter], bool]] = []
"""What is asked to make a parameter whole that was touched; empty but while modules are made (see ``sharded_init``)."""


class ShardRanks:
    """The ranks that parameters are split over, and what carries their values; there until an engine has taken over the
    last one, or nobody refers to any.

    Args:
        device: where whole values are.
        rest: where slices are; None: there too.
        patience, timeout: seconds, as of an ``Engine``.
        hollow: reading the data of a split parameter gives no elements instead of raising.
    """

    def __init__(
        self,
        device: torch.device,
        rest: torch.device | None = None,
        patience: float = USUAL,
        timeout: float = 1800.0,
        *,
        hollow: bool = False,
    ) -> None:
        self.device, self.rest, self.hollow = device, rest or device, hollow
        with ExitStack() as held:
            mesh, agreement = joined(self, None, device, patience, timeout, held)
            memory = DeviceTier(device)
            transport = StreamTransport() if mesh.on_streams else GlooTransport(memory.empty, memory.recycle)
            self.comm = Comm(mesh, agreement, transport, Meter(mesh), memory)
            held.callback(self.comm.close)
            self._held = held.pop_all()
        self._begin()

    def _begin(self) -> None:
        mesh = self.comm.mesh
        self.over = tuple(axis for axis in DATA_AXES if axis not in mesh.sizes.rare)
        self.parts, self.part = mesh.parts(self.over), shard_index(self.over, mesh.sizes, mesh.coords)
        self.numbered = 0  # parameters so far
        self._handed_over = 0
        self._complete = False  # no more will come

    @classmethod
    def of(cls, comm: Comm) -> ShardRanks:
        """The ranks of an engine's mesh that have the same parameters as this one."""
        made = cls.__new__(cls)
        made.device = made.rest = comm.memory.device
        made.hollow, made.comm, made._held = False, comm, ExitStack()
        made._begin()
        return made

    def count(self) -> int:
        """One parameter more: its number."""
        self.numbered += 1
        return self.numbered

    def complete(self) -> None:
        """No more parameters will come; every rank says so."""
        self._complete = True
        self._end_if_unused()

    def handed_over(self) -> None:
        """One parameter less; every rank says so."""
        self._handed_over += 1
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._complete and self._handed_over == self.numbered:
            self._held.close()

    def slice_of(self, flat: Tensor, *, same: bool = False) -> Tensor:
        """This rank's slice of rank 0's values: of ``flat`` ``(numel,)`` there, or here if all have the ``same``."""
        ranks, size = self.parts, -(-flat.numel() // self.parts)
        flat = flat if self.comm.mesh.on_streams else flat.cpu()  # Gloo does not scatter tensors of a GPU
        own = torch.empty(size, dtype=flat.dtype, device=flat.device)
        if same or ranks == 1:
            own.copy_(_padded(flat[self.part * size : (self.part + 1) * size], size))
        elif size:
            parts = range(ranks if self.comm.mesh.rank == 0 else 0)
            sent = [as_bytes(_padded(flat[i * size : (i + 1) * size], size)) for i in parts] or None
            with self.comm.agreement.uninterrupted():
                self.comm.agreement.issue("a scatter of a parameter")
                work = dist.scatter(as_bytes(own), sent, group_src=0, group=self.comm.mesh.everyone, async_op=True)
                self.comm.agreement.wait(work)
        return own.to(self.rest)


class EarlyShard:
    """What a parameter knows of itself while no engine holds it.

    Attributes:
        ranks: that it is split over.
        number: among those of its ``ranks``, in the order of construction, the same on every rank.
        name: for messages.
        shape, dtype: of the whole.
        values: this rank's slice, ``(ceil(numel / ranks),)``.
        pins: how many times over it is whole.
    """

    way = "give its model to an Engine, or wrap the access in `with sf.whole(parameter):`, which all ranks enter"

    def __init__(
        self, parameter: nn.Parameter, name: str, ranks: ShardRanks, dtype: torch.dtype | None, *, same: bool = False
    ) -> None:
        self.ranks, self.number, self.name = ranks, ranks.count(), name
        self.pins = 0
        value = parameter.detach()
        if dtype is not None and value.is_floating_point():
            value = value.to(dtype)
        self._fit(value.to(ranks.device), same=same)
        self._parameter = weakref.ref(parameter)
        vars(parameter)[_EARLY] = self
        self.seal(parameter)

    def equals(self, other: Any) -> bool:
        """Whether another one has the same values, on all ranks. Every rank asks.

        Raises:
            OrderError: ranks compare different parameters.
        """
        if not isinstance(other, EarlyShard) or other.ranks is not self.ranks:
            return False
        self.ranks.comm.agreement.meet(f"a comparison of {_described([self, other])}")
        same = self.shape == other.shape and torch.equal(self.values, other.values)
        return not self.ranks.comm.any_rank([not same], "whether parameters are equal")[0]

    def copied(self, parameter: nn.Parameter) -> nn.Parameter:
        """A deep copy, split as this one is; nothing is sent. Every rank makes it."""
        copy = nn.Parameter(self._hollow.detach(), requires_grad=parameter.requires_grad)
        shard = EarlyShard.__new__(EarlyShard)
        shard.__dict__.update(self.__dict__)
        shard.number, shard.pins, shard.values = self.ranks.count(), 0, self.values.clone()
        shard._parameter = weakref.ref(copy)
        vars(copy)[_EARLY] = shard
        shard.seal(copy)
        return copy

    def _fit(self, value: Tensor, *, same: bool) -> None:
        """Takes shape, dtype and rank 0's values of ``value``, which may be the ``same`` on all ranks."""
        self.shape, self.dtype = value.shape, value.dtype
        self.values = self.ranks.slice_of(value.contiguous().view(-1), same=same)
        # What the parameter is while it is not whole: it has a shape, and no memory.
        self._hollow = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        self._hollow.untyped_storage().resize_(0)

    def __reduce__(self) -> Any:  # a copy of a parameter that is whole is an ordinary one
        return type(None), ()

    @property
    def nothing(self) -> Tensor:
        """A tensor of its shape without memory."""
        return self._hollow

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def __call__(self) -> bool:
        """The parameter was touched: under a constructor it is made whole."""
        parameter = self._parameter()
        return parameter is not None and bool(TOUCHED) and TOUCHED[-1](parameter)

    @property
    def hollow(self) -> bool:
        return self.ranks.hollow and not TOUCHED

    def outline(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """What ``detach()`` answers: ``state_dict()`` shows names and shapes of a model whose values are split."""
        return None if TOUCHED else outline(parameter, self.name, _Outline(self))

    def seal(self, parameter: nn.Parameter) -> None:
        parameter.data = self._hollow
        seal(parameter, self.name, self)

    def padded(self) -> Tensor:
        """A flat for the whole values, with this rank's slice in place; ``(ranks * ceil(numel / ranks),)``."""
        size, rank = self.values.numel(), self.ranks.part
        flat = self.ranks.comm.memory.empty(size * self.ranks.parts, self.dtype)
        flat[rank * size : (rank + 1) * size].copy_(self.values)
        return flat

    def open(self, parameter: nn.Parameter, flat: Tensor) -> None:
        unseal(parameter)
        parameter.data = flat[: self.numel].view(self.shape)

    def pin(self) -> None:
        """The parameter, which is whole, stays so until :meth:`unpin`."""
        self.pins += 1

    def unpin(self, parameter: nn.Parameter) -> None:
        """With the last pin it is split again."""
        self.pins -= 1
        if not self.pins:
            self.seal(parameter)

    def rename(self, parameter: nn.Parameter, name: str) -> None:
        """From now on messages have that name."""
        self.name = name
        if isinstance(parameter, FreedParameter):
            unseal(parameter)
            seal(parameter, name, self)

    def keep_own(self, parameter: nn.Parameter) -> None:
        """This rank's slice of the values that the parameter has here; nothing is sent."""
        size, rank = self.values.numel(), self.ranks.part
        flat = parameter.detach().contiguous().view(-1)
        self.values.copy_(_padded(flat[rank * size : (rank + 1) * size], size))

    def take(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Takes ``whole``, the same on every rank, which the parameter may have got by ``parameter.data = x``."""
        if whole.shape != self.shape or whole.dtype != self.dtype:
            self._fit(whole, same=True)
        else:
            self.keep_own(parameter)


class _Outline:
    """Behind a tensor that only tells the shape of a parameter."""

    def __init__(self, shard: EarlyShard) -> None:
        self._shard, self.way = shard, shard.way

    def __call__(self) -> bool:
        return False

    def outline(self, parameter: nn.Parameter) -> nn.Parameter | None:
        return self._shard.outline(parameter)


def early_shard(parameter: Any) -> EarlyShard | None:
    """What a parameter that is split and that no engine holds knows of itself; None for any other."""
    return parameter.__dict__.get(_EARLY) if isinstance(parameter, nn.Parameter) else None


# -- whole for a while ----------------------------------------------------------------------------------------------


def gather(parameters: Iterable[nn.Parameter]) -> None:
    """Makes early parameters whole on every rank until :func:`release`; others are left alone. Every rank calls it.

    Raises:
        OrderError: ranks ask for different parameters.
    """
    for ranks, members in _by_ranks(parameters):
        apart_now = [p for p in members if isinstance(p, FreedParameter)]
        if apart_now:
            shards = [_shard(p) for p in apart_now]
            what = f"a gather of {_described(shards)}"
            ranks.comm.agreement.meet(what)
            with torch.no_grad(), without_user_modes():
                flats = [shard.padded() for shard in shards]
                complete(ranks.comm, [flat for flat in flats if flat.numel()], ranks.over, what)
            for p, shard, flat in zip(apart_now, shards, flats, strict=True):
                shard.open(p, flat)
        for p in members:
            _shard(p).pin()


def release(parameters: Iterable[nn.Parameter], *, source: int | None = None, failed: bool = False) -> None:
    """Ends a :func:`gather`. Every rank calls it.

    Args:
        parameters: that were gathered.
        source: the rank whose values become everyone's; None: what was changed is gone.
        failed: this rank left by an exception: nothing is kept, and ranks that would write raise.

    Raises:
        OrderError: ranks would write different parameters, or one of them failed.
    """
    for ranks, members in _by_ranks(parameters):
        try:
            if source is not None:
                _write_back(ranks, members, source, failed)
        finally:
            for p in members:
                _shard(p).unpin(p)


def _write_back(ranks: ShardRanks, members: Sequence[nn.Parameter], source: int, failed: bool) -> None:
    what = f"writing {_described([_shard(p) for p in members], [p.shape for p in members])} of rank {source}"
    if failed:
        with suppress(OrderError):  # what this rank raises already is what its user shall see
            ranks.comm.agreement.meet("leaving a block that writes parameters by an exception: nothing is written")
        return
    ranks.comm.agreement.meet(what)
    with torch.no_grad(), without_user_modes():
        wholes = [p.detach().to(ranks.device).contiguous() for p in members]
        spread(ranks.comm, [whole for whole in wholes if whole.numel()], what, source)
        for p, whole in zip(members, wholes, strict=True):
            p.data = whole
            _shard(p).take(p, whole)


def announce(parameters: Iterable[nn.Parameter], what: str) -> None:
    """All ranks that early parameters are split over are about to do ``what``, or all raise ``OrderError``."""
    for ranks, _ in _by_ranks(parameters):
        ranks.comm.agreement.meet(what)


def hand_over(parameters: Iterable[nn.Parameter]) -> None:
    """Early parameters become ordinary ones, whole; others are left alone. Every rank calls it."""
    early = [p for p in parameters if early_shard(p) is not None]
    gather(early)
    for p in early:
        vars(p).pop(_EARLY).ranks.handed_over()


class _OnAnotherStage:
    """What a parameter asks when it is touched that other ranks have."""

    way = "another stage of the pipeline has it: build the model anew"

    def __call__(self) -> bool:
        return False


def keep_mine(parameters: Iterable[nn.Parameter], mine: Container[int], comm: Comm) -> None:
    """Of the early ones among ``parameters`` those whose ``id`` is in ``mine`` are split over the ranks that have them,
    all others are gone. One is whole at a time, on every rank; they all call it with the same parameters.

    Args:
        parameters: of a whole model.
        mine: those of this rank's stages.
        comm: of the engine that will have them.
    """
    groups, ranks = _by_ranks(parameters), ShardRanks.of(comm)
    for before, members in groups:
        for parameter in members:
            gather([parameter])
            early = vars(parameter).pop(_EARLY)
            if id(parameter) in mine:
                EarlyShard(parameter, early.name, ranks, None, same=True)
            else:
                parameter.data = early.nothing
                seal(parameter, early.name, _OnAnotherStage())
            before.handed_over()
    ranks.complete()


def _shard(parameter: nn.Parameter) -> EarlyShard:
    return parameter.__dict__[_EARLY]


def _by_ranks(parameters: Iterable[nn.Parameter]) -> list[tuple[ShardRanks, list[nn.Parameter]]]:
    """Early parameters, each once, in the order of construction: users pass sets, which have another on each rank."""
    early = {id(p): p for p in parameters if early_shard(p) is not None}
    groups: dict[int, tuple[ShardRanks, list[nn.Parameter]]] = {}
    for p in sorted(early.values(), key=lambda p: _shard(p).number):
        ranks = _shard(p).ranks
        groups.setdefault(id(ranks), (ranks, []))[1].append(p)
    return sorted(groups.values(), key=lambda group: (len(group[0].comm.mesh.name), group[0].comm.mesh.name))


def _described(shards: Sequence[EarlyShard], shapes: Sequence[torch.Size] | None = None) -> str:
    shapes = shapes or [shard.shape for shard in shards]
    parts = [f"{shard.name} {tuple(shape)}" for shard, shape in zip(shards, shapes, strict=True)]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    numels = sum(shape.numel() for shape in shapes)
    return f"{', '.join(parts[:3])}{more} ({numels} elements, numbers {shards[0].number} to {shards[-1].number})"


def _padded(piece: Tensor, size: int) -> Tensor:
    """``piece`` with zeros behind it, ``(size,)``."""
    if piece.numel() == size:
        return piece
    padded = piece.new_zeros(size)
    padded[: piece.numel()].copy_(piece)
    return padded
