"""Any element-wise ``torch.optim`` optimizer on shards.

The user's optimizer object stays what it is: its class, its parameter groups (the same dicts, so a learning-rate
schedule made before or after keeps working), its hyper-parameters. Only the tensors in its groups change: each
parameter is replaced by the piece of it that this rank owns, a 1-D view of the master shard. AdamW, Adam and SGD are
then updated by the fused pass of ``fused``; any other class by its own ``step`` on the pieces. Optimizers of ours
(``parts``) are told where their pieces lie, have a piece of every parameter on every rank, and may ask other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from shardfold import accelerator
from shardfold.errors import ConfigError
from shardfold.optim.compiled import compiled_adam
from shardfold.optim.fused import FusedShard, fused_moments, options_of, terms_of, why_not_fused
from shardfold.optim.guard import Guard
from shardfold.optim.link import RankLink
from shardfold.optim.parts import PartOptimizer, ShardPlacement
from shardfold.optim.speculation import Snapshots, Speculation
from shardfold.optim.threads import UpdateThreads
from shardfold.plan.axes import Axes
from shardfold.plan.cost import Sent
from shardfold.plan.layout import Cell, Layout, Tier
from shardfold.plan.placement import SegmentSpec
from shardfold.plan.report import MemoryRow
from shardfold.sharding.groups import PerElement
from shardfold.sharding.segment import TORCH_DTYPES, Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.unit import Unit
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers
from shardfold.torch_internals import own_step_pre_hooks, step_pre_hooks

__all__ = ["ShardedOptimizer", "build", "check_rounding", "check_tier"]

#: Not element-wise: their update of one element reads others, which may lie on another rank. Some have one of ours.
NOT_ELEMENTWISE = ("LBFGS", "Muon", "Adafactor", "SparseAdam")
OURS = ("Muon", "Adafactor")


def build(optimizer: Any, model: nn.Module, *, empty: bool = False) -> Optimizer:
    """The optimizer object itself, or what a class, a ``partial`` or a function makes of the parameters;
    ``empty``: there may be none that is trained, as on a rank whose stage of the model is frozen.

    Raises:
        ConfigError: it is no optimizer, has stepped already, or its update is not element-wise; or nothing trains.
    """
    parameters = list(model.parameters())
    if not isinstance(optimizer, Optimizer):
        makes = issubclass(optimizer, Optimizer) if isinstance(optimizer, type) else callable(optimizer)
        if not makes:
            raise ConfigError(
                f"optimizer={optimizer!r} is neither a torch.optim.Optimizer nor something that makes one of "
                "parameters: pass e.g. partial(torch.optim.AdamW, lr=3e-4)."
            )
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        try:
            optimizer = optimizer(trainable or ([{"params": []}] if empty else []))
        except ValueError as error:
            if trainable:
                raise
            why = "all its parameters are frozen (requires_grad=False)" if parameters else "it has no parameters"
            raise ConfigError(
                f"optimizer= has nothing to train in this model: {why}; leave optimizer= out, or unfreeze before the "
                "engine is made what is to be trained."
            ) from error
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"optimizer= made a {type(optimizer).__name__}, which is not a torch.optim.Optimizer.")
    elif any(float(state.get("step", 1)) for state in optimizer.state.values()):  # Adagrad's is made at once, at step 0
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
    name = type(optimizer).__name__
    if name in NOT_ELEMENTWISE and not isinstance(optimizer, PartOptimizer):
        instead = "AdamW, Adam, SGD, Adagrad, RMSprop or another element-wise class"
        raise ConfigError(
            f"torch's {name} is not element-wise: its update of a shard would need the other shards; "
            f"use {f'shardfold.optim.{name}, which asks them' if name in OURS else instead}."
        )
    return optimizer


def check_rounding(optimizer: Optimizer) -> None:
    """Whether a bf16 master that this optimizer updates can be rounded stochastically.

    Raises:
        ConfigError: its update is its own.
    """
    if why := why_not_fused(optimizer):
        raise ConfigError(f"rounding='stochastic' works for AdamW, Adam and SGD, but {why}, or set rounding='nearest'.")


def check_tier(optimizer: Optimizer, layout: Layout, device: torch.device) -> None:
    """Whether this optimizer's state can rest in the tier that a table says.

    Raises:
        ConfigError: it keeps its state itself; the message says why, and what would mend it.
    """
    tier = layout.moments.tier
    if tier is Tier.DEVICE or not (why := why_not_fused(optimizer)):
        return
    if layout.updates_on is not tier:  # what a class keeps is where its parameters are
        raise ConfigError(
            f"moments rest in the {tier} tier, which works for AdamW, Adam and SGD, but {why}, or choose the "
            f"{layout.updates_on if layout.master.tier is not Tier.DISK else Tier.HOST} tier."
        )
    if filed := [name for name in ("grads", "master") if layout.cells()[name].tier is Tier.DISK]:
        raise ConfigError(  # a class steps once, over all that it updates
            f"{' and '.join(filed)} rest in the disk tier, from which they come unit by unit: that works for AdamW, "
            f"Adam and SGD, but {why}, or choose the host tier."
        )
    if isinstance(optimizer, PartOptimizer) and accelerator.has_streams(device):
        raise ConfigError(
            f"{type(optimizer).__name__} asks other ranks for parts of its state, which cannot travel from the {tier} "
            "tier: let master and moments rest on the device, or take AdamW, Adam or SGD."
        )


def check_compiled(optimizer: Optimizer, stochastic: int | None) -> None:
    """Whether the compiled pass can stand in for this optimizer's update.

    Raises:
        ConfigError: it cannot.
    """
    if fused_moments(optimizer) != ("exp_avg", "exp_avg_sq") or stochastic is not None:
        what = "rounding='stochastic'" if stochastic is not None else type(optimizer).__name__
        raise ConfigError(
            f"Overlap(compiled_update=True) works for AdamW and Adam without amsgrad, rounded to the nearest, and not "
            f"for {what}: leave compiled_update out."
        )


def check_speculation(optimizer: Optimizer, layout: Layout, *, clamps: bool) -> None:
    """Whether units can be updated before their step.

    Raises:
        ConfigError: not with this optimizer, or where states rest; the message says why, and what would mend it.
    """
    call = "Overlap(speculate=...) updates units in host memory as their gradients come there"
    for name in ("grads", "master", "moments"):
        if (tier := layout.cells()[name].tier) is not Tier.HOST:
            raise ConfigError(f"{call}, but {name} rest in the {tier} tier: give offload='host'.")
    _check_on_host(call, "speculate", optimizer, layout)
    if clamps:
        raise ConfigError(f"{call}, before Clip(value=...) cuts them: clip their norm, or leave speculate out.")


def check_delayed(optimizer: Optimizer, layout: Layout, units: Sequence[Unit]) -> None:
    """Whether updates can go on behind their step.

    Raises:
        ConfigError: not with this optimizer, or where states rest; the message says why, and what would mend it.
    """
    call = "Overlap(delayed_update=True) updates in host memory while the next step computes"
    for name in ("grads", "master", "moments"):
        tier = layout.cells()[name].tier
        if name == "grads" and tier is Tier.DISK:
            raise ConfigError(
                f"{call}, but grads rest in the disk tier, where the next backward would need the room of those that "
                "an update still reads: let them rest in host memory, as in offload={'optimizer': 'disk', 'grads': "
                "'host'}."
            )
        if tier is Tier.DEVICE:
            raise ConfigError(
                f"{call}, but {name} rest in the device tier: give offload='host', or offload={{'optimizer': 'disk', "
                "'grads': 'host'}."
            )
    _check_on_host(call, "delayed_update", optimizer, layout)
    for unit in units:
        for segment in unit.trainable:
            if segment.table.params is None or segment.master_is_rest:
                raise ConfigError(
                    f"{call}, which reads params meanwhile: they need a copy apart from master, as zero2 and zero3 "
                    "have on the device; choose one of these, or leave delayed_update out."
                )


def _check_on_host(call: str, option: str, optimizer: Optimizer, layout: Layout) -> None:
    """
    Raises:
        ConfigError: what the update reads and writes is not in host memory for all units, or it is not the fused one.
    """
    if layout.share != 1.0:
        raise ConfigError(
            f"{call}, but with share={layout.share:g} some units' states stay on the device: let all of them rest in "
            f"host memory, as offload='host' does, or leave {option} out."
        )
    if layout.params is not None and layout.params.tier is Tier.DISK:
        raise ConfigError(f"{call}, but params rest in the disk tier: let them rest on the device or in host memory.")
    if why := why_not_fused(optimizer):
        raise ConfigError(f"{call}, which works for AdamW, Adam and SGD, but {why}, or leave {option} out.")


@dataclass(frozen=True)
class _Piece:
    """This rank's part of one parameter: ``start`` is its place in the master shard of the segment."""

    segment: Segment
    slot: int
    start: int
    tensor: nn.Parameter


