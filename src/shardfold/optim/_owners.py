"""Whole matrices on one rank each: parts go to an owner, which makes something of the whole, and come back.

Which rank owns which matrix is decided by cost, the dearest first, each to the rank that has least to do; all ranks
decide alike, as they know all shapes. One exchange carries the parts of many matrices, of up to 64 MiB per rank, so
that what is whole at a time stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from shardfold.nn.axis_group import AxisGroup
from shardfold.optim.parts import PartRanks, ShardPlacement

__all__ = ["balanced", "exchanged", "joined_place", "on_owners"]

BATCH = 64 * 1024 * 1024
"""Bytes of whole matrices that one rank completes at a time (or one matrix, if it is larger)."""


def balanced(costs: Sequence[float], ranks: int) -> list[int]:
    """The owner of each of some things, so that no rank has much more than its share of their cost."""
    load, owners = [0.0] * ranks, [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[i] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[i]] += costs[i]
    return owners


def on_owners(
    parts: Sequence[Tensor],
    places: Sequence[ShardPlacement],
    owners: Sequence[int],
    group: AxisGroup,
    function: Callable[[int, Tensor], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    """``(i, part)``: this rank's part ``(held,)`` of ``function(i, whole)``, which runs on the owner of each matrix.

    Args:
        parts: of each parameter, ``(held,)``, all of one dtype and device.
        places: of the parameters.
        owners: rank that completes each.
        group: the ranks.
        function: takes the number of a parameter and all of it in its shape; gives as many values of the same dtype.
    """
    if group.size == 1:
        for i, (part, place) in enumerate(zip(parts, places, strict=True)):
            yield i, function(i, part.view(place.shape)).reshape(-1)
        return
    for batch in _batches(parts, places, owners):
        yield from _exchange(batch, parts, places, owners, group, function)


def exchanged(
    places: Sequence[ShardPlacement], owners: Sequence[int], itemsize: int, group: AxisGroup
) -> tuple[int, int]:
    """Collectives that :func:`on_owners` takes for one batch, and bytes that this rank sends in them."""
    if group.size == 1 or not places:
        return 0, 0
    owned = list(zip(places, owners, strict=True))
    away = sum(place.part_numel for place, owner in owned if owner != group.rank)
    home = sum(place.numel - place.part_numel for place, owner in owned if owner == group.rank)
    calls = 2 * len(list(_batches_of([place.numel * itemsize for place in places], owners)))
    return calls, (away + home) * itemsize


def joined_place(place: ShardPlacement, ranks: PartRanks) -> ShardPlacement:
    """Where parts of a matrix are on all ranks that have some: its boxes lie one behind the other, ``(boxes, rows,
    columns)``."""
    if place.box is None:
        return place
    shares = tuple(
        (box * place.numel + place.shares[own][0], box * place.numel + place.shares[own][1])
        for own, box in ranks.places
    )
    return ShardPlacement((ranks.group.size // len(place.shares), *place.shape), shares, ranks.group.rank)


def _batches(parts: Sequence[Tensor], places: Sequence[ShardPlacement], owners: Sequence[int]) -> Iterator[list[int]]:
    itemsize = parts[0].itemsize if parts else 1
    return _batches_of([place.numel * itemsize for place in places], owners)


def _batches_of(sizes: Sequence[int], owners: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of matrices that travel together: no owner gets more than a batch."""
    batch: list[int] = []
    load: dict[int, int] = {}
    for i, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if load.get(owner, 0) and load[owner] + size > BATCH:
            yield batch
            batch, load = [], {}
        batch.append(i)
        load[owner] = load.get(owner, 0) + size
    if batch:
        yield batch


def _exchange(
    batch: Sequence[int],
    parts: Sequence[Tensor],
    places: Sequence[ShardPlacement],
    owners: Sequence[int],
    group: AxisGroup,
    function: Callable[[int, Tensor], Tensor],
) -> Iterator[tuple[int, Tensor]]:
    theirs = [[i for i in batch if owners[i] == rank] for rank in range(group.size)]
    mine = theirs[group.rank]
    sent = torch.cat([parts[i] for owned in theirs for i in owned])
    to = [sum(places[i].part_numel for i in owned) for owned in theirs]
    shares = [[(i, *places[i].shares[rank]) for i in mine] for rank in range(group.size)]  # in the order of arrival
    by = [sum(stop - start for _, start, stop in row) for row in shares]
    received = group.exchange(sent, to, by)
    del sent  # what comes back takes its memory

    whole = {i: received.new_empty(places[i].numel) for i in mine}
    _copy(received, shares, whole, read=True)
    for i in mine:
        whole[i] = function(i, whole[i].view(places[i].shape)).reshape(-1)
    _copy(received, shares, whole, read=False)
    back = group.exchange(received, by, to)
    position = 0
    for owned in theirs:
        for i in owned:
            yield i, back[position : position + places[i].part_numel]
            position += places[i].part_numel


def _copy(
    stream: Tensor, shares: Sequence[Sequence[tuple[int, int, int]]], whole: dict[int, Tensor], *, read: bool
) -> None:
    """Copies between a stream of parts and the matrices that they are of; ``read``: out of the stream."""
    position = 0
    for row in shares:
        for i, start, stop in row:
            part, place = stream[position : position + stop - start], whole[i][start:stop]
            if read:
                place.copy_(part)
            else:
                part.copy_(place)
            position += stop - start
