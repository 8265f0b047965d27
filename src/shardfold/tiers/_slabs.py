"""Pinned memory for what rests there as long as an engine, in slabs.

PyTorch's allocator of pinned memory gives powers of 2, so that of a region of 0.75 GiB a quarter would be lost: of a
model of 7 billion parameters 28 of 128 GiB. Several regions in one slab lose a sixteenth. A slab is a quarter of what
there is before it at most, so that the last one, which may stay empty in part, is a small part of all.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

__all__ = ["Slabs", "slab_bytes"]

ALIGNED = 4096  # bytes at which a region begins
LEAST = 1 << 20  # bytes of a slab
LOST = 1 / 16  # of a slab
PART = 4  # a slab is at most a PART-th of all that was pinned before


def slab_bytes(nbytes: int, before: int) -> int:
    """The smallest power of 2 of which regions of ``nbytes`` lose no more than ``LOST``, or else the one of which they
    lose least; it is no larger than ``LEAST``, than one of them needs, or than a part of ``before``."""
    sizes = [max(LEAST, 1 << (nbytes - 1).bit_length())]
    while 2 * sizes[-1] <= before // PART and sizes[-1] * LOST < nbytes:
        sizes.append(2 * sizes[-1])
    return next((s for s in sizes if s % nbytes <= LOST * s), min(sizes, key=lambda s: s % nbytes / s))


class Slabs:
    """Takes regions one behind the other. What is dropped leaves its place empty; the slab goes with its last region.

    Args:
        make: pinned memory of so many bytes, uint8.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._open: list[Tensor] = []  # what is left of slabs
        self._pinned = 0

    def take(self, nbytes: int) -> Tensor:
        """The next ``nbytes``, uint8."""
        whole = -(-nbytes // ALIGNED) * ALIGNED
        place = next((i for i, left in enumerate(self._open) if len(left) >= whole), None)
        if place is None:
            size = slab_bytes(whole, self._pinned)
            self._pinned += size
            self._open.append(self._make(size))
            place = len(self._open) - 1
        left = self._open[place]
        if len(left) == whole:
            del self._open[place]
        else:
            self._open[place] = left[whole:]
        return left[:nbytes]

    def close(self) -> None:
        """Nothing more is taken."""
        self._open.clear()