class _LateUpdate(NamedTuple):
    """What an update behind its step is made with: options of its group, which parameters some rank used, what
    gradients are multiplied by, and memory of the host for the compute-dtype copy, ``(n,)``."""

    options: Mapping[str, Any]
    used: Sequence[bool]
    factor: Tensor | None
    aside: Tensor | None


class ShardedOptimizer:
    """Updates the master shards of units with a torch optimizer whose groups now hold this rank's pieces.

    Args:
        optimizer: from :func:`build`; its groups are re-pointed in place.
        units: with their states bound.
        moments: the bound table's cell of the fused update's moments, for their dtype; where they rest is in the
            tables of the segments.
        tiers: what these rest in.
        block: elements per fused call, 0 for the default of the device.
        stochastic: the seed, where a bf16 master is rounded stochastically; None: to the nearest.
        threads: how many update what is in host memory.
        compiled: whether a compiled pass does.
        delayed: whether updates go on behind their step (see :meth:`hold`).

    Raises:
        ConfigError: it cannot be compiled, or could not be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        units: Sequence[Unit],
        moments: Cell,
        tiers: Tiers,
        block: int,
        stochastic: int | None = None,
        threads: int = 1,
        compiled: bool = False,
        delayed: bool = False,
    ) -> None:
        self.torch_optimizer = optimizer
        self._guard: Guard | None = None  # against calls of users'
        self._ours = optimizer if isinstance(optimizer, PartOptimizer) else None
        self._block, self._tiers = block, tiers
        self._dtype = TORCH_DTYPES[moments.dtype]
        self._away: Tier | None = None  # where the state rests for a while, in place of its own tiers
        self._pieces: dict[int, list[_Piece]] = {}  # by segment
        self._nothing: list[nn.Parameter] = []  # for groups that this rank has no piece of
        self._fused: dict[int, FusedShard] = {}
        self._names = fused_moments(optimizer)
        self._stochastic, self._threads = stochastic, UpdateThreads(threads)
        self._compiled, self.delayed = compiled, delayed
        self._held: dict[int, _LateUpdate] = {}  # by segment
        self.snapshots = Snapshots(tiers.device.device)
        for unit in units:
            self.add(unit)
        if compiled and not any(shard.compiled for shard in self._fused.values()):
            check_compiled(optimizer, stochastic)
            raise ConfigError(
                "Overlap(compiled_update=True) joins an update in host memory with the casts of 16-bit gradients and "
                "parameters; here nothing is cast, or the states are on another device: leave compiled_update out."
            )
        self.point_groups(units)

    def close(self) -> None:
        """The optimizer is its user's again."""
        self.withdraw()
        self.snapshots.close()
        self._threads.close()
        if self._guard is not None:
            self._guard.close()

    def guard_by(self, zero_grad: Callable[[bool], None]) -> None:
        """From now on calls of users' are refused, but for ``zero_grad()``, which calls that method."""
        self._guard = Guard(self.torch_optimizer, zero_grad)

    @property
    def fused(self) -> bool:
        """Whether the cache-blocked update is used."""
        return self._names is not None

    def connect(self, link: RankLink, axes: Axes) -> None:
        """The ranks that hold the other pieces, for an optimizer that asks them, and the axes of the mesh on which
        parameters may be cut; all ranks call it."""
        if self._ours is not None:
            self._ours.link = link
            if self._ours.multiplies:
                self._ours.products = link.product_dtype()
            for axis in axes if self._ours.exchanges else ():
                link.join((axis,))

    # -- the update

    def around(self, update: Callable[[], None]) -> None:
        """Does the update of one step; what users registered by ``register_step_pre_hook`` and
        ``register_step_post_hook`` is called around it, as the ``step`` of a class calls it."""
        if self._names is None:  # its own step is called
            update()
            return

        def step(optimizer: Optimizer) -> None:
            update()

        if self._has_pre_hooks():  # which see the pieces, and may change them
            self.withdraw()
        Optimizer.profile_hook_step(step)(self.torch_optimizer)

    def fetch(self, unit: Unit) -> None:
        """The state of a unit begins to come to where it is updated, ahead of that."""
        for segment in unit.trainable:
            near = segment.table.updates_on is Tier.DEVICE
            self._fused[id(segment)].fetch(self._tiers.device.empty if near else self._tiers.host.empty)

    def store(self, unit: Unit) -> None:
        """The state of a unit that was updated begins to go back to its tier.

        Raises:
            OSError: what was stored earlier is not there; all of this unit's is taken (see ``Region.store``).
        """
        problem: OSError | None = None
        for segment in unit.trainable:
            for region, values in self._fused[id(segment)].leave():
                try:
                    region.store(values)
                except OSError as error:
                    problem = problem or error
                if segment.table.updates_on is Tier.HOST:
                    self._tiers.host.recycle(values)
        if problem is not None:
            raise problem

    def moved_bytes(self, unit: Unit) -> int:
        """Of the state that :meth:`fetch` and :meth:`store` bring."""
        return sum(self._fused[id(segment)].nbytes for segment in unit.trainable)

    def speculate(self, unit: Unit, name: str) -> None:
        """Begins to update a unit's master ranges as its gradients are now, for a step whose norm is not known yet; the
        next :meth:`update` keeps or undoes that. What has no room for its snapshot is left to that one.

        Args:
            unit: whose gradients are summed.
            name: of the operation, for a trace.
        """
        room = self.snapshots.room(unit.name)
        if room is None or self._has_pre_hooks():
            return
        for segment, used in zip(unit.trainable, unit.gradients.used, strict=True):
            if any(used):
                group = self.torch_optimizer.param_groups[segment.spec.group]
                coefficient = None if segment.unscale == 1.0 else torch.full((), segment.unscale)
                terms = terms_of(group, used, coefficient)
                self._fused[id(segment)].speculate(terms, self._block, room, self.snapshots.begin, name)

    def hold(self, units: Sequence[Unit], used: Mapping[str, Sequence[Sequence[bool]]], factor: Tensor | None) -> None:
        """The next updates, which go on behind the step, are with hyper-parameters and factors as they are now: users
        may change them meanwhile. What they make of ``params`` has its memory from now on. Arguments are as of
        :meth:`update`."""
        for unit in units:
            for segment, flags in zip(unit.trainable, used[unit.name], strict=True):
                options = options_of(self.torch_optimizer.param_groups[segment.spec.group])
                copies = segment.keeps_copy and any(flags)
                aside = self._host_memory(segment.shard_numel, segment.dtype) if copies else None
                self._held[id(segment)] = _LateUpdate(options, flags, _factor(segment, factor), aside)

    def take_updated(self) -> None:
        """What updates behind their step made of parameters that rest in host memory is there."""
        self._held.clear()
        for shard in self._fused.values():
            shard.take_updated()

    def updated_row(self) -> MemoryRow:
        """Of what updates behind their step make of ``params``, for a report of memory: it is there from a step until
        the next one, but of what no rank used."""
        copies = sum(s.shard_numel * s.dtype.itemsize for s in self._segments() if s.keeps_copy)
        held = sum(each.aside.nbytes for each in self._held.values() if each.aside is not None)
        return MemoryRow("updated", "host", copies, 0.0, held)

    def withdraw(self, units: Iterable[Unit] | None = None) -> None:
        """What was updated before its step, of these units or all, is as it was before: its gradients change, or are
        dropped."""
        segments = [s for unit in units for s in unit.trainable] if units is not None else self._segments()
        for segment in segments:
            if isinstance(segment.under_way, Speculation):
                segment.under_way.settle()

    def _has_pre_hooks(self) -> bool:
        """Whether something of the user's is called before each step."""
        return bool(step_pre_hooks or own_step_pre_hooks(self.torch_optimizer))

    def _segments(self) -> Iterator[Segment]:
        return (shard.segment for shard in self._fused.values())

    def _shard(self, segment: Segment) -> FusedShard:
        """The state of a segment, as it is after the last step."""
        if segment.under_way is not None:
            segment.under_way.settle()
        return self._fused[id(segment)]

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
            if self.delayed:
                held = self._held[id(segment)]
                self._fused[id(segment)].update(held.options, held.used, held.factor, self._block, held.aside)
            elif self._names is not None:
                group = self.torch_optimizer.param_groups[segment.spec.group]
                self._fused[id(segment)].update(group, flags, _factor(segment, coefficient), self._block)
            elif segment.compute_range is not None and segment.keeps_copy:
                assert segment.master is not None
                segment.compute_range.copy_(segment.master)
            segment.sent_grads = None

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
        flags = {id(s): row for unit in units for s, row in zip(unit.trainable, used[unit.name], strict=True)}
        for pieces in filter(None, self._pieces.values()):
            segment, device = pieces[0].segment, pieces[0].tensor.device
            if not any(flags[id(segment)]):
                continue
            grads, factor = segment.update_grads, _factor(segment, coefficient(device))
            for piece in pieces:
                if flags[id(segment)][piece.slot]:
                    grad = grads[piece.start : piece.start + piece.tensor.numel()].to(device, piece.tensor.dtype)
                    piece.tensor.grad = grad if factor is None else grad * factor.to(device)
        for _, stranger in self.strangers():  # trained from the next forward on; its gradient here is this rank's own
            stranger.grad = None
        # An optimizer that wraps another may take no hooks: those of the one inside then run behind `begun`.
        hook = None
        if own_step_pre_hooks(self.torch_optimizer) is None:
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

    # -- pieces come and go

    def add(self, unit: Unit) -> None:
        """Makes this rank's pieces of a unit, with no state yet; :meth:`point_groups` shows them to the optimizer."""
        for segment in unit.trainable:
            master = segment.master
            if master is None:  # in a file: its pieces say of which shape they are
                master = torch.empty(segment.shard_numel, dtype=segment.dtypes["master"], device="meta")
            places = [(slot, segment.own_piece(slot)[0]) for slot in range(len(segment.spec.slots))]
            self._pieces[id(segment)] = [
                _Piece(segment, slot, place.start, nn.Parameter(master[place]))
                for slot, place in places
                if place.start < place.stop or self._ours is not None
            ]
            if self._ours is not None:
                for piece in self._pieces[id(segment)]:
                    place = self._ours.places[piece.tensor] = _place(segment, piece.slot)
                    self._ours.prepare(self._ours.param_groups[segment.spec.group], piece.tensor, place)
            if self._names is not None:
                kind = type(self.torch_optimizer)
                moments = self._no_moments(segment)
                shard = FusedShard(segment, kind, moments, threads=self._threads, empty=self._host_memory)
                if self._stochastic is not None:
                    place = f"{self._stochastic}/{segment.spec.slots[0].name}/{segment.master_range[0]}"
                    shard.stochastic = crc32(place.encode())
                if self._compiled:
                    shard.compiled = self._compiled_for(segment)
                self._fused[id(segment)] = shard

    def _compiled_for(self, segment: Segment) -> Any:
        """The compiled pass for a segment, or None where nothing is cast, or not in host memory."""
        check_compiled(self.torch_optimizer, self._stochastic)
        if not segment.keeps_copy or segment.update_device.type != "cpu":
            return None
        group = self.torch_optimizer.param_groups[segment.spec.group]
        kind = getattr(self.torch_optimizer, "same_as", type(self.torch_optimizer))
        decoupled = kind is AdamW or group.get("decoupled_weight_decay", False)
        dtypes = segment.dtypes
        return compiled_adam(decoupled, dtypes["master"], dtypes["moments"], dtypes["grads"], segment.dtype)

    def pieces(self, segment: Segment) -> Iterator[tuple[Tensor, dict[str, Any], slice]]:
        """This rank's pieces of a segment, as the optimizer has them, with their groups and places in the shard."""
        group = self.torch_optimizer.param_groups[segment.spec.group]
        for piece in self._pieces[id(segment)]:
            yield piece.tensor, group, slice(piece.start, piece.start + piece.tensor.numel())

    def point_pieces(self, segment: Segment) -> None:
        """The pieces of a segment whose master lies elsewhere now are views of that."""
        master = segment.master
        if master is None:
            return
        for piece in self._pieces[id(segment)]:
            piece.tensor.data = master[piece.start : piece.start + piece.tensor.numel()]

    def rest_in(self, tier: Tier) -> None:
        """What of the optimizer's state rests on the device by its table moves to memory of that tier, the device's or
        the host's, for as long as nothing is updated."""
        before, self._away = str(self._away or Tier.DEVICE), None if tier is Tier.DEVICE else tier
        for shard in self._fused.values():
            if shard.segment.table.moments.tier is Tier.DEVICE:
                shard.moments = {name: self._tiers.moved(region, tier) for name, region in shard.moments.items()}
        for piece in () if self._names is not None else self._every_piece():
            if piece.segment.table.moments.tier is not Tier.DEVICE:
                continue
            for value in self.torch_optimizer.state.get(piece.tensor, {}).values():
                if isinstance(value, Tensor) and value.dim():
                    region = self._tiers.moved(self._tiers.over(before, value.data), tier)
                    value.data = region.get() if tier is Tier.DEVICE else region.values().view(value.shape)

    def drop(self, unit: Unit) -> None:
        """Forgets a unit that is no more, and its state."""
        self.withdraw([unit])
        for segment in unit.trainable:
            if (shard := self._fused.pop(id(segment), None)) is not None:
                for moment in shard.moments.values():
                    moment.drop()
            for piece in self._pieces.pop(id(segment), ()):
                self.torch_optimizer.state.pop(piece.tensor, None)
                if self._ours is not None:
                    del self._ours.places[piece.tensor]

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
        """Takes in groups that were added.

        Raises:
            ConfigError: one needs an update of another kind than the states that there are were made for.
        """
        names = fused_moments(self.torch_optimizer)
        if (names is None) != (self._names is None):
            raise ConfigError(
                f"a group added to {type(self.torch_optimizer).__name__} has options (amsgrad, differentiable or a "
                "tensor as lr) that its other groups do not have: give them to the optimizer from the start."
            )
        if names is not None and names != self._names:  # momentum, in a group of an SGD that had none
            self._names = names
            for shard in self._fused.values():
                shard.moments = self._no_moments(shard.segment)

    # -- the state

    def num_moments(self) -> int:
        """How many moments each element has; for a class of the user's, as seen in its state so far."""
        if self._names is not None:
            return len(self._names)
        return max((len(self._dtypes(piece)) for piece in self._every_piece()), default=0)

    def kept_bytes(self) -> Callable[[SegmentSpec], float] | None:
        """Of an optimizer of ours: bytes that it keeps of a segment on this rank. None: a number of moments says it."""
        ours = self._ours
        if ours is None:
            return None
        kept: dict[SegmentSpec, float] = {}
        for pieces in self._pieces.values():
            for piece in pieces:
                spec = piece.segment.spec
                place, group = ours.places[piece.tensor], ours.param_groups[spec.group]
                kept[spec] = kept.get(spec, 0.0) + ours.state_bytes(group, place, piece.tensor.itemsize)
        return lambda spec: kept.get(spec, 0.0)

    def traffic(self) -> dict[Sent, tuple[int, float]]:
        """Collectives of the optimizer's own in a step, and bytes this rank sends in them, by kind."""
        return dict(self._ours.traffic()) if self._ours is not None else {}

    def regions(self) -> list[Region]:
        """What the optimizer's own state rests in."""
        if self._names is not None:
            return [moment for shard in self._fused.values() for moment in shard.moments.values()]
        return [
            self._tiers.over(str(self._tier_of(piece.segment)), value)
            for piece in self._every_piece()
            for value in self.torch_optimizer.state.get(piece.tensor, {}).values()
            if isinstance(value, Tensor)
        ]

    def fetched(self) -> list[Tensor]:
        """Of a state that rests elsewhere, what is on the device for an update now."""
        away = [shard for shard in self._fused.values() if shard.segment.table.moments.tier is not Tier.DEVICE]
        return [values for shard in away for values in shard.here]

    def state_dtypes(self) -> dict[str, torch.dtype]:
        """Names and dtypes of the state that has an element for each of a parameter's; of a class of the user's, what
        this rank's pieces have so far."""
        if self._names is not None:
            return dict.fromkeys(self._names, self._dtype)
        return {name: dtype for piece in self._every_piece() for name, dtype in self._dtypes(piece).items()}

    def describe(self, segment: Segment) -> dict[int, tuple[int, dict[str, Any]]]:
        """What is kept for each slot of which this rank has a piece: ``{slot: (elements, {name: value})}``, with
        :class:`PerElement` in place of what has a value for each element. The fused update knows it of every slot."""
        if self._names is not None:
            shard = self._shard(segment)
            each = {name: PerElement(moment.dtype) for name, moment in shard.moments.items()}
            return {slot: (1, {**each, "step": step}) for slot, step in enumerate(shard.steps)}
        said: dict[int, tuple[int, dict[str, Any]]] = {}
        for piece in self._pieces[id(segment)]:
            each = {name: PerElement(dtype) for name, dtype in self._dtypes(piece).items()}
            said[piece.slot] = (piece.tensor.numel(), {**self._once(piece), **each})
        return said

    def has_state(self, segment: Segment, slot: int, name: str) -> bool:
        """Whether this rank's piece of a parameter has that state; the fused update's is always there."""
        if self._names is not None:
            return name in self._names
        return any(name in self._dtypes(piece) for piece in self._pieces_of(segment, slot))

    def stored(self, segment: Segment, slot: int) -> Iterator[tuple[str, int, Tensor | Shard]]:
        """``(name, elements per value, values)`` of this rank's piece of a parameter, as they are kept."""
        if self._names is not None:
            for name, moment in self._shard(segment).moments.items():
                yield name, 1, Shard(moment, 0, segment.shard_numel).part(segment.own_piece(slot)[0])
            return
        for piece in self._pieces_of(segment, slot):
            if self._ours is not None:
                yield from ((name, *kept) for name, kept in self._ours.stored(piece.tensor).items())
            else:
                yield from ((name, 1, self._value(piece, name).reshape(-1)) for name in self._dtypes(piece))

    def kept_once(self, segment: Segment, slot: int) -> dict[str, Any]:
        """What a parameter has once, such as its step count; where this rank has a piece of it."""
        if self._names is not None:
            return {"step": self._shard(segment).steps[slot]}
        return {name: value for piece in self._pieces_of(segment, slot) for name, value in self._once(piece).items()}

    def state_shard(self, segment: Segment, name: str, dtype: torch.dtype) -> Tensor:
        """That state of this rank's master range on the device, ``(length / parts,)``, to be read; zeros where a class
        of the user's has none."""
        if self._names is not None:
            return self._shard(segment).moments[name].get()
        shard = torch.zeros(segment.shard_numel, dtype=dtype, device=segment.update_device)
        for piece in self._pieces[id(segment)]:
            if name in self._dtypes(piece):
                shard[piece.start : piece.start + piece.tensor.numel()].copy_(self._value(piece, name))
        return shard

    def take_state(self, segment: Segment, slot: int, name: str, values: Tensor, *, changed: bool = False) -> None:
        """Writes this rank's piece of a parameter's state from ``values`` ``(numel,)``, or makes it.

        ``changed``: a user gave them, so that a first step must read them too.
        """
        part = segment.own_piece(slot)
        if self._names is not None:
            shard = self._shard(segment)
            Shard(shard.moments[name], 0, segment.shard_numel).part(part[0]).write(values[part[1]])
            if changed and shard.kind is SGD:  # a first step would overwrite the momentum instead of reading it
                shard.steps[slot] = max(1, shard.steps[slot])
            return
        for piece in self._pieces_of(segment, slot):
            if self._ours is not None:
                self._ours.take_value(piece.tensor, name, values[part[1]])
            elif name in self._dtypes(piece):
                self._value(piece, name).copy_(values[part[1]])
            else:
                self.torch_optimizer.state[piece.tensor][name] = values[part[1]].clone()

    def needs(self, segment: Segment, slot: int) -> set[str] | None:
        """States that a checkpoint must have for each element of a parameter; None: only the user's class knows."""
        if self._names is not None:
            return set(self._names)
        if self._ours is None:
            return None
        return {name for piece in self._pieces_of(segment, slot) for name in self._ours.dtypes(piece.tensor)}

    def forget(self, segment: Segment, slots: Collection[int]) -> None:
        """The state of some parameters becomes what it is before their first step; that of all of a segment also where
        it cannot be read any more."""
        if self._names is not None:
            shard = self._shard(segment)
            for slot in slots:
                shard.steps[slot] = 0
            for moment in shard.moments.values() if slots else ():
                if moment.resting is None and len(slots) == len(segment.spec.slots):  # in a file, which is not read
                    whole = torch.zeros(segment.shard_numel, dtype=moment.dtype)
                else:
                    whole = moment.values()
                for slot in slots:
                    whole[segment.own_piece(slot)[0]].zero_()
                moment.store(whole)
            return
        for piece in self._pieces[id(segment)]:
            if piece.slot in slots:
                self.torch_optimizer.state.pop(piece.tensor, None)
                if self._ours is not None:
                    group = self._ours.param_groups[segment.spec.group]
                    self._ours.prepare(group, piece.tensor, self._ours.places[piece.tensor])

    def moment(self, segment: Segment, name: str) -> Region | None:
        """What that moment of the fused update rests in, ``(length / parts,)``; None: the state is kept in pieces."""
        return self._shard(segment).moments[name] if self._names is not None else None

    def take_piece(self, segment: Segment, slot: int, name: str, shard: Tensor) -> None:
        """Writes this rank's piece of a state from a shard of the master range, or makes it; 16-bit values stay so."""
        for piece in self._pieces_of(segment, slot):
            values = shard[piece.start : piece.start + piece.tensor.numel()]
            if self._ours is not None:
                self._ours.take_value(piece.tensor, name, values)
            else:
                self.torch_optimizer.state[piece.tensor][name] = values.clone()

    def take_value(self, segment: Segment, slot: int, name: str, value: Any) -> None:
        """Sets a state that a parameter has once, such as its step count."""
        if self._names is not None:
            if name == "step":
                self._shard(segment).steps[slot] = int(value)
            return
        if self._ours is not None and name == "step":
            value = int(value)
        elif name == "step" and isinstance(value, int):  # as torch's classes count
            value = torch.tensor(float(value))
        for piece in self._pieces_of(segment, slot):
            if self._ours is not None:
                self._ours.take_once(piece.tensor, name, value)
            else:
                group = self.torch_optimizer.param_groups[segment.spec.group]
                if isinstance(value, Tensor) and (name != "step" or group.get("capturable") or group.get("fused")):
                    value = value.to(piece.tensor.device)
                self.torch_optimizer.state[piece.tensor][name] = copy.deepcopy(value)

    def _host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._tiers.host.empty(numel, dtype)

    def _no_moments(self, segment: Segment) -> dict[str, Region]:
        tier = self._tiers.named(self._tier_of(segment), segment.table.moments.folder)
        dtype, shape = segment.dtypes["moments"], (segment.shard_numel,)
        return {name: tier.allocate(shape, dtype, zero=True) for name in self._names or ()}

    def _tier_of(self, segment: Segment) -> Tier:
        """Where the optimizer's state of a segment rests now."""
        home = segment.table.moments.tier
        return self._away or home if home is Tier.DEVICE else home

    def _every_piece(self) -> Iterator[_Piece]:
        return (piece for pieces in self._pieces.values() for piece in pieces)

    def _pieces_of(self, segment: Segment, slot: int) -> Iterator[_Piece]:
        return (piece for piece in self._pieces[id(segment)] if piece.slot == slot)

    def _dtypes(self, piece: _Piece) -> dict[str, torch.dtype]:
        """Of what is kept of a piece with a value for each element, by name."""
        if self._ours is not None:
            return self._ours.dtypes(piece.tensor)
        state, shape = self.torch_optimizer.state.get(piece.tensor, {}), piece.tensor.shape
        return {name: v.dtype for name, v in state.items() if isinstance(v, Tensor) and v.shape == shape}

    def _value(self, piece: _Piece, name: str) -> Tensor:
        """One of these; of a class of the user's, the tensor itself."""
        if self._ours is not None:
            return self._ours.value(piece.tensor, name)
        return self.torch_optimizer.state[piece.tensor][name]

    def _once(self, piece: _Piece) -> dict[str, Any]:
        """What is kept of a piece's parameter once, by name."""
        if self._ours is not None:
            return self._ours.once(piece.tensor)
        each = self._dtypes(piece)
        return {n: value for n, value in self.torch_optimizer.state.get(piece.tensor, {}).items() if n not in each}


def _factor(segment: Segment, coefficient: Tensor | None) -> Tensor | None:
    """What a step multiplies a segment's gradients by, 0-d; None: nothing."""
    if segment.unscale == 1.0:
        return coefficient
    # In fp64, whatever gradients are in: the factor of weights is no power of two, and fp32 would round it.
    unscale = torch.full((), segment.unscale, dtype=torch.float64, device=segment.update_device)
    return unscale if coefficient is None else coefficient.to(unscale.device) * unscale


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
