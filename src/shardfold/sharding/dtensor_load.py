"""DTensors of a state dict into shards: each rank gets of them what is in its own ranges.

Any placements on any mesh are read. Where a DTensor is divided into blocks over exactly the ranks that run the program,
each rank sends of its block what lies in others' ranges, so that nothing is ever whole; over other ranks, or with sums
still to be taken, it is made whole by its own mesh, one after the other.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm.coalesced import BATCH, as_bytes
from shardfold.comm.device_mesh import is_dtensor
from shardfold.errors import ModelError
from shardfold.plan.placement import Box, Extent, boxes, chunk_box, shard_range, shared
from shardfold.sharding.dtensors import Placing
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.stand_ins import Read
from shardfold.sharding.together import on_disk, together

__all__ = ["BlockRead", "ParameterHome", "Unpacked", "as_read", "check_dtensors", "described", "take_blocks", "unpack"]

WHAT = "engine.load_state_dict()"


class ParameterHome(NamedTuple):
    """Where a parameter lies."""

    segment: Segment
    slot: int


@dataclass
class Unpacked:
    """A state dict whose DTensors are read by others.

    Attributes:
        state: the same, of plain tensors; one without memory stands for a DTensor that is taken part by part.
        waiting: these DTensors, by the ``id`` of what stands for them.
    """

    state: Mapping[str, Any]
    waiting: dict[int, tuple[Tensor, Any]] = field(default_factory=dict[int, tuple[Tensor, Any]])

    def load(self, model: ShardedModel, read: Read) -> None:
        """Takes what waits into the shards, and out of what is ``read``. All ranks that run the program call it."""
        jobs: list[BlockRead] = []
        placing = Placing(model)
        for segment in model.segments():
            for slot, parameter in enumerate(segment.parameters):
                stands = read.parameters.get(id(parameter))
                if stands is not None and id(stands) in self.waiting:
                    jobs.append(BlockRead(ParameterHome(segment, slot), self.waiting[id(stands)][1], placing, model))
                    del read.parameters[id(parameter)]
        if not jobs:
            return
        model.let_go()

        def take(job: BlockRead, part: Tensor) -> None:
            job.home.segment.take(job.home.slot, part, start=job.needs(model.rank)[1][0])

        take_blocks(model, jobs, take)


def unpack(model: ShardedModel, state: Mapping[str, Any], asked: Collection[int]) -> Unpacked:
    """All ranks that run the program call it.

    Args:
        model: that loads it.
        state: that was given, and checked.
        asked: parameters whose values the model's own code reads, by ``id``.

    Raises:
        ConfigError: on all ranks: they have different DTensors.
    """
    given = {name: value for name, value in state.items() if is_dtensor(value)}
    if not model.comm.any_rank([bool(given)], WHAT)[0]:
        return Unpacked(state)
    model.comm.agreement.same({"the DTensors of the state dict": json.dumps(described(model, given))})
    plain: Any = OrderedDict(state)
    if hasattr(state, "_metadata"):
        plain._metadata = cast(Any, state)._metadata
    found, homes, placing = Unpacked(plain), _homes(model), Placing(model)
    for name in sorted(given):
        value, home = given[name], homes.get(name)
        if home is not None and id(home.segment.parameters[home.slot]) not in asked:
            spec = home.segment.spec.slots[home.slot]
            if _in_blocks(model, value) and tuple(value.shape) == spec.whole and placing.divides(*home):
                stands = torch.empty(spec.shape, dtype=value.dtype, device="meta")
                found.waiting[id(stands)] = stands, value
                plain[name] = stands
                continue
        if model.rank not in _ranks(value):
            del plain[name]  # of another stage
            continue
        whole = _of_rank(value.full_tensor().cpu(), home)
        elsewhere = model.whole is not None and name in model.whole.names and name not in _own_names(model)
        plain[name] = whole.new_empty(0) if elsewhere else whole
    return found


def _of_rank(whole: Tensor, home: ParameterHome | None) -> Tensor:
    """What this rank's model has of a whole parameter."""
    spec = home.segment.spec.slots[home.slot] if home is not None else None
    if spec is not None and spec.box is not None and tuple(whole.shape) == spec.whole:
        return whole.view(spec.box.view(spec.whole))[spec.box.slices].reshape(spec.shape)
    return whole


