"""What autograd saves for backward: moved out of the device behind a forward, and back ahead of backward; and counted.

A *frame* is one forward of one module. What autograd saves in it is copied to a store, each storage once however many
operations save views of it, and kept on the device until the forward is over. In backward the first tensor that is
asked for brings back the frame, and begins to bring back the one before it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from shardfold.freed import apart
from shardfold.hooks import in_backward, inside_checkpoint, tensors_in, top_saved_hooks
from shardfold.report import SavedReport, SavedRow
from shardfold.stores.disk import DiskStore
from shardfold.stores.host import HostStore
from shardfold.unit import Unit

__all__ = ["Movers", "Tally", "counted"]

ROOT = "(root)"

_untraced: Any = torch.compiler.disable  # torch.compile looks into what a forward that it does not trace calls

SHARE = 4
"""A storage is copied as a whole if a tensor that is saved has this part of it or more: others may save the rest."""


class Copy(Protocol):
    """A copy in a store."""

    def fetch(self) -> None: ...
    def get(self) -> Tensor: ...


class Tally:
    """Bytes of what was moved: on the ``device`` now and at most (``peak``), and ``outside``, all forwards together."""

    def __init__(self) -> None:
        self.device = self.peak = self.outside = 0

    def arrive(self, num_bytes: int) -> None:
        self.device += num_bytes
        self.peak = max(self.peak, self.device)


class _Entry:
    """One storage, or a part of it, that is away: ``flat`` is contiguous."""

    def __init__(self, tally: Tally, flat: Tensor, copy: Copy) -> None:
        self._tally, self._copy, self.nbytes = tally, copy, flat.nbytes
        self._back: Tensor | None = None
        self._asked = False
        self.pieces = self._given = 0
        tally.outside += self.nbytes

    def fetch(self) -> None:
        if self._back is None and not self._asked:
            self._asked = True
            self._tally.arrive(self.nbytes)
            self._copy.fetch()

    def get(self) -> Tensor:
        self.fetch()
        if self._back is None:
            self._back = self._copy.get()
        back = self._back
        self._given += 1
        if self._given % self.pieces == 0:  # all that was saved has been asked for
            self._forget()
        return back

    def _forget(self) -> None:
        if self._asked:
            self._tally.device -= self.nbytes
        self._back, self._asked = None, False

    def __del__(self) -> None:
        self._forget()
        self._tally.outside -= self.nbytes


class _Piece(NamedTuple):
    """What is saved in place of a tensor."""

    frame: _Frame
    entry: _Entry
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Elsewhere(NamedTuple):
    """What stays where it is, or goes where hooks around say."""

    packed: Any
    unpack: Callable[[Any], Tensor] | None


class _Known(NamedTuple):
    """A tensor that a module was called with, and what was moved of its memory. While it lives, its memory is no
    other's: what several modules are called with is moved once."""

    tensor: weakref.ref[Tensor]
    entries: weakref.WeakValueDictionary[Any, _Entry]


