"""What an engine has that a checkpoint keeps: this rank's part of each state, as it lies in memory, and the run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfold.checkpoint.apart import group_here, is_apart, of_group, shared_states
from shardfold.checkpoint.files import NAMES, UnwrittenPiece, dtype_name
from shardfold.checkpoint.index import Index, Parameter, Piece
from shardfold.checkpoint.rng import rng_state
from shardfold.checkpoint.trees import encode
from shardfold.plan.layout import Axes
from shardfold.plan.placement import Slot, shard_index
from shardfold.plan.version import __version__
from shardfold.sharding.groups import alignment
from shardfold.sharding.lost import LOST
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.stand_ins import extra_states
from shardfold.sharding.whole_state import buffers_of, most_precise, names_of

__all__ = ["average_state", "collect", "header", "is_average", "is_moment"]


def collect(
    model: ShardedModel,
    rank_state: Mapping[str, Any],
    run_tensors: Mapping[str, Tensor],
    left_out: Mapping[str, str],
    lost: Mapping[int, Tensor],
) -> tuple[list[UnwrittenPiece], Index]:
    """This rank's parts, and what it alone knows: numbers kept once, its own tree.

    Where a state is whole on several ranks, each writes an equal share of it. ``left_out``: see :mod:`.base`; ``lost``:
    see :func:`sums_of_lost`.
    """
    parts: list[UnwrittenPiece] = []
    once, described, group = dict[str, Any](), dict[str, Any](), group_here(model)
    for unit in model.units:
        for segment in unit.segments:
            for slot, place in enumerate(segment.spec.slots):
                if place.name not in left_out and model.counts(segment) and (segment.spec.trainable or not group):
                    _of_parameter(model, segment, slot, parts, once, lost.get(id(segment)))
    parts = of_group(parts, group)
    if group:
        once.clear()
    for segment in model.trainable():
        _of_all_groups(model, segment, parts)
    tensors: dict[str, Tensor] = {}
    tree = encode({"rng": rng_state()}, "rank_state", tensors)
    tree["state"] = encode(plain(rank_state), "rank_state.state", tensors, "rank_state")
    for name, tensor in tensors.items():
        parts.append(UnwrittenPiece.whole("rank", "", name, tensor, rank=model.rank))
    if model.leads and not group:
        for name, (buffer, _) in _buffers(model):
            parts.append(UnwrittenPiece.whole("buffer", "", name, buffer))
        if model.rank:  # of another stage than rank 0's, which the header tells of
            described = _described(model, left_out, {})
            run_tensors = dict[str, Tensor]()
            described["run"] = {"extra": _extra(model, run_tensors)}
    parts += [UnwrittenPiece.whole("run", "", name, tensor) for name, tensor in run_tensors.items()]
    return parts, Index(once=once, ranks=[tree], **described)


def header(
    model: ShardedModel, state: Mapping[str, Any], left_out: Mapping[str, str]
) -> tuple[Index, dict[str, Tensor]]:
    """What all ranks share; rank 0's is written. Its larger tensors, by the names that the tree has."""
    tensors: dict[str, Tensor] = {}
    run = {
        "schedule": model.run.lr_schedule.state_dict() if model.run.lr_schedule is not None else None,
        "loss_scale": model.run.loss_scale.state_dict() if model.run.loss_scale is not None else None,
        "averages": [{"updates": average.updates} for average in model.run.averages],
        "outer": model.run.outer.describe() if model.run.outer is not None else None,
    }
    tree = encode(run, "run", tensors)
    tree["state"] = encode(plain(state), "run.state", tensors, "state")
    tree["extra"] = _extra(model, tensors)
    index = Index(
        step=model.run.steps,
        written={
            "shardfold": __version__,
            "torch": str(torch.__version__),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        layout={
            "table": str(model.layout),
            "precision": str(model.rules.default),
            "mesh": dict(model.comm.mesh.sizes),
            "ranks": model.world_size,
        },
        run=tree,
        **_described(model, left_out, tensors),
    )
    return index, tensors


def _extra(model: ShardedModel, tensors: dict[str, Tensor]) -> Any:
    """Extra state of this rank's modules, as a tree by its names in a state dict.

    Raises:
        CheckpointError: a module's is what only a pickle holds.
    """
    hollow = model.whole.hollow if model.whole is not None else frozenset[str]()
    found = {name: part.get_extra_state() for name, part in extra_states(model.module, hollow).items()}
    return encode(found, "run.extra", tensors, "extra state")


def _described(model: ShardedModel, left_out: Mapping[str, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Parameters, buffers and the optimizer's groups of this rank's model, in its order, as an index has them."""
    parameters: list[Parameter] = []
    also = names_of(model.module) | (dict(model.whole.also) if model.whole is not None else {})
    for segment, slot in _places(model):
        name, shape = segment.spec.slots[slot].name, segment.spec.slots[slot].whole
        dtype, trainable = NAMES[most_precise(model, segment)[0].dtype], segment.spec.trainable
        parameters.append(Parameter(name, shape, dtype, also.get(name, ()), trainable, left_out.get(name)))
    order = {name: i for i, (name, _) in enumerate(model.module.named_parameters())}
    parameters.sort(key=lambda p: order.get(p.name, len(order)))
    buffers = [Parameter(name, tuple(b.shape), NAMES[b.dtype], others) for name, (b, others) in _buffers(model)]
    return {"parameters": parameters, "buffers": buffers, "optimizer": _optimizer(model, tensors)}


def _buffers(model: ShardedModel) -> list[tuple[str, tuple[Tensor, tuple[str, ...]]]]:
    """Those that this rank tells of."""
    untold = model.whole.untold if model.whole is not None else frozenset[str]()
    return [entry for entry in buffers_of(model.module).items() if entry[0] not in untold]


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The user's own: what has a ``state_dict()`` gives that."""
    return {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in state.items()}


def average_state(number: int) -> str:
    """The name of the state of an average, by its number among the engine's."""
    return "average" + (f"_{number}" if number else "")


def is_average(state: str) -> bool:
    """Whether a state is an average."""
    return re.fullmatch(r"average(_[1-9]\d*)?", state) is not None


def is_moment(state: str) -> bool:
    """Whether a state is the optimizer's."""
    return state not in ("weight", LOST) and not is_average(state) and not is_apart(state)


# -- a parameter ---------------------------------------------------------------------------------------------------


def _places(model: ShardedModel) -> Iterator[tuple[Segment, int]]:
    for segment in model.segments():
        if model.counts(segment):
            yield from ((segment, slot) for slot in range(len(segment.spec.slots)))


def _share(model: ShardedModel, bounds: tuple[int, int], over: Axes, segment: Segment, slot: Slot) -> tuple[int, int]:
    """This rank's share of a range that all ranks have which differ from it on other axes only: data axes, or, of a
    parameter that is whole, any."""
    sizes = model.comm.mesh.sizes
    every = slot.box is None and not segment.spec.distinct
    shared = sizes.meeting if every else [a for a in sizes.alike if a not in segment.spec.distinct]
    others = tuple(axis for axis in shared if axis not in over and sizes[axis] > 1)
    replicas = model.comm.mesh.parts(others)
    number = shard_index(others, sizes, model.comm.mesh.coords)
    align = alignment(model.optimizer)
    steps = (bounds[1] - bounds[0]) // align
    low, high = steps * number // replicas * align, steps * (number + 1) // replicas * align
    if number == replicas - 1:
        high = bounds[1] - bounds[0]
    return bounds[0] + low, bounds[0] + high


def _of_parameter(
    model: ShardedModel,
    segment: Segment,
    slot: int,
    parts: list[UnwrittenPiece],
    once: dict[str, dict[str, Any]],
    lost: Tensor | None,
) -> None:
    place = segment.spec.slots[slot]
    weights, bounds, over = most_precise(model, segment)
    low, high = _share(model, bounds, over, segment, place)
    a, b = max(low, place.offset), min(high, place.offset + place.numel)
    first = place.offset in range(low, high) or (not place.numel and model.rank == 0)
    if a < b:
        parts.append(_range(place, "weight", a - place.offset, weights.part(slice(a - bounds[0], b - bounds[0]))))
    update = model.updater
    if update is None or not segment.spec.trainable:
        return
    begin = max(bounds[0], place.offset)  # where this rank's piece of the parameter begins
    if a < b:
        for name, per_value, values in update.stored(segment, slot):
            x, y = (a - begin) // per_value, -(-(b - begin) // per_value)
            some = values.part(slice(x, y)) if isinstance(values, Shard) else values[x:y]
            parts.append(_range(place, name, a - place.offset, some, b - a, per_value))
        for number, average in enumerate(model.run.averages):
            values = average.shard(segment)[a - bounds[0] : b - bounds[0]]
            parts.append(_range(place, average_state(number), a - place.offset, values))
        if lost is not None:
            parts.append(_range(place, LOST, a - place.offset, lost[a - bounds[0] : b - bounds[0]]))
    if first and not any(place.starts):  # of boxes the one that begins the parameter: what is kept once is equal in all
        numbers: dict[str, Any] = {}
        for name, value in update.kept_once(segment, slot).items():
            if isinstance(value, Tensor) and value.dim():
                parts.append(UnwrittenPiece.whole("once", name, place.name, value))
            else:
                numbers[name] = encode(value, f"{name} of {place.name}", {})
        if numbers:
            once[place.name] = numbers


def _of_all_groups(model: ShardedModel, segment: Segment, parts: list[UnwrittenPiece]) -> None:
    """This rank's share of what groups of ranks have together of a segment."""
    over = (*segment.table.master.over, *model.comm.mesh.sizes.rare)
    for state, bounds, values in shared_states(model, segment):
        for place in segment.spec.slots:
            low, high = _share(model, bounds, over, segment, place)
            a, b = max(low, place.offset), min(high, place.offset + place.numel)
            if a < b:
                parts.append(_range(place, state, a - place.offset, values[a - bounds[0] : b - bounds[0]]))


def _range(
    slot: Slot, state: str, start: int, values: Tensor | Shard, numel: int | None = None, block: int = 1
) -> UnwrittenPiece:
    """``values``: of a shard, its memory; one in a file is read when it is its turn to be written."""
    kind = "element" if block == 1 else "block"
    stop = start + (values.numel() if numel is None else numel)
    dtype, shape = dtype_name(values.dtype, slot.name), (values.numel(),)
    piece = Piece(slot.name, state, kind, dtype, shape, start, stop, slot.box, block)
    if isinstance(values, Tensor):
        return UnwrittenPiece(piece, values)
    memory = values.memory
    return UnwrittenPiece(piece, values if memory is None else memory)


def _optimizer(model: ShardedModel, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
    if model.optimizer is None:
        return None
    names: Sequence[list[str]] = [[] for _ in model.optimizer.param_groups]
    for segment, slot in _places(model):
        if segment.spec.trainable:
            names[segment.spec.group].append(segment.spec.slots[slot].name)
    groups: list[Any] = []
    for number, (group, members) in enumerate(zip(model.optimizer.param_groups, names, strict=True)):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names") and not callable(v)}
        groups.append({"options": encode(options, f"group {number}", tensors), "parameters": members})
    kind = type(model.optimizer)
    return {"class": f"{kind.__module__}.{kind.__qualname__}", "groups": groups}
