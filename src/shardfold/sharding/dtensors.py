"""A model's values as DTensors, PyTorch's own word for a tensor that ranks have in parts.

A rank's shard is a range of a unit's flat, which ends in the middle of a row; a DTensor's is whole rows of each
parameter, in ``torch.chunk``'s parts, as under FSDP2. So what is made here is new: each rank sends of its ranges what
is in others' rows, bundle by bundle, and nothing is ever whole where it rests in parts. What is sent is at most a
rank's share of the model, once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardfold.comm.coalesced import BATCH, as_bytes
from shardfold.comm.comm import Comm
from shardfold.comm.device_mesh import device_mesh_of
from shardfold.errors import ModelError, UsageError
from shardfold.plan.axes import Axes
from shardfold.plan.layout import Tier
from shardfold.plan.placement import chunk_box, shard_range
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard
from shardfold.sharding.slices import divided_dims
from shardfold.sharding.stand_ins import own_state
from shardfold.sharding.together import together
from shardfold.sharding.whole_state import chosen, most_precise

__all__ = ["Placing", "RowSource", "check_sharded", "own_rows", "sharded_state"]

WHAT = "engine.state_dict(sharded=True)"


def sharded_state(model: ShardedModel, frozen: str) -> OrderedDict[str, Any]:
    """See :meth:`Engine.state_dict`. All ranks of the job call it.

    Raises:
        ModelError: a hook of the state dict cannot run here.
    """
    segments, placing = chosen(model, frozen), Placing(model)
    values: dict[int, Tensor] = {}
    with torch.no_grad():
        sources = [RowSource.of(model, segment) for segment in segments]
        for source, slot, local in own_rows(model.comm, sources, WHAT):
            segment = source.segment
            values[id(segment.parameters[slot])] = placing.dtensor(segment, slot, local, source.rows)
    hollow = model.whole.hollow if model.whole is not None else ()
    state = own_state(model.module, values, hollow)
    for name in model.whole.untold if model.whole is not None else ():
        state.pop(name, None)
    return state


def check_sharded(model: ShardedModel, frozen: str, *, apart: bool) -> None:
    """``apart``: groups of ranks have weights of their own.

    Raises:
        ConfigError: ``frozen`` is neither ``"keep"`` nor ``"skip"``.
        ModelError: a parameter's parts are no chunks.
        UsageError: there is no state of all ranks.
    """
    if apart:
        raise UsageError(
            f"{WHAT}: groups of ranks have weights of their own, as their outer steps are some steps apart: use "
            "engine.save(), or call engine.outer_step() and take rank 0's engine.state_dict()."
        )
    Placing(model).check(chosen(model, frozen))


class Placing:
    """How parameters of a model lie as DTensors, on axes of more than one rank of its mesh, but those of stages and of
    groups."""

    def __init__(self, model: ShardedModel) -> None:
        self._mesh = model.comm.mesh
        sizes = self._mesh.sizes
        self.axes: Axes = tuple(a for a in sizes if sizes[a] > 1 and a not in (*sizes.stages, *sizes.rare))
        self._dims = divided_dims(model.module, sizes)
        self._made: dict[Axes, Any] = {}

    def check(self, segments: Sequence[Segment]) -> None:
        """
        Raises:
            ModelError: no placement says how a parameter is divided.
        """
        for segment in segments:
            for number, slot in enumerate(segment.spec.slots):
                if not self.divides(segment, number):
                    raise ModelError(
                        f"{slot.name!r} is divided over {', '.join(segment.spec.distinct) or 'ranks'} into parts that "
                        "are no chunks along one dimension, as DTensors' are (it is several matrices in one, or marked "
                        "with whole= and start=, or without dim=): use engine.save(), or engine.state_dict()."
                    )

    def divides(self, segment: Segment, slot: int) -> bool:
        """Whether what ranks have of a parameter are chunks of it, or all of it."""
        some = segment.spec.slots[slot].larger or segment.spec.distinct
        return not some or self._dims.get(id(segment.parameters[slot]), {}) is not None

    def distinct(self, segment: Segment, slot: int) -> dict[str, int]:
        """The dimension that each axis divides on which ranks have other parts of a parameter."""
        return self._dims.get(id(segment.parameters[slot])) or {}

    def dims(self, segment: Segment, slot: int, rows: Axes) -> tuple[Axes, list[int | None]]:
        """The axes in the order in which they divide a parameter, rows over these, and the dimension that each does."""
        distinct, over = self.distinct(segment, slot), rows_over(segment, slot, rows)
        first = [axis for axis in self.axes if axis in distinct]  # what others divide once more
        order = (*first, *(axis for axis in self.axes if axis not in first)) if over and first else self.axes
        return order, [distinct.get(axis, 0 if axis in over else None) for axis in order]

    def dtensor(self, segment: Segment, slot: int, local: Tensor, rows: Axes) -> Tensor:
        """The parameter, or a state with an element for each of its, whose rows are divided over these axes and here
        are ``local``; on one rank that is all of it, and a plain tensor."""
        if not self.axes:
            return local
        from torch.distributed import tensor as dtensor

        order, dims = self.dims(segment, slot, rows)
        if order not in self._made:
            self._made[order] = device_mesh_of(self._mesh, order)
        whole = segment.spec.slots[slot].whole
        placements = [dtensor.Replicate() if dim is None else dtensor.Shard(dim) for dim in dims]
        strides = torch.empty(whole, device="meta").stride()
        return dtensor.DTensor.from_local(
            local, self._made[order], placements, run_check=False, shape=torch.Size(whole), stride=strides
        )


def rows_over(segment: Segment, slot: int, rows: Axes) -> Axes:
    """The axes over which a parameter's rows are divided, of those that rows are; a single number is over none."""
    return rows if segment.spec.slots[slot].shape else ()


