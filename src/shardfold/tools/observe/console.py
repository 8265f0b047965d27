"""A console whose failures end nothing: what it shows is also in files, and a run is worth more than its last line."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import IO, Any, TextIO

from rich.console import Console

__all__ = ["lenient_console"]


class Lenient:
    """A text stream that replaces what it cannot encode, and falls silent once nobody reads it or its disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if not self._broken:
            encoding = self._stream.encoding or "utf-8"
            try:
                self._stream.write(text.encode(encoding, errors="replace").decode(encoding))
            except (OSError, ValueError):  # ValueError: it is closed
                self._give_up()
        return len(text)

    def flush(self) -> None:
        if not self._broken:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._give_up()

    def _give_up(self) -> None:
        """Send what is still buffered nowhere: the interpreter would fail on it at its exit."""
        self._broken = True
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def lenient_console(stream: TextIO | None = None) -> Console:
    """Return a console on `stream`, by default standard output, for people: no failure to write is raised."""
    file: IO[str] = Lenient(stream or sys.stdout)  # pyright: ignore[reportAssignmentType]  # all that Rich asks of it
    return Console(file=file)
