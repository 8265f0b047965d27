"""Pinned memory for what rests there as long as an engine, in slabs.

PyTorch's allocator of pinned memory gives powers of 2, so that of a region of 0.75 GiB a quarter would be lost: of a
model of 7 billion parameters 28 of 128 GiB. Several regions in one slab lose a sixteenth. A slab is a quarter of what
there is before it at most, so that the last one, which may stay empty in part, is a small part of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Slabs", "pinned_bytes", "slab_bytes"]

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


class Bytes(Protocol):
    """Memory of bytes, or what counts as such."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: Any, /) -> Any: ...


B = TypeVar("B", bound=Bytes)


class Slabs(Generic[B]):
    """Takes regions one behind the other. What is dropped leaves its place empty; the slab goes with its last region.

    Args:
        make: pinned memory of so many bytes, uint8.

    Attributes:
        pinned: bytes of all slabs that were made.
    """

    def __init__(self, make: Callable[[int], B]) -> None:
        self._make = make
        self._open: list[B] = []  # what is left of slabs
        self.pinned = 0

    def take(self, nbytes: int) -> B:
        """The next ``nbytes``, uint8."""
        whole = -(-nbytes // ALIGNED) * ALIGNED
        place = next((i for i, left in enumerate(self._open) if len(left) >= whole), None)
        if place is None:
            size = slab_bytes(whole, self.pinned)
            self.pinned += size
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


def pinned_bytes(regions: Iterable[int]) -> int:
    """Bytes of the slabs that regions of these bytes are taken from, in that order."""
    slabs = Slabs(range)
    for nbytes in regions:
        if nbytes:
            slabs.take(nbytes)
    return slabs.pinned
