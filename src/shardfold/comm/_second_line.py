"""A second connection to a store, for when the first one is silent.

What TCP has sent and nobody has acknowledged is sent again behind 0.2 s, 0.4, 0.8 and so on: behind a link that was cut
for a while, an answer comes up to twice that while after the cut. A connection that is begun meanwhile comes through as
soon as the link is whole. So a launcher whose question has no answer tries one again and again: by it the node that has
the store hears that this one lives, and this one that the store is there and an answer may still come.

``[Note: no sign of life of one that goes on]`` Who hears it lets its ranks write for most of a patience. So none is
given without an answer in front of it, from which on this process waits for a whole patience until it gives the store
up: a host that stands still has connections taken by its kernel. And none is given once it was given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

__all__ = ["SecondLine"]


class SecondLine:
    """
    Args:
        reach: connects to the store, and returns, behind an answer of it, what gives a sign of life there.
    """

    def __init__(self, reach: Callable[[], Callable[[], None]]) -> None:
        self._reach = reach
        self._heard, self._closed = 0.0, False
        self._lock = threading.Lock()
        self._trying: threading.Thread | None = None

    def knock(self) -> float:
        """Begin to try it, unless that is under way; when the store was last heard of so, by the monotonic clock."""
        with self._lock:
            self._closed = False
        if self._trying is None or not self._trying.is_alive():
            self._trying = threading.Thread(target=self._try, name="shardfold-knock", daemon=True)
            self._trying.start()
        return self._heard

    def close(self) -> float:
        """No sign of life is given any more, until the next knock; when the store was last heard of."""
        with self._lock:
            self._closed = True
        return self._heard

    def _try(self) -> None:
        with suppress(RuntimeError, OSError):  # there is nobody, or no way
            show = self._reach()
            with self._lock:
                if self._closed:
                    return
                self._heard = time.monotonic()
            show()