# -- rows out of ranges


@dataclass(frozen=True)
class RowSource:
    """What a segment's values are read from.

    Attributes:
        segment: whose they are.
        shard: a state, of its length.
        split: the axes that the state is split over.
        rows: the axes over which rows are to be divided.
        name: of the state.
    """

    segment: Segment
    shard: Shard
    split: Axes
    rows: Axes
    name: str = ""

    @staticmethod
    def of(model: ShardedModel, segment: Segment) -> RowSource:
        """Parameters where they have the master's dtype, as they may rest on more ranks; else what is most precise."""
        shard, _, over = most_precise(model, segment)
        rest = segment.shard("params")
        rows = segment.table.rest.over
        if rest is not None and rest.dtype == shard.dtype:
            return RowSource(segment, rest, rows, rows)
        return RowSource(segment, shard, over, rows)


def own_rows(comm: Comm, sources: Sequence[RowSource], what: str) -> Iterator[tuple[RowSource, int, Tensor]]:
    """This rank's rows of each parameter, ``(rows, ...)``, on the CPU, for a call that messages name ``what``; its
    shares of segments come 16 MiB, or one, at a time."""
    batch: list[RowSource] = []
    for source in sources:
        fits = sum(_share_bytes(comm, one) for one in [*batch, source]) <= BATCH // 4
        if batch and not (fits and _ways(batch[0]) == _ways(source)):
            yield from _batch_of_rows(comm, batch, what)
            batch = []
        batch.append(source)
    if batch:
        yield from _batch_of_rows(comm, batch, what)


def _ways(source: RowSource) -> tuple[Axes, Axes]:
    return source.split, source.rows


def _share_bytes(comm: Comm, source: RowSource) -> int:
    """The larger of what this rank reads and what it gets."""
    parts = min(comm.mesh.parts(axes) for axes in _ways(source))
    return source.segment.spec.length // parts * source.shard.itemsize


