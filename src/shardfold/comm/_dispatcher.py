"""Who goes on with what is under way over connections: whoever waits for any of it, and else a thread.

``[Note: who reads and sends]`` A rank that waits reads and sends by itself, on the core that it would leave idle: no
other thread has to wake up for it. While it computes, what it has begun goes on as far as the system's buffers reach.
Beyond that other ranks would wait for this one, so a thread looks every few milliseconds whether something is under way
that nobody waits for, and goes on with it until somebody does. For a second behind the last collective it dozes, so
that to begin one wakes nobody; then it sleeps.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from time import monotonic

from shardfold.comm._connection import Connection
from shardfold.torch_internals import when_groups_end

__all__ = ["Dispatcher"]

DOZE, CROWDED = 1, 20
"""Milliseconds between two looks of the thread: where it has a core of its own, and where it takes one from others."""
AWAKE, LOOK = 1.0, 50
"""Seconds behind the last collective in which it looks, and milliseconds after which, with something under way, it
looks again whether there is more."""
PATIENCE = 1.0
"""Seconds after which who waits looks again."""


class Dispatcher:
    """
    Args:
        connections: what it goes on with.
        cores: how many this rank has to itself.
    """

    def __init__(self, connections: Iterable[Connection], cores: float) -> None:
        self._doze = DOZE if cores >= 2 else CROWDED
        self._connections = list(connections)
        self._lock = threading.RLock()  # a garbage collection may end a transport while it is held
        self._driven = 0  # threads that wait, and read and send meanwhile
        self._begun = 0
        self._asleep = self._closed = False
        self._bell, self._knocker = socket.socketpair()
        self._thread: threading.Thread | None = None
        self._never_mind: Callable[[], None] = lambda: None
        self._sockets = [*(connection.sock for connection in self._connections), self._bell, self._knocker]
        weakref.finalize(self, _close, self._sockets)
        _dispatchers.add(self)

    def begin(self, posts: Callable[[], None]) -> None:
        """``posts`` puts parts on connections; they go on from now on."""
        with self._lock:
            posts()
            self._begun += 1
            for connection in self._connections:
                while connection.out and not connection.is_full and connection.send():
                    pass  # what the system takes now no other thread has to bring later
        if self._thread is None and not self._closed:
            self._start()
        self._wake()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shardfold-sockets", daemon=True)
        self._thread.start()
        ours = weakref.ref(self)
        self._never_mind = when_groups_end(lambda: None if (own := ours()) is None else own.close())

    def _wake(self) -> None:
        """What is under way is not left alone while the thread sleeps."""
        if self._asleep:
            self._knocker.send(b"!")

    def advance(self) -> None:
        """Goes on with everything as far as it goes."""
        with self._lock:
            while any([connection.send() | connection.receive() for connection in self._under_way()]):
                pass

    def _under_way(self) -> list[Connection]:
        return [connection for connection in self._connections if connection.out or connection.into]

    def _watched(self) -> select.poll:
        """What there is to wait for."""
        found = select.poll()
        with self._lock:
            for connection in self._under_way():
                if events := select.POLLIN * connection.expects() | select.POLLOUT * connection.is_full:
                    found.register(connection.sock, events)
        return found

    def wait(self, done: Callable[[], bool], timeout: timedelta) -> None:
        """Returns when it is done.

        Raises:
            RuntimeError: "timed out".
        """
        deadline = 0.0
        with self._lock:
            self._driven += 1
        try:
            while True:
                self.advance()
                if done():
                    return
                now = monotonic()
                deadline = deadline or now + timeout.total_seconds()
                if now >= deadline:
                    raise RuntimeError("timed out")
                self._watched().poll(1e3 * min(deadline - now, PATIENCE))
        finally:
            with self._lock:
                self._driven -= 1
            if self._under_way():
                self._wake()

    def _run(self) -> None:
        idle, begun = 0, -1
        while not self._closed:
            idle, begun = (idle + 1 if begun == self._begun else 0), self._begun
            if self._driven or not self._under_way():
                self._rest(select.poll(), None if self._doze * idle > 1e3 * AWAKE else self._doze, begun)
            else:
                self.advance()
                self._rest(self._watched(), LOOK if idle else self._doze, begun)

    def _rest(self, watched: select.poll, milliseconds: int | None, begun: int) -> None:
        """Until something of it can go on, that time is over, or somebody wakes this thread up."""
        watched.register(self._bell, select.POLLIN)
        self._asleep = milliseconds is None
        # Who begins something says so first, and looks then whether this thread sleeps.
        left_alone = self._under_way() and not self._driven
        if self._asleep and (begun != self._begun or left_alone):
            milliseconds = 0
        if any(file == self._bell.fileno() for file, _ in watched.poll(milliseconds)):
            self._bell.recv(64)
        self._asleep = False

    def close(self) -> None:
        """Nothing more is begun; what the others have sent can still be waited for."""
        self.leave()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._never_mind()

    def leave(self) -> None:
        """The same on any thread at any moment, such as a garbage collection: nothing is waited for."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):
                self._knocker.send(b"!")
            for connection in self._connections:
                connection.end()

    def sever(self) -> None:
        """On any thread: whoever waits for a connection raises."""
        for connection in self._connections:
            connection.sever()

    def forget(self) -> None:
        """This process is a fork of the one whose connections these are."""
        self._closed = True
        self._connections.clear()
        _close(self._sockets)


def _close(sockets: Iterable[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


_dispatchers: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def _forget() -> None:
    """A fork keeps no connection open that its parent closes, and ends none."""
    for dispatcher in list(_dispatchers):
        dispatcher.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
