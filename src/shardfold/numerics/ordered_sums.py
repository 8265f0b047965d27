"""Sums that are the same to the bit in whatever order, and in whatever parts, their terms are added.

Terms are cut into slices, as in Demmel and Nguyen, Parallel Reproducible Summation (IEEE Trans. Comput. 64, 2015): each
is rounded to a grid that is so coarse beside the largest term that fp64 adds all multiples of it without rounding; what
that leaves of a term is rounded to a finer grid, and so on. The sums of slices are exact, so they do not depend on an
order; what the last grid leaves is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import frexp, inf, isfinite, ldexp, nan

import torch
from torch import Tensor

from shardfold import accelerator

__all__ = ["GRIDS", "joined_slices", "largest_power", "slice_sums"]

GRIDS = 3
"""With a million terms 93 bits below the largest are kept, with 64 billion 42."""
CACHED, WIDE = 1 << 15, 1 << 24
"""Terms at a time: in the cache of a core, and on a device with streams."""
DIGITS = 53


def largest_power(flats: Iterable[Tensor], p: float) -> float:
    """The largest ``|x| ** p``; inf if some x is inf or NaN, 0 without any."""
    most = [float(torch.linalg.vector_norm(flat, inf)) for flat in flats if flat.numel()]
    return max(most, default=0.0) ** p if all(map(isfinite, most)) else inf


def slice_sums(flats: Iterable[Tensor], p: float, largest: float, count: int, device: torch.device) -> Tensor:
    """Sums of the slices of all ``|x| ** p``, for p = 1 and 2: ``(GRIDS,)`` in fp64.

    Args:
        flats: whose elements are x.
        largest: of all terms that are added up, these and others, finite.
        count: of all these.
        device: where the sums are to be.
    """
    sums = torch.zeros(GRIDS, dtype=torch.float64, device=device)
    room = DIGITS - 2 - count.bit_length()  # bits of a slice
    top = frexp(largest)[1]  # all terms are below 2 ** top
    # A number to which 1.5 * 2 ** 52 grids were added is a multiple of the grid.
    anchors = [ldexp(1.5, top - room * (number + 1) + DIGITS - 1) for number in range(GRIDS)]
    for flat in flats if largest else ():
        block = WIDE if accelerator.has_streams(flat.device) else CACHED
        room_of = torch.empty(2, min(block, flat.numel()), dtype=torch.float64, device=flat.device)
        for some in flat.split(block):
            rest, part = room_of[:, : some.numel()]
            torch.abs(rest.copy_(some), out=rest)
            if p == 2:
                rest.mul_(rest)
            for number, anchor in enumerate(anchors):
                torch.add(rest, anchor, out=part).sub_(anchor)
                sums[number] += part.sum().to(device)
                rest.sub_(part)
    return sums


def joined_slices(sums: Tensor, largest: float) -> Tensor:
    """The sum of all terms, 0-d, of the sums of their slices; NaN where the ``largest`` is not finite."""
    return sums.flip(0).sum() if isfinite(largest) else torch.full((), nan, dtype=torch.float64, device=sums.device)
