"""How queued work runs: at once, or later by a thread that takes the streams' heads in a random legal order.

Both are asked for the same: ``run`` queues a call, ``record`` and ``wait`` put an event's moment and a wait for it into
a stream, ``until`` has the host wait. A call that gives back a callable is not over before that one says so; a
collective under way does that.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from shardfold.testing.simulated.clocks import Moment

__all__ = ["Lagging", "PromptQueues", "Queues"]

Poll = Callable[[], bool]

PAUSE = 0.005
"""Seconds without a call of the host's after which a device that lags goes on by itself: the host may wait for another
process that waits for this device."""


class Queues(Protocol):
    """See above."""

    lags: bool

    def run(self, stream: int, call: Callable[[], Poll | None]) -> None:
        """Queues ``call`` in ``stream``."""

    def record(self, stream: int, moment: Moment) -> None:
        """``moment`` is done when the stream has come there."""

    def wait(self, stream: int, moment: Moment) -> None:
        """The stream goes on when ``moment`` is done."""

    def until(self, moment: Moment) -> None:
        """Returns when ``moment`` is done.

        Raises:
            RuntimeError: the queues were closed, so that it never will be.
        """

    def is_idle(self, stream: int) -> bool:
        """Whether nothing is queued there."""
        ...

    def close(self) -> None:
        """Nothing will be queued any more."""


class PromptQueues:
    """Everything runs as it is queued."""

    lags = False

    def run(self, stream: int, call: Callable[[], Poll | None]) -> None:
        call()

    def record(self, stream: int, moment: Moment) -> None:
        moment.done = True

    def wait(self, stream: int, moment: Moment) -> None:
        """What ran before is over already."""

    def until(self, moment: Moment) -> None:
        """It is done."""

    def is_idle(self, stream: int) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to end."""


class _Item(NamedTuple):
    kind: str  # "run", "poll", "record", "wait"
    what: Any


class Lagging:
    """Queues that stay up to ``lag`` items behind the host until it waits, and run in an order drawn from ``seed``.

    Args:
        seed: of the order.
        lag: as above.
        failed: is called with what a call raised.
    """

    lags = True

    def __init__(self, seed: int, lag: int, failed: Callable[[BaseException], None]) -> None:
        self._random, self._lag, self._failed = random.Random(seed), lag, failed
        self._queues: dict[int, deque[_Item]] = {}
        self._total = self._waiters = 0
        self._change = threading.Condition()
        self._touched = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._go, daemon=True, name="shardfold-simulated-device")
        self._thread.start()

    def run(self, stream: int, call: Callable[[], Poll | None]) -> None:
        self._put(stream, _Item("run", call))

    def record(self, stream: int, moment: Moment) -> None:
        self._put(stream, _Item("record", moment))

    def wait(self, stream: int, moment: Moment) -> None:
        self._put(stream, _Item("wait", moment))

    def until(self, moment: Moment) -> None:
        with self._change:
            self._waiters += 1
            self._change.notify_all()
            self._change.wait_for(lambda: moment.done or self._closed)
            self._waiters -= 1
        if not moment.done:
            raise RuntimeError(
                "the block of simulated() ended while this thread waited for the device, which does nothing any more: "
                "let the thread end before the block does."
            )

    def is_idle(self, stream: int) -> bool:
        with self._change:
            return not self._queues.get(stream)

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    def _put(self, stream: int, item: _Item) -> None:
        with self._change:
            self._queues.setdefault(stream, deque()).append(item)
            self._total += 1
            self._touched = time.monotonic()
            if self._total == 1 or self._total > self._lag:  # 1: the device had nothing to do, and sleeps
                self._change.notify_all()

    def _go(self) -> None:
        while (stream := self._next()) is not None:
            item = self._queues[stream][0]
            again = self._do(item)
            with self._change:
                if again is not None:
                    self._queues[stream][0] = again
                    continue
                self._queues[stream].popleft()
                self._total -= 1
                self._change.notify_all()

    def _next(self) -> int | None:
        """The stream whose head runs next; None: the end."""
        while True:
            with self._change:
                if self._closed:
                    return None
                if not (self._total and (self._waiters or self._total > self._lag or self._paused())):
                    self._change.wait(PAUSE if self._total else None)
                    continue
                heads = {stream: queue[0] for stream, queue in self._queues.items() if queue}
            ready = [stream for stream, item in heads.items() if self._is_ready(item)]
            if ready:
                return self._random.choice(ready)
            with self._change:
                self._change.wait(0.001)  # for a collective, which only its poll knows of

    def _paused(self) -> bool:
        return time.monotonic() - self._touched > PAUSE

    def _is_ready(self, item: _Item) -> bool:
        if item.kind == "wait":
            return item.what.done
        if item.kind == "poll":
            try:
                return item.what()
            except BaseException as error:
                self._failed(error)
        return True

    def _do(self, item: _Item) -> _Item | None:
        """What is at the head of the queue instead, if the item is not over."""
        try:
            if item.kind == "run":
                poll = item.what()
                return _Item("poll", poll) if callable(poll) else None
            if item.kind == "record":
                item.what.done = True
        except BaseException as error:
            self._failed(error)
        return None
