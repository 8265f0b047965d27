"""What a rank leaves for its launcher: why it fails, and how far it came, which is read when it has ended, however it
ended; and what the launcher leaves for it: that it shall leave.

The launcher has opened a file of three parts for it. A rank that was started by another launcher has none.
"""

from __future__ import annotations

import os
from contextlib import suppress

__all__ = ["is_given_notice", "note_step", "tell_launcher"]

FILE = "SHARDFOLD_FOLLOWS"
MOST = 4000
STEP, NOTICE = 4096, 5000
"""Where in the file the number of steps is, and what says that the rank shall leave; the reason stands in front."""

_file: list[int] = []  # of this process, once it is open
_told: list[str] = []  # what was told last, until an update


def tell_launcher(why: str, *, follows: bool = False) -> None:
    """Leaves why this rank fails, which the launcher says should the rank end so.

    Args:
        why: a sentence or more, each of which ends with a full stop.
        follows: another rank's end is why; the launcher names that one instead, if it failed.
    """
    text = f"{int(follows)}{' '.join(why.split())}".encode()[:MOST]
    _told[:] = [why]
    _write(text + b"\0", 0)


def note_step(steps: int) -> None:
    """Leaves how many updates were done. Who goes on has not failed by what was told before."""
    if _told:
        _told.clear()
        _write(b"0\0", 0)
    _write(b"%020d" % steps, STEP)


def is_given_notice() -> bool:
    """Whether the launcher was told that its ranks shall leave."""
    with suppress(OSError):
        return _opened() is not None and os.pread(_file[0], 1, NOTICE) == b"1"
    return False


def _write(text: bytes, at: int) -> None:
    with suppress(OSError):
        if _opened() is not None:
            os.pwrite(_file[0], text, at)


def _opened() -> int | None:
    if not _file and (place := os.environ.get(FILE)):
        _file.append(os.open(place, os.O_RDWR))
    return _file[0] if _file else None
