"""The store that all ranks share, which is asked for no longer than a collective may take.

It lies with one rank, and what is asked goes there over a connection that waits without end: behind a link that is cut
an answer comes when the link is whole again, or when the operating system gives up, a quarter of an hour later. So each
question has a thread of its own, which is left behind if no answer comes. As they share one connection, nothing else is
asked until it has come.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from shardfold.comm._second_line import SecondLine

__all__ = ["Answered", "StoreLine", "answered", "ask_another", "ask_no_more"]


LOOK = 1.0
"""Seconds that a host has to say whether somebody listens at a port."""


class _Question:
    """One that is asked.

    Attributes:
        over: nobody waits for the answer any more, or it came.
        came: it came, if only after all.
    """

    def __init__(self) -> None:
        self.over, self.came = threading.Event(), False

    def end(self) -> None:
        """The answer is there."""
        self.came = True
        self.over.set()


class StoreLine:
    """The connection over which a store is asked, one question at a time.

    Args:
        second: tried ``every`` so many seconds while an answer does not come. From when the store was heard of by it,
            the answer may take its time once more; it is not tried again then.

    Attributes:
        open: questions whose answer was given up.
        asked: those whose answer is waited for.
    """

    def __init__(self, second: SecondLine | None = None, every: float = threading.TIMEOUT_MAX) -> None:
        self._second, self._every = second, every
        self.open: list[_Question] = []
        self.asked: set[_Question] = set()

    def ask(self, ask: Callable[[], Any], limit: float) -> Any:
        """What ``ask`` returns.

        Raises:
            DistStoreError: it was not over within so many seconds, or nobody is to wait any more.
        """
        self.open = [each for each in self.open if not each.came]
        said: list[Any] = []
        failed: list[BaseException] = []
        question = _Question()

        def run() -> None:
            try:
                said.append(ask())
            except BaseException as error:
                failed.append(error)
            finally:
                question.end()

        if not self.open:
            self.asked.add(question)
            try:
                threading.Thread(target=run, name="shardfold-ask", daemon=True).start()
            except RuntimeError:  # the interpreter exits: from Python 3.12 on no thread begins then
                run()
            self._await(question, limit)
            self.asked.discard(question)
            if not question.came:
                self.open.append(question)
        if self.open:
            raise dist.DistStoreError(f"it has not answered within {limit:.0f} s")
        if failed:
            raise failed[0]
        return said[0]

    def _await(self, question: _Question, limit: float) -> None:
        begun = heard = time.monotonic()
        while not question.over.wait(min(heard + limit - time.monotonic(), self._every, threading.TIMEOUT_MAX)):
            now, before = time.monotonic(), heard
            if self._second is not None:
                heard = max(heard, self._second.knock() if now < begun + limit else self._second.close())
            if now >= before + limit and heard == before:
                return

    def give_up(self) -> None:
        """By another thread: whoever waits for an answer waits no longer, and nothing else is asked until it has
        come."""
        for question in list(self.asked):
            question.over.set()


_ours = [StoreLine()]  # of this process, to the store of its ranks


class Answered:
    """A store of ``torch.distributed``; what it is asked raises if no answer comes.

    Args:
        store: asked.
        limit: seconds that an answer may take.
        line: over which it is asked; None: that of this process.

    Raises:
        DistStoreError: by each method: none came. It is a RuntimeError, as what a store raises whose process is gone.
    """

    def __init__(self, store: Any, limit: float, line: StoreLine | None = None) -> None:
        self._store, self.limit, self._line = store, limit, line

    def allow(self, limit: float) -> None:
        """From now on an answer may take so many seconds."""
        self.limit = limit

    def __getattr__(self, name: str) -> Any:
        ask = getattr(self._store, name)
        if name == "clone":  # a connection of its own
            ask = partial(_cloned, self._store)
            return lambda: Answered(answered(ask, self.limit, self._line), self.limit, self._line)
        return lambda *given: answered(lambda: ask(*given), self.limit, self._line)

    def wait(self, keys: Sequence[str], *timeout: timedelta) -> None:
        """Waits for keys. That the time is over is an answer of the store's too, which may not come either.

        Args:
            keys: that are to be there.
            timeout: for how long; none: as the store has it, but no longer than an answer may take.

        Raises:
            DistStoreError: the time is over, or no answer came.
        """
        seconds = sum(each.total_seconds() for each in timeout)
        answered(lambda: self._store.wait(list(keys), *timeout), self.limit + seconds, self._line)


def _cloned(store: Any) -> Any:
    """A connection of its own to the same store. Where the process of that has died its host says so at once, while
    torch would try for twice the timeout.

    Raises:
        DistStoreError: it has.
    """
    below = store
    while isinstance(below, PrefixStore):
        below = below.underlying_store
    if isinstance(below, TCPStore):
        with suppress(OSError):  # a link may be cut, and heal
            try:
                socket.create_connection((below.host, below.port), timeout=LOOK).close()
            except ConnectionRefusedError as error:
                raise dist.DistStoreError(f"nobody listens at {below.host}:{below.port}") from error
    return store.clone()


def answered(ask: Callable[[], Any], limit: float, line: StoreLine | None = None) -> Any:
    """What ``ask`` returns, which asks a store over this line, by itself or by what it calls; None: the store of this
    process.

    Raises:
        DistStoreError: it was not over within so many seconds, or :func:`ask_no_more` was called.
    """
    return (line or _ours[0]).ask(ask, limit)


def ask_no_more() -> None:
    """By another thread: whoever waits for the store of this process waits no longer, and nothing else is asked of it
    until :func:`ask_another`, or until the answer has come."""
    _ours[0].give_up()


def ask_another() -> None:
    """The store is another one from now on, over a connection of its own: no answer of the last one is waited for, nor
    does it matter when one that was asked there is given up."""
    _ours[0] = StoreLine()
