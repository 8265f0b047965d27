"""A unit: parameters that move together, and the flat tensors they are views of.

[Note: the tensors of a segment] (no other word is used for any of them)

    flat      (length,)            compute dtype; every parameter is a view of it. Its memory is there only while the
                                   unit is gathered, if params rest split.
    rest      (length / parts,)    this rank's range of params (a view of flat where params are not split)
    held      (length / parts,)    this rank's range of the copy that backward gathers (hpZ)
    grads     (length / parts,)    accumulated gradients, in the grads dtype (whole where they are not split)
    master    (length / parts,)    what the optimizer updates (a view of rest where both have one dtype)
    moments   by the optimizer     laid out as master

    incoming  (length,)            gradients of one pass that are still to be reduced (see GradientBuffer)

A unit's life is one enum; the transitions are three lines each and an illegal one raises.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import partial

import torch
from torch import Tensor, nn

from shardfold.errors import UsageError
from shardfold.freed import outline, seal, unseal
from shardfold.gradients import GradientBuffer
from shardfold.layout import ITEMSIZE, ROLES, Layout, Mesh
from shardfold.shards import SegmentSpec, UnitSpec, shard_range
from shardfold.stores.device import DeviceStore
from shardfold.wires.plain import Pending, Waiter

__all__ = ["CLOSED_WAY", "TORCH_DTYPES", "Life", "Segment", "Unit", "dtype_name"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


def dtype_name(dtype: torch.dtype) -> str | None:
    """The table's name of a dtype, or None if it has none."""
    return next((name for name, value in TORCH_DTYPES.items() if value == dtype), None)


class Life(Enum):
    """Where the values of a unit's parameters are."""

    RESTING = "only this rank's shard is in memory"
    GATHERING = "the flat has its memory and is being filled"
    GATHERED = "all values are in the flat"


