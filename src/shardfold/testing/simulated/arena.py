"""How many bytes of the device are taken, counted as PyTorch's caching allocators count them, and how many there are.

Each allocation takes whole granules. What was freed and has been used by a stream other than its own
(``record_stream``) stays taken until that stream is done with what it had queued; an allocation that does not fit
otherwise waits for those streams, as CUDA's does. What the pool of another stream keeps is no loss: an allocator that
has nothing left gives it back to the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardfold.accelerator import GRANULE
from shardfold.plan.checks import human

__all__ = ["Arena"]


class Arena:
    """
    Attributes:
        limit: bytes that there are; None: as many as somebody asks for.
        allocated: bytes that tensors have now.
        peak: the most that they had.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self.allocated = self.peak = 0
        self._leaving: list[tuple[int, frozenset[int]]] = []  # bytes that were freed, and the streams that may use them

    def take(self, nbytes: int) -> None:
        """
        Raises:
            torch.OutOfMemoryError: there are not as many.
        """
        more = _granules(nbytes)
        if self.limit is not None and self.allocated + more > self.limit:
            raise torch.OutOfMemoryError(
                f"The simulated device is out of memory: an allocation asks for {human(more)} ({more:,} bytes), "
                f"{human(self.allocated)} ({self.allocated:,} bytes) are held, and the limit is {human(self.limit)} "
                f"({self.limit:,} bytes)."
            )
        self.allocated += more
        self.peak = max(self.peak, self.allocated)

    def give_back(self, nbytes: int, streams: set[int]) -> None:
        """Memory is freed that these streams may still use."""
        self.allocated -= _granules(nbytes)
        if streams and self.limit is not None:
            self._leaving.append((_granules(nbytes), frozenset(streams)))

    def wanting(self, nbytes: int, is_idle: Callable[[int], bool]) -> set[int]:
        """The streams that have to be waited for before so many bytes fit; none where they fit now, or never will."""
        self._leaving = [(n, streams) for n, streams in self._leaving if not all(map(is_idle, streams))]
        leaving, held = sum(n for n, _ in self._leaving), self.allocated + _granules(nbytes)
        if self.limit is None or not held <= self.limit < held + leaving:
            return set()
        found = {stream for _, streams in self._leaving for stream in streams}
        self._leaving = []
        return found

    def begin(self, limit: int | None) -> int | None:
        """From now on there are ``limit`` bytes, and the peak is that of now; the limit before."""
        before, self.limit = self.limit, limit
        self._leaving, self.peak = [], self.allocated
        return before


def _granules(nbytes: int) -> int:
    return -(-nbytes // GRANULE) * GRANULE
