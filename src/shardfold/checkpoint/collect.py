"""What of an engine a checkpoint keeps: this rank's part of each state, as it lies in memory, and the run.

Groups of ranks that train apart between outer steps. The states of the first group have the names that they always
have: a reader that knows of no groups takes these. Those of another one have its number in front (``group1.weight``),
as weights and moments differ between rounds. What groups share is there once: the last global weights, the outer
momentum, and changes that are still to be taken in; of what ranks have lost that send signs, the mean, which is all
that later averages feel. A run of as many groups goes on to the bit. One of another number gives its groups those that
there were, in turn, so what groups that are no more had learned since the last outer step is lost, as when one dies.

Frozen parameters that are left out (``frozen="skip"``). A checksum of each stands for its values: a fine-tuned adapter
is some millionths of its base, which does not change and which whoever loads such a checkpoint has already.

What formats of reductions have lost. Each rank keeps what its own encoding lost of every element that it sends,
``format_state`` of a segment, ``(length,)``. To what is applied later only the sum over ranks matters, so that is what
a checkpoint has: one value per element, whatever the number of ranks. Whoever reads it gives each element to the rank
that owns it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.checkpoint.files import DTYPES, NAMES, UnwrittenPiece, dtype_name
from shardfold.checkpoint.index import Index, Parameter, Piece, checksum
from shardfold.checkpoint.lent import Lending, LentMemory
from shardfold.checkpoint.rng import rng_state
from shardfold.checkpoint.trees import encode
from shardfold.comm.comm import Comm
from shardfold.comm.hops import nodes
from shardfold.errors import ConfigError, UsageError
from shardfold.plan.layout import DATA_AXES, Axes
from shardfold.plan.placement import Slot, shard_index
from shardfold.plan.program import Op
from shardfold.plan.version import __version__
from shardfold.sharding.model import ShardedModel, alignment
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.whole_segments import whole_segments
from shardfold.sharding.whole_state import buffers_of, extra_states, most_precise, names_of
from shardfold.tiers.tier import Region

__all__ = [
    "LOST",
    "FrozenBase",
    "average_state",
    "check_slices",
    "collect",
    "copied",
    "group_read",
    "header",
    "is_moment",
    "lost_targets",
    "other_base",
    "shared_targets",
    "sums_of_lost",
    "take_lost",
    "with_group",
]

# -- groups of ranks that train apart

GLOBAL, MOMENTUM, CHANGE = "outer_global", "outer_momentum", "outer_change"
WORKER, SERVER = "signs_worker", "signs_server"
SHARED = (GLOBAL, MOMENTUM, CHANGE, WORKER, SERVER)
OF_GROUP = re.compile(r"group[1-9]\d*\..+", re.DOTALL)


def _is_apart(state: str) -> bool:
    """Whether a state is another group's, or shared by all."""
    return state in SHARED or OF_GROUP.fullmatch(state) is not None


def with_group(group: int, state: str) -> str:
    """The name of a group's state."""
    return f"group{group}.{state}" if group else state


def _group_here(model: ShardedModel) -> int:
    """The number of this rank's group."""
    mesh = model.comm.mesh
    return mesh.coords[mesh.sizes.rare[0]] if mesh.sizes.rare and not mesh.sizes.meets else 0


def group_read(model: ShardedModel, run: Mapping[str, Any]) -> int:
    """Which of the groups that there were this rank's goes on as."""
    return _group_here(model) % int((run.get("outer") or {}).get("groups", 1))


def _of_group(parts: list[UnwrittenPiece], group: int) -> list[UnwrittenPiece]:
    """The parts of a group's parameters, under its names; what is kept once is the first group's."""
    if not group:
        return parts
    each = [part for part in parts if part.piece.kind in ("element", "block")]
    return [part._replace(piece=replace(part.piece, state=with_group(group, part.piece.state))) for part in each]


def _shared_states(model: ShardedModel, segment: Segment) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """What this rank has to tell of what groups share: its group's part, with where that lies in the segment."""
    outer, signs = model.run.outer, model.run.signs
    if signs is not None and "worker" in segment.regions:
        own, start = signs.own(segment), segment.master_range[0]
        bounds = start + own.start, start + own.stop
        yield WORKER, bounds, signs.mean(segment)[own]
        yield SERVER, bounds, segment.regions["server"].values()
    if outer is None or not segment.spec.trainable:
        return
    own, start = outer.weights.own(segment), segment.master_range[0]
    bounds = start + own.start, start + own.stop
    yield GLOBAL, bounds, segment.regions["global"].values()[own]
    if "momentum" in segment.regions:
        kept = segment.regions["momentum"].values()
        yield MOMENTUM, bounds, kept if len(kept) == own.stop - own.start else kept[own]
    if (change := outer.weights.in_flight(segment)) is not None:
        yield CHANGE, bounds, change[own]


