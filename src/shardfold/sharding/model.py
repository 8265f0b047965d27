"""A model that is split over ranks: what works on it is given this, and nothing of who trains it.

module     what the user built         units      its parameters, split
comm       the way to other ranks      gate       when something beside passes may be done
optimizer  the user's, or None         updater    the same over shards
loans      whole values that the user has meanwhile, to which some things must not happen
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardfold.comm.comm import Comm
from shardfold.errors import UsageError
from shardfold.plan.layout import Layout
from shardfold.plan.report import MemoryRow
from shardfold.plan.rules import Rules
from shardfold.sharding.run_state import RunState
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.unit import Unit
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers

__all__ = [
    "Gate",
    "HeldCopy",
    "Loan",
    "Owner",
    "PerElement",
    "ShardedModel",
    "StagedNames",
    "Updater",
    "alignment",
    "group_numbers",
    "refuse_during",
]


@dataclass(eq=False)
class Loan:
    """Tensors by name, lent until the end of a ``with`` block; ``what`` names the block in messages.

    ``writes``: at the end of the block rank 0's values become everyone's.
    """

    what: str
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    versions: dict[str, int] = field(default_factory=dict[str, int])
    writes: bool = False

    def __post_init__(self) -> None:
        self.look()

    def look(self) -> None:
        """From now on these values are what changes are compared with."""
        self.versions = {name: tensor._version for name, tensor in self.tensors.items()}

    def overlook(self, written: Container[int]) -> None:
        """That the engine has written to these tensors, by ``id``, is no change."""
        self.versions.update({name: t._version for name, t in self.tensors.items() if id(t) in written})

    def changed(self) -> list[str]:
        """Names of the tensors that were written to since; writes by ``.data`` leave no trace."""
        return [name for name, tensor in self.tensors.items() if tensor._version != self.versions[name]]


def refuse_during(loans: Sequence[Loan], call: str) -> None:
    """Raises if anything is lent.

    Raises:
        UsageError: ``call`` would change values that are lent, or be lost when the loan ends.
    """
    if loans:
        raise UsageError(
            f"{call} inside `with {loans[-1].what}:` would change values that are gathered there: call it outside."
        )


class Gate(Protocol):
    """What the passes of a model offer to what is done beside them."""

    @property
    def under_way(self) -> bool:
        """Whether a pass runs, or was interrupted and is not settled."""
        ...

    def meet(
        self,
        what: str,
        *,
        follow: bool = False,
        settle: bool = False,
        buffers: bool = True,
        check: Callable[[], None] | None = None,
    ) -> None:
        """All ranks are about to do ``what`` between passes, or all raise, also where ``check`` raises on one only: it
        sends nothing. ``follow`` the model first if it changed. To follow, or to ``settle``, what the last step began
        is finished. ``buffers``: they are rank 0's from then on."""
        ...

    def went_apart(self) -> None:
        """Ranks may each have run forwards of their own: before the next of all they look whether buffers differ."""
        ...

    def follow(self) -> None:
        """Makes units anew where the structure of the model changed."""
        ...

    def enter(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a method of the model (or of a part of it) as a forward."""
        ...

    def hold(self, units: Sequence[Unit]) -> bool:
        """Inside of a pass: gathers the units and keeps them to its end; False outside of one."""
        ...

    def secure(self) -> None:
        """Reads in what was written into parameters beside a finer master, and by ``parameter.data = x``."""
        ...

    def attach(self, units: Sequence[Unit]) -> None:
        """The parameters of these units are heard again."""
        ...

    def take(self, units: Sequence[Unit]) -> None:
        """These are the units from now on."""
        ...

    def used(self) -> dict[str, list[list[bool]]]:
        """Which parameters any rank used since the last step, by unit, trainable segment and slot."""
        ...

    def sum_late(self) -> dict[str, list[list[bool]]]:
        """The same, with all gradients summed that came late, and dropped on all ranks what some rank's user dropped.

        Raises:
            UsageError: on all ranks: users did not do the same to gradients.
        """
        ...

    def zero_grad(self) -> None:
        """Forgets all gradients since the last step."""
        ...

    def gradients_hidden(self) -> AbstractContextManager[None]:
        """Inside, what users did to ``parameter.grad`` is in the gradients."""
        ...


class HeldCopy(Protocol):
    """What this rank holds for another of a segment (see ``plan/copies``).

    Attributes:
        segment: where it lies in the segment, ``master_range`` and ``own_piece``, its ``master``, and the ``axis``
            along which the one that it is of comes before this rank.
        moments: by name.
        steps: of each parameter of the segment, how many updates it has had.
    """

    segment: Any
    moments: dict[str, Region]
    steps: list[int]


class Updater(Protocol):
    """An optimizer over shards, as what changes, lends, saves and loads them asks it."""

    fused: bool

    def adapt(self) -> None:
        """Takes in groups that were added.

        Raises:
            ConfigError: one needs an update of another kind than the states that there are were made for.
        """
        ...

    def num_moments(self) -> int:
        """How many moments each element has; for a class of the user's, as seen in its state so far."""
        ...

    def pieces(self, segment: Segment) -> Iterator[tuple[Tensor, dict[str, Any], slice]]: ...
    def strangers(self) -> list[tuple[int, nn.Parameter]]: ...
    def point_groups(self, units: Sequence[Unit]) -> None: ...
    def add(self, unit: Unit) -> None: ...
    def drop(self, unit: Unit) -> None: ...

    def describe(self, segment: Segment) -> dict[int, tuple[int, dict[str, Any]]]:
        """What is kept for each slot of which this rank has a piece: ``{slot: (elements, {name: value})}``, with
        :class:`PerElement` in place of what has a value for each element. The fused update knows it of every slot."""
        ...

    def has_state(self, segment: Segment, slot: int, name: str) -> bool:
        """Whether this rank's piece of a parameter has that state; the fused update's is always there."""
        ...

    def needs(self, segment: Segment, slot: int) -> set[str] | None:
        """States that a checkpoint must have for each element of a parameter; None: only the user's class knows."""
        ...

    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Names and dtypes of the state that has an element for each of a parameter's; of a class of the user's, what
        this rank's pieces have so far."""
        ...

    def state_shard(self, segment: Segment, name: str, dtype: torch.dtype) -> Tensor:
        """That state of this rank's master range on the device, ``(length / parts,)``, to be read; zeros where a class
        of the user's has none."""
        ...

    def stored(self, segment: Segment, slot: int) -> Iterator[tuple[str, int, Tensor | Shard]]:
        """``(name, elements per value, values)`` of this rank's piece of a parameter, as they are kept."""
        ...

    def kept_once(self, segment: Segment, slot: int) -> dict[str, Any]:
        """What a parameter has once, such as its step count; where this rank has a piece of it."""
        ...

    def owned(self, segment: Segment, slot: int) -> dict[str, Tensor]:
        """What this rank keeps of a whole parameter for all that have parts of it, by name; only its owner has it."""
        ...

    def elsewhere(self, segment: Segment, slot: int) -> Collection[str]:
        """Names of what another rank keeps so."""
        ...

    def take_state(self, segment: Segment, slot: int, name: str, values: Tensor, *, changed: bool = False) -> None:
        """Writes this rank's piece of a parameter's state from ``values`` ``(numel,)``, or makes it.

        ``changed``: a user gave them, so that a first step must read them too.
        """
        ...

    def take_value(self, segment: Segment, slot: int, name: str, value: Any) -> None:
        """Sets a state that a parameter has once, such as its step count."""
        ...

    def forget(self, segment: Segment, slots: Collection[int]) -> None:
        """The state of some parameters becomes what it is before their first step; that of all of a segment also where
        it cannot be read any more."""
        ...

    def copied(self, segment: Segment) -> HeldCopy | None:
        """The copy of another rank's states that this one holds; None: the table has no copies."""
        ...

    def moment(self, segment: Segment, name: str) -> Region | None:
        """What that moment of the fused update rests in, ``(length / parts,)``; None: the state is kept in pieces."""
        ...

    def take_piece(self, segment: Segment, slot: int, name: str, shard: Tensor) -> None:
        """Writes this rank's piece of a state from a shard of the master range, or makes it; 16-bit values stay so."""
        ...


@dataclass(frozen=True)
class StagedNames:
    """Of a model whose stages are on several ranks, what each rank knows of all of it.

    Attributes:
        names: of all parameters and persistent buffers.
        also: further names of parameters, by the first.
        untold: names of persistent buffers that this rank has and another tells of: that of the last stage that has
            them, which runs the most of the model's code.
        hollow: paths of modules that this rank has nothing of.
    """

    names: frozenset[str]
    also: Mapping[str, tuple[str, ...]]
    untold: frozenset[str] = frozenset()
    hollow: frozenset[str] = frozenset()


@dataclass(eq=False)
class ShardedModel:
    """A model, its units, and what carries them.

    Attributes:
        module: the user's.
        rules: which precision holds where.
        layout: the table, bound to the main precision.
        comm: the way to the other ranks.
        tiers: what states rest in.
        run: where training is.
        optimizer: the user's, whose groups hold this rank's pieces; None: nothing is trained.
        units: in definition order.
        updater: the optimizer over shards.
        loans: whole values that are lent: no update meanwhile.
        rows: of memory that the table does not have.
        followed: structures that it has followed so far.
        closed: why nothing can be done with it any more.
        whole: where this rank has some stages of it; None: it has all.
        owner: who trains it, and lives as long as the model does.
    """

    module: nn.Module
    rules: Rules
    layout: Layout
    comm: Comm
    tiers: Tiers
    run: RunState
    optimizer: Optimizer | None = None
    units: list[Unit] = field(default_factory=list[Unit])
    updater: Updater | None = None
    loans: list[Loan] = field(default_factory=list[Loan])
    rows: list[Callable[[], MemoryRow]] = field(default_factory=list[Callable[[], MemoryRow]])
    followed: int = 0
    closed: str = ""
    whole: StagedNames | None = None
    owner: Any = None
    _gate: Gate | None = None

    @property
    def gate(self) -> Gate:
        assert self._gate is not None, "the passes of this model are not made yet"
        return self._gate

    def connect(self, gate: Gate) -> None:
        """The passes of this model are made."""
        self._gate = gate

    def take_rules(self, rules: Rules) -> None:
        """These hold from now on, before there are units."""
        self.rules, self.layout = rules, rules.layouts[-1]

    def take_units(self, units: list[Unit]) -> None:
        """These are the units from now on."""
        self.units = units

    def train_by(self, updater: Updater) -> None:
        """This updates the units' shards from now on."""
        self.updater = updater

    @property
    def device(self) -> torch.device:
        return self.comm.memory.device

    @property
    def rank(self) -> int:
        return self.comm.mesh.rank

    @property
    def world_size(self) -> int:
        return self.comm.mesh.world

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that run its program."""
        return self.rank == self.comm.agreement.peers.ranks[0]

    def counts(self, segment: Segment) -> bool:
        """Whether what ranks have together is this rank's to tell of: of what several stages have, the first's."""
        places = segment.spec.places
        return not places or self.comm.mesh.coords[self.comm.mesh.sizes.stages[0]] == places[0]

    def follow(self, units: list[Unit]) -> None:
        """Its structure has changed, and these are its units."""
        self.followed += 1
        self.take_units(units)

    def close(self, reason: str) -> None:
        """Nothing can be done with it any more; calls raise with ``reason``."""
        self.closed = reason

    def let_go(self) -> None:
        """The shards are about to get other values: what a forward left whole for its backward would keep the old."""
        for unit in self.units:
            unit.let_go()

    def segments(self) -> Iterator[Segment]:
        """All of them, unit by unit."""
        return (segment for unit in self.units for segment in unit.segments)

    def trainable(self) -> Iterator[Segment]:
        """Those with master and moments."""
        return (segment for unit in self.units for segment in unit.trainable)


class Owner(Protocol):
    """Who trains a model, as users hold it: an engine."""

    @property
    def sharded(self) -> ShardedModel: ...


# -- what an optimizer says of how units are cut


def group_numbers(optimizer: Optimizer) -> dict[int, int]:
    """``{id(parameter): number of its group}``."""
    return {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}


def alignment(optimizer: Optimizer | None) -> int:
    """Elements that no rank boundary may cut, for this optimizer."""
    return int(getattr(optimizer, "align", 1))  # of ours; torch's cut anywhere


@dataclass(frozen=True)
class PerElement:
    """A part of an optimizer's state that has one value for each element of its parameter."""

    dtype: torch.dtype
