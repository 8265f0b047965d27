"""What autograd saves for backward: moved out of the device behind a forward, and back ahead of backward; and counted.

A *frame* is one forward of one module. What autograd saves in it is copied to a tier, each storage once however many
operations save views of it, and kept on the device until the forward is over. In backward the first tensor that is
asked for brings back the frame, and begins to bring back the one before it.

A copy stands for what is saved later of the same version, and of the same counter of versions: views of
``unsafe_chunk``, which recurrent modules write into, have one of their own each, and their versions say nothing of one
another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardfold import accelerator
from shardfold.activations._encoded import EncodedRegion, EncodedTier
from shardfold.plan.layout import ENCODED
from shardfold.plan.report import SavedReport, SavedRow
from shardfold.sharding.autograd import Kept, inside_checkpoint, keep, tensors_in
from shardfold.sharding.partition import ROOT
from shardfold.sharding.unit import Unit
from shardfold.tiers.disk import DiskRegion
from shardfold.tiers.tier import MemoryTier, Region
from shardfold.tiers.tiers import Tiers
from shardfold.torch_internals import (
    DispatchMode,
    counted_together,
    in_backward,
    storage_key,
    top_saved_hooks,
    untraced,
    without_user_modes,
)

__all__ = ["Counter", "Movers", "Results", "Tally", "counted", "held"]


PROBE = 4 * 1024 * 1024
"""Bytes of a copy by which a tier is timed."""

SHARE = 4
"""A storage is copied as a whole if a tensor that is saved has this part of it or more: others may save the rest."""


class Tally:
    """Bytes of what was moved: on the ``device`` now and at most (``peak``), and ``outside``.

    Args:
        whole: what this is a part of.
    """

    def __init__(self, whole: Tally | None = None) -> None:
        self.device = self.peak = self.outside = 0
        self._whole = whole
        self._told: Callable[[], None] = lambda: None

    def tell(self, told: Callable[[], None]) -> None:
        """``told`` is called from now on when more, or less, is on the device."""
        self._told = told

    def forget_peak(self) -> None:
        """The most is taken of what comes from now on."""
        self.peak = self.device

    def arrive(self, num_bytes: int) -> None:
        """So much more is on the device, or less."""
        self.device += num_bytes
        self.peak = max(self.peak, self.device)
        if self._whole is not None:
            self._whole.arrive(num_bytes)
        self._told()

    def rest(self, num_bytes: int) -> None:
        """So much more is outside, or less."""
        self.outside += num_bytes
        if self._whole is not None:
            self._whole.rest(num_bytes)


class _Entry:
    """One storage, or a part of it, that is away in a region."""

    def __init__(self, tally: Tally, region: Region | EncodedRegion) -> None:
        self._tally, self.nbytes = tally, region.nbytes
        self._region: Any = region
        self._back: Tensor | None = None
        self._asked = False
        self._pieces = self._given = 0
        self._rest(self.nbytes)

    def add_piece(self) -> None:
        """Another tensor is saved that is a part of it."""
        self._pieces += 1

    def fetch(self) -> None:
        if self._back is None and not self._asked:
            self._asked = True
            self._tally.arrive(self.nbytes)
            self._region.fetch()

    def get(self) -> Tensor:
        if self._back is None:
            self._back = self._bring()
        back = self._back
        self._given += 1
        if self._given % self._pieces == 0:  # all that was saved has been asked for
            self._forget()
        return back

    def _rest(self, num_bytes: int) -> None:
        self._tally.rest(num_bytes)

    def _bring(self) -> Tensor:
        self.fetch()
        return self._region.get()

    def _forget(self) -> None:
        if self._asked:
            self._tally.arrive(-self.nbytes)
        self._back, self._asked = None, False

    def __del__(self) -> None:
        self._forget()
        self._rest(-self.nbytes)
        self._region.drop()


class _Coded(_Entry):
    """One that stays on the device in fewer bits: it is decoded when it is asked for, and not ahead of that."""

    def __init__(self, tally: Tally, region: EncodedRegion, num_bytes: int) -> None:
        super().__init__(tally, region)
        self._decoded = num_bytes

    def fetch(self) -> None:
        """Nothing: it is here."""

    def _rest(self, num_bytes: int) -> None:
        self._tally.arrive(num_bytes)

    def _bring(self) -> Tensor:
        back = self._region.get()
        self._tally.arrive(self._decoded)
        return back

    def _forget(self) -> None:
        if self._back is not None:
            self._tally.arrive(-self._decoded)
        self._back = None


class _Offloaded(NamedTuple):
    """What is saved in place of a tensor."""

    frame: _Frame
    entry: _Entry
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Elsewhere(NamedTuple):
    """What stays where it is, or goes where hooks around say."""

    packed: Any
    unpack: Callable[[Any], Tensor]


class _Made(NamedTuple):
    """A copy, and a tensor that it was made of."""

    source: Tensor
    entry: _Entry


class _Known(NamedTuple):
    """A tensor that a module was called with, and what was moved of its memory, of its own counter of versions. While
    it lives, its memory is no other's: what several modules are called with is moved once."""

    tensor: weakref.ref[Tensor]
    entries: weakref.WeakValueDictionary[Any, _Entry]