def as_read(model: ShardedModel, home: ParameterHome, value: Any, placing: Placing, state: str) -> BlockRead | Tensor:
    """How a state of a parameter is taken from a DTensor or a plain tensor of the whole parameter's shape: part by
    part, or of what is here of it. All ranks that run the program call it alike."""
    if not is_dtensor(value):
        return _of_rank(value.detach().cpu(), home)
    if _in_blocks(model, value) and placing.divides(*home):
        return BlockRead(home, value, placing, model, state=state)
    return _of_rank(value.full_tensor().cpu(), home)


def check_dtensors(model: ShardedModel, state: Mapping[str, Any], needed: Collection[str] | None = None) -> None:
    """``needed``: names that every rank reads; None: those of its model.

    Raises:
        ModelError: this rank needs a tensor of which it can get nothing, or has another part than it says.
    """
    own = _own_names(model) if needed is None else needed
    for name, value in state.items():
        if type(value).__name__ == "ShardedTensor":
            raise ModelError(
                f"the state dict has {name!r} as a ShardedTensor, which PyTorch has given up for DTensors: load it by "
                "torch.distributed.checkpoint into engine.state_dict(sharded=True), and give that."
            )
        if not is_dtensor(value):
            continue
        ranks = _ranks(value)
        if model.rank not in ranks:
            if name in own:
                raise ModelError(
                    f"the state dict has {name!r} as a DTensor of a mesh that rank {model.rank} is not in: give "
                    "DTensors over all ranks, or plain tensors."
                )
        elif _in_blocks(model, value):
            box = _blocks(value)[ranks.index(model.rank)]
            if value.to_local().numel() != box.numel:
                raise ModelError(
                    f"the state dict has {name!r} as a DTensor of the shape {tuple(value.shape)} and placements "
                    f"{tuple(value.placements)}, of which rank {model.rank} has {value.to_local().numel()} elements "
                    f"and not {box.numel}: make it by distribute_tensor()."
                )


def _homes(model: ShardedModel) -> dict[str, ParameterHome]:
    """Where the parameters of the units lie, by all of their names."""
    by_id = {id(p): ParameterHome(s, slot) for s in model.segments() for slot, p in enumerate(s.parameters)}
    named = model.module.named_parameters(remove_duplicate=False)
    return {name: by_id[id(parameter)] for name, parameter in named if id(parameter) in by_id}


def _own_names(model: ShardedModel) -> set[str]:
    module = model.module
    names = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name for name, _ in names}


# -- which block a rank has


def _ranks(value: Any) -> list[int]:
    """The ranks of the job that a DTensor is of, in the order of its mesh."""
    if value.device_mesh.get_coordinate() is None:
        return []
    return value.device_mesh.mesh.flatten().tolist()


def _in_blocks(model: ShardedModel, value: Any) -> bool:
    """Whether a DTensor is one block on each of exactly the ranks that run the program."""
    simple = all(p.is_replicate() or type(p).__name__ == "Shard" for p in value.placements)
    return simple and sorted(_ranks(value)) == sorted(model.comm.mesh.program_ranks)


def _blocks(value: Any) -> list[Box]:
    """The block of each of its ranks."""
    dims = [None if p.is_replicate() else p.dim % value.dim() for p in value.placements]
    return boxes(tuple(value.shape), dims, tuple(value.device_mesh.shape))


def described(model: ShardedModel, given: Mapping[str, Any]) -> list[Any]:
    """What ranks have to have alike."""
    found: list[list[Any]] = []
    for name, value in sorted(given.items()):
        blocks = [_ranks(value), list(value.device_mesh.shape), list(map(str, value.placements))]
        found.append([name, list(value.shape), str(value.dtype), blocks if _in_blocks(model, value) else []])
    return found


# -- parts


def take_blocks(model: ShardedModel, jobs: Sequence[BlockRead], take: Callable[[BlockRead, Tensor], None]) -> None:
    """Hands each job what this rank needs of its DTensor, on the CPU. All ranks that run the program call it, with the
    same jobs in the same order."""
    for batch in _batches(jobs) if jobs else ():
        values = _received(model, batch)

        def each(batch: Sequence[BlockRead] = batch, values: Sequence[Tensor] = values) -> None:
            for job, part in zip(batch, values, strict=True):
                take(job, part)

        with torch.no_grad():
            together(model.comm, WHAT, each, files=on_disk(model.layout))


