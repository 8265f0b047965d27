"""What DTensor's placements say: which block of a tensor each place of a mesh has. Index arithmetic only.

``Shard(dim)`` divides as ``torch.chunk`` does: chunks of ``ceil(size / parts)`` rows, of which the last ones are
shorter or empty. Where several dimensions of a mesh divide one dimension of a tensor, the first does, and each next one
divides what is left:

    7 rows on a mesh of 2 x 2, Shard(0) on both     4 | 3     then 2 2 | 2 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from shardfold.plan.box import Box

__all__ = ["boxes", "chunk", "chunk_box"]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """The half-open range that is chunk ``index`` of ``size`` elements."""
    each = -(-size // parts)
    return min(each * index, size), min(each * (index + 1), size)


def chunk_box(shape: Sequence[int], dims: Sequence[int | None], sizes: Sequence[int], place: Sequence[int]) -> Box:
    """The block that a place of a mesh has of a tensor.

    Args:
        shape: of the tensor.
        dims: by dimension of the mesh, that of the tensor which it divides; None: none, all along it have the same.
        sizes: of the mesh.
        place: in the mesh.
    """
    starts, stops = [0] * len(shape), list(shape)
    for dim, parts, index in zip(dims, sizes, place, strict=True):
        if dim is not None:
            start, stop = chunk(stops[dim] - starts[dim], parts, index)
            starts[dim], stops[dim] = starts[dim] + start, starts[dim] + stop
    return Box(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


def boxes(shape: Sequence[int], dims: Sequence[int | None], sizes: Sequence[int]) -> list[Box]:
    """The block of each place of a mesh, row by row."""
    return [chunk_box(shape, dims, sizes, place) for place in product(*map(range, sizes))]
