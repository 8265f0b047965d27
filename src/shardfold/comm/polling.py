"""Waiting for keys of the store that all ranks share, so that it can end meanwhile.

The store's own waiting looks at nothing else, Ctrl-C included, and writes two warnings to the log of every rank when a
slice of it is over, as if something were wrong. So the store is asked again and again, the more rarely the longer it
takes: the wait is longer by a tenth at most, and each rank asks four times a second where all of them wait long.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any

__all__ = ["come"]

PART = 0.1  # of what has been waited for so far
MOST = 0.25  # seconds between two questions


def come(store: Any, keys: Sequence[str], seconds: float) -> bool:
    """Whether all of these keys are in a store within so many seconds.

    Raises:
        RuntimeError: the store does not answer.
    """
    begun = monotonic()
    while not store.check(list(keys)):
        waited = monotonic() - begun
        if waited >= seconds:
            return False
        sleep(min(PART * waited, MOST, seconds - waited))
    return True
