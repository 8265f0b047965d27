"""Models too big to build: construct without memory, then make real unit by unit, keeping only this rank's shard.

Under :func:`meta_init` parameters are created on the meta device (shape and dtype, no memory); buffers are real, so
tables that a constructor computes are right. The engine then gives one unit at a time its memory, fills it, keeps its
own shard and gives the rest back: a rank never holds more than its shards, the root and one unit.

Values come from, in this order: ``weights=`` (a state dict, or safetensors files); the model's own
``_init_weights(module)`` (transformers); each module's ``reset_parameters()``. Random numbers are drawn from a
generator seeded by ``(seed, path of the module)``, so they do not depend on the layout or the number of ranks; for
parameters that are distinct on an axis (see ``distinct``) by the place on it too.
"""

from __future__ import annotations

import json
import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardfold import accelerator
from shardfold.comm.comm import Comm
from shardfold.comm.device_mesh import is_dtensor
from shardfold.errors import ModelError, UsageError, did_you_mean
from shardfold.plan.checks import known_arguments
from shardfold.plan.layout import Layout
from shardfold.plan.placement import Box
from shardfold.plan.rules import Rules
from shardfold.sharding.buffers import take_first_rank
from shardfold.sharding.model import StagedNames
from shardfold.sharding.partition import Cut
from shardfold.sharding.partitioned import hand_over
from shardfold.sharding.replicas import differing_in
from shardfold.sharding.segment import TORCH_DTYPES, Segment
from shardfold.sharding.slices import Slice, slices_on
from shardfold.sharding.unit import Unit
from shardfold.tiers.pages import let_go, spare
from shardfold.tiers.tiers import Tiers

__all__ = ["Weights", "buffer_dtypes", "make_units", "meta_init", "move_buffers"]

AT_ONCE = 4 * 2**20
"""Bytes of a parameter that are read of a file at a time."""
FIRST = "the broadcast of the first values of {}"


LOST = (
    "which has no memory inside of meta_init(), so they would be lost: pass them as Init(weights=...) (a state dict or "
    "a path) when making the engine, or build and load the model inside of sf.sharded_init()."
)


