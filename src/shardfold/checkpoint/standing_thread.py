"""A thread that stands by for what is to be done beside the training.

To start one takes as long as the system, and Python's lock, make it wait for its first turn: on busy cores that is what
a call would wait for that does next to nothing itself. So the first task starts it, and later ones find it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread

__all__ = ["StandingThread"]

Task = Callable[[], None]


class StandingThread:
    """Does tasks, one behind the other.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: Thread | None = None
        self._tasks: SimpleQueue[tuple[Task, Event] | None] = SimpleQueue()

    def do(self, task: Task) -> Event:
        """Has it done, and says when it is: behind those before."""
        if self._thread is None or not self._thread.is_alive():  # as behind a fork
            self._tasks = SimpleQueue()
            thread = Thread(target=_work, args=(self._tasks,), name=self._name, daemon=True)
            thread.start()
            self._thread = thread
            weakref.finalize(self, self._tasks.put, None)
        done = Event()
        self._tasks.put((task, done))
        return done

    def end(self, within: float) -> None:
        """Waits until all is done, so many seconds at most."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(within)
            self._thread = None


def _work(tasks: SimpleQueue[tuple[Task, Event] | None]) -> None:
    while (next_one := tasks.get()) is not None:
        task, done = next_one
        try:
            task()
        finally:
            del next_one, task  # what it had in memory
            done.set()
