"""Two hops: what is split over nodes and the ranks of each crosses one and then the other.

A flat of M nodes of L ranks is M parts of L slices: shard ``m * L + i`` is that of rank ``i`` of node ``m``. Ranks of
the same place ``i`` in their nodes exchange between nodes, so that each element goes to another node once, and not once
for each of its ranks:

    gather   between nodes the slices (m, i) of all m come to rank i of each node, encoded; then within the node every
             rank gets those of the others, and decodes all
    reduce   within the node rank i gets the sums of the slices (m, i) of all m; those are encoded once more and summed
             between nodes, where (m, i) stays with node m

So a payload is ordered ``(L, M, bytes of a slice)``, which is what a gather's second hop completes in place.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardfold import accelerator
from shardfold.comm.mesh import DataMesh
from shardfold.comm.transport import Pending, Transport
from shardfold.plan.formats import Format
from shardfold.plan.layout import DATA_AXES
from shardfold.tiers.device import DeviceTier

__all__ = ["gather_between", "gather_within", "nodes"]

BETWEEN, WITHIN = DATA_AXES


def nodes(mesh: DataMesh) -> tuple[int, int]:
    """How many there are, and how many ranks each has."""
    return mesh.sizes[BETWEEN], mesh.sizes[WITHIN]


def gather_between(
    transport: Transport, memory: DeviceTier, mesh: DataMesh, form: Format, full: Tensor, codes: Tensor | None = None
) -> tuple[Tensor, Pending]:
    """The first hop of a gather of ``full``, in which this rank's chunk is in place, unless there are ``codes`` of it:
    a payload of all of it, in which this rank's slice of each node comes."""
    num_nodes, ranks = nodes(mesh)
    m, i = mesh.coords[BETWEEN], mesh.coords[WITHIN]
    values = full.view(num_nodes, ranks, -1)
    payload = memory.empty(num_nodes * ranks * form.nbytes(values.shape[2]), torch.uint8)
    rows = payload.view(ranks, num_nodes, -1)
    with torch.no_grad():
        if codes is None:
            form.encode(values[m, i : i + 1], rows[i, m : m + 1])
        else:
            rows[i, m].copy_(codes)
    return payload, transport.all_gather(rows[i].view(-1), mesh.group((BETWEEN,)))


def gather_within(
    transport: Transport, memory: DeviceTier, mesh: DataMesh, form: Format, full: Tensor, payload: Tensor
) -> tuple[Pending, Pending]:
    """The second hop, behind the first; to be waited for in this order."""
    accelerator.used_here(payload)
    return transport.all_gather(payload, mesh.group((WITHIN,))), Pending(
        [], partial(_decode, memory, nodes(mesh), form, payload, full)
    )


def _decode(memory: DeviceTier, sizes: tuple[int, int], form: Format, payload: Tensor, full: Tensor) -> None:
    accelerator.used_here(payload)  # the side stream made it
    num_nodes, ranks = sizes
    values, rows = full.view(num_nodes, ranks, -1), payload.view(ranks, num_nodes, -1)
    with torch.no_grad():
        for i in range(ranks):
            form.decode(rows[i], values[:, i])
    memory.recycle(payload)
