"""Event files of TensorBoard's as rows of ``metrics.jsonl``, so that curves read one kind of file."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardfold.tools.observe.event_files import EventFile, event_files

__all__ = ["EventRows"]

PIECE = 2**20
QUIET = 2.0  # seconds without an event after which a step is taken to be whole


class EventRows:
    """The events of a folder; what was read is in a file that has no name, and is gone with this object."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with tempfile.TemporaryFile() as file:
            self._rows = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._rows)
        self._files: dict[Path, EventFile] = {}
        self._begun: float | None = None
        self._row: dict[str, float | None] = {}

    @contextmanager
    def opened(self) -> Iterator[int]:
        """The rows that there are now, and some that are new."""
        paths = event_files(self._folder)
        for path in paths:
            file = self._files.setdefault(path, EventFile(path))
            for each in file.scalars(PIECE):
                self._begun = each.time if self._begun is None else self._begun
                if self._row.get("step") != each.step:
                    self._write()
                    self._row = {"step": each.step, "seconds": round(each.time - self._begun, 3)}
                self._row[each.key] = each.value if math.isfinite(each.value) else None
            with suppress(OSError):
                found = path.stat()
                if not file.problem and file.cursor < found.st_size and found.st_size - file.cursor > PIECE:
                    break  # the next file's are later
        if self._row and all(_is_quiet(path) for path in paths):
            self._write()
        yield self._rows

    def _write(self) -> None:
        if self._row:
            os.write(self._rows, json.dumps(self._row).encode() + b"\n")
            self._row = {}


def _is_quiet(path: Path) -> bool:
    with suppress(OSError):
        return time.time() - path.stat().st_mtime > QUIET
    return True