@known_arguments
@contextmanager
def meta_init() -> Iterator[None]:
    """Inside, parameters of new modules take no memory; an engine makes them real shard by shard.

    A parameter that is put in the place of one behind its module's constructor keeps its values.

    Raises:
        UsageError: values are copied into a parameter that has no memory, and would be lost (``load_state_dict``).

    Examples:
        >>> with sf.meta_init():
        ...     large = nn.Linear(10**4, 10**4)  # 400 MB that nobody touches
        >>> large.weight.device.type
        'meta'
    """
    register, load = nn.Module.register_parameter, nn.Module.load_state_dict

    def refuse(self: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        hollow = next((name for name, p in self.named_parameters() if p.is_meta), None)
        if hollow is not None and not assign and not _constructing():
            raise UsageError(f"load_state_dict() would copy values into {hollow!r}, {LOST}")
        return load(self, state_dict, strict=strict, assign=assign)

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and (name not in self._parameters or _constructing()):
            param = type(param)(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    copies = _RefuseCopies()
    nn.Module.register_parameter, nn.Module.load_state_dict = on_meta, refuse
    spare(copies)  # what a constructor makes, and is then let go, leaves no hole of a model's size in the heap
    try:
        with copies:
            yield
    finally:
        let_go(copies)
        nn.Module.register_parameter, nn.Module.load_state_dict = register, load


class _RefuseCopies(TorchFunctionMode):
    """Copying into a meta tensor does nothing, and says nothing. Constructors may: what they do to values is done again
    when there is memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "normal_":  # of a tensor or nn.init, where packages put their own
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta and (func is not Tensor.normal_ or not filled.requires_grad):
                return filled  # there is nothing to fill, but PyTorch imports its compiler for it, which takes a second
        if func is Tensor.copy_ and args[0].is_meta and len(args) > 1 and not args[1].is_meta and not _constructing():
            raise UsageError(f"copy_() would copy values into a tensor of shape {tuple(args[0].shape)}, {LOST}")
        return func(*args, **(kwargs or {}))


def _constructing() -> bool:
    """Whether the constructor of a module is under way."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        frame = frame.f_back
    return False


def make_units(
    model: nn.Module,
    cuts: Iterable[Cut],
    layout: Layout,
    comm: Comm,
    tiers: Tiers,
    weights: Weights | None,
    seed: int,
) -> list[Unit]:
    """Makes the units of a model real, one after the other; each rests when the next one begins.

    The root stays gathered (the caller releases it): modules of other units may be tied to it.
    """
    units: list[Unit] = []
    mesh, owners = comm.mesh, _Owners(model, comm)
    recurrent = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for module in recurrent:  # they keep weak references to their weights, and such tensors cannot be made real
        module._flat_weight_refs = []
    spare(tiers)  # whole units that come and go leave no holes between what stays of them
    try:
        for c in cuts:
            segments = [
                Segment(spec, members, layout, mesh.sizes, mesh.coords, comm.memory)
                for spec, members in zip(c.spec.segments, c.by_segment, strict=True)
            ]
            unit = Unit(c.spec, segments, comm.memory, c.modules)
            _give_values(unit, owners, comm, tiers, weights, seed)
            if unit.trainable and not c.spec.table_or(layout).buffered:
                unit.gradients.rest(adopt=mesh.world == 1 and not accelerator.has_streams(comm.memory.device))
            if unit.split and not c.spec.root:
                unit.release()
            units.append(unit)
    finally:
        let_go(tiers)
        for module in recurrent:
            module._flat_weight_refs = [weakref.ref(w) if w is not None else None for w in module._flat_weights]
    return units


class _Owners:
    """Which modules have a parameter, and which slice it is: asked of the model once for all units, of which there may
    be thousands.

    Args:
        model: whose parameters stay the same objects meanwhile.
        comm: to the other ranks.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        self.model, self._mesh = model, comm.mesh

    def of(self, wanted: Iterable[int]) -> list[tuple[str, nn.Module]]:
        """Modules that have a parameter whose ``id`` is ``wanted``, and their paths, in the model's order."""
        places = {place for key in wanted for place in self._places[key]}
        return [self._modules[place] for place in sorted(places)]

    @cached_property
    def slices(self) -> dict[int, Slice]:
        """What each marked parameter is on this rank, by its ``id``."""
        return slices_on(self.model, self._mesh.sizes, self._mesh.coords)

    @cached_property
    def _modules(self) -> list[tuple[str, nn.Module]]:
        return list(self.model.named_modules())

    @cached_property
    def _places(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for place, (_, module) in enumerate(self._modules):
            for parameter in module._parameters.values():
                found.setdefault(id(parameter), []).append(place)
        return found


def _give_values(unit: Unit, owners: _Owners, comm: Comm, tiers: Tiers, weights: Weights | None, seed: int) -> None:
    """Makes the states of a unit. Values are made, and reach the master, in its dtype: in that of the parameters they
    would be rounded, and the first steps be those of another model than AMP, or FSDP2, trains."""
    hand_over(parameter for _, parameter in unit.parameters())
    exact = [segment.exact_flat(comm.memory) for segment in unit.segments]
    empty = _bind_parameters(unit, exact)
    if empty or weights is not None:
        _initialize(unit, owners, empty, weights, seed, comm)
    for segment, flat in zip(unit.segments, exact, strict=True):
        same = comm.mesh.sizes.summed(segment.spec.distinct)  # as DDP does: there rank 0's values are everyone's
        for axes in (same, comm.mesh.sizes.rare) if not comm.mesh.states_come else ():  # and of all groups
            comm.broadcast(flat, f"broadcast {unit.name}", over=axes, detail=FIRST.format(unit.name))
        _check_replicas(segment, flat, comm)
        released = unit.split and not unit.spec.root
        segment.bind(comm.mesh.sizes, comm.mesh.coords, flat, tiers, released=released)


def _check_replicas(segment: Segment, flat: Tensor, comm: Comm) -> None:
    """
    Raises:
        ModelError: on every rank: parameters that are not marked as distinct on an axis differ there.
    """
    for axis in comm.mesh.sizes.replicas(segment.spec.distinct):
        pieces = [slice(slot.offset, slot.offset + slot.numel) for slot in segment.spec.slots]
        if names := differing_in(segment, flat, pieces, axis, comm):
            raise ModelError(
                f"{', '.join(map(repr, names))} differ{'s' * (len(names) == 1)} between ranks along the axis {axis!r}: "
                f"give them equal values there, or say which slice each rank has with mark_slice(module, 'name', "
                f"axis={axis!r}, dim=0)."
            )


def move_buffers(
    modules: Mapping[str, nn.Module],
    comm: Comm,
    dtypes: Mapping[int, torch.dtype],
) -> None:
    """Moves the own buffers of modules (by path) to the device and gives every rank rank 0's values, as DDP does.

    ``dtypes`` has that of a module's floating buffers from now on, but for fp64, by its ``id``; others keep their own.

    Raises:
        ModelError: a buffer was made of a parameter that had no memory, and no weights gave it values.
    """
    buffers = {
        id(buffer): (f"{path}.{name}" if path else name, buffer)
        for path, module in modules.items()
        for name, buffer in module.named_buffers(recurse=False)
    }
    if left := [name for name, buffer in buffers.values() if buffer.is_meta]:
        raise ModelError(
            f"nothing gives values to the buffer{'s' * (len(left) > 1)} {', '.join(left)}, made from parameters that "
            "had no memory yet: pass Init(weights=...) that have them, or make them from shapes in the constructor."
        )
    for module in modules.values():
        dtype = dtypes.get(id(module))
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            casts = dtype is not None and buffer.is_floating_point() and buffer.dtype != torch.float64
            module._buffers[name] = buffer.to(comm.memory.device, dtype if casts else buffer.dtype)
    moved = {id(b): b for module in modules.values() for b in module.buffers(recurse=False)}
    for axes in (comm.mesh.data, comm.mesh.sizes.rare):
        take_first_rank(comm, list(moved.values()), "broadcast the buffers", FIRST.format("the buffers"), over=axes)


def buffer_dtypes(rules: Rules, model: nn.Module) -> dict[int, torch.dtype]:
    """The dtype of the floating buffers of each module whose policy says one, by ``id``."""
    rule = [TORCH_DTYPES[p.compute] if p.buffers == "compute" else None for p in rules.precisions]
    found = {key: rule[number] for key, number in rules.assign(model).items()}
    return {key: dtype for key, dtype in found.items() if dtype is not None}


def _bind_parameters(unit: Unit, flats: Sequence[Tensor]) -> set[str]:
    """Makes every parameter of the unit a view of its segment's flat among ``flats``; returns the names of those that
    had no values yet.

    The parameter objects stay the same: optimizers, ties and users' references hold.
    """
    empty: set[str] = set()
    for segment, flat in zip(unit.segments, flats, strict=True):
        for slot, parameter, view in zip(segment.spec.slots, segment.parameters, segment.views_of(flat), strict=True):
            if parameter.is_meta:
                empty.add(slot.name)
                fresh = nn.Parameter(view.new_empty(0), requires_grad=False)
                vars(fresh).update(vars(parameter))  # what users wrote on it stays with the object
                try:
                    torch.utils.swap_tensors(parameter, fresh.requires_grad_(parameter.requires_grad))
                except RuntimeError as error:
                    raise ModelError(
                        f"parameter {slot.name!r}, built under meta_init(), cannot be made real while something keeps "
                        "a weak reference to it: build this model without meta_init()."
                    ) from error
            else:
                view.copy_(parameter.detach())
            # Through .data the parameter keeps a version counter of its own: filling the flat again is no change.
            parameter.data = view
        for start, stop in segment.gaps:
            flat[start:stop].zero_()
    return empty


def _initialize(unit: Unit, owners: _Owners, empty: set[str], weights: Weights | None, seed: int, comm: Comm) -> None:
    """Gives values to the parameters of a (gathered) unit that have none.

    Raises:
        ModelError: some get none; all are named.
    """
    values = dict(unit.parameters())
    boxes = {slot.name: (slot.whole, slot.box) for s in unit.segments for slot in s.spec.slots}
    with torch.no_grad():
        for name in empty if weights is None else ():
            if values[name].is_floating_point():
                values[name].fill_(float("nan"))  # so that what nobody initializes is found
        if weights is not None:
            for name, parameter in values.items():
                weights.fill(name, parameter, *boxes[name])
            empty = set()
        if empty:
            wanted = {id(values[name]) for name in empty}
            apart = {key: owners.slices[key].axes for key in wanted if key in owners.slices}
            ours = {id(values[name]): (whole, box) for name, (whole, box) in boxes.items() if name in empty and box}
            apart = {key: axes for key, axes in apart.items() if key not in ours}
            _reset(owners, wanted, f"{seed}", comm.memory.device, ours)
            for axes in dict.fromkeys(apart[key] for key in wanted if key in apart):  # each rank has others of these
                place = "".join(f"/{axis}={comm.mesh.coords[axis]}" for axis in axes)
                of_axes = {key for key in wanted if apart.get(key) == axes}
                rest = {name: p.clone() for name, p in values.items() if id(p) not in of_axes}
                _reset(owners, of_axes, f"{seed}{place}", comm.memory.device)
                for name, value in rest.items():
                    values[name].copy_(value)
        left = [name for name in sorted(empty) if values[name].is_floating_point() and values[name].isnan().any()]
    if left:
        raise ModelError(
            f"nothing initializes {', '.join(left)}: give the module that owns it a reset_parameters() method that "
            "sets every parameter, or pass Init(weights=...)."
        )


_Boxes = Mapping[int, tuple[tuple[int, ...], Box]]
"""By the ``id`` of a parameter the shape of the whole, and which box of it is here."""


def _reset(owners: _Owners, wanted: set[int], seed: str, device: torch.device, boxes: _Boxes | None = None) -> None:
    of_model = getattr(owners.model, "_init_weights", None)
    for path, module in owners.of(wanted):
        own = getattr(module, "reset_parameters", None)
        with (
            accelerator.seeded(device, zlib.crc32(f"{seed}/{path}".encode())),
            _made_whole(module, boxes or {}),
        ):
            if callable(of_model):
                of_model(module)
            elif callable(own):
                own()


@contextmanager
def _made_whole(module: nn.Module, boxes: _Boxes) -> Iterator[None]:
    """Inside, the module's own parameters that are boxes are whole, so that they are initialized as where nothing is
    cut; their boxes of that are kept."""
    mine = {name: p for name, p in module._parameters.items() if p is not None and id(p) in boxes}
    for name, parameter in mine.items():
        whole = parameter.new_full(boxes[id(parameter)][0], float("nan"))
        module._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for name, parameter in mine.items():
            (_, box), made = boxes[id(parameter)], module._parameters[name]
            assert made is not None
            module._parameters[name] = parameter
            parameter.data.copy_(_box_of(made.detach(), box))


class Weights:
    """Values of parameters by name, read one at a time, so that a rank holds one besides its shards.

    Args:
        source: a mapping of tensors, a safetensors file, or a folder of them (with or without an index).
        model: every parameter must have a value under one of its names (a tied one has several), and every value a
            parameter or buffer.
        whole: names of what other ranks have of it.

    Raises:
        ModelError: the path has no weights, or names are missing or unexpected; all are listed.
    """

    def __init__(self, source: Any, model: nn.Module, whole: StagedNames | None = None) -> None:
        if not isinstance(source, Mapping | str | Path):
            raise ModelError(
                f"Init(weights=...) is of type {type(source).__name__}: give a state dict, or the path of safetensors "
                "files or of a checkpoint."
            )
        self._source = source if isinstance(source, Mapping) else None
        self._files: dict[str, Path] = {} if isinstance(source, Mapping) else _find_files(Path(source))
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        also = whole.also if whole is not None else {}
        alike = {name: [first, *others] for first, others in also.items() for name in (first, *others)}
        for group in names.values():  # of what several stages have, this rank's model may not have all names
            group += [name for name in alike.get(group[0], ()) if name not in group]
        given = set(self._source if self._source is not None else self._files)
        self._stored = {group[0]: next((n for n in group if n in given), None) for group in names.values()}
        missing = sorted(name for name, stored in self._stored.items() if stored is None)
        known = {name for group in names.values() for name in group} | {name for name, _ in model.named_buffers()}
        known |= whole.names if whole is not None else set()
        unexpected = sorted(given - known)
        if missing or unexpected:
            raise ModelError(
                f"Init(weights=...) does not fit the model: missing {', '.join(missing) or 'nothing'}; unexpected "
                f"{', '.join(unexpected) or 'nothing'}."
            )

    def name_of(self, parameter: str) -> str:
        """The name under which a parameter's values are stored."""
        stored = self._stored[parameter]
        assert stored is not None
        return stored

    def fill(self, parameter: str, into: Tensor, whole: tuple[int, ...], box: Box | None) -> None:
        """Reads the values of a parameter, or, where what is stored is of the shape ``whole``, this ``box`` of it. Of a
        large one in a file some rows at a time: what was read of a file counts as the process's until it is closed.

        Raises:
            ModelError: they are of another shape.
        """
        name = self.name_of(parameter)
        rows = max(1, AT_ONCE * len(into) // into.nbytes) if into.dim() and into.numel() else 1
        slices = tuple(map(slice, into.shape[:1])) if box is None else () if box.stacked else box.slices
        if self._source is not None or not slices or not into.dim() or rows >= len(into):
            self._check_shape(parameter, (value := self.read(name, whole, box)).shape, into)
            into.copy_(value)
            return
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as opened:
            shape = tuple(opened.get_slice(name).get_shape())
        if box is None or shape != whole:
            self._check_shape(parameter, shape, into)
            slices = (slice(0, len(into)),)
        first = slices[0].start or 0
        for start in range(0, len(into), rows):
            some = into[start : start + rows]
            with safe_open(self._files[name], framework="pt") as opened:
                of_file = (slice(first + start, first + start + len(some)), *slices[1:])
                some.copy_(opened.get_slice(name)[of_file])

    @staticmethod
    def _check_shape(parameter: str, shape: Sequence[int], into: Tensor) -> None:
        if tuple(shape) != tuple(into.shape):
            raise ModelError(
                f"weights give {parameter!r} the shape {tuple(shape)}, but the model's is {tuple(into.shape)}."
            )

    def read(self, name: str, whole: tuple[int, ...] = (), box: Box | None = None) -> Tensor:
        """A value; where it is of the shape ``whole``, this ``box`` of it."""
        if self._source is not None:
            value = self._source[name]
            if is_dtensor(value):
                raise ModelError(
                    f"Init(weights=...) has {name!r} as a DTensor, which other ranks have parts of: make the engine "
                    "without, and give the state dict to engine.load_state_dict()."
                )
            return value if box is None or tuple(value.shape) != whole else _box_of(value, box)
        from safetensors import safe_open

        with safe_open(self._files[name], framework="pt") as opened:
            part = opened.get_slice(name)
            if box is None or tuple(part.get_shape()) != whole:
                return opened.get_tensor(name)
            return _box_of(opened.get_tensor(name), box) if box.stacked else part[box.slices]

    def load_buffers(self, model: nn.Module) -> None:
        """Gives values to the buffers that have any stored."""
        given = self._source if self._source is not None else self._files
        for prefix, module in model.named_modules():
            for name, buffer in list(module._buffers.items()):
                path = f"{prefix}.{name}" if prefix else name
                if buffer is None or path not in given:
                    continue
                if buffer.is_meta:
                    module._buffers[name] = self.read(path).to(buffer.dtype, copy=True)
                else:
                    buffer.copy_(self.read(path))


def _box_of(value: Tensor, box: Box) -> Tensor:
    """In the shape of the parameter that it is of."""
    values = value.reshape(box.view(value.shape))[box.slices]
    return values.flatten(box.stacked[0], box.stacked[0] + 1) if box.stacked else values


def _find_files(path: Path) -> dict[str, Path]:
    """Which safetensors file holds each tensor."""
    from safetensors import safe_open

    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        beside = [p.name for p in path.parent.glob("*.safetensors")]
        near = did_you_mean(path.name, beside) if beside else ""
        raise ModelError(f"Init(weights={str(path)!r}) holds no safetensors file.{near}")
    index = path / "model.safetensors.index.json"
    if path.is_dir() and index.is_file():
        return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    where: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            where.update(dict.fromkeys(opened.keys(), file))
    return where
