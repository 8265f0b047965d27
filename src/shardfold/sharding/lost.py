"""What the formats of reductions have lost and keep, over all ranks.

Each rank keeps what its own encoding lost of every element that it sends, ``format_state`` of a segment, ``(length,)``.
To what is applied later only the sum over ranks matters, so that is what a checkpoint has: one value per element, as of
a moment, whatever the number of ranks. Whoever reads it gives each element to the rank that owns it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.comm.comm import Comm
from shardfold.comm.hops import nodes
from shardfold.plan.layout import DATA_AXES
from shardfold.plan.program import Op
from shardfold.sharding.segment import Segment

__all__ = ["LOST", "sums_of_lost", "take_lost"]

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