class BlockRead:
    """One parameter, and the DTensor that it is taken from; or a ``state`` of the optimizer's, of that name."""

    def __init__(
        self, home: ParameterHome, value: Any, placing: Placing, model: ShardedModel, *, state: str = ""
    ) -> None:
        self.home, self.value, self.state, self._mesh = home, value, state, model.comm.mesh
        self.dtype, self.numel = value.dtype, value.numel()
        self._divided = placing.distinct(*home)
        self._peers = list(model.comm.mesh.program_ranks)
        self.owners: dict[Box, list[int]] = {}
        for rank, box in zip(_ranks(value), _blocks(value), strict=True):
            self.owners.setdefault(box, []).append(rank)

    def needs(self, rank: int) -> tuple[Box, tuple[int, int]]:
        """What a rank has of the parameter here, and the elements of it that are in its shards, or between these."""
        segment, sizes, coords = self.home.segment, self._mesh.sizes, self._mesh.sizes.coords(rank)
        slot, table = segment.spec.slots[self.home.slot], segment.table
        axes = [axis for axis in sizes if axis in self._divided]
        dims: list[int | None] = [self._divided[axis] for axis in axes]
        box = chunk_box(slot.whole, dims, [sizes[a] for a in axes], [coords[a] for a in axes])
        cells = [table.rest, *([table.held] if table.held is not None else [])]  # master is in the range of rest
        cells = [table.master] if self.state else cells
        ends: list[int] = []
        for cell in cells:
            start, stop = shard_range(segment.spec.length, cell.over, sizes, coords)
            start, stop = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            ends += [start - slot.offset, stop - slot.offset] if start < stop else []
        return box, (min(ends), max(ends)) if ends else (0, 0)

    def extents(self, source: int, target: int) -> Iterator[tuple[Box, Extent]]:
        """What ``source`` sends to ``target``: the block that it is of, where in it, and where in the parameter. Of
        ranks with one block a rank is its own source, and the others take turns."""
        box, within = self.needs(target)
        for block, owners in self.owners.items():
            if (target if target in owners else owners[self._peers.index(target) % len(owners)]) == source:
                yield from ((block, extent) for extent in shared(block, (0, block.numel), box, within))


def _batches(jobs: Sequence[BlockRead]) -> Iterator[list[BlockRead]]:
    """64 MiB of whole parameters, or one."""
    batch: list[BlockRead] = []
    for job in jobs:
        if batch and sum(one.numel * one.dtype.itemsize for one in [*batch, job]) > BATCH:
            yield batch
            batch = []
        batch.append(job)
    yield batch


def _received(model: ShardedModel, batch: Sequence[BlockRead]) -> list[Tensor]:
    """The elements of each parameter that this rank needs, on the CPU."""
    comm, me, ranks = model.comm, model.rank, list(model.comm.mesh.program_ranks)
    firsts = [job.needs(me)[1][0] for job in batch]
    values = [torch.empty(job.needs(me)[1][1] - job.needs(me)[1][0], dtype=job.dtype) for job in batch]
    locals_ = [job.value.to_local().detach().cpu().contiguous().view(-1) for job in batch]

    def pieces(source: int, target: int) -> list[tuple[int, Extent]]:
        return [(i, extent) for i, job in enumerate(batch) for _, extent in job.extents(source, target)]

    def put(number: int, extent: Extent, part: Tensor) -> None:
        at = extent.other - firsts[number]
        values[number][at : at + extent.numel].copy_(part)

    for number, extent in pieces(me, me):
        put(number, extent, locals_[number][extent.one : extent.one + extent.numel])
    if len(ranks) == 1:
        return values
    goes = [pieces(me, rank) if rank != me else [] for rank in ranks]
    comes = [pieces(rank, me) if rank != me else [] for rank in ranks]
    to, by = ([sum(e.numel * batch[i].dtype.itemsize for i, e in row) for row in rows] for rows in (goes, comes))
    out = torch.empty(sum(to), dtype=torch.uint8)
    at = 0
    for number, extent in (piece for row in goes for piece in row):
        part = as_bytes(locals_[number][extent.one : extent.one + extent.numel])
        out[at : at + part.numel()].copy_(part)
        at += part.numel()
    received = torch.empty(sum(by), dtype=torch.uint8)
    with comm.agreement.uninterrupted():
        comm.agreement.issue(f"an exchange of DTensors for {WHAT}")
        group = comm.agreement.peers.group
        comm.agreement.wait(dist.all_to_all_single(received, out, by, to, group=group, async_op=True), control=True)
    at = 0
    for number, extent in (piece for row in comes for piece in row):
        length = extent.numel * batch[number].dtype.itemsize
        put(number, extent, received[at : at + length].clone().view(batch[number].dtype))  # clone: aligned
        at += length
    return values
