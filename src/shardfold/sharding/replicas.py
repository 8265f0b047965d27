"""What is replicated on an axis of tensor is equal there to the bit, though nothing sends it: so it can be compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardfold.comm.coalesced import as_bytes
from shardfold.comm.comm import Comm
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment

__all__ = ["differing", "differing_in"]


def differing(model: ShardedModel) -> list[str]:
    """The names of trained parameters, in order, whose master is not equal on all ranks along an axis of tensor where
    they are no slices; the same on every rank. All ranks call it, between passes."""
    names: list[str] = []
    for unit in model.units:
        for segment in unit.segments:
            values = segment.master
            if values is None or not model.comm.mesh.sizes.replicas(segment.spec.distinct):
                continue
            flat = values.detach().to(model.device)
            pieces = [segment.own_piece(slot)[0] for slot in range(len(segment.spec.slots))]
            for axis in model.comm.mesh.sizes.replicas(segment.spec.distinct):
                names += differing_in(segment, flat, pieces, axis, model.comm)
    return list(dict.fromkeys(names))


def differing_in(segment: Segment, flat: Tensor, pieces: Sequence[slice], axis: str, comm: Comm) -> list[str]:
    """Which parameters of a segment differ along an axis; ``pieces`` of ``flat`` are theirs, in order."""
    first = flat.clone()
    comm.broadcast(first, f"the comparison of replicas on {axis}", over=(axis,))
    flags = [not torch.equal(as_bytes(flat[piece]), as_bytes(first[piece])) for piece in pieces]
    differ = comm.any_rank(flags, f"what is replicated on {axis}")
    return [slot.name for slot, other in zip(segment.spec.slots, differ, strict=True) if other]
