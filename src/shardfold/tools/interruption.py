"""Ctrl-C of the command `shardfold`, from its start on: one sentence, status 130, and what was begun is cleaned up."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

__all__ = ["INTERRUPTED", "INTERRUPTION", "Interruption"]

INTERRUPTED = 130
SENTENCE = "Error: interrupted before it was done.\n"
COMMANDS = ("shardfold.tools.entry", "shardfold.tools.cli")
"""Whose modules import before they have begun anything."""
IMPORTS = ("importlib._bootstrap", "_frozen_importlib")
SOON = 0.02  # seconds between two looks at whether an import is over


class Interruption:
    """The handler of SIGINT: raises KeyboardInterrupt, but not within an import; the second time it ends the process.

    Packages try others that may be absent, and go on without what was interrupted: PyTorch then fails later in other
    ways, or not at all. So the imports with which a command begins end at once, and later ones are waited for.

    Attributes:
        received: whether one came.
    """

    def __init__(self) -> None:
        self.received = False
        self._waits = False

    def install(self) -> None:
        """From now on; a launcher of ours starts ranks with the signal held back, so that none comes before."""
        signal.signal(signal.SIGINT, self)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def __call__(self, number: int, frame: FrameType | None) -> None:
        importer = importing(frame)
        again = self.received and not self._waits
        self.received, self._waits = True, False
        if again or (importer is not None and importer.startswith(COMMANDS)):
            self.end()
        if importer is None:
            raise KeyboardInterrupt
        self._waits = True
        later = threading.Timer(SOON, _thread.interrupt_main)
        later.daemon = True
        later.start()

    def say(self) -> None:
        """One sentence; not by print, as whoever was interrupted may hold the stream's lock."""
        with suppress(Exception):
            sys.stdout.flush()
        with suppress(OSError):  # nobody reads it any more
            os.write(2, SENTENCE.encode())

    def end(self) -> NoReturn:
        """At once."""
        self.say()
        os._exit(INTERRUPTED)


def importing(frame: FrameType | None) -> str | None:
    """The name of the module that imports another one in this frame, of several the outermost; None if none does."""
    found = None
    while frame is not None:
        caller = frame.f_back
        if frame.f_globals.get("__name__") in IMPORTS and caller is not None:
            found = str(caller.f_globals.get("__name__"))
        frame = caller
    return found


INTERRUPTION = Interruption()