class Segment:
    """Parameters of equal dtype, trainability and hyper-parameters, as views of one flat."""

    def __init__(
        self,
        spec: SegmentSpec,
        parameters: list[nn.Parameter],
        layout: Layout,
        mesh: Mesh,
        coords: Mesh,
        store: DeviceStore,
    ) -> None:
        self.spec = spec
        self.parameters = parameters
        self.dtype = TORCH_DTYPES[spec.dtype]
        self.dtypes = {what: TORCH_DTYPES[spec.dtype_for(what, layout)] for what in ROLES if what != "compute"}
        rest_over = layout.rest.over
        self.rest_range = shard_range(spec.length, rest_over, mesh, coords)
        self.master_range = shard_range(spec.length, layout.master.over, mesh, coords)
        self.flat = store.empty(spec.length, self.dtype)
        self.gaps = _gaps(spec)
        self._places = [(s.shape, torch.empty(s.shape, device="meta").stride(), s.offset) for s in spec.slots]
        ranges = sorted(
            [(s.offset, s.offset + s.numel, 0, i) for i, s in enumerate(spec.slots)]
            + [(*gap, 1, 0) for gap in self.gaps]
        )
        self._sizes = [stop - start for start, stop, _, _ in ranges]
        self._slots_at = [i for i, (_, _, gap, _) in enumerate(ranges) if not gap]
        self._gaps_at = [i for i, (_, _, gap, _) in enumerate(ranges) if gap]
        self.rest: Tensor | None = None
        self.held: Tensor | None = None
        self.held_range: tuple[int, int] | None = None
        self.gradient_flat: Tensor | None = None  # ``grads``, behind what is adopted
        self.adopted: dict[int, Tensor] = {}  # by slot: gradients as autograd made them, still to be copied
        self.master: Tensor | None = None
        self.factor = 1.0  # what each gradient is multiplied by as it arrives
        self.unscale = 1.0  # what its sums are still to be multiplied by; not 1 only for fp16 under a loss scale

    @property
    def split(self) -> bool:
        """Whether the flat's memory comes and goes."""
        return self.rest_range != (0, self.spec.length)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a flat of this segment's length, one per parameter, with its shape."""
        start = flat.storage_offset()
        return [flat.as_strided(shape, strides, start + offset) for shape, strides, offset in self._places]

    def parts_of(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """As :meth:`views_of`, and the ranges of padding; made in one call, because each by itself costs as much as
        copying a small parameter's gradient."""
        parts = torch.unsafe_split_with_sizes(flat, self._sizes)
        views = [
            parts[i] if len(shape) == 1 else parts[i].view(shape)
            for i, (shape, _, _) in zip(self._slots_at, self._places, strict=True)
        ]
        return views, [parts[i] for i in self._gaps_at]

    def exact_flat(self) -> Tensor:
        """A flat for values as the master will have them, ``(length,)``; where that has the parameters' dtype, or there
        is none, the flat itself."""
        master = self.dtypes["master"]
        if not self.spec.trainable or master == self.dtype:
            return self.flat
        return torch.empty(self.spec.length, dtype=master, device=self.flat.device)

    def bind(self, layout: Layout, mesh: Mesh, coords: Mesh, exact: Tensor) -> None:
        """Makes the states that rest, and the flat, from the values in ``exact`` (see :meth:`exact_flat`)."""
        spec, flat = self.spec, self.flat
        if exact is not flat:
            flat.copy_(exact)
            for parameter, view in zip(self.parameters, self.views_of(flat), strict=True):
                parameter.data = view
        start, stop = self.rest_range
        keeps_copy = layout.params is not None or not spec.trainable
        if not self.split:
            self.rest = flat
        elif keeps_copy:
            self.rest = flat[start:stop].clone()
        if layout.held is not None and layout.held.over:
            self.held_range = shard_range(spec.length, layout.held.over, mesh, coords)
            self.held = flat[self.held_range[0] : self.held_range[1]].clone()
        if not spec.trainable:
            return
        a, b = self.master_range
        master = self.dtypes["master"]
        if self.rest is not None and self.dtype == master and layout.params is not None:
            self.master = self.rest[a - start : b - start]
        else:
            self.master = exact[a:b].to(master, copy=True)
        size = spec.length if not layout.grads.over else spec.length // layout.grads.parts(mesh)
        self.gradient_flat = torch.zeros(size, dtype=self.dtypes["grads"], device=flat.device)

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
        """The gradients of this rank's master range, ``(length / parts,)``."""
        grads = self.grads
        assert grads is not None
        if grads.numel() == self.spec.length:
            return grads[self.master_range[0] : self.master_range[1]]
        return grads

    @property
    def compute_range(self) -> Tensor | None:
        """The compute-dtype copy of the master range, where there is one; ``(length / parts,)``."""
        if self.rest is None:
            return None
        offset = self.rest_range[0]
        return self.rest[self.master_range[0] - offset : self.master_range[1] - offset]

    def add_to_grads(self, flat: Tensor) -> None:
        grads = self.grads
        assert grads is not None
        grads.add_(flat)

    def fill_own_range(self) -> None:
        """Writes this rank's shard into its range of the flat, ready for a gather; casts if only master rests."""
        source = self.rest if self.rest is not None else self.master
        assert source is not None
        if source is not self.flat:
            self.flat[self.rest_range[0] : self.rest_range[1]].copy_(source)

    def take(self, slot: int, values: Tensor, *, exact: bool = True) -> None:
        """Takes a parameter's values (all of them, any shape) into every state that mirrors it; nothing is sent.

        ``exact=False``: where a finer master already rounds to the new value, it keeps its own digits.
        """
        values = values.detach().reshape(-1)
        targets = [(self.rest, self.rest_range), (self.held, self.held_range)]
        if not self.master_is_rest:
            targets.append((self.master, self.master_range))
        for target, bounds in targets:
            if target is None or bounds is None:
                continue
            piece, part = self._overlap(slot, bounds)
            old, new = target[piece], values[part]
            if exact or target is not self.master:
                old.copy_(new)
            else:
                old.copy_(torch.where(old.to(new.dtype) == new, old, new.to(old.dtype)))

    def own_piece(self, slot: int) -> tuple[slice, slice]:
        """Where this rank's master range meets a parameter: in the shard, and in the parameter; both may be empty."""
        return self._overlap(slot, self.master_range)

    def _overlap(self, slot: int, bounds: tuple[int, int]) -> tuple[slice, slice]:
        offset, numel = self.spec.slots[slot].offset, self.spec.slots[slot].numel
        a = min(max(offset, bounds[0]), bounds[1])
        b = max(min(offset + numel, bounds[1]), a)
        return slice(a - bounds[0], b - bounds[0]), slice(a - offset, b - offset)

    @property
    def master_is_rest(self) -> bool:
        """Whether master and rest are the same bytes."""
        return (
            self.rest is not None
            and self.master is not None
            and self.rest.untyped_storage()._cdata == self.master.untyped_storage()._cdata
        )


CLOSED_WAY = (
    "its engine is closed, so the rest of it is gone: engine.release() in place of engine.close() would have left a "
    "plain model; build the model anew and load a state dict or a checkpoint"
)
"""Ends the message of a parameter that was split when its engine was closed."""


class _Touch:
    """What a freed parameter asks when it is touched. A parameter that autograd holds must not hold the engine."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self) -> bool:
        unit = self._unit()
        return unit is not None and unit.touch()

    @property
    def way(self) -> str | None:
        """What helps where the engine does not: it was closed, and is nothing's any more."""
        unit = self._unit()
        return CLOSED_WAY if unit is None or unit.closed else None

    def outline(self, parameter: nn.Parameter) -> nn.Parameter | None:
        unit = self._unit()
        if unit is None or not unit.outlines:
            return None
        names = {id(p): name for name, p in unit.parameters()}
        return outline(parameter, names.get(id(parameter), unit.name), self)


class Unit:
    """Parameters that move together: their segments, their life, and what is on its way for them."""

    def __init__(self, spec: UnitSpec, segments: list[Segment], store: DeviceStore, modules: list[nn.Module]) -> None:
        self.spec = spec
        self.name = spec.name
        self.segments = segments
        self.trainable = [segment for segment in segments if segment.spec.trainable]
        self.modules = modules
        self.split = any(segment.split for segment in segments)
        self.life = Life.GATHERED
        self.pinned_here = False  # it was engine.gathered() that gathered it
        self.pins = 0  # engine.gathered() holds the unit this many times over
        self.running = 0  # forwards of its modules that are under way
        self.aside = False  # a backward reached it by another way than its outputs
        self.filling: list[Pending] = []
        self._lending: list[Callable[[], None]] = []  # to wait until the others have read what they need of this rank
        # gradients
        self.resting: GradientBuffer | None = None  # over grads itself, where they are not split
        self.incoming: GradientBuffer | None = None
        self.waiting: list[tuple[int, int, Tensor]] = []  # gradients that came while there was no room for incoming
        self.reducing: list[Pending] = []
        self.reduced = False  # grads already hold what an earlier reduction of this step gave
        self.extra: list[Tensor] | None = None  # scattered after grads were summed over all axes; joins them when it is
        self.summed = False  # grads already hold a sum over all axes, in a layout that needs two reductions for it
        self.seen: set[tuple[int, int]] = set()  # parameters whose gradient came in this backward
        self.used = [[False] * len(s.parameters) for s in self.trainable]
        self._shown: list[nn.Parameter] = []  # parameters whose .grad is a view of the resting buffer
        self.num_trainable = sum(len(s.parameters) for s in self.trainable)
        self.replaced = False  # the model changed, and its parameters are other units' now
        self.closed = False  # its engine is: what is split stays so
        self._store = store
        self.on_touch: Callable[[], bool] | None = None  # gathers the unit if a pass is under way
        self.outlines = False  # `detach()` of a parameter that is freed tells its shape instead of raising
        self._touch = _Touch(self)

    def storages(self) -> set[int]:
        """What identifies the memory of the flats."""
        return {segment.flat.untyped_storage()._cdata for segment in self.segments}

    @property
    def version(self) -> int:
        """Changes when a parameter's values are changed, but not when the flat is freed and filled again."""
        return sum(parameter._version for segment in self.segments for parameter in segment.parameters)

    # -- life

    def touch(self) -> bool:
        """A parameter is read while it is freed; whether its values are there now."""
        return self.life is Life.GATHERED or (self.on_touch is not None and self.on_touch())

    def begin_gather(self) -> None:
        """RESTING -> GATHERING: the flat gets its memory and this rank's shard."""
        self._expect(Life.RESTING)
        for segment in self.segments:
            if segment.split:
                self._store.give(segment.flat)
        self.life = Life.GATHERING

    def end_gather(self, waiter: Waiter) -> None:
        """GATHERING -> GATHERED: the values are there and the parameters may be touched."""
        self._expect(Life.GATHERING)
        for pending in self.filling:
            pending.arrive(waiter)
        self._lending, self.filling = [partial(pending.wait, waiter) for pending in self.filling], []
        self.open()
        self.life = Life.GATHERED

    def settle(self) -> None:
        """Waits until no other rank reads from this one what the last gather gave."""
        while self._lending:
            self._lending.pop()()

    def release(self) -> None:
        """GATHERED -> RESTING: the parameters are sealed and the flat's memory is given back."""
        self._expect(Life.GATHERED)
        self.settle()
        for segment in self.segments:
            if segment.split:
                for slot, parameter in zip(segment.spec.slots, segment.parameters, strict=True):
                    seal(parameter, slot.name, self._touch)
                # A backward that reads the values without asking for them first must not find freed memory: it sees a
                # version that is not the one it saved, and autograd raises. ``open`` takes this back.
                torch.autograd.graph.increment_version(segment.parameters)
                self._store.take_back(segment.flat)
        self.life = Life.RESTING

    def _expect(self, life: Life) -> None:
        if self.life is not life:
            raise UsageError(
                f"unit {self.name!r} is {self.life.name} ({self.life.value}) where it must be {life.name}: "
                "call engine.reset() if an earlier pass ended in an exception."
            )

    def open(self) -> None:
        for segment in self.segments:
            if segment.split:
                for parameter in segment.parameters:
                    unseal(parameter)
                if self.life is Life.GATHERING:
                    _take_back_version(segment.parameters)

    def check_current(self) -> None:
        """A backward arrives.

        Raises:
            UsageError: its forward was that of a model that has changed since.
        """
        if self.replaced:
            raise UsageError(
                f"backward reached {self.name!r} through a forward that ran before the structure of the model changed: "
                "call backward before the change, or forward after it."
            )

    # -- gradients

    def accept(self, segment: int, slot: int, grad: Tensor) -> None:
        """Takes one gradient into the buffer that the next reduction sends, making it if need be."""
        scale = self.trainable[segment].factor
        if self.resting is not None and not self.reduced:
            self.resting.add(segment, slot, grad, scale)
            return
        if self.incoming is None:
            self.incoming = self.new_buffer()
        self.incoming.add(segment, slot, grad, scale)

    def flush(self) -> None:
        """At the end of a pass: no gradient waits to be copied."""
        for gradients in (self.resting, self.incoming):
            if gradients is not None:
                gradients.flush()

    def accept_waiting(self) -> None:
        """Takes the gradients that had to wait; each is given back as soon as it is copied."""
        while self.waiting:
            self.accept(*self.waiting.pop(0))

    @property
    def has_unsent(self) -> bool:
        """Whether gradients are here that no reduction has taken."""
        return self.incoming is not None or bool(self.waiting)

    def new_buffer(self) -> GradientBuffer:
        """What gradients are copied into in the dtype in which they are sent."""
        flats = [self._store.empty(s.spec.length, s.dtypes["reduce"]) for s in self.trainable]
        return GradientBuffer(self.trainable, flats)

    def end_reduce(self, waiter: Waiter) -> None:
        """The sums are in ``grads``; the buffers they came from are given back."""
        self._drain(self.reducing, waiter)

    def show_gradients(self) -> None:
        """Where a rank has all gradients, users find them where PyTorch puts them."""
        buffer = self.resting
        if buffer is None or any(
            s.dtype != flat.dtype or s.unscale != 1.0 for s, flat in zip(self.trainable, buffer.flats, strict=True)
        ):
            return
        for segment, views, touched in zip(self.trainable, buffer.views, buffer.touched, strict=True):
            for slot, (parameter, view, was) in enumerate(zip(segment.parameters, views, touched, strict=True)):
                if was:
                    parameter.grad = segment.adopted.get(slot, view)
                    self._shown.append(parameter)

    def hide_gradients(self) -> None:
        """Before gradients come: what is shown is the buffer itself, and autograd would add into it by itself."""
        for parameter in self._shown:
            parameter.grad = None
        self._shown.clear()

    def forget_gradients(self) -> None:
        """As before the first backward of a step."""
        if any(segment.adopted for segment in self.trainable):  # what is shown is all that keeps them
            self.hide_gradients()
        self.incoming = self.extra = None
        self.waiting.clear()
        self.reduced = self.summed = False
        self.seen.clear()
        for used in self.used:
            used[:] = [False] * len(used)
        if self.resting is not None:
            self.resting.clear()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for segment in self.segments:
            for slot, parameter in zip(segment.spec.slots, segment.parameters, strict=True):
                yield slot.name, parameter

    @staticmethod
    def _drain(pending: list[Pending], waiter: Waiter) -> None:
        while pending:
            pending[0].wait(waiter)
            del pending[0]


def _take_back_version(parameters: Sequence[nn.Parameter]) -> None:
    """One version less: filling a flat again is no change of its values, while updates in between still count."""
    versions = tuple(parameter._version - 1 for parameter in parameters)
    torch._C._autograd._unsafe_set_version_counter(tuple(parameters), versions)  # pyright: ignore


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


def rest_itemsize(layout: Layout) -> int:
    """Bytes of the narrowest element that a bound layout keeps: what alignment is counted in."""
    return min(ITEMSIZE[cell.dtype] for cell in layout.cells().values())
