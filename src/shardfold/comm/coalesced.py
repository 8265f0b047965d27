"""A bundle: what many tensors lack, in one buffer, so that one collective brings it to all of them.

What a rank has of the tensors, in their order, is its *stream* of bytes. A collective carries a range of every rank's
stream, padded to the longest; a bundle of up to 64 MiB is one collective, and a larger one is several, so that its
buffer stays small. Tensors of any dtype travel together. A tensor of 1 MiB or more travels by itself, in place: on two
ranks of Gloo a copy through a buffer takes longer than one more collective from about there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardfold.comm.comm import Comm
from shardfold.comm.transport import Pending
from shardfold.plan.layout import Axes
from shardfold.plan.placement import shard_index
from shardfold.plan.program import Op

__all__ = ["BATCH", "Stretch", "as_bytes", "complete", "exchange", "spread"]

BATCH = 64 * 1024 * 1024
"""Bytes of the largest buffer."""

LARGE = 1024 * 1024
"""Bytes of a tensor that travels by itself."""


class Stretch(NamedTuple):
    """Bytes ``[start, stop)`` of one tensor of a bundle: what a stream is made of."""

    tensor: int
    start: int
    stop: int


def complete(comm: Comm, flats: Sequence[Tensor], over: Axes, what: str) -> None:
    """Completes 1-D ``flats``, in each of which this rank's of ``parts`` equal chunks is in place.

    Args:
        comm: that carries them.
        flats: of any dtypes; their lengths divide by the number of chunks.
        over: the axes that the chunks are split over.
        what: the caller, for messages.
    """
    parts = comm.mesh.parts(over)
    if parts == 1 or not flats:
        return
    small, large = _by_size(flats)
    for one in [_all_gather(comm, flat, over, what) for flat in large]:
        one.wait(comm.agreement.wait)
    sizes = [flat.nbytes // parts for flat in small]
    rows = [[Stretch(i, r * n, (r + 1) * n) for i, n in enumerate(sizes)] for r in range(parts)]
    exchange(comm, [as_bytes(flat) for flat in small], rows, over, what)


def spread(comm: Comm, tensors: Sequence[Tensor], what: str, source: int = 0) -> None:
    """The values that ``source``, by data rank, has of contiguous ``tensors`` become every rank's."""
    if comm.mesh.data_ranks == 1:
        return
    small, large = _by_size(tensors)
    for tensor in large:
        _broadcast(comm, as_bytes(tensor), what, source)
    parts = [as_bytes(tensor) for tensor in small]
    stream = [Stretch(i, 0, part.numel()) for i, part in enumerate(parts)]
    total = sum(part.numel() for part in parts)
    for start in range(0, total, BATCH):
        buffer = comm.memory.empty(min(BATCH, total - start), torch.uint8)
        if comm.mesh.data_rank == source:
            _copy(stream, parts, buffer, start, read=True)
        _broadcast(comm, buffer, what, source)
        if comm.mesh.data_rank != source:
            _copy(stream, parts, buffer, start, read=False)


# -- streams ------------------------------------------------------------------------------------------------------


def exchange(comm: Comm, tensors: Sequence[Tensor], rows: Sequence[Sequence[Stretch]], over: Axes, what: str) -> None:
    """Brings each rank's stream (``rows``, by shard index) to all; what this rank has is in ``tensors``, as bytes."""
    ranks, me = len(rows), shard_index(over, comm.mesh.sizes, comm.mesh.coords)
    longest = max((sum(s.stop - s.start for s in row) for row in rows), default=0)
    if ranks == 1 or longest == 0:
        return
    width = min(longest, max(BATCH // ranks, 1))
    steps = [*range(0, longest, width), longest]
    for start, stop in pairwise(steps):
        buffer = comm.memory.empty(ranks * (stop - start), torch.uint8)
        chunks = buffer.chunk(ranks)
        _copy(rows[me], tensors, chunks[me], start, read=True)
        _all_gather(comm, buffer, over, what).wait(comm.agreement.wait)
        for r, row in enumerate(rows):
            if r != me:
                _copy(row, tensors, chunks[r], start, read=False)


def _copy(stream: Sequence[Stretch], tensors: Sequence[Tensor], chunk: Tensor, at: int, *, read: bool) -> None:
    """Copies between ``chunk`` and that much of a stream, from its byte ``at`` on; ``read``: out of the tensors."""
    position = 0
    with torch.no_grad():
        for tensor, start, stop in stream:
            a, b = max(position, at), min(position + stop - start, at + chunk.numel())
            if a < b:
                part = tensors[tensor][start + a - position : start + b - position]
                ours = chunk[a - at : b - at]
                if read:
                    ours.copy_(part)
                else:
                    part.copy_(ours)
            position += stop - start


def _by_size(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that share buffers, and those that travel by themselves."""
    if len(tensors) == 1:
        return [], list(tensors)
    return [t for t in tensors if t.nbytes < LARGE], [t for t in tensors if t.nbytes >= LARGE]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, ``(nbytes,)``."""
    return tensor.detach().view(-1).view(torch.uint8)


def _all_gather(comm: Comm, flat: Tensor, over: Axes, what: str) -> Pending:
    op = Op("ALL_GATHER", axes=over)
    comm.agreement.issue(f"{op} for {what}")
    comm.meter.ask(op.verb, over, flat.nbytes)
    return comm.transport.all_gather(flat, comm.mesh.group(over))


def _broadcast(comm: Comm, flat: Tensor, what: str, source: int) -> None:
    comm.meter.ask("BROADCAST", comm.mesh.data, flat.nbytes)
    comm.broadcast(flat, f"BROADCAST for {what}", source)