def shared_targets(
    model: ShardedModel, segment: Segment, there: Collection[str], *, flies: bool
) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Where those of it that are ``there`` are read to, whatever the number of groups; ``flies``: the rounds are those
    that there were."""
    outer = model.run.outer
    assert outer is not None
    bounds, region = segment.master_range, segment.regions["global"]
    if GLOBAL in there:
        yield GLOBAL, bounds, region.values()
    if MOMENTUM in there and "momentum" in segment.regions:
        own, kept = outer.weights.own(segment), segment.regions["momentum"].values()
        low, high = (own.start, own.stop) if len(kept) == own.stop - own.start else (0, len(kept))
        yield MOMENTUM, (bounds[0] + low, bounds[0] + high), kept
    if CHANGE in there and flies:
        yield CHANGE, bounds, outer.weights.put_in_flight(segment).zero_()
    elif CHANGE in there:  # what was on its way has come
        change = torch.zeros(segment.shard_numel, dtype=region.dtype, device=region.values().device)
        yield CHANGE, bounds, change
        region.values().add_(change)


def lost_targets(
    model: ShardedModel, segment: Segment, there: Collection[str]
) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Where what ranks lost that send signs is read to: each takes the mean of what all had; where there is none, 0."""
    signs = model.run.signs
    if signs is None or "worker" not in segment.regions:
        return
    own, bounds = signs.own(segment), segment.master_range
    places = {WORKER: ("worker", bounds), SERVER: ("server", (bounds[0] + own.start, bounds[0] + own.stop))}
    for state, (region, at) in places.items():
        values = segment.regions[region].values().zero_()
        if state in there:
            yield state, at, values


# -- what one rank keeps, and what all share


def collect(
    model: ShardedModel,
    rank_state: Mapping[str, Any],
    run_tensors: Mapping[str, Tensor],
    left_out: Mapping[str, str],
    lost: Mapping[int, Tensor],
    *,
    every: bool = False,
    lending: Lending | None = None,
) -> tuple[list[UnwrittenPiece], Index]:
    """This rank's parts, and what it alone knows: numbers kept once, its own tree. With a ``lending`` the parts of what
    is trained are those of another rank, of which this one holds the copies, read when it is their turn.

    Where a state is whole on several ranks, each writes an equal share of it; with ``every`` each writes all that it
    has, as any other may be gone. ``left_out``: see :meth:`FrozenBase.left_out`; ``lost``: see :func:`sums_of_lost`.
    """
    parts: list[UnwrittenPiece] = []
    once, described, group = dict[str, Any](), dict[str, Any](), _group_here(model)
    for unit in model.units:
        for segment in unit.segments:
            for slot, place in enumerate(segment.spec.slots):
                if lending is not None and segment.spec.trainable:
                    if _is_seen(segment):
                        parts += _own_weight(model, segment, place)
                    continue
                if place.name not in left_out and model.counts(segment) and (segment.spec.trainable or not group):
                    _of_parameter(model, segment, slot, parts, once, lost.get(id(segment)), every=every)
    if lending is not None:
        others, numbers = _copied_trained(model, lending)
        parts += others
        once.update(numbers)
    parts = _of_group(parts, group)
    if group:
        once.clear()
    for segment in model.trainable():
        _of_all_groups(model, segment, parts)
    tensors: dict[str, Tensor] = {}
    tree = encode({"rng": rng_state()}, "rank_state", tensors)
    tree["state"] = encode(plain(rank_state), "rank_state.state", tensors, "rank_state")
    for name, tensor in tensors.items():
        parts.append(UnwrittenPiece.whole("rank", "", name, tensor, rank=model.rank))
    if (model.leads or every) and not group:
        for name, (buffer, _) in _buffers(model):
            parts.append(UnwrittenPiece.whole("buffer", "", name, buffer))
        if model.rank and not every:  # of another stage than rank 0's, which the header tells of
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
        codes = segment.spec.codes or None
        parameters.append(Parameter(name, shape, dtype, also.get(name, ()), trainable, left_out.get(name), codes))
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


def _is_average(state: str) -> bool:
    """Whether a state is an average."""
    return re.fullmatch(r"average(_[1-9]\d*)?", state) is not None


def is_moment(state: str) -> bool:
    """Whether a state is the optimizer's."""
    return state not in ("weight", LOST) and not _is_average(state) and not _is_apart(state)