class _Frame:
    """One forward of one module."""

    def __init__(self, movers: Movers, tally: Tally, tier: MemoryTier | EncodedTier, smallest: int) -> None:
        self._movers, self._tally, self._tier, self._smallest = movers, tally, tier, smallest
        self._outer = top_saved_hooks()
        self._before = movers.last
        self._entries: list[_Entry] = []
        self._made: dict[Any, list[_Made]] = {}  # while the sources live
        self._num_bytes = self._rests = self._pieces = self._given = 0
        self._fetched = False
        self.encodes = isinstance(tier, EncodedTier)

    @untraced
    def pack(self, tensor: Tensor) -> _Offloaded | _Elsewhere:
        with torch.no_grad(), self._movers.apart():
            if not self._movers.moves(tensor, self._smallest) or not self._encodes(tensor):
                pack, unpack = self._outer or (keep, Kept.get)
                return _Elsewhere(pack(tensor), unpack)
            storage = tensor.untyped_storage()
            # What is no view and has a part of its memory counts its changes by itself: the rest is other tensors'.
            share = SHARE if tensor._is_view() and not self.encodes else 1
            whole = tensor.nbytes * share >= storage.nbytes() and storage.nbytes() % tensor.itemsize == 0
            key: Any = (storage_key(storage), tensor._version, tensor.dtype)
            if not whole:
                key = (*key, tensor.storage_offset(), tensor.shape, tensor.stride())
            entry = self._entry(key, tensor, whole)
            entry.add_piece()
            self._pieces += 1
            if whole:
                return _Offloaded(self, entry, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return _Offloaded(self, entry, tensor.shape, tensor.contiguous().stride(), 0)

    def _encodes(self, tensor: Tensor) -> bool:
        """False: it would be, in a tier of fewer bits, as many of them."""
        return not isinstance(self._tier, EncodedTier) or self._tier.takes(tensor)

    def _entry(self, key: Any, tensor: Tensor, whole: bool) -> _Entry:
        for made in self._made.get(key, ()):
            if counted_together(made.source, tensor):
                return made.entry
        known = self._movers.known(key[0], tensor)
        if known is not None and (entry := known.get(key)) is not None:
            return entry
        if whole:
            length = tensor.untyped_storage().nbytes() // tensor.itemsize
            flat = tensor.detach().as_strided((length,), (1,), 0)
        else:
            flat = tensor.detach().contiguous().view(-1)
        region = self._tier.allocate(flat.shape, flat.dtype)
        region.store(flat)
        if isinstance(region, EncodedRegion):
            entry = _Coded(self._tally, region, flat.nbytes)
        else:
            entry = _Entry(self._tally, region)
        self._made.setdefault(key, []).append(_Made(tensor, entry))
        if known is not None:
            known[key] = entry
        self._entries.append(entry)
        self._num_bytes += flat.nbytes
        self._rests += entry.nbytes
        self._tally.arrive(flat.nbytes)
        return entry

    @untraced
    def unpack(self, packed: _Offloaded | _Elsewhere) -> Tensor:
        if isinstance(packed, _Elsewhere):
            return packed.unpack(packed.packed)
        with torch.no_grad(), self._movers.apart():
            if not self._given:
                self._fetch()
                if self._before is not None and (before := self._before()) is not None:
                    before._fetch()
            self._given += 1
            if self._given == self._pieces:  # of this backward; the graph may be kept for another
                self._given, self._fetched = 0, False
            return packed.entry.get().as_strided(packed.size, packed.stride, packed.offset)

    def _fetch(self) -> None:
        if not self._fetched:
            self._fetched = True
            for entry in self._entries:
                entry.fetch()

    def leave(self) -> int:
        """The forward is over: what was copied may be given back; the bytes of the copies."""
        self._made.clear()
        self._tally.arrive(-self._num_bytes)
        return self._rests


class Movers:
    """Moves what autograd saves in forwards of one model.

    Attributes:
        tally: of all of it.
        parts: of each unit, by its name.
        moved: bytes that forwards moved since they are counted, by the name of the unit.
        encoded: those that they kept in fewer bits.
        last: the frame before the next.
        counter: while forwards are counted.
        stays: storages that are not moved.
        kinds: types of tensors that are moved.
    """

    kinds: tuple[type, ...] = (Tensor,)

    def __init__(self, model: nn.Module, tiers: Tiers) -> None:
        self._model, self._tiers, self._device = model, tiers, tiers.device.device
        self.tally = Tally()
        self.parts: dict[str, Tally] = {}
        self.moved: dict[str, int] = {}
        self.encoded: dict[str, int] = {}
        self.last: weakref.ref[_Frame] | None = None
        self.counter: Counter | None = None
        self.stays: set[int] = set()
        self._known: dict[int, _Known] = {}

    def count(self, counter: Counter | None) -> None:
        """``counter`` counts from now on what forwards save, and what they move is counted; None: no more."""
        self.counter = counter
        if counter is not None:
            self.moved.clear()
            self.encoded.clear()
            self.tally.forget_peak()

    def apart(self) -> AbstractContextManager[object]:
        """Inside, modes of the user's do not see what is moved."""
        return without_user_modes()

    def follow(self, flats: Sequence[int]) -> None:
        """The memory of parameters, whose comings and goings are a layout's, and of buffers is not moved."""
        self.stays = {*flats, *(storage_key(buffer.untyped_storage()) for buffer in self._model.buffers())}

    def moves(self, tensor: Tensor, smallest: int) -> bool:
        """Whether a tensor that is saved is moved."""
        if type(tensor) not in self.kinds or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.nbytes == 0 or tensor.nbytes < smallest:
            return False
        return storage_key(tensor.untyped_storage()) not in self.stays

    def known(self, storage: int, tensor: Tensor) -> weakref.WeakValueDictionary[Any, _Entry] | None:
        """What was moved of a storage that modules are called with, and of which ``tensor`` is a view."""
        found = self._known.get(storage)
        given = found.tensor() if found is not None else None
        return found.entries if found is not None and given is not None and counted_together(given, tensor) else None

    @untraced
    def begin(self, unit: str, mode: str, folder: str | None, smallest: int, inputs: Any) -> Any:
        """From now on what autograd saves for a unit is moved: to ``"host"`` memory, or to ``"disk"`` in that folder;
        or kept in fewer bits.

        Returns:
            What :meth:`end` takes; None inside of a checkpoint, to which it is left.
        """
        if inside_checkpoint():
            return None
        tier = EncodedTier(mode) if mode in ENCODED else self._tiers.named(mode, folder)
        self._meet(tensors_in(inputs))
        frame = _Frame(self, self.parts.setdefault(unit, Tally(self.tally)), tier, smallest)
        self.last = weakref.ref(frame)
        hooks = torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack)
        hooks.__enter__()
        return frame, hooks

    def rate(self, mode: str, folder: str | None) -> tuple[float, float, bool]:
        """Milliseconds per byte, out of the device and back, as a copy takes them now; and whether that runs beside the
        computation."""
        tier = self._tiers.named(mode, folder)
        flat = torch.zeros(PROBE, dtype=torch.uint8, device=self._device)
        seconds: list[tuple[float, float]] = []
        for _ in range(3):  # the first is slow
            begun = self._now()
            region: Region = tier.allocate(flat.shape, flat.dtype)
            region.store(flat)
            if isinstance(region, DiskRegion):
                region.flush()
            gone = self._now()
            region.get()
            seconds.append((gone - begun, self._now() - gone))
        out, back = (1000 * min(times) / PROBE for times in zip(*seconds, strict=True))
        return out, back, mode == "disk" or accelerator.has_streams(self._device)

    def _now(self) -> float:
        accelerator.synchronize(self._device)
        return perf_counter()

    @untraced
    def end(self, begun: tuple[_Frame, Any], unit: str) -> None:
        """The forward is over."""
        frame, hooks = begun
        hooks.__exit__()
        count = self.encoded if frame.encodes else self.moved
        count[unit] = count.get(unit, 0) + frame.leave()

    def _meet(self, tensors: Sequence[Tensor]) -> None:
        self._known = {key: known for key, known in self._known.items() if known.tensor() is not None}
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = storage_key(tensor.untyped_storage())
                known = self._known.get(storage)
                if known is None or known.tensor() is not tensor:
                    self._known[storage] = _Known(weakref.ref(tensor), weakref.WeakValueDictionary())


