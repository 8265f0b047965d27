"""A segment: parameters of equal dtype, trainability and hyper-parameters, and the flat tensors they are views of.

[Note: the tensors of a segment] (no other word is used for any of them)

    flat      (length,)            compute dtype; every parameter is a view of it. Its memory is there only while the
                                   unit is gathered, if params rest split.
    rest      (length / parts,)    this rank's range of params (a view of flat where params are not split)
    held      (length / parts,)    this rank's range of the copy that backward gathers (hpZ)
    grads     (length / parts,)    accumulated gradients, in the grads dtype (whole where they are not split)
    master    (length / parts,)    what the optimizer updates (a view of rest where both have one dtype)
    moments   by the optimizer     laid out as master
    codes     uint8                what params and held of a frozen segment rest as under a table with ``base``: blocks
                                   that no shard's boundary cuts
    global    (length / parts,)    of outer steps: the last weights that all groups had
    worker    (length / parts,)    of signs: what this rank has lost in sending
    server    (length / parts / groups,)    the same in answering
    momentum  (length / parts / groups,)    the outer optimizer's, of this group's part of that

    local     (length,)            this rank's own gradients, before they are reduced (see GradientBuffer)

Each rests in its cell's tier: memory of the device, memory of the host, or a file. Whoever reads or writes host memory
here finds it at rest: what was on its way to or from it is waited for. A state in a file has no tensor here but while
it is updated, from :meth:`Segment.bring` to :meth:`Segment.leave`; :meth:`Segment.shard` reads and writes it, as it
does all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.comm.dtypes import TORCH_DTYPES
from shardfold.errors import ConfigError
from shardfold.plan.axes import Mesh
from shardfold.plan.formats import FORMATS, Format
from shardfold.plan.layout import DATA_AXES, ROLES, Cell, Layout, Sizes, Tier
from shardfold.plan.placement import SegmentSpec, shard_range
from shardfold.sharding._coded_shard import CodedShard
from shardfold.sharding.shard import Shard
from shardfold.tiers.device import DeviceTier
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers

_version = attrgetter("_version")

__all__ = ["TORCH_DTYPES", "Segment", "check_dtype"]


def check_dtype(call: str, dtype: Any) -> None:
    """
    Raises:
        ConfigError: ``dtype=`` of ``call`` is neither None nor a floating dtype.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"{call}: dtype= is {dtype!r}: it is a floating dtype, as torch.bfloat16, or None.")


class PendingUpdate(Protocol):
    """An update of a segment's shard on another thread, before its step is known or behind it.

    Attributes:
        owns_grads: whether gradients are not to be written meanwhile.
    """

    owns_grads: bool

    def settle(self) -> None:
        """Master and moments are as they are to be read: one before its step is undone, one behind it is waited for.
        Its own thread, which reads them too, does nothing."""
        ...