# -- a parameter ---------------------------------------------------------------------------------------------------


def _places(model: ShardedModel) -> Iterator[tuple[Segment, int]]:
    for segment in model.segments():
        if model.counts(segment):
            yield from ((segment, slot) for slot in range(len(segment.spec.slots)))


def _share(model: ShardedModel, bounds: tuple[int, int], over: Axes, segment: Segment, slot: Slot) -> tuple[int, int]:
    """This rank's share of a range that all ranks have which differ from it on other axes only: data axes, or, of a
    parameter that is whole, any."""
    number, replicas = _replica(model, over, segment, slot)
    align = alignment(model.optimizer) if segment.form is None else segment.form.block
    steps = (bounds[1] - bounds[0]) // align
    low, high = steps * number // replicas * align, steps * (number + 1) // replicas * align
    if number == replicas - 1:
        high = bounds[1] - bounds[0]
    return bounds[0] + low, bounds[0] + high


def _replica(model: ShardedModel, over: Axes, segment: Segment, slot: Slot) -> tuple[int, int]:
    """Which of the ranks that have the same of a parameter this one is, and how many there are."""
    sizes = model.comm.mesh.sizes
    every = slot.box is None and not segment.spec.distinct
    shared = sizes.meeting if every else [a for a in sizes.alike if a not in segment.spec.distinct]
    others = tuple(axis for axis in shared if axis not in over and sizes[axis] > 1)
    return shard_index(others, sizes, model.comm.mesh.coords), model.comm.mesh.parts(others)


def _of_parameter(
    model: ShardedModel,
    segment: Segment,
    slot: int,
    parts: list[UnwrittenPiece],
    once: dict[str, dict[str, Any]],
    lost: Tensor | None,
    *,
    every: bool,
) -> None:
    place = segment.spec.slots[slot]
    weights, bounds, over = most_precise(model, segment)
    low, high = bounds if every else _share(model, bounds, over, segment, place)
    a, b = max(low, place.offset), min(high, place.offset + place.numel)
    first = place.offset in range(low, high) or (not place.numel and model.rank == 0)
    if a < b and segment.form is not None:
        parts.append(_codes(segment, place, a, b, segment.regions["params"], segment.rest_range[0]))
    elif a < b:
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
    if every or not _replica(model, segment.table.master.over, segment, place)[0]:
        for name, value in update.owned(segment, slot).items():
            parts.append(UnwrittenPiece.whole("once", name, place.name, value))
    if first and not any(place.starts):  # of boxes the one that begins the parameter: what is kept once is equal in all
        numbers: dict[str, Any] = {}
        for name, value in update.kept_once(segment, slot).items():
            if isinstance(value, Tensor) and value.dim():
                parts.append(UnwrittenPiece.whole("once", name, place.name, value))
            else:
                numbers[name] = encode(value, f"{name} of {place.name}", {})
        if numbers:
            once[place.name] = numbers


def copied(model: ShardedModel) -> tuple[list[UnwrittenPiece], dict[str, dict[str, Any]]]:
    """What this rank holds of another's states, as that one would write it; and what that one keeps once."""
    parts, once = _copied_trained(model, None)
    for segment in model.segments():
        if segment.copied_range is not None:
            parts += _copied_frozen(segment)
    return parts, once


def _is_seen(segment: Segment) -> bool:
    """Whether users have the master itself in their parameters, and may write it without a trace."""
    return segment.master_is_rest and not segment.split


def _own_weight(model: ShardedModel, segment: Segment, place: Slot) -> Iterator[UnwrittenPiece]:
    """This rank's part of a parameter's values."""
    weights, (low, high), _ = most_precise(model, segment)
    a, b = max(low, place.offset), min(high, place.offset + place.numel)
    if a < b:
        yield _range(place, "weight", a - place.offset, weights.part(slice(a - low, b - low)))


def _copied_trained(
    model: ShardedModel, lending: Lending | None
) -> tuple[list[UnwrittenPiece], dict[str, dict[str, Any]]]:
    """The same of what is trained, as lent to a save."""
    parts: list[UnwrittenPiece] = []
    once: dict[str, dict[str, Any]] = {}
    update = model.updater
    found = [(s, update.copied(s)) for s in model.trainable()] if update is not None else []
    for segment, held in found:
        if held is None:
            continue
        whole: dict[str, Shard] = {}
        weight = {"weight": held.segment.regions["copies"]} if lending is None or not _is_seen(segment) else {}
        for name, region in {**weight, **held.moments}.items():
            whole[name] = Shard(region, 0, held.segment.shard_numel)
            if lending is not None:
                held.segment.lend(lent := LentMemory(lending, region))
                whole[name] = lent.shard()
        for slot, place in enumerate(segment.spec.slots):
            piece, of = held.segment.own_piece(slot)
            if piece.start < piece.stop:
                parts += [_range(place, name, of.start, shard.part(piece)) for name, shard in whole.items()]
            if place.offset in range(*held.segment.master_range) and not any(place.starts):
                once[place.name] = {"step": encode(held.steps[slot], f"step of {place.name}", {})}
    return parts, once


