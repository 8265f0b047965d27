"""What an engine has that a checkpoint keeps: this rank's part of each state, as it lies in memory, and the run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardfold.checkpoint.files import NAMES, Part
from shardfold.checkpoint.format import Index, Parameter, Piece
from shardfold.checkpoint.trees import encode
from shardfold.errors import CheckpointError
from shardfold.layout import DATA_AXES, Axes
from shardfold.optim.sharded import alignment
from shardfold.rng import rng_state
from shardfold.shards import shard_index
from shardfold.unit import Segment

if TYPE_CHECKING:
    from shardfold.engine import Engine

__all__ = ["average_state", "buffers_of", "collect", "header", "is_average", "most_precise", "names_of"]


def collect(
    engine: Engine, rank_state: Mapping[str, Any], run_tensors: Mapping[str, Tensor], left_out: Mapping[str, str]
) -> tuple[list[Part], Index]:
    """This rank's parts, and what it alone knows: numbers kept once, its own tree.

    Where a state is whole on several ranks, each writes an equal share of it. ``left_out``: see :mod:`.base`.
    """
    parts: list[Part] = []
    index = Index()
    for unit in engine.units:
        for segment in unit.segments:
            for slot, place in enumerate(segment.spec.slots):
                if place.name not in left_out:
                    _of_parameter(engine, segment, slot, parts, index)
    tensors: dict[str, Tensor] = {}
    tree = encode({"rng": rng_state()}, "rank_state", tensors)
    tree["state"] = encode(plain(rank_state), "rank_state.state", tensors, "rank_state")
    index.ranks = [tree]
    for name, tensor in tensors.items():
        parts.append(_whole("rank", "", name, tensor, rank=engine.rank))
    if engine.rank == 0:
        for name, (buffer, _) in buffers_of(engine).items():
            parts.append(_whole("buffer", "", name, buffer))
        parts += [_whole("run", "", name, tensor) for name, tensor in run_tensors.items()]
    return parts, index


def header(engine: Engine, state: Mapping[str, Any], left_out: Mapping[str, str]) -> tuple[Index, dict[str, Tensor]]:
    """What all ranks share; rank 0's is written. Its larger tensors, by the names that the tree has."""
    import shardfold

    tensors: dict[str, Tensor] = {}
    also = names_of(engine)
    parameters: list[Parameter] = []
    for segment, slot in _places(engine):
        name, shape = segment.spec.slots[slot].name, segment.spec.slots[slot].shape
        dtype, trainable = NAMES[most_precise(engine, segment)[0].dtype], segment.spec.trainable
        parameters.append(Parameter(name, shape, dtype, also.get(name, ()), trainable, left_out.get(name)))
    order = {name: i for i, (name, _) in enumerate(engine.module.named_parameters())}
    parameters.sort(key=lambda p: order.get(p.name, len(order)))
    run = {
        "schedule": engine.schedule.state_dict() if engine.schedule is not None else None,
        "loss_scale": engine.loss_scale.state_dict() if engine.loss_scale is not None else None,
        "averages": [{"updates": average.updates} for average in engine.averages],
    }
    tree = encode(run, "run", tensors)
    tree["state"] = encode(plain(state), "run.state", tensors, "state")
    index = Index(
        step=engine.steps,
        written={
            "shardfold": shardfold.__version__, "torch": str(torch.__version__),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        layout={
            "table": str(engine.layout), "precision": str(engine.precision),
            "mesh": dict(engine.mesh.sizes), "ranks": engine.world_size,
        },
        parameters=parameters,
        buffers=[
            Parameter(name, tuple(b.shape), NAMES[b.dtype], also) for name, (b, also) in buffers_of(engine).items()
        ],
        optimizer=_optimizer(engine, tensors),
        run=tree,
    )  # fmt: skip
    return index, tensors


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own: what has a ``state_dict()`` gives that."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}


def names_of(engine: Engine) -> dict[str, tuple[str, ...]]:
    """Further names of parameters, by the first."""
    first: dict[int, str] = {}
    also: dict[str, tuple[str, ...]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        home = first.setdefault(id(parameter), name)
        if home != name:
            also[home] = (*also.get(home, ()), name)
    return also


def buffers_of(engine: Engine) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
    """Persistent buffers, each with its further names, by the first."""
    first: dict[int, str] = {}
    found: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
    for path, module in engine.module.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set:
                continue
            full = f"{path}.{name}" if path else name
            home = first.setdefault(id(buffer), full)
            if home == full:
                found[full] = (buffer, ())
            elif full not in found[home][1]:
                found[home] = (buffer, (*found[home][1], full))
    return found


def average_state(number: int) -> str:
    """The name of the state of an average, by its number among the engine's."""
    return "average" + (f"_{number}" if number else "")


def is_average(state: str) -> bool:
    """Whether a state is an average, and not the optimizer's."""
    return re.fullmatch(r"average(_[1-9]\d*)?", state) is not None


# -- a parameter ---------------------------------------------------------------------------------------------------


def _places(engine: Engine) -> Iterator[tuple[Segment, int]]:
    for unit in engine.units:
        for segment in unit.segments:
            yield from ((segment, slot) for slot in range(len(segment.spec.slots)))


def most_precise(engine: Engine, segment: Segment) -> tuple[Tensor, tuple[int, int], Axes]:
    """The copy of the weights that is kept, its range of the segment, and the axes that it is split over."""
    if segment.master is not None:
        return segment.master, segment.master_range, engine.layout.master.over
    assert segment.rest is not None
    return segment.rest, segment.rest_range, engine.layout.rest.over


def _share(engine: Engine, bounds: tuple[int, int], over: Axes) -> tuple[int, int]:
    """This rank's share of a range that all ranks have which differ from it on other axes only."""
    sizes = engine.mesh.sizes
    others = tuple(axis for axis in DATA_AXES if axis not in over and sizes[axis] > 1)
    replicas = engine.mesh.parts(others)
    number = shard_index(others, sizes, engine.mesh.coords)
    align = alignment(engine.optimizer)
    steps = (bounds[1] - bounds[0]) // align
    low, high = steps * number // replicas * align, steps * (number + 1) // replicas * align
    if number == replicas - 1:
        high = bounds[1] - bounds[0]
    return bounds[0] + low, bounds[0] + high


def _of_parameter(engine: Engine, segment: Segment, slot: int, parts: list[Part], index: Index) -> None:
    place = segment.spec.slots[slot]
    weights, bounds, over = most_precise(engine, segment)
    low, high = _share(engine, bounds, over)
    a, b = max(low, place.offset), min(high, place.offset + place.numel)
    first = place.offset in range(low, high) or (not place.numel and engine.rank == 0)
    if a < b:
        parts.append(_range(place.name, "weight", a - place.offset, weights[a - bounds[0] : b - bounds[0]]))
    update = engine._update
    if update is None or not segment.spec.trainable:
        return
    begin = max(bounds[0], place.offset)  # where this rank's piece of the parameter begins
    if a < b:
        for name, per_value, values in update.stored(segment, slot):
            x, y = (a - begin) // per_value, -(-(b - begin) // per_value)
            parts.append(_range(place.name, name, a - place.offset, values[x:y], b - a, per_value))
        for number, average in enumerate(engine.averages):
            values = average.shard(segment)[a - bounds[0] : b - bounds[0]]
            parts.append(_range(place.name, average_state(number), a - place.offset, values))
    if first:
        numbers: dict[str, Any] = {}
        for name, value in update.kept_once(segment, slot).items():
            if isinstance(value, Tensor) and value.dim():
                parts.append(_whole("once", name, place.name, value))
            else:
                numbers[name] = encode(value, f"{name} of {place.name}", {})
        if numbers:
            index.once[place.name] = numbers


def _range(name: str, state: str, start: int, values: Tensor, numel: int | None = None, block: int = 1) -> Part:
    kind = "element" if block == 1 else "block"
    stop = start + (values.numel() if numel is None else numel)
    shape = (values.numel(),)
    return Part(Piece(name, state, kind, _dtype(values, name), shape, start, stop, block=block), values)


def _whole(kind: str, state: str, name: str, values: Tensor, rank: int | None = None) -> Part:
    return Part(Piece(name, state, kind, _dtype(values, name), tuple(values.shape), rank=rank), values)


def _dtype(values: Tensor, name: str) -> str:
    if values.dtype not in NAMES:
        raise CheckpointError(f"{name!r} has dtype {values.dtype}, which safetensors files do not have: cast it.")
    return NAMES[values.dtype]


def _optimizer(engine: Engine, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    if engine.optimizer is None:
        return None
    names: Sequence[list[str]] = [[] for _ in engine.optimizer.param_groups]
    for segment, slot in _places(engine):
        if segment.spec.trainable:
            names[segment.spec.group].append(segment.spec.slots[slot].name)
    groups: list[Any] = []
    for number, (group, members) in enumerate(zip(engine.optimizer.param_groups, names, strict=True)):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names") and not callable(v)}
        groups.append({"options": encode(options, f"group {number}", tensors), "parameters": members})
    kind = type(engine.optimizer)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "groups": groups}
