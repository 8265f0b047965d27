"""How long threads of the host have waited for values on their way to or from a tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

__all__ = ["Waits"]


class Waits:
    """Attributes:
    seconds: of all waits so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def leave_out(self, seconds: float) -> None:
        """So many of them were no waits of this kind."""
        self.seconds -= seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What is inside waits."""
        begun = perf_counter()
        try:
            yield
        finally:
            self.seconds += perf_counter() - begun
