"""What flows between the pieces of a model: found in one run in which pieces compute shapes only.

A skeleton of the model, made before its parameters are dropped, has parameters without memory; the code around the
pieces runs as it is. A piece's inputs go to the meta device, and what it gives is a placeholder of the same
shape: NaN, one element that stands for all. Which placeholder a later piece's input was made of is followed through
every operation of the code around (:class:`_Origins`), so that skip connections, encoder states and whatever else
crosses several stages is found, and what is made of the inputs alone is not sent at all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from shardfold.errors import ModelError
from shardfold.parallel.expert_parallel import give_shapes
from shardfold.parallel.pipeline.pieces import PipelinePiece
from shardfold.sharding.autograd import outside_inference
from shardfold.torch_internals import DispatchMode, storage_key, tree_flatten, tree_unflatten, version_of

__all__ = [
    "Constant",
    "Made",
    "Passed",
    "PieceCall",
    "PieceTrace",
    "Skeleton",
    "TensorOrigin",
    "TracedResult",
    "is_plain",
    "placeholder",
    "replace_forward",
    "signature",
]


_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
"""Functions that give values to Python and are no operations."""
_WRITTEN = ("refers to a single memory location", "a leaf Variable that requires grad")
"""What PyTorch says of a placeholder that is written into."""


class TensorOrigin(NamedTuple):
    """A tensor that a piece made: the number of the call, and that of the tensor among what it gave. Or, with a call of
    -1, a parameter or a buffer that is read outside of its piece, by its number in ``Skeleton.names``."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Made:
    """A tensor that a piece gives: of which form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Passed:
    """Something that a piece gives back as it got it: the number of that input."""

    number: int


@dataclass(frozen=True)
class Constant:
    """Something that a piece gives and that is no tensor."""

    value: Any


@dataclass(frozen=True)
class PieceCall:
    """One call of a piece.

    Attributes:
        piece: its number.
        reads: the tensors of earlier calls that its inputs were made of.
        spec: how its outputs are nested.
        leaves: what they are.
        saved: bytes that autograd keeps of it for backward, parameters left out.
    """

    piece: int
    reads: frozenset[TensorOrigin]
    spec: Any
    leaves: tuple[Made | Passed | Constant, ...]
    saved: int = 0


@dataclass(frozen=True)
class TracedResult:
    """What a model gives.

    Attributes:
        spec: how it is nested.
        leaves: what is in it.
    """

    spec: Any
    leaves: tuple[Made | Constant, ...]


@dataclass(frozen=True)
class PieceTrace:
    """The calls of pieces in one run.

    Attributes:
        calls: in order.
        result: what the value at the end is.
        end: what the value at the end was made of.
        writes: whether what pieces give is written into: placeholders then have memory of their own.
        written: names of the buffers around the pieces that are written.
    """

    calls: Sequence[PieceCall]
    result: TracedResult
    end: frozenset[TensorOrigin]
    writes: bool
    written: tuple[str, ...]

    def made(self, origin: TensorOrigin) -> Made:
        leaf = self.calls[origin.call].leaves[origin.leaf]
        assert isinstance(leaf, Made)
        return leaf


def placeholder(made: Made, device: torch.device, *, writes: bool = False) -> Tensor:
    """Stands for a tensor that another stage has: one element in the place of all, unless it is written into."""
    value = nan if made.dtype.is_floating_point or made.dtype.is_complex else 0
    if writes:
        return torch.full(made.shape, value, dtype=made.dtype, device=device)
    return torch.full((), value, dtype=made.dtype, device=device).expand(made.shape)


def signature(tree: Any) -> Any:
    """What a trace depends on of the inputs: their structure, shapes and dtypes, and values that are no tensors."""
    leaves, spec = tree_flatten(tree)
    forms = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return str(spec), forms, torch.is_grad_enabled()


class Skeleton:
    """A copy of a model whose pieces have no memory.

    Args:
        model: with all its parameters, on whatever device.
        pieces: of it.
        device: of the placeholders.
        heard: is told behind each call of a piece its number and its arguments, without values.

    Attributes:
        names: of parameters, and behind them of the buffers in pieces.
        around: names of the buffers outside of pieces.

    Raises:
        ModelError: the model cannot be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        pieces: Sequence[PipelinePiece],
        device: torch.device,
        heard: Callable[[int, Any, Any], object] = lambda number, args, kwargs: None,
    ) -> None:
        self._pieces, self._device, self._heard = pieces, device, heard
        inside = {id(b) for piece in pieces for b in piece.module.buffers()}
        memo: dict[int, Any] = {}
        for p in model.parameters():
            hollow = placeholder(Made(tuple(p.shape), p.dtype, False), device)
            memo[id(p)] = nn.Parameter(hollow, requires_grad=p.requires_grad)
        for buffer in model.buffers():
            hollow = placeholder(Made(tuple(buffer.shape), buffer.dtype, False), device)
            memo[id(buffer)] = hollow if id(buffer) in inside else buffer
        try:
            self.module: nn.Module = copy.deepcopy(model, memo)
        except Exception as error:
            raise ModelError(
                "parallel= has an axis of pipeline, which needs a copy of the model without its values, and copying it "
                f"failed ({type(error).__name__}: {error})."
            ) from error
        give_shapes(self.module)
        for number, piece in enumerate(pieces):
            module = self.module.get_submodule(piece.path)
            replace_forward(module, partial(self._call, number, piece.path, module.forward))
        buffers = [name for name, buffer in model.named_buffers() if id(buffer) in inside]
        self.names = [*(name for name, _ in model.named_parameters()), *buffers]
        self.around = [name for name, buffer in model.named_buffers() if id(buffer) not in inside]
        self._inside = False
        self._begin()

    def _begin(self, *, writes: bool = False) -> None:
        self._calls: list[PieceCall] = []
        self._writes, self._origins = writes, _Origins(lambda: self._inside)

    def take_flags(self, flags: Mapping[str, bool]) -> None:
        """Whether parameters are trained, by name; those of others are as they were."""
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(flags.get(name, parameter.requires_grad))

    def run(self, call: Callable[[nn.Module], Any], *, training: bool) -> PieceTrace:
        """What ``call`` of the model makes pieces do.

        Raises:
            ModelError: the code around the pieces cannot run on placeholders.
        """
        self.module.train(training)
        made: Any = None
        written: tuple[str, ...] = ()
        around = self._buffers_around()
        try:
            for writes in (False, True):
                self._begin(writes=writes)
                held = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
                for number, name in enumerate(self.names):
                    self._origins.begin(held[name], TensorOrigin(-1, number))
                try:
                    with outside_inference(), self._origins, _Reads(self._origins):
                        made = call(self.module)
                    break
                except RuntimeError as error:
                    if writes or not any(text in str(error) for text in _WRITTEN):
                        raise
        except Exception as error:
            at = "before its first piece"
            if self._calls:
                at = f"behind the piece {self._pieces[self._calls[-1].piece].path!r}"
            raise ModelError(
                "a run of the model in which pieces compute shapes only, to find what its stages have to send, failed "
                f"{at} ({type(error).__name__}: {error}): code between pieces, and that of the "
                "loss, cannot ask for values of what pieces give, and pieces run on the meta device."
            ) from error
        finally:
            written = self._put_back(around)
        trace = PieceTrace(self._calls, _result(made), self._origins.of(_tensors(made)), self._writes, written)
        self._begin()
        return trace

    def _buffers_around(self) -> list[tuple[str, Any, Tensor, Tensor, int | None]]:
        """Buffers around the pieces, which are the model's own: name, place, object, values and version."""
        found: list[tuple[str, Any, Tensor, Tensor, int | None]] = []
        for name in self.around:
            place, _, own = name.rpartition(".")
            held = self.module.get_submodule(place)._buffers
            if (buffer := held.get(own)) is not None:
                found.append((name, held, buffer, buffer.clone(), version_of(buffer)))
        return found

    def _put_back(self, around: Sequence[tuple[str, Any, Tensor, Tensor, int | None]]) -> tuple[str, ...]:
        """A run that finds shapes leaves no trace in the model; gives the names of what it has written."""
        written: list[str] = []
        for name, held, buffer, values, version in around:
            own = name.rpartition(".")[2]
            if held.get(own) is not buffer or version_of(buffer) != version:
                written.append(name)
                held[own] = buffer
                with torch.no_grad():
                    buffer.copy_(values)
        return tuple(written)

    def _call(self, number: int, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # a piece inside of another, which shares it
            return forward(*args, **kwargs)
        given, spec = tree_flatten((args, kwargs))
        reads = self._origins.of(x for x in given if isinstance(x, Tensor))
        hollow: dict[int, Any] = {id(x): _hollow(x) for x in given}
        before = {id(x): x._version for x in hollow.values() if isinstance(x, Tensor)}
        args, kwargs = tree_unflatten([hollow[id(x)] for x in given], spec)
        self._inside = True
        try:
            saved = _SavedBytes()
            with _on_meta(self.module.get_submodule(path)), saved:
                out = forward(*args, **kwargs)
        finally:
            self._inside = False
        self._writes |= any(before.get(id(x), 0) != getattr(x, "_version", 0) for x in hollow.values())
        leaves, spec = tree_flatten(out)
        call, outputs, at = len(self._calls), [], {id(hollow[id(x)]): i for i, x in enumerate(given)}
        found: list[Made | Passed | Constant] = []
        for leaf, value in enumerate(leaves):
            same = at.get(id(value)) if not is_plain(value) else None
            if same is not None and before.get(id(value), 0) == getattr(value, "_version", 0):
                found.append(Passed(same))
                outputs.append(given[same])
            elif isinstance(value, Tensor):
                made = Made(tuple(value.shape), value.dtype, value.requires_grad)
                found.append(made)
                stands = placeholder(made, self._device, writes=self._writes)
                stands.requires_grad_(made.requires_grad)
                outputs.append(stands.clone() if self._writes else stands)  # a leaf is not written into
                self._origins.begin(outputs[-1], TensorOrigin(call, leaf))
            elif is_plain(value):
                found.append(Constant(value))
                outputs.append(value)
            else:
                raise ModelError(f"the piece {path!r} gives a {type(value).__name__}, which no stage can send.")
        self._calls.append(PieceCall(number, reads, spec, tuple(found), saved.nbytes))
        self._heard(number, args, kwargs)
        return tree_unflatten(outputs, spec)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Calls of the module run ``forward`` from now on, inside of its hooks."""
    module.forward = forward


def _result(given: Any) -> TracedResult:
    leaves, spec = tree_flatten(given)
    return TracedResult(
        spec, tuple(Made(tuple(x.shape), x.dtype, False) if isinstance(x, Tensor) else Constant(x) for x in leaves)
    )


class _SavedBytes(saved_tensors_hooks):
    """Counts bytes of what autograd saves inside, each storage once."""

    def __init__(self) -> None:
        super().__init__(self._pack, lambda tensor: tensor)
        self._storages: dict[int, Any] = {}

    def _pack(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            self._storages[storage_key(storage)] = storage
        return tensor

    @property
    def nbytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


@contextmanager
def _on_meta(module: nn.Module) -> Iterator[None]:
    """Inside, its parameters and buffers are on the meta device."""
    before: list[tuple[Any, str, Tensor]] = []
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                hollow = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                if isinstance(tensor, nn.Parameter):
                    hollow = nn.Parameter(hollow, requires_grad=tensor.requires_grad)
                before.append((held, name, tensor))
                held[name] = made.setdefault(id(tensor), hollow)  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for held, name, tensor in before:
            held[name] = tensor


def _hollow(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_like(value, device="meta", requires_grad=value.requires_grad)
    return made.clone() if value.requires_grad else made  # a piece may write into it, which it could not into a leaf


def is_plain(value: Any) -> bool:
    """Whether it is a value that all stages make alike."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device))


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (x for x in tree_flatten(tree)[0] if isinstance(x, Tensor))


class _Origins(DispatchMode):
    """Follows what tensors are made of, by their memory, except while it is ``off``: inside of a piece."""

    def __init__(self, off: Callable[[], bool]) -> None:
        super().__init__()
        self.off = off
        self._of: dict[int, frozenset[TensorOrigin]] = {}
        self._kept: list[Any] = []  # so that no memory is used twice

    def begin(self, tensor: Tensor, origin: TensorOrigin) -> None:
        """A piece has made it."""
        self._note(tensor, frozenset((origin,)))

    def of(self, tensors: Any) -> frozenset[TensorOrigin]:
        return frozenset().union(*(self._of.get(storage_key(tensor.untyped_storage()), ()) for tensor in tensors))

    def _note(self, tensor: Tensor, found: frozenset[TensorOrigin]) -> None:
        key = storage_key(tensor.untyped_storage())
        self._of[key] = self._of.get(key, frozenset()) | found
        self._kept.append(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.off():
            return _on_shapes(func, args, kwargs)
        found = self.of(_tensors((args, kwargs)))
        out = func(*args, **kwargs)
        if found and isinstance(out, (bool, int, float, complex)):  # item(), bool(), torch.equal and what calls them
            raise ValueError("it asks for a value")
        if found:
            for tensor in _tensors(out):
                self._note(tensor, found)
            for place, value in zip(func._schema.arguments, args, strict=False):
                if place.alias_info is not None and place.alias_info.is_write and isinstance(value, Tensor):
                    self._note(value, found)
        return out


def _on_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """[Note: kernels for shapes] An operation inside of a piece, on the meta device. There some take fewer dtypes than
    with values, as ``aten._grouped_mm`` takes bf16 alone, and shapes do not depend on that: what refuses the one
    floating dtype of its arguments is asked in bf16."""
    try:
        return func(*args, **kwargs)
    except RuntimeError:
        leaves, spec = tree_flatten((args, kwargs))
        floats = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        dtypes = {x.dtype for x in floats}
        if len(dtypes) != 1 or dtypes == {torch.bfloat16} or func._schema.is_mutable:
            raise
        (dtype,) = dtypes
        narrow = {id(x): x.to(torch.bfloat16) for x in floats} | {id(dtype): torch.bfloat16}
        args, kwargs = tree_unflatten([narrow.get(id(x), x) for x in leaves], spec)
        try:
            made, form = tree_flatten(func(*args, **kwargs))
        except RuntimeError:
            made, form = None, None
        if made is None:
            raise
        gives = [isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in made]
        return tree_unflatten([x.to(dtype) if wide else x for x, wide in zip(made, gives, strict=True)], form)


class _Reads(TorchFunctionMode):
    """Refuses to hand out values of what pieces give: they are none."""

    def __init__(self, origins: _Origins) -> None:
        super().__init__()
        self._origins = origins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not self._origins.off() and self._origins.of(args[:1]):
            raise ValueError(f"it asks for a value with {func.__name__}()")
        return func(*args, **(kwargs or {}))
