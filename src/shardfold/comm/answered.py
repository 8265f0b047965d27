"""The store that all ranks share, which is asked for no longer than a collective may take.

It lies with one rank, and what is asked goes there over a connection that waits without end: behind a link that is cut
an answer comes when the link is whole again, or when the operating system gives up, a quarter of an hour later. So each
question has a thread of its own, which is left behind if no answer comes. As they share one connection, nothing else is
asked until it has come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

__all__ = ["Answered", "answered", "ask_another"]

_open: list[threading.Event] = []  # of this process: set when an answer came after all


class Answered:
    """A store of ``torch.distributed``; what it is asked raises if no answer comes.

    Args:
        store: asked.
        limit: seconds that an answer may take.

    Raises:
        DistStoreError: by each method: none came. It is a RuntimeError, as what a store raises whose process is gone.
    """

    def __init__(self, store: Any, limit: float) -> None:
        self._store, self.limit = store, limit

    def allow(self, limit: float) -> None:
        """From now on an answer may take so many seconds."""
        self.limit = limit

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._store, name)
        if name == "clone":  # a connection of its own
            return lambda: Answered(answered(ask, self.limit), self.limit)
        return lambda *given: answered(lambda: ask(*given), self.limit)

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Waits for keys. That the time is over is an answer of the store's too, which may not come either.

        Args:
            keys: that are to be there.
            timeout: for how long; none: as the store has it, but no longer than an answer may take.

        Raises:
            DistStoreError: the time is over, or no answer came.
        """
        seconds = sum(each.total_seconds() for each in timeout)
        answered(lambda: self._store.wait(list(keys), *timeout), self.limit + seconds)


def answered(ask: Callable[[], Any], limit: float) -> Any:
    """What ``ask`` returns, which asks the store of this process, by itself or by what it calls.

    Raises:
        DistStoreError: it was not over within so many seconds.
    """
    _open[:] = [each for each in _open if not each.is_set()]
    said: list[Any] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            said.append(ask())
        except BaseException as error:
            failed.append(error)
        finally:
            over.set()

    if not _open:
        threading.Thread(target=run, name="shardfold-ask", daemon=True).start()
        if not over.wait(min(limit, threading.TIMEOUT_MAX)):
            _open.append(over)
    if _open:
        raise dist.DistStoreError(f"it has not answered within {limit:.0f} s")
    if failed:
        raise failed[0]
    return said[0]


def ask_another() -> None:
    """The store is another one from now on, over a connection of its own: no answer of the last one is waited for."""
    _open.clear()