# -- counting


@contextmanager
def counted(model: nn.Module, units: Sequence[Unit], modes: Mapping[str, str], movers: Movers) -> Iterator[SavedReport]:
    """Inside, what autograd saves in forwards of a model is counted; the report is complete at the end.

    Args:
        model: the whole model.
        units: of it.
        modes: what happens in a unit, by its name.
        movers: of the model.
    """
    report = SavedReport()
    counter = Counter({s for unit in units for s in unit.storages()}, model)
    movers.count(counter)
    names = _names(units)
    inner = [(unit, module) for unit in units if not unit.spec.root for module in unit.modules]
    for name, module in [(names[0], model), *((unit.name, module) for unit, module in inner)]:
        counter.watch(name, module)
    try:
        yield report
    finally:
        movers.count(None)
        counter.close()
        report.peak = movers.tally.peak
        report.rows = tuple(
            SavedRow(
                name,
                modes.get(name, "keep"),
                counter.bytes.get(name, 0) + movers.encoded.get(name, 0),
                movers.moved.get(name, 0),
            )
            for name in names
        )


def held(units: Sequence[Unit], modes: Mapping[str, str], movers: Movers) -> tuple[SavedRow, ...]:
    """What autograd holds now, of units for which it holds anything. What was never moved is known while it is
    :func:`counted`, and of forwards since then."""
    kept = movers.counter.held() if movers.counter is not None else {}
    rows: list[SavedRow] = []
    for name in _names(units):
        moved = movers.parts.get(name) or Tally()
        rows.append(SavedRow(name, modes.get(name, "keep"), kept.get(name, 0) + moved.device, moved.outside))
    return tuple(row for row in rows if row.device or row.outside)


