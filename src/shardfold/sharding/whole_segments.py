"""All values of a state that is split: of whole segments, or of single parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardfold.comm.coalesced import BATCH, Stretch, as_bytes, complete, exchange
from shardfold.comm.comm import Comm
from shardfold.plan.layout import Axes, Tier
from shardfold.plan.placement import shard_index
from shardfold.sharding.segment import Segment
from shardfold.sharding.shard import Shard, values_of
from shardfold.sharding.together import together

__all__ = ["SegmentSlice", "gather_slices", "whole_parameters", "whole_segments"]


class SegmentSlice(NamedTuple):
    """A parameter's part of a state of its segment: ``shard`` is this rank's range of it, ``(length / parts,)``."""

    segment: Segment
    slot: int
    shard: Tensor


def gather_slices(comm: Comm, slices: Sequence[SegmentSlice], what: str) -> list[Tensor]:
    """New tensors with all values of parameters' states that are split as master is, in their shapes and dtypes."""
    whole: dict[int, Tensor] = {}
    for over in dict.fromkeys(one.segment.table.master.over for one in slices):
        numbers = [i for i, one in enumerate(slices) if one.segment.table.master.over == over]
        found = _gather_slices(comm, [slices[i] for i in numbers], over, what)
        whole.update(zip(numbers, found, strict=True))
    return [whole[i] for i in range(len(slices))]


def _gather_slices(comm: Comm, slices: Sequence[SegmentSlice], over: Axes, what: str) -> list[Tensor]:
    sizes, parts = comm.mesh.sizes, comm.mesh.parts(over)
    me = shard_index(over, sizes, comm.mesh.coords)
    whole: list[Tensor] = []
    rows: list[list[Stretch]] = [[] for _ in range(parts)]
    for i, (segment, number, shard) in enumerate(slices):
        slot, dtype = segment.spec.slots[number], shard.dtype
        whole.append(torch.empty(slot.shape, dtype=dtype, device=comm.memory.device))
        length = segment.spec.length // parts
        for r in range(parts):
            a, b = max(slot.offset, r * length), min(slot.offset + slot.numel, (r + 1) * length)
            if a < b:
                rows[r].append(Stretch(i, (a - slot.offset) * dtype.itemsize, (b - slot.offset) * dtype.itemsize))
                if r == me:
                    whole[i].view(-1)[a - slot.offset : b - slot.offset].copy_(shard[a - r * length : b - r * length])
    exchange(comm, [as_bytes(tensor) for tensor in whole], rows, over, what)
    return whole


def whole_segments(
    comm: Comm, shards: Iterable[tuple[Segment, Tensor | Shard, Axes]], what: str
) -> Iterator[tuple[Segment, Tensor]]:
    """``(segment, flat)`` for each ``(segment, shard, over)``: all its values ``(length,)``; 16 MiB, or one, at a time.

    Where nothing is split, ``flat`` is the shard itself; what rests in a file is read when it is its turn.
    """
    batch: list[tuple[Segment, Tensor | Shard, Axes]] = []
    for item in shards:
        if batch and (item[2] != batch[0][2] or _whole_bytes([*batch, item]) > BATCH // 4):
            yield from _whole_batch(comm, batch, what)
            batch = []
        batch.append(item)
    yield from _whole_batch(comm, batch, what)


def _whole_bytes(batch: Sequence[tuple[Segment, Tensor | Shard, Axes]]) -> int:
    return sum(segment.spec.length * shard.itemsize for segment, shard, _ in batch)


def _whole_batch(
    comm: Comm, batch: Sequence[tuple[Segment, Tensor | Shard, Axes]], what: str
) -> Iterator[tuple[Segment, Tensor]]:
    if not batch:
        return
    over = batch[0][2]
    index = shard_index(over, comm.mesh.sizes, comm.mesh.coords)
    flats: list[Tensor] = []
    files = any(isinstance(given, Shard) and given.region.tier == Tier.DISK for _, given, _ in batch)
    shards = together(comm, what, lambda: [values_of(given) for _, given, _ in batch], files=files)
    for (segment, _, _), shard in zip(batch, shards, strict=True):
        if shard.numel() == segment.spec.length:
            flats.append(shard.detach())
            continue
        flat = torch.empty(segment.spec.length, dtype=shard.dtype, device=comm.memory.device)
        flat[index * shard.numel() : (index + 1) * shard.numel()].copy_(shard)
        flats.append(flat)
    complete(comm, flats, over, what)
    for (segment, _, _), flat in zip(batch, flats, strict=True):
        yield segment, flat


def whole_parameters(
    comm: Comm, shards: Iterable[tuple[Segment, Tensor | Shard, Axes]], what: str
) -> dict[int, Tensor]:
    """As :func:`whole_segments`, on the CPU: a new tensor for each parameter, by its ``id``."""
    whole: dict[int, Tensor] = {}
    for segment, flat in whole_segments(comm, shards, what):
        values = flat.cpu()
        for parameter, view in zip(segment.parameters, segment.views_of(values), strict=True):
            whole[id(parameter)] = view.clone()
    return whole
