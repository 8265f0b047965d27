"""Files of a run, which may be anybody's: what is no regular file is not opened, and what is too large is not read."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["opened", "read_object", "read_text", "text_of"]

MOST_OBJECT = 4 * 2**20
"""Bytes of a file with an object."""
DEEPEST = 40


@contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """A regular file, opened without waiting for anybody and without following a link; None: it is none."""
    file = None
    with suppress(OSError, ValueError):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield file if file is not None and stat.S_ISREG(os.fstat(file).st_mode) else None
    finally:
        if file is not None:
            os.close(file)


def read_text(path: Path) -> str:
    """A short text; "" where there is none."""
    with opened(path) as file:
        return os.read(file, 1000).decode(errors="replace").strip() if file is not None else ""


def text_of(name: str) -> str:
    """A file's name as text: bytes that are no UTF-8 become marks."""
    return os.fsencode(name).decode("utf-8", errors="replace")


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, or it is too large."""
    with opened(path) as file, suppress(OSError, ValueError, RecursionError):
        if file is not None and os.fstat(file).st_size <= MOST_OBJECT:
            found = json.loads(os.read(file, MOST_OBJECT))
            if isinstance(found, dict) and _is_shallow(found):
                return found
    return {}


def _is_shallow(found: Any) -> bool:
    """Whether it is not nested so deeply that who walks through it gets lost."""
    level = [found]
    for _ in range(DEEPEST):
        level = [
            inner
            for each in level
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, dict | list)
        ]
    return not level
