"""The signals that end a run at a step, and not within one."""

from __future__ import annotations

import math
import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType

from shardfold.launch import GRACE_AFTER_SIGTERM, is_rank

__all__ = ["StopSignal"]

LAST_WORDS = 5  # seconds to say that the time after SIGTERM is over


class StopSignal:
    """Notes the first SIGINT or SIGTERM, so that the run can end at a step; the second ends the process at once.

    Attributes:
        received: its number; 0: none came.

    After SIGTERM the process has a limited time, up to :meth:`release`: a thread then says so and ends it with status
    143, in whatever it is; if what it writes to does not take the sentence, SIGALRM ends it.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.received = 0
        self.then = "a second Ctrl-C ends at once"
        self._timer: threading.Timer | None = None

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._note) for number in self.NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        if number == signal.SIGTERM:
            self.then = f"what is not done {GRACE_AFTER_SIGTERM:g} seconds after SIGTERM is left out"
            if not is_rank():  # a launcher counts the time of its ranks itself
                self._timer = threading.Timer(GRACE_AFTER_SIGTERM, self._end)
                self._timer.daemon = True
                self._timer.start()
                signal.alarm(math.ceil(GRACE_AFTER_SIGTERM) + LAST_WORDS)
        for each in self.NUMBERS:
            signal.signal(each, signal.SIG_DFL)

    def release(self) -> None:
        """The run is complete: its time counts no more."""
        if self._timer is not None:
            self._timer.cancel()
            signal.alarm(0)

    @staticmethod
    def _end() -> None:
        # Not by print: the main thread may hold the stream's lock.
        said = f"Error: the run did not end within {GRACE_AFTER_SIGTERM:g} s of SIGTERM and was killed.\n"
        with suppress(OSError):  # nobody reads it any more
            os.write(2, said.encode())
        os._exit(128 + signal.SIGTERM)
