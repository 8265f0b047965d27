"""A second cursor: a thread that goes through a section of the program while the first goes through another.

Where the first needs what the second does, the program says ``JOIN``. Nothing in a section that the second goes through
is a collective, so all ranks still issue these in one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition, get_ident
from typing import Any

import torch

from shardfold import accelerator
from shardfold.engine.track import Track

__all__ = ["Cursor"]


class Cursor:
    """Goes through one track at a time.

    Args:
        device: where it has streams, what the second cursor queues goes into the stream of whoever lets it go.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        self._moved = Condition()
        self._ahead: dict[str, int] = {}  # operations of each unit that are not done yet
        self._error: BaseException | None = None
        self._run: Future[None] | None = None
        self._ident = 0

    @contextmanager
    def following(self, track: Track) -> Iterator[None]:
        """Inside, the second cursor goes through the track from its beginning. At the end all of it is done, or, where
        an operation raised or what is inside did, as much as was.

        Raises:
            BaseException: what an operation of the track raised, if no :meth:`join` has.
        """
        if not track.ops:
            yield
            return
        self.begin(track)
        try:
            yield
        finally:
            self._wait()
        self._raise()

    def begin(self, track: Track) -> None:
        """The second cursor begins to go through the track; :meth:`end` waits for it."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix="shardfold-updates")
        track.restart()
        self._error, self._ahead = None, {}
        for op in track.ops:
            self._ahead[op.unit] = self._ahead.get(op.unit, 0) + 1
        stream = accelerator.current_stream(self._device)
        self._run = self._threads.submit(self._go, track, stream)

    def end(self) -> None:
        """All that was begun is done.

        Raises:
            BaseException: what an operation of the track raised.
        """
        self._wait()
        self._raise()

    def _wait(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.result()  # it never raises

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    @property
    def is_here(self) -> bool:
        """Whether this thread is the second cursor's."""
        return get_ident() == self._ident

    def _go(self, track: Track, stream: Any) -> None:
        self._ident = get_ident()
        with accelerator.on(stream):  # updates are in the order of what reads gradients and gathers weights
            for op in track.ops:
                try:
                    track.advance()
                except BaseException as error:
                    with self._moved:
                        self._error = error
                        self._moved.notify_all()
                    return
                with self._moved:
                    self._ahead[op.unit] -= 1
                    self._moved.notify_all()

    def join(self, unit: str) -> None:
        """Waits until all operations of the unit are done.

        Raises:
            BaseException: what an operation of the track raised.
        """
        with self._moved:
            self._moved.wait_for(lambda: self._error is not None or not self._ahead.get(unit))
        self._raise()

    def close(self) -> None:
        """Ends the thread."""
        if self._threads is not None:
            self._threads.shutdown()
