"""Ends what a rank waits for in an epoch of which somebody is gone.

Where another rank is killed its connections end, and whoever waits for it raises. Behind a link that is cut, or of a
process that stands still, they do not: a collective would wait for its timeout. The launcher knows first, and notes it
for its ranks; a thread of each looks there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardfold.comm.launcher_notes import is_broken

__all__ = ["EpochWatch"]

LOOK = 0.02
"""Seconds between two looks, which are a read of some bytes of memory each."""


class EpochWatch:
    """A thread, from the first epoch that it watches until :meth:`close`."""

    def __init__(self) -> None:
        self._watched: tuple[int, Callable[[], None]] | None = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, epoch: int, end: Callable[[], None]) -> None:
        """From now on ``end`` is called, once, when the launcher notes that somebody of the epoch is gone; on another
        thread, while this one may be in a collective."""
        with self._lock:
            self._watched = epoch, end
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardfold-epoch", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """This rank has noticed by itself: ``end`` is not under way when this returns, and is not called any more."""
        with self._lock:
            self._watched = None

    def close(self) -> None:
        """The thread ends."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK):
            with self._lock:
                if self._watched is not None and is_broken(self._watched[0]):
                    (_, end), self._watched = self._watched, None
                    end()