def _batch_of_rows(comm: Comm, batch: Sequence[RowSource], what: str) -> Iterator[tuple[RowSource, int, Tensor]]:
    sizes, me = comm.mesh.sizes, comm.mesh.coords
    split = batch[0].split
    group = tuple(axis for axis in sizes if axis in split and sizes[axis] > 1)  # master is split wherever params are
    ranks = next(row for row in sizes.rows(group) if comm.mesh.rank in row)
    places = [sizes.coords(rank) for rank in ranks]
    files = any(source.shard.region.tier == Tier.DISK for source in batch)
    read = together(comm, what, lambda: [source.shard.read() for source in batch], files=files)

    def pieces(source: Mapping[str, int], target: Mapping[str, int]) -> list[tuple[int, int, int, int]]:
        """What the rank at one place has of the rows of that at another: number in the batch, slot, start and stop in
        the segment."""
        found: list[tuple[int, int, int, int]] = []
        for number, one in enumerate(batch):
            spec = one.segment.spec
            a, b = shard_range(spec.length, split, sizes, source)
            for slot in range(len(spec.slots)):
                start, stop = _row_range(one, slot, sizes, target)
                if max(a, start) < min(b, stop):
                    found.append((number, slot, max(a, start), min(b, stop)))
        return found

    rows = {
        (number, slot): torch.empty(_row_box(one, slot, sizes, me).sizes, dtype=one.shard.dtype)
        for number, one in enumerate(batch)
        for slot in range(len(one.segment.spec.slots))
    }

    def put(piece: tuple[int, int, int, int], values: Tensor) -> None:
        number, slot, start, stop = piece
        first = _row_range(batch[number], slot, sizes, me)[0]
        rows[number, slot].view(-1)[start - first : stop - first].copy_(values)

    def own(piece: tuple[int, int, int, int]) -> Tensor:
        number, _, start, stop = piece
        first = shard_range(batch[number].segment.spec.length, split, sizes, me)[0]
        return read[number].detach()[start - first : stop - first]

    for piece in pieces(me, me):
        put(piece, own(piece))
    if group:
        goes = [[] if at == me else pieces(me, at) for at in places]
        comes = [[] if at == me else pieces(at, me) for at in places]
        sent = [as_bytes(own(piece).contiguous()) for row in goes for piece in row]
        by = [sum((stop - start) * batch[number].shard.itemsize for number, _, start, stop in row) for row in comes]
        to = [sum((stop - start) * batch[number].shard.itemsize for number, _, start, stop in row) for row in goes]
        received = _exchange(comm, sent, to, by, group, what)
        at = 0
        for piece in (piece for row in comes for piece in row):
            number, _, start, stop = piece
            length = (stop - start) * batch[number].shard.itemsize
            put(piece, received[at : at + length].clone().view(batch[number].shard.dtype))  # clone: aligned
            at += length
    for (number, slot), values in rows.items():
        yield batch[number], slot, values


def _row_range(source: RowSource, slot: int, sizes: Any, coords: Mapping[str, int]) -> tuple[int, int]:
    """Where the rows of the rank at ``coords`` are in the segment, of what ranks have of the parameter here."""
    spec, box = source.segment.spec.slots[slot], _row_box(source, slot, sizes, coords)
    width = prod(spec.shape[1:])
    start = spec.offset + (box.starts[0] * width if spec.shape else 0)
    return start, start + box.numel


def _row_box(source: RowSource, slot: int, sizes: Any, coords: Mapping[str, int]) -> Any:
    over = [axis for axis in sizes if axis in rows_over(source.segment, slot, source.rows)]
    shape = source.segment.spec.slots[slot].shape
    return chunk_box(shape, [0] * len(over), [sizes[axis] for axis in over], [coords[axis] for axis in over])


def _exchange(
    comm: Comm, sent: Sequence[Tensor], to: Sequence[int], by: Sequence[int], group: Axes, what: str
) -> Tensor:
    """What the ranks of a group have for this one, as bytes, one rank's after the other's; ``to``, ``by``: how many."""
    device = comm.memory.device
    out = torch.cat([part.to(device) for part in sent]) if sent else torch.empty(0, dtype=torch.uint8, device=device)
    received = torch.empty(sum(by), dtype=torch.uint8, device=device)
    with comm.agreement.uninterrupted():
        comm.agreement.issue(f"an exchange of rows for {what}")
        comm.transport.exchange(out, to, received, by, comm.mesh.group(group)).wait(comm.agreement.wait)
    comm.meter.ask("ALL_TO_ALL", group, out.nbytes * len(by) // (len(by) - 1))
    return received.cpu()