def _names(units: Sequence[Unit]) -> list[str]:
    """The root's name and those of the other units with modules."""
    root = next((unit.name for unit in units if unit.spec.root), ROOT)
    return [root, *(unit.name for unit in units if not unit.spec.root and unit.modules)]


class _CountedTensor:
    """What is saved in place of a tensor while it is counted. It lives as long as autograd holds it."""

    def __init__(self, unit: str, storage: int, nbytes: int) -> None:
        self.unit, self.storage, self.nbytes = unit, storage, nbytes
        self.packed: Any = None

    def hold(self, packed: Any) -> None:
        """What hooks around keep of the tensor."""
        self.packed = packed


class Counter:
    """Bytes of storages that autograd saves, each once while it is held, by where it does."""

    def __init__(self, flats: set[int], model: nn.Module) -> None:
        self.bytes: dict[str, int] = {}
        self._rest = flats | {storage_key(buffer.untyped_storage()) for buffer in model.buffers()}
        self._saved: weakref.WeakValueDictionary[int, _CountedTensor] = weakref.WeakValueDictionary()  # in their order
        self._last: weakref.WeakValueDictionary[int, _CountedTensor] = weakref.WeakValueDictionary()  # by storage
        self._number = 0
        self._handles: list[Any] = []
        self._open: list[tuple[nn.Module, AbstractContextManager[Any]]] = []

    def watch(self, name: str, module: nn.Module) -> None:
        """What is saved in forwards of a module, and not in that of one watched inside of it, counts for ``name``."""

        def before(module: nn.Module, args: Any) -> None:
            if not in_backward():
                hooks = nullcontext() if inside_checkpoint() else self._hooks(name)
                hooks.__enter__()
                self._open.append((module, hooks))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._open and self._open[-1][0] is module and not in_backward():
                self._open.pop()[1].__exit__(None, None, None)

        self._handles.append(module.register_forward_pre_hook(untraced(before)))
        self._handles.append(module.register_forward_hook(untraced(after), always_call=True))

    def count(self, name: str, tensor: Tensor) -> _CountedTensor:
        """``tensor`` is kept for backward in forwards of ``name``, for as long as the answer lives."""
        storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if storage is None or storage_key(storage) in self._rest:
            return _CountedTensor(name, 0, 0)
        saved = _CountedTensor(name, storage_key(storage), storage.nbytes())
        if saved.storage not in self._last:
            self.bytes[name] = self.bytes.get(name, 0) + saved.nbytes
        self._saved[self._number] = self._last[saved.storage] = saved
        self._number += 1
        return saved

    def held(self) -> dict[str, int]:
        """Bytes that are held now, by unit."""
        found: dict[str, int] = {}
        seen: set[int] = set()
        for saved in list(self._saved.values()):
            if saved.storage not in seen:
                seen.add(saved.storage)
                found[saved.unit] = found.get(saved.unit, 0) + saved.nbytes
        return found

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hooks(self, name: str) -> AbstractContextManager[Any]:
        outer = top_saved_hooks()

        def pack(tensor: Tensor) -> _CountedTensor:
            saved = self.count(name, tensor)  # first: what is around counts it for an outer module
            saved.hold(keep(tensor) if outer is None else outer[0](tensor))
            return saved

        def unpack(saved: _CountedTensor) -> Tensor:
            return saved.packed.get() if outer is None else outer[1](saved.packed)

        return torch.autograd.graph.saved_tensors_hooks(untraced(pack), untraced(unpack))


class Results(DispatchMode):
    """Inside, results of some operations are noted, and whether one of them is changed in place."""

    def __init__(
        self,
        operations: frozenset[Any],
        note: Callable[[Tensor], None],
        changed: Callable[[Any], None] = lambda value: None,
    ) -> None:
        super().__init__()
        self._operations, self._note, self._changed = operations, note, changed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args:
            self._changed(args[0])
        out = func(*args, **(kwargs or {}))
        if func in self._operations:
            for tensor in tensors_in(out):
                self._note(tensor)
        return out