class _Frame:
    """One forward of one module."""

    def __init__(self, movers: Movers, store: Any, smallest: int) -> None:
        self._movers, self._store, self._smallest = movers, store, smallest
        self._outer = top_saved_hooks()
        self._before = movers.last
        self._entries: list[_Entry] = []
        self._made: dict[Any, _Entry] = {}  # while the sources live
        self._sources: list[Tensor] = []
        self._num_bytes = self._pieces = self._given = 0
        self._fetched = False

    @_untraced
    def pack(self, tensor: Tensor) -> _Piece | _Elsewhere:
        with torch.no_grad(), apart():
            if not self._movers.moves(tensor, self._smallest):
                pack, unpack = self._outer or (None, None)
                return _Elsewhere(tensor if pack is None else pack(tensor), unpack)
            storage = tensor.untyped_storage()
            whole = tensor.nbytes * SHARE >= storage.nbytes() and storage.nbytes() % tensor.itemsize == 0
            key: Any = (storage._cdata, tensor._version, tensor.dtype)
            if not whole:
                key = (*key, tensor.storage_offset(), tensor.shape, tensor.stride())
            entry = self._entry(key, tensor, whole)
            entry.pieces += 1
            self._pieces += 1
            if whole:
                return _Piece(self, entry, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
            return _Piece(self, entry, tensor.shape, tensor.contiguous().stride(), 0)

    def _entry(self, key: Any, tensor: Tensor, whole: bool) -> _Entry:
        known = self._movers.known(key[0])
        entry = self._made.get(key) or (known.get(key) if known is not None else None)
        if entry is not None:
            return entry
        if whole:
            length = tensor.untyped_storage().nbytes() // tensor.itemsize
            flat = tensor.detach().as_strided((length,), (1,), 0)
        else:
            flat = tensor.detach().contiguous().view(-1)
        entry = _Entry(self._movers.tally, flat, self._store.put(flat))
        self._made[key] = entry
        if known is not None:
            known[key] = entry
        self._entries.append(entry)
        self._sources.append(tensor)
        self._num_bytes += entry.nbytes
        self._movers.tally.arrive(entry.nbytes)
        return entry

    @_untraced
    def unpack(self, packed: _Piece | _Elsewhere) -> Tensor:
        if isinstance(packed, _Elsewhere):
            return packed.packed if packed.unpack is None else packed.unpack(packed.packed)
        with torch.no_grad(), apart():
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
        """The forward is over: what was copied may be given back; its bytes."""
        self._made.clear()
        self._sources.clear()
        self._movers.tally.device -= self._num_bytes
        return self._num_bytes


class Movers:
    """Moves what autograd saves in forwards of one model.

    Attributes:
        tally: of all of it.
        moved: bytes that forwards of each module moved since they are counted, by ``id``.
        last: the frame before the next.
        counter: while forwards are counted.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self.tally = Tally()
        self.moved: dict[int, int] = {}
        self.last: weakref.ref[_Frame] | None = None
        self.counter: _Counter | None = None
        self._stores: dict[tuple[str, str | None], Any] = {}
        self._stays: set[int] = set()
        self._known: dict[int, _Known] = {}

    def follow(self, flats: Sequence[int]) -> None:
        """The memory of parameters, whose comings and goings are a layout's, and of buffers is not moved."""
        self._stays = {*flats, *(buffer.untyped_storage()._cdata for buffer in self._model.buffers())}

    def moves(self, tensor: Tensor, smallest: int) -> bool:
        """Whether a tensor that is saved is moved."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.nbytes == 0 or tensor.nbytes < smallest:
            return False
        return tensor.untyped_storage()._cdata not in self._stays

    def known(self, storage: int) -> weakref.WeakValueDictionary[Any, _Entry] | None:
        """What was moved of a storage that modules are called with."""
        found = self._known.get(storage)
        return found.entries if found is not None and found.tensor() is not None else None

    @_untraced
    def begin(self, mode: str, folder: str | None, smallest: int, inputs: Any) -> Any:
        """From now on what autograd saves is moved: to ``"host"`` memory, or to ``"disk"`` in that folder.

        Returns:
            What :meth:`end` takes; None inside of a checkpoint, to which it is left.
        """
        if inside_checkpoint():
            return None
        store = self._stores.get((mode, folder))
        if store is None:
            store = DiskStore(self._device, folder) if mode == "disk" else HostStore(self._device)
            self._stores[mode, folder] = store
        self._meet(tensors_in(inputs))
        frame = _Frame(self, store, smallest)
        self.last = weakref.ref(frame)
        hooks = torch.autograd.graph.saved_tensors_hooks(frame.pack, frame.unpack)
        hooks.__enter__()
        return frame, hooks

    @_untraced
    def end(self, begun: tuple[_Frame, Any], module: nn.Module) -> None:
        """The forward of a module is over."""
        frame, hooks = begun
        hooks.__exit__()
        self.moved[id(module)] = self.moved.get(id(module), 0) + frame.leave()

    def _meet(self, tensors: Sequence[Tensor]) -> None:
        self._known = {key: known for key, known in self._known.items() if known.tensor() is not None}
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()._cdata
                known = self._known.get(storage)
                if known is None or known.tensor() is not tensor:
                    self._known[storage] = _Known(weakref.ref(tensor), weakref.WeakValueDictionary())

    def close(self) -> None:
        """Gives back what stores hold."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()


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
    report, counter = SavedReport(), _Counter({s for unit in units for s in unit.storages()}, model)
    tally = movers.tally
    tally.peak = tally.device
    movers.moved.clear()
    movers.counter = counter
    root = next((unit.name for unit in units if unit.spec.root), ROOT)
    inner = [(unit, module) for unit in units if not unit.spec.root for module in unit.modules]
    for name, module in [(root, model), *((unit.name, module) for unit, module in inner)]:
        counter.watch(name, module)
    try:
        yield report
    finally:
        movers.counter = None
        counter.close()
        outside: dict[str, int] = {}
        owner = {id(part): unit.name for unit, module in inner for part in module.modules()}
        for key, num_bytes in movers.moved.items():
            name = owner.get(key, root)
            outside[name] = outside.get(name, 0) + num_bytes
        report.peak = tally.peak
        report.rows = tuple(
            SavedRow(name, modes.get(name, "keep"), counter.bytes.get(name, 0), outside.get(name, 0))
            for name in dict.fromkeys([root, *(unit.name for unit, _ in inner)])
        )


class _Counter:
    """Bytes of storages that autograd saves, each once, by where it does."""

    def __init__(self, flats: set[int], model: nn.Module) -> None:
        self.bytes: dict[str, int] = {}
        self._seen = flats | {buffer.untyped_storage()._cdata for buffer in model.buffers()}
        self._handles: list[Any] = []
        self._open: list[tuple[nn.Module, Any]] = []

    def watch(self, name: str, module: nn.Module) -> None:
        """What is saved in forwards of a module, and not in that of one watched inside of it, counts for ``name``."""

        def before(module: nn.Module, args: Any) -> None:
            if not in_backward():
                hooks = torch.autograd.graph.saved_tensors_hooks(*self._hooks(name))
                hooks.__enter__()
                self._open.append((module, hooks))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._open and self._open[-1][0] is module and not in_backward():
                self._open.pop()[1].__exit__()

        self._handles.append(module.register_forward_pre_hook(_untraced(before)))
        self._handles.append(module.register_forward_hook(_untraced(after), always_call=True))

    def count(self, name: str, tensor: Tensor) -> None:
        """``tensor`` is kept for backward in forwards of ``name``."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.bytes[name] = self.bytes.get(name, 0) + storage.nbytes()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hooks(self, name: str) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        outer = top_saved_hooks()
        recomputed = outer is not None and outer[0].__module__ == "torch.utils.checkpoint"

        def pack(tensor: Tensor) -> Any:
            if not recomputed:
                self.count(name, tensor)
            return tensor if outer is None else outer[0](tensor)

        return _untraced(pack), _untraced((lambda packed: packed) if outer is None else outer[1])