def _copied_frozen(segment: Segment) -> Iterator[UnwrittenPiece]:
    """What this rank holds of another's part of what is frozen."""
    region, (low, high) = segment.regions["copies"], segment.copied_range or (0, 0)
    for slot, place in enumerate(segment.spec.slots):
        piece, of = segment.copied_piece(slot)
        if piece.start == piece.stop:
            continue
        if segment.form is not None:
            yield _codes(segment, place, low + piece.start, low + piece.stop, region, low)
        else:
            yield _range(place, "weight", of.start, Shard(region, 0, high - low).part(piece))


def _of_all_groups(model: ShardedModel, segment: Segment, parts: list[UnwrittenPiece]) -> None:
    """This rank's share of what groups of ranks have together of a segment."""
    over = (*segment.table.master.over, *model.comm.mesh.sizes.rare)
    for state, bounds, values in _shared_states(model, segment):
        for place in segment.spec.slots:
            low, high = _share(model, bounds, over, segment, place)
            a, b = max(low, place.offset), min(high, place.offset + place.numel)
            if a < b:
                parts.append(_range(place, state, a - place.offset, values[a - bounds[0] : b - bounds[0]]))


def _codes(segment: Segment, slot: Slot, start: int, stop: int, region: Region, low: int) -> UnwrittenPiece:
    """Elements ``[start, stop)`` of a segment that rests as codes, of one of its parameters, from a region that begins
    with element ``low``."""
    form = segment.form
    assert form is not None
    width = form.nbytes(form.block)
    count = -(-(stop - start) // form.block)
    bounds, shape = (start - slot.offset, stop - slot.offset), (count * width,)
    piece = Piece(slot.name, "weight", "block", "U8", shape, *bounds, slot.box, form.block, width=width)
    shard = Shard(region, form.nbytes(start - low), count * width)
    return UnwrittenPiece(piece, shard if shard.memory is None else shard.memory)


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


# -- what is left out


class FrozenBase:
    """An engine's frozen parameters and their checksums, which are made once."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = model
        self._known: dict[str, str] = {}
        self._version: list[object] = []

    def left_out(self, frozen: str) -> dict[str, str]:
        """Checksums by the names of the parameters that a save leaves out; every rank calls it.

        Raises:
            ConfigError: ``frozen`` is neither ``"keep"`` nor ``"skip"``.
            UsageError: nothing would be left, as the engine has no optimizer, or a rank has a box only of one of them.
        """
        if frozen == "keep":
            return {}
        model = self._model
        if frozen != "skip":
            raise ConfigError(f"engine.save(frozen={frozen!r}): frozen parameters are kept ('keep') or not ('skip').")
        if model.optimizer is None:
            raise UsageError(
                "engine.save(frozen='skip') of an engine without optimizer would leave out every parameter: "
                "use frozen='keep'."
            )
        units = [unit for unit in model.units if any(not s.spec.trainable for s in unit.segments)]
        frozen_slots = [slot for unit in units for s in unit.segments if not s.spec.trainable for slot in s.spec.slots]
        if boxed := next((slot for slot in frozen_slots if slot.box is not None), None):
            raise UsageError(
                f"engine.save(frozen='skip') keeps a checksum of all of {boxed.name!r}, of which this rank has a box "
                f"of shape {boxed.shape} in {boxed.whole}: use frozen='keep'."
            )
        version = [model.followed, *((unit.name, unit.life, unit.version) for unit in units)]
        if model.comm.control([float(version != self._version)], dist.ReduceOp.MAX)[0]:
            self._known = _digests(
                model,
                {
                    slot.name: most_precise(model, segment)[0].dtype
                    for unit in units
                    for segment in unit.segments
                    if not segment.spec.trainable
                    for slot in segment.spec.slots
                },
            )
            self._version = version
        return self._known


def other_base(model: ShardedModel, left_out: Mapping[str, Parameter]) -> tuple[list[str], list[str]]:
    """Which parameters have other values than those that a checkpoint left out; every rank calls it.

    Args:
        model: whose values are compared.
        left_out: what the checkpoint says of them, by the engine's names.

    Returns:
        Names of those that differ, and of those that cannot be compared, as they are kept in fewer digits here or not
        whole.
    """
    if not left_out:
        return [], []
    slots = {s.name: (s, most_precise(model, g)[0]) for u in model.units for g in u.segments for s in g.spec.slots}
    unclear = [
        name
        for name, theirs in left_out.items()
        for slot, kept in [slots[name]]
        if slot.box is not None or torch.promote_types(kept.dtype, DTYPES[theirs.dtype]) != kept.dtype
    ]
    found = _digests(model, {n: DTYPES[p.dtype] for n, p in left_out.items() if n not in unclear})
    return [name for name, digest in found.items() if digest != left_out[name].digest], unclear


def _digests(model: ShardedModel, dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Checksums of parameters' values in these dtypes; 16 MiB, or one segment, are whole at a time."""
    segments = [s for unit in model.units for s in unit.segments if any(p.name in dtypes for p in s.spec.slots)]
    shards = [(segment, kept, over) for segment in segments for kept, _, over in [most_precise(model, segment)]]
    found: dict[str, str] = {}
    for segment, flat in whole_segments(model.comm, shards, "checksums of frozen parameters"):
        for slot in segment.spec.slots:
            if slot.name in dtypes:
                values = flat[slot.offset : slot.offset + slot.numel].detach().to(dtypes[slot.name]).cpu()
                found[slot.name] = checksum(values.view(torch.uint8).numpy())
    return found


# -- what formats have lost


LOST = "format"
"""The name of this state in a checkpoint."""
AT_ONCE = 4 * 1024 * 1024
"""Elements of a temporary."""


def sums_of_lost(comm: Comm, segments: Sequence[Segment], what: str) -> dict[int, Tensor]:
    """By ``id`` of the segment the sum over ranks on its master range, ``(length / parts,)``; every rank calls it."""
    found: dict[int, Tensor] = {}
    for segment in segments:
        kept = segment.format_state
        if kept is None:
            continue
        whole = _all(comm, segment, kept)
        axes = comm.mesh.sizes.summed(segment.spec.distinct)
        start, stop = segment.master_range
        out = found[id(segment)] = torch.zeros(stop - start, dtype=kept.dtype, device=kept.device)
        for at in range(0, len(kept), AT_ONCE):
            some = whole[at : at + AT_ONCE].clone()
            if comm.mesh.parts(axes) > 1:
                op = Op("ALL_REDUCE", axes=axes)
                comm.agreement.issue(f"{op} for {what}")
                comm.meter.ask(op.verb, axes, some.nbytes)
                comm.agreement.wait(dist.all_reduce(some, group=comm.mesh.group(axes), async_op=True))
            a, b = max(start, at), min(stop, at + len(some))
            if a < b:
                out[a - start : b - start] = some[a - at : b - at]
    return found


def _all(comm: Comm, segment: Segment, kept: Tensor) -> Tensor:
    """What a rank keeps of each element, of the second of two hops too."""
    if segment.node_state is None:
        return kept
    num_nodes, ranks = nodes(comm.mesh)
    both = kept.clone()
    both.view(num_nodes, ranks, -1)[:, comm.mesh.coords[DATA_AXES[1]]] += segment.node_state.view(num_nodes, -1)
    return both


def take_lost(comm: Comm, segment: Segment, values: Tensor) -> None:
    """Gives this rank what it is to keep of the sums on its master range; the first of those that have it keeps all."""
    kept = segment.format_state
    assert kept is not None
    others = [axis for axis in comm.mesh.sizes.summed(segment.spec.distinct) if axis not in segment.table.master.over]
    with torch.no_grad():
        kept.zero_()
        if segment.node_state is not None:
            segment.node_state.zero_()
        if not any(comm.mesh.coords[axis] for axis in others):
            kept[slice(*segment.master_range)] = values


def check_slices(call: str, model: ShardedModel) -> None:
    """
    Raises:
        ConfigError: ranks hold parts of a parameter, and nothing says which part of which whole.
    """
    apart = (
        (slot.name, s.spec.distinct)
        for s in model.segments()
        if s.spec.distinct
        for slot in s.spec.slots
        if not slot.box
    )
    if (found := next(apart, None)) is not None:
        name, axes = found
        raise ConfigError(
            f"{call}: each rank along the axis {axes[0]!r} has another {name!r}, and nothing says which part of which "
            f"whole: say so with mark_slice(module, {name.rpartition('.')[2]!r}, axis={axes[0]!r}, dim=...), or with "
            "whole= and start=."
        )