class Segment:
    """Parameters of equal dtype, trainability and hyper-parameters, as views of one flat."""

    def __init__(
        self,
        spec: SegmentSpec,
        parameters: list[nn.Parameter],
        layout: Layout,
        mesh: Sizes,
        coords: Mapping[str, int],
        store: DeviceTier,
    ) -> None:
        self.spec = spec
        self.parameters = parameters
        self.dtype = TORCH_DTYPES[spec.dtype]
        self.dtypes = {what: TORCH_DTYPES[spec.dtype_for(what, layout)] for what in ROLES if what != "compute"}
        gather, reduce = (FORMATS[spec.format_for(purpose, layout)] for purpose in ("gather", "reduce"))
        self.form: Format | None = FORMATS[spec.codes] if spec.codes else None
        self._brought: Tensor | None = None  # this rank's codes, on their way to be decoded
        self._rounds = None if gather.native == spec.dtype or self.form is not None else gather
        self.format_state: Tensor | None = None  # what the format of its reductions keeps, ``(length,)``
        self.node_state: Tensor | None = None  # the same of the second of two hops, ``(length / ranks of a node,)``
        self.payload: Tensor | None = None  # of a gather between its two hops
        self._keeps = TORCH_DTYPES[reduce.state] if reduce.state is not None else None
        self.table = spec.table_or(layout)
        self.rest_range = shard_range(spec.length, self.table.rest.over, mesh, coords)
        self.master_range = shard_range(spec.length, self.table.master.over, mesh, coords)
        self._mesh, self._coords = Mesh.of(mesh), dict(coords)
        apart = {*self.table.master.over} if self.table.reduce.ordered else {*mesh}
        summed = self._mesh.summed(spec.distinct)
        self._divided = tuple(axis for axis in summed if axis not in apart)  # whose ranks sum a part each of ``grads``
        #: Whether there is nobody to sum with, and the gradient of each micro-batch is added by itself all the same.
        self.adds_alone = self.table.reduce.ordered and not summed and self.table.grads.tier is Tier.DEVICE
        self.copied_range: tuple[int, int] | None = None  # frozen: another rank's, of which this one has a copy
        copies = self.table.copies
        if copies is not None and not spec.trainable and self.table.is_copied(trainable=False):
            self.copied_range = shard_range(spec.length, self.table.rest.over, mesh, copies.held_at(coords, mesh))
        self.flat = store.empty(spec.length, self.dtype)
        self.gaps = _gaps(spec)
        self._filled = [i for i, slot in enumerate(spec.slots) if slot.numel]
        self._byte_offsets = [spec.slots[i].offset * self.flat.itemsize for i in self._filled]
        self._places = [(s.shape, torch.empty(s.shape, device="meta").stride(), s.offset) for s in spec.slots]
        ranges = sorted(
            [(s.offset, s.offset + s.numel, 0, i) for i, s in enumerate(spec.slots)]
            + [(*gap, 1, 0) for gap in self.gaps]
        )
        self._sizes = [stop - start for start, stop, _, _ in ranges]
        self._slots_at = [i for i, (_, _, gap, _) in enumerate(ranges) if not gap]
        self._gaps_at = [i for i, (_, _, gap, _) in enumerate(ranges) if gap]
        self.regions: dict[str, Region] = {}  # by state: what each that is no other's bytes rests in
        self._slower = any(cell.tier is not Tier.DEVICE for cell in self.table.cells().values())
        self._rest: Tensor | None = None
        self.held: Tensor | None = None
        self.held_range: tuple[int, int] | None = None
        self._gradient_flat: Tensor | None = None  # ``grads``, behind what is adopted
        self.sent_grads: Region | None = None  # the same, gone to where the update is
        self.updated: Tensor | None = None  # host: what the update made of ``params``, on its way to where they rest
        self.under_way: PendingUpdate | None = (
            None  # an update on another thread: whoever reads what it writes settles it
        )
        self.here: dict[str, Tensor] = {}  # by state: what came from its file to host memory
        self.noted: list[Tensor] | None = (
            None  # 0-d: what a step asks of gradients that went to a file; None: not known
        )
        self._coming: dict[str, Region] = {}  # by state: what is on its way there
        self.adopted: dict[int, Tensor] = {}  # by slot: gradients as autograd made them, still to be copied
        self._master: Tensor | None = None
        self.taken = 0  # how often values of users' came into its states
        self.factor = 1.0  # what each gradient is multiplied by as it arrives
        self.unscale = 1.0  # what its sums are still to be multiplied by; not 1 only for fp16 under a loss scale

    def set_factors(self, factor: float, unscale: float) -> None:
        """Gradients are multiplied by ``factor`` as they arrive, and sums of them are still to be by ``unscale``."""
        self.factor, self.unscale = factor, unscale

    def note(self, grads: list[Tensor]) -> None:
        """What a step asks of gradients that go to a file."""
        self.noted = grads

    def hold_payload(self, payload: Tensor | None) -> None:
        """What the first hop of a gather brings, for the second."""
        self.payload = payload

    def take_payload(self) -> Tensor | None:
        """The same, which is held no longer."""
        payload, self.payload = self.payload, None
        return payload

    def send_grads(self, region: Region) -> None:
        """Its gradients go there, to be used in an update."""
        self.sent_grads = region
        region.store(self.master_grads)

    def pop_updated(self) -> Tensor | None:
        """What an update on the host made of ``params``, which is there no longer."""
        updated, self.updated = self.updated, None
        return updated

    @property
    def split(self) -> bool:
        """Whether the flat's memory comes and goes."""
        return self.table.comes_and_goes or self.form is not None

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat of this segment's length, one per parameter, with its shape."""
        start = flat.storage_offset()
        return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in self._places]

    def view_of(self, slot: int) -> Tensor:
        """The flat's view of one parameter, with its shape."""
        shape, strides, offset = self._places[slot]
        return self.flat.as_strided(shape, strides, self.flat.storage_offset() + offset)

    def versions(self) -> list[int]:
        """Of each parameter: changes when its values are written in place."""
        return list(map(_version, self.parameters))

    def written(self, found: Sequence[int]) -> list[int]:
        """Slots of the parameters that were written since these versions were found, or that lie elsewhere now."""
        versions, start = self.versions(), self.flat.data_ptr()
        there = [start + offset for offset in self._byte_offsets]
        pointers = [self.parameters[slot].data_ptr() for slot in self._filled]
        if versions == found and pointers == there:
            return []
        moved = {slot for slot, at, home in zip(self._filled, pointers, there, strict=True) if at != home}
        return [i for i, (old, new) in enumerate(zip(found, versions, strict=True)) if old != new or i in moved]

    def unseen_writes(self, written: Sequence[int]) -> str:
        """The name of a parameter of which this rank's part is another in the flat than at rest; empty: of none."""
        source = self._as_gathered(self._resting.read()).to(self.flat.device)
        start, stop = self.rest_range
        if torch.equal(self.flat[start:stop], source):
            return ""
        for slot, spec in enumerate(self.spec.slots):
            piece, part = self._overlap(slot, self.rest_range)
            if slot not in written and not torch.equal(self.view_of(slot).reshape(-1)[part], source[piece]):
                return spec.name
        return ""

    def _as_gathered(self, shard: Tensor) -> Tensor:
        """The values that a gather gives of a shard, in the dtype of the flat."""
        values = shard.to(self.dtype)
        if self._rounds is None:
            return values
        rounded = torch.empty_like(values)
        payload = torch.empty(1, self._rounds.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        self._rounds.encode(values.view(1, -1), payload)
        self._rounds.decode(payload, rounded.view(1, -1))
        return rounded

    def parts_of(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """As :meth:`views_of`, and the ranges of padding; made in one call, because each by itself costs as much as
        copying a small parameter's gradient."""
        parts = torch.unsafe_split_with_sizes(flat, self._sizes)
        views = [
            parts[i] if len(shape) == 1 else parts[i].view(shape)
            for i, (shape, _, _) in zip(self._slots_at, self._places, strict=True)
        ]
        return views, [parts[i] for i in self._gaps_at]

    def exact_flat(self, store: DeviceTier) -> Tensor:
        """A flat for values as the master will have them, ``(length,)``; where that has the parameters' dtype, or there
        is none, the flat itself. What becomes codes is not rounded before, and the flat has no memory meanwhile."""
        master = self.dtypes["master"]
        if self.form is not None:
            given = {p.dtype for p in self.parameters} - {self.dtype}
            wide = self.dtype
            for dtype in given:
                wide = torch.promote_types(wide, dtype)
            if wide == self.dtype:
                return self.flat
            store.take_back(self.flat)
            return store.empty(self.spec.length, wide)
        if not self.spec.trainable or master == self.dtype:
            return self.flat
        return torch.empty(self.spec.length, dtype=master, device=self.flat.device)

    def bind(
        self, mesh: Sizes, coords: Mapping[str, int], exact: Tensor, tiers: Tiers, *, released: bool = False
    ) -> None:
        """Makes the states that rest, each in its cell's tier, and the flat, from the values in ``exact`` (see
        :meth:`exact_flat`). ``released``: the unit is about to be, so that nothing is decoded."""
        spec, flat, layout = self.spec, self.flat, self.table
        if layout.held is not None and layout.held.over:
            self.held_range = shard_range(spec.length, layout.held.over, mesh, coords)
        if self.form is not None:
            self._bind_codes(self.form, exact, tiers, released)
            return
        if exact is not flat:
            flat.copy_(exact)
            self._point()
        start, stop = self.rest_range
        keeps_copy = layout.params is not None or not spec.trainable
        if not self.split:
            self._rest = flat
            self.regions["params"] = tiers.device.adopt(flat)
        elif keeps_copy:
            self._rest = self._rest_in(tiers, "params", layout.rest, flat[start:stop])
        if layout.held is not None and self.held_range is not None:
            self.held = self._rest_in(tiers, "held", layout.held, flat[slice(*self.held_range)])
        if not spec.trainable:
            self._hold_copy(tiers)
            return
        a, b = self.master_range
        params, same = layout.params, self.dtype == self.dtypes["master"]
        if keeps_copy and same and params is not None and params.tier is layout.master.tier:
            self._master = self._rest[a - start : b - start] if self._rest is not None else None
        else:
            self._master = self._rest_in(tiers, "master", layout.master, exact[a:b])
        size = spec.length if not layout.grads.over else spec.length // layout.grads.parts(mesh)
        tier = tiers.named(layout.grads.tier, layout.grads.folder)
        grads = tier.allocate((size,), self.dtypes["grads"], zero=True, rests=True)
        self.regions["grads"] = grads
        self._gradient_flat = grads.resting
        if layout.outer is not None:
            dtype, outer = TORCH_DTYPES[spec.outer_dtype(layout)], tiers.named(Tier(layout.outer.tier))
            weights = self.regions["global"] = outer.allocate((b - a,), dtype)
            weights.store(exact[a:b].to(dtype))
            weights.values(slice(0, 0))  # ``exact`` may be written to from now on
            if layout.outer.beta:
                parts = mesh[layout.outer.axis] if layout.outer.quorum is None else 1
                self.regions["momentum"] = outer.allocate(((b - a) // parts,), dtype, zero=True)
        if layout.signs is not None and layout.signs.error and mesh[layout.signs.axis] > 1:
            for side, parts in (("worker", 1), ("server", mesh[layout.signs.axis])):
                self.regions[side] = tiers.device.allocate(((b - a) // parts,), torch.float32, zero=True)
        if self._keeps is not None:
            second = spec.length // mesh[DATA_AXES[1]] if layout.reduce.hops == 2 else 0
            kept = self.regions["format"] = tiers.device.allocate((spec.length + second,), self._keeps, zero=True)
            self.format_state = kept.get()[: spec.length]
            self.node_state = kept.get()[spec.length :] if second else None

    def _bind_codes(self, form: Format, exact: Tensor, tiers: Tiers, released: bool) -> None:
        """What rests of a segment of codes, one parameter after the other, and the values that they stand for."""
        device, table = tiers.device, self.table
        for state, cell, bounds in (("params", table.rest, self.rest_range), ("held", table.held, self.held_range)):
            if cell is not None and bounds is not None:
                tier = tiers.named(cell.tier, cell.folder)
                size = form.nbytes(bounds[1] - bounds[0])
                self.regions[state] = tier.allocate((size,), torch.uint8, zero=True, rests=True)
        if not released:
            device.give(self.flat)
            for start, stop in self.gaps:
                self.flat[start:stop].zero_()
        for slot in self.spec.slots:
            payload = self._write_codes(form, slot.offset, exact[slot.offset : slot.offset + slot.numel])
            if not released:
                length = -(-slot.numel // form.block) * form.block
                form.decode(payload.view(1, -1), self.flat[slot.offset : slot.offset + length].view(1, -1))
        if exact is not self.flat:  # whose memory goes before the flat has its own
            exact.untyped_storage().resize_(0)
        device.give(self.flat)
        self._point()
        self._hold_copy(tiers)

    def _hold_copy(self, tiers: Tiers) -> None:
        """Room for another rank's part of what is frozen (see ``plan/copies``), as much as this rank has."""
        if self.copied_range is not None:
            cell, own = self.table.copies_rest(trainable=False), self.regions["params"]
            numel, tier = own.nbytes // own.dtype.itemsize, tiers.named(cell.tier, cell.folder)
            self.regions["copies"] = tier.allocate((numel,), own.dtype, zero=True, rests=True)

    def _write_codes(self, form: Format, first: int, values: Tensor) -> Tensor:
        """The codes of a whole parameter, whose scales may be coded together, and which begins at element ``first``:
        this rank's part of them rests from now on."""
        length = -(-values.numel() // form.block) * form.block
        payload = torch.empty(form.nbytes(length), dtype=torch.uint8, device=values.device)
        form.encode_tensor(values, payload)
        for state, _, (low, high) in self.copies():
            a, b = max(first, low), min(first + length, high)
            if a < b:
                part = payload[form.nbytes(a - first) : form.nbytes(b - first)]
                self.regions[state].write(form.nbytes(a - low), part)
        return payload

    def _rest_in(self, tiers: Tiers, state: str, cell: Cell, values: Tensor) -> Tensor | None:
        """A state with these values, in its tier; the memory itself, or None of a file."""
        tier = tiers.named(cell.tier, cell.folder)
        region = self.regions[state] = tier.allocate(values.shape, values.dtype, rests=True)
        region.store(values)
        region.values(slice(0, 0))  # ``values`` may be written to from now on
        return region.resting

    def rest_in(self, state: str, tiers: Tiers, tier: Tier) -> None:
        """``params``, ``grads`` or ``master`` moves to memory of that tier, with its values, for as long as nothing is
        computed with it; what shares its bytes with another state moves with that one, and the flat stays."""
        old = self.regions.get(state)
        if old is None or old.tier == tier or (state == "params" and not self.split):
            return
        shared = state == "params" and self.master_is_rest
        new = self.regions[state] = tiers.moved(old, tier)
        memory = new.resting
        if state == "params":
            assert memory is not None
            a, b = (end - self.rest_range[0] for end in self.master_range)
            if self.form is None:
                self._rest, self._master = memory, memory[a:b] if shared else self._master
        elif state == "master":
            self._master = memory
        else:
            self._gradient_flat = memory
        self._slower = any(region.tier != Tier.DEVICE for region in self.regions.values())

    @property
    def rest(self) -> Tensor | None:
        """The memory of ``params``; None: there is none."""
        return self._at_rest(self._rest, "params")

    @property
    def master(self) -> Tensor | None:
        """The memory of ``master``, or what came of it from its file; None: there is none."""
        self._settle("master")
        if "master" in self.here:
            return self.here["master"]
        return self._at_rest(self._master, "master")

    @property
    def gradient_flat(self) -> Tensor | None:
        return self._at_rest(self._gradient_flat, "grads")

    def _at_rest(self, memory: Tensor | None, state: str) -> Tensor | None:
        """The memory of a state, once nothing is on its way to or from it."""
        self._settle(state)
        if self._slower and memory is not None:
            (self.regions.get(state) or self.regions["params"]).values(slice(0, 0))
        return memory

    def _settle(self, state: str) -> None:
        """No update on another thread writes this state meanwhile, or reads it while it is to be written."""
        under_way = self.under_way
        if under_way is not None and (
            state == "master"
            or (state == "params" and self.master_is_rest)
            or (state == "grads" and under_way.owns_grads)
        ):
            under_way.settle()

    def shard(self, state: str) -> Shard | None:
        """``params``, ``held``, ``master`` or ``grads`` of this rank, wherever that rests, as it is to be read:
        ``rest_range``, ``held_range`` and, of the last two, ``master_range``; None: there is no such state."""
        self._settle(state)
        if self.form is not None:
            bounds = self.held_range if state == "held" else self.rest_range if state == "params" else None
            if bounds is None:
                return None
            return CodedShard(self.regions[state], 0, bounds[1] - bounds[0], self.form, self.dtype)
        if state == "held":
            return None if self.held is None else Shard(self.regions["held"], 0, self.held.numel())
        region = self.regions.get(state)
        if state == "params":
            return None if region is None else Shard(region, 0, self.rest_range[1] - self.rest_range[0])
        if not self.spec.trainable:
            return None
        start = self.master_range[0]
        if region is None:
            assert state == "master"
            return Shard(self.regions["params"], start - self.rest_range[0], self.shard_numel)
        whole = region.nbytes > self.shard_numel * region.dtype.itemsize
        return Shard(region, start if whole else 0, self.shard_numel)

    def fetch(self, state: str, empty: Callable[[int, torch.dtype], Tensor]) -> None:
        """Begins to bring a state from its file to host memory, which ``empty`` gives; not again if it has begun."""
        if state in self._coming:
            return
        region = self._region(state)
        self.here.pop(state, None)
        region.fetch(empty(region.nbytes // region.dtype.itemsize, region.dtype))
        self._coming[state] = region

    def bring(self, state: str) -> Tensor | None:
        """What :meth:`fetch` began is in ``here`` from now on; None: it has not begun.

        Raises:
            OSError: it could not be read.
        """
        region = self._coming.pop(state, None)
        if region is not None:
            self.here[state] = region.get()
        return self.here.get(state)

    def leave(self, state: str) -> tuple[Region, Tensor]:
        """What is ``here`` is not any more: the region that is to take it, and its values."""
        if state == "params":
            values, self.updated = self.updated, None
            assert values is not None
            return self._region(state), values
        return self._region(state), self.here.pop(state)

    def _region(self, state: str) -> Region:
        """What a state rests in; ``master`` is in that of ``params`` where both are the same bytes, and where there is
        nothing else, as the segment is frozen."""
        return self.regions.get(state) or self.regions["params"]

    # -- its update

    def begin_update(self, pending: PendingUpdate) -> None:
        """An update is under way: whoever reads what it writes settles it."""
        self.under_way = pending

    def end_update(self, *, undone: bool = False) -> None:
        """It is not any more; ``undone``: nor is there what it made of ``params``."""
        self.under_way = None
        if undone:
            self.updated = None

    def lay_aside(self, copy: Tensor) -> None:
        """What the update makes of ``params``, ``(length / parts,)`` on the host, waits there (see :meth:`leave`)."""
        self.updated = copy

    def write_updated(self) -> None:
        """What waits is written to ``params``, where these rest in memory of the host and no operation of the program
        brings it there."""
        if self.updated is not None and self.table.params is not None and self.table.params.tier is not Tier.DEVICE:
            assert self.compute_range is not None
            self.compute_range.copy_(self.updated)
            self.updated = None

    def drop_sent_grads(self) -> None:
        """The update has read them."""
        self.sent_grads = None

    def drop_noted(self) -> None:
        """Gradients in a file are others than those that ``noted`` is of."""
        self.noted = None

    def count_as_summed(self) -> None:
        """Nothing is left to be multiplied to the sums of gradients."""
        self.unscale = 1.0

    def forget_fetched(self) -> None:
        """What came from files, or comes, is not needed."""
        self.here.clear()
        for region in self._coming.values():
            region.stop()
        self._coming.clear()

    def give_up(self) -> None:
        """The segment is no more: nothing here keeps memory."""
        self.forget_fetched()
        self._rest = self.held = self._gradient_flat = self._master = self.sent_grads = self.updated = None
        self.format_state = self.node_state = self.payload = self._brought = None
        self.under_way = None
        self.regions.clear()
        self.flat = self.flat.new_empty(0)
        self.parameters = []

    @property
    def grads(self) -> Tensor | None:
        """Accumulated gradients, all of them in one flat."""
        if self.adopted:
            assert self.gradient_flat is not None
            views = self.views_of(self.gradient_flat)
            with torch.no_grad():
                for slot, grad in self.adopted.items():
                    views[slot].copy_(grad)
                    if self.parameters[slot].grad is grad:
                        self.parameters[slot].grad = views[slot]
            self.adopted.clear()
        return self.gradient_flat

    @property
    def master_grads(self) -> Tensor:
        """The gradients of this rank's master range, ``(length / parts,)``, in memory or as they came from a file."""
        grads = self.here.get("grads", self.grads)
        assert grads is not None
        if grads.numel() == self.spec.length:
            return grads[self.master_range[0] : self.master_range[1]]
        return grads

    @property
    def summed_grads(self) -> Tensor:
        """The part of :attr:`master_grads` that this rank sums, in the order of all ranks; where others do not sum some
        of it, all of that."""
        start, stop = shard_range(self.master_range[1] - self.master_range[0], self._divided, self._mesh, self._coords)
        return self.master_grads[start:stop]

    def arranged(self, flat: Tensor, out: Callable[[int, torch.dtype], Tensor]) -> Tensor | None:
        """A flat of gradients in the order of the ranks that sum parts of it, in memory that ``out`` gives; None: it is
        in that order."""
        over, each = self.table.master.over, (*self.table.master.over, *self._divided)
        order = [each.index(axis) for axis in self._mesh if axis in each]
        if not over or not self._divided or order == sorted(order):
            return None
        rows = flat.view(*(self._mesh[axis] for axis in each), -1).permute(*order, len(order))
        made = out(flat.numel(), flat.dtype)
        made.view(rows.shape).copy_(rows)
        return made

    @property
    def update_grads(self) -> Tensor:
        """The same where the update is."""
        return self.master_grads if self.sent_grads is None else self.sent_grads.values()

    @property
    def update_device(self) -> torch.device:
        """Where the update computes."""
        return self.flat.device if self.table.updates_on is Tier.DEVICE else torch.device("cpu")

    @property
    def moments_come(self) -> bool:
        """Whether moments rest elsewhere than where the update is: they are fetched for it, and stored behind it."""
        return self.table.moments.tier is not self.table.updates_on

    @property
    def keeps_copy(self) -> bool:
        """Whether the master range rests in the compute dtype too."""
        return "params" in self.regions and not self.master_is_rest

    @property
    def compute_range(self) -> Tensor | None:
        """The compute-dtype copy of the master range, where there is one in memory; ``(length / parts,)``."""
        if self.rest is None:
            return None
        offset = self.rest_range[0]
        return self.rest[self.master_range[0] - offset : self.master_range[1] - offset]

    @property
    def shard_numel(self) -> int:
        """Elements of this rank's master range."""
        return self.master_range[1] - self.master_range[0]

    def add_to_grads(self, flat: Tensor) -> None:
        grads = self.grads
        assert grads is not None
        grads.add_(flat)

    def fill_own_range(self, source: str = "params") -> Tensor | None:
        """Writes this rank's shard of ``source`` (``params``, ``held`` or ``master``) into its range of the flat, ready
        for a gather; casts if only ``master`` rests. Codes stay beside the flat, see :meth:`take_codes`. The memory
        that it came to from a file is nobody's any more: that is given back; None: there is none."""
        if self.form is not None:
            self._brought = self._own_codes(source)
            return None
        bounds = self.held_range if source == "held" else self.rest_range
        shard = self.shard("held") if source == "held" else self._resting
        assert shard is not None and bounds is not None
        if shard.region.resting is self.flat:
            return None
        own = self.flat[bounds[0] : bounds[1]]
        region = shard.region
        if region.tier == Tier.DISK:
            values = self.bring(source)
            own.copy_(shard.read() if values is None else values, non_blocking=True)
            return self.here.pop(source, None)
        if self.table.rest.tier is Tier.DEVICE or source == "held":
            own.copy_(shard.read())
        else:
            region.fetch(own)
            region.get()  # whoever sends or reads the flat is behind it
        return None

    def fill_own_values(self) -> None:
        """The same, also of codes: for a gather of the values that they stand for."""
        if self.form is None:
            self.fill_own_range()
        else:
            self.flat[slice(*self.rest_range)].copy_(self._resting.read())

    def take_codes(self, source: str) -> Tensor | None:
        """This rank's codes of ``source``, uint8, for whoever sends or decodes them; None: it has none."""
        if self.form is None:
            return None
        codes, self._brought = self._brought, None
        return self._own_codes(source) if codes is None else codes

    def _own_codes(self, source: str) -> Tensor:
        region = self.regions["held" if source == "held" else "params"]
        if region.tier == Tier.DISK:
            values = self.bring(source)
            self.here.pop(source, None)
            return (region.values() if values is None else values).to(self.flat.device, non_blocking=True)
        if region.tier == Tier.DEVICE or not accelerator.has_streams(self.flat.device):
            return region.values()
        codes = torch.empty(region.nbytes, dtype=torch.uint8, device=self.flat.device)
        region.fetch(codes)
        return region.get()

    def decode(self, codes: Tensor) -> None:
        """Fills the flat with what codes of all of it stand for."""
        assert self.form is not None
        accelerator.used_here(codes)  # where they came on the side stream
        self.form.decode(codes.view(1, -1), self.flat.view(1, -1))

    @property
    def _resting(self) -> Shard:
        """``params``, or, where there are none and the segment is not frozen, ``master``."""
        shard = self.shard("params") or self.shard("master")
        assert shard is not None
        return shard

    def move(self, store: DeviceTier) -> None:
        """The flat and the parameters get memory of their own; what is in the old one stays with who refers to it."""
        flat = store.empty(self.spec.length, self.dtype)
        with torch.no_grad():
            flat.copy_(self.flat)
        self.flat = flat
        self._point()

    def _point(self) -> None:
        """The parameters are views of the flat."""
        for parameter, view in zip(self.parameters, self.views_of(self.flat), strict=True):
            parameter.data = view

    def own_copy(self, source: str) -> Tensor | None:
        """What this rank gives to a gather of ``source``, as it rests outside of the flat; None if it is nowhere
        else."""
        tier = self.table.rest.tier
        if not self.split or tier is Tier.DISK:
            return None
        if tier is not Tier.DEVICE and accelerator.has_streams(self.flat.device):
            return None
        if source == "held":
            return self.held
        if self.rest is not None:
            return self.rest
        same = self.master is not None and self.master.dtype == self.dtype and self.master_range == self.rest_range
        return self.master if same else None

    def residents(self) -> Iterator[Tensor]:
        """The states that mirror the parameters and rest in memory outside of the flat."""
        return (state for state in (self.rest, self.held, self.master) if state is not None)

    def take(self, slot: int, values: Tensor, *, exact: bool = True, start: int = 0) -> None:
        """Takes a parameter's values (any shape; all of them, or from element ``start`` on those that lie here) into
        every state that mirrors it; nothing is sent.

        ``exact=False``: where what rests is gathered as the new value already, it keeps its own digits.
        """
        self.taken += 1
        values = values.detach().reshape(-1)
        if self.form is not None and start == 0 and values.numel() == self.spec.slots[slot].numel:
            self._take_coded(self.form, slot, values)
            return
        for _, target, bounds in self.copies():
            piece, part = self._overlap(slot, bounds)
            own, new = target.part(piece), values[part.start - start : part.stop - start]
            if not exact and (target.dtype != self.dtype or self._rounds is not None):
                old = own.read()
                new = new.to(old.device)
                # What rests is rounded in blocks of a format, so that all of it is looked at.
                gathered = self._as_gathered(target.read())[piece] if self._rounds is not None else old.to(self.dtype)
                new = torch.where(gathered == new, old, new.to(old.dtype))
            own.write(new)
        if self.updated is not None and (copy := self.compute_range) is not None:  # it would otherwise come over it
            piece, _ = self._overlap(slot, self.master_range)
            self.updated[piece].copy_(copy[piece])

    def _take_coded(self, form: Format, slot: int, values: Tensor) -> None:
        """A whole parameter. Where its values are what its codes stand for, these stay: coded once more they could be
        others in their last digit."""
        piece, part = self._overlap(slot, self.rest_range)
        old = self._resting.part(piece).read()
        if not torch.equal(old, values[part].to(old.device, old.dtype)):
            self._write_codes(form, self.spec.slots[slot].offset, values)

    def copies(self) -> Iterator[tuple[str, Shard, tuple[int, int]]]:
        """The states that mirror the parameters, each with its range of the segment; what shares bytes once."""
        for state, bounds in (("params", self.rest_range), ("held", self.held_range), ("master", self.master_range)):
            if (shard := self.shard(state)) is not None and not (state == "master" and self.master_is_rest):
                assert bounds is not None
                yield state, shard, bounds

    def own_piece(self, slot: int) -> tuple[slice, slice]:
        """Where this rank's master range meets a parameter: in the shard, and in the parameter; both may be empty."""
        return self._overlap(slot, self.master_range)

    def copied_piece(self, slot: int) -> tuple[slice, slice]:
        """Where the copy of what is frozen of another rank meets a parameter; both are empty where there is none."""
        return self._overlap(slot, self.copied_range or (0, 0))

    def _overlap(self, slot: int, bounds: tuple[int, int]) -> tuple[slice, slice]:
        offset, numel = self.spec.slots[slot].offset, self.spec.slots[slot].numel
        a = min(max(offset, bounds[0]), bounds[1])
        b = max(min(offset + numel, bounds[1]), a)
        return slice(a - bounds[0], b - bounds[0]), slice(a - offset, b - offset)

    @property
    def master_is_rest(self) -> bool:
        """Whether master and rest are the same bytes."""
        return self.spec.trainable and "master" not in self.regions and "params" in self.regions


def _gaps(spec: SegmentSpec) -> list[tuple[int, int]]:
    """The ranges of padding, in elements."""
    gaps: list[tuple[int, int]] = []
    end = 0
    for slot in spec.slots:
        if slot.offset > end:
            gaps.append((end, slot.offset))
        end = slot.offset + slot.numel
    if spec.length > end:
        gaps.append((end, spec.length))
    return gaps
