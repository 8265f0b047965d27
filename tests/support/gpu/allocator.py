"""PyTorch's caching allocator of CUDA memory, by its rules: what a series of requests makes it take from the device.

    a request      is rounded up to 512 bytes
    small          of at most 1 MiB: out of segments of 2 MiB
    large          below 10 MiB: out of segments of 20 MiB; else of a segment of its own, rounded up to 2 MiB
    best fit       the smallest free block of its pool that is large enough, the lowest of those
    split          what remains is a free block: at least 512 bytes of a small one, more than 1 MiB of a large one
    freed          a block joins its free neighbours in the segment; segments stay
    expandable     one segment for each pool, which grows at its end by 2 or 20 MiB at a time

One stream, and no memory returned to the device under pressure (``torch.cuda.empty_cache``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

__all__ = ["CachingAllocator", "rounded"]

ROUND, SMALL, MIB = 512, 1 << 20, 1 << 20
SMALL_SEGMENT, LARGE_SEGMENT, LEAST_OWN, OWN_ROUND = 2 * MIB, 20 * MIB, 10 * MIB, 2 * MIB


def rounded(size: int) -> int:
    """The bytes of a block for a request."""
    return max(ROUND, -(-size // ROUND) * ROUND)


@dataclass
class _Block:
    start: int
    size: int
    free: bool = True


class CachingAllocator:
    """The allocator of one device.

    Args:
        expandable: as ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.

    Attributes:
        allocated: bytes of blocks in use.
        reserved: bytes taken from the device.
        peak: the most that was reserved.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.allocated = self.reserved = self.peak = 0
        self._expandable = expandable
        self._segments: dict[bool, list[list[_Block]]] = {True: [], False: []}  # by whether they are for small ones
        self._used: dict[int, tuple[list[_Block], _Block]] = {}
        self._numbers = count()

    def allocate(self, size: int) -> int:
        """The number of a block for so many bytes."""
        size = rounded(size)
        small = size <= SMALL
        segment, block = self._find(size, small) or self._take(size, small)
        self._split(segment, block, size, small)
        block.free = False
        self.allocated += block.size
        number = next(self._numbers)
        self._used[number] = segment, block
        return number

    def free(self, number: int) -> None:
        """A block is not used any more."""
        segment, block = self._used.pop(number)
        self.allocated -= block.size
        block.free = True
        place = segment.index(block)
        if place + 1 < len(segment) and segment[place + 1].free:
            block.size += segment.pop(place + 1).size
        if place and segment[place - 1].free:
            segment[place - 1].size += block.size
            del segment[place]

    def segments(self) -> Iterator[list[tuple[int, int, bool]]]:
        """Of each segment its blocks: where they start, their bytes, whether they are free."""
        for pool in self._segments.values():
            for segment in pool:
                yield [(block.start, block.size, block.free) for block in segment]

    def _find(self, size: int, small: bool) -> tuple[list[_Block], _Block] | None:
        fitting = [(b.size, n, b.start) for n, s in enumerate(self._segments[small]) for b in s if b.free
                   and b.size >= size]  # fmt: skip
        if not fitting:
            return None
        _, number, start = min(fitting)
        segment = self._segments[small][number]
        return segment, next(block for block in segment if block.start == start)

    def _take(self, size: int, small: bool) -> tuple[list[_Block], _Block]:
        if self._expandable:
            return self._grow(size, small)
        if small:
            room = SMALL_SEGMENT
        else:
            room = LARGE_SEGMENT if size < LEAST_OWN else -(-size // OWN_ROUND) * OWN_ROUND
        segment = [_Block(0, room)]
        self._segments[small].append(segment)
        self._reserve(room)
        return segment, segment[0]

    def _grow(self, size: int, small: bool) -> tuple[list[_Block], _Block]:
        if not self._segments[small]:
            self._segments[small].append([])
        segment = self._segments[small][0]
        step = SMALL_SEGMENT if small else LARGE_SEGMENT
        there = segment[-1].size if segment and segment[-1].free else 0
        more = -(-(size - there) // step) * step
        if there:
            segment[-1].size += more
        else:
            end = segment[-1].start + segment[-1].size if segment else 0
            segment.append(_Block(end, more))
        self._reserve(more)
        return segment, segment[-1]

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def _split(self, segment: list[_Block], block: _Block, size: int, small: bool) -> None:
        rest = block.size - size
        if rest >= ROUND if small or self._expandable else rest > SMALL:
            segment.insert(segment.index(block) + 1, _Block(block.start + size, rest))
            block.size = size
