"""What ranks have started and what outlives them: found by a mark in its environment, and ended.

A process that gives itself a session of its own (``setsid``, a daemon, a server of a logger) is in no group that a
signal would reach, and if its rank is killed nobody knows it. But it has its rank's environment, and there the
launcher's mark. Should the launcher itself be killed, a small process that waits for its end does the same. What shall
outlive a run is started without the variable ``SHARDFOLD_RUN``. On systems without ``/proc`` nothing is found.

Where the launcher is process 1 of a container, what ranks have left are its children when they end, and it waits for
them: else they would stay as zombies, until the container has no number for a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from shardfold.tiers.limit import is_doomed

__all__ = ["MARK", "Leftovers"]

MARK = "SHARDFOLD_RUN"
LOOK = 0.05
SWEEP = """
import os, signal, sys
mark, begins = (each.encode() for each in sys.argv[1:])
if sys.stdin.buffer.read():
    sys.exit()
again = True
while again:
    again = False
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    variables = file.read().split(b"\\0")
                given = [each[len(begins):] for each in variables if each.startswith(begins)]
                if given and mark in given[-1].split(b":"):
                    os.kill(int(name), signal.SIGKILL)
                    again = True
            except OSError:
                pass
"""
"""Of the process that waits: a word on its standard input, and it goes; the input's end without one, and it acts."""


class Leftovers:
    """Of one launcher, from now until :meth:`close`.

    Attributes:
        mark: the value of ``SHARDFOLD_RUN`` for its ranks: its own name behind those of launchers around it.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self.mark = ":".join(filter(None, [os.environ.get(MARK, ""), self._name]))
        self._watcher: subprocess.Popen[bytes] | None = None
        if Path("/proc/self/environ").exists():
            with suppress(OSError):
                self._watcher = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", SWEEP, self._name, f"{MARK}="],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env={name: value for name, value in os.environ.items() if name != MARK},
                    cwd="/",
                )

    def end(self, grace: float) -> list[int]:
        """Ask all of them to end, and kill those that run on after so many seconds.

        Returns:
            The numbers of the processes that were there.
        """
        there = self.found()
        _send(there, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while (left := self.found()) and time.monotonic() < deadline:
            time.sleep(LOOK)
        while left:  # what is killed may have started another one meanwhile
            _send(left, signal.SIGKILL)
            left = self.found()
        return there

    def reap(self, ranks: Iterable[int]) -> None:
        """As process 1, waits for children that have ended and are neither of these ranks nor of this session, which
        this process has started itself."""
        if os.getpid() != 1:
            return
        own = {*ranks, self._watcher.pid if self._watcher is not None else 0}
        for pid in set(_children()) - own:
            with suppress(OSError):
                if os.getsid(pid) != os.getsid(0):
                    os.waitpid(pid, os.WNOHANG)

    def close(self) -> None:
        """The launcher ends by itself: nobody has to wait for that."""
        if self._watcher is not None and self._watcher.stdin is not None:
            with suppress(OSError):
                self._watcher.stdin.write(b".")
                self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None

    def found(self) -> list[int]:
        """The numbers of the processes that carry the mark; not of those that have ended and were not awaited, or that
        are frozen and end when they go on."""
        name, begins = self._name.encode(), f"{MARK}=".encode()
        return [pid for pid in _processes() if name in _variable(pid, begins).split(b":") and not is_doomed(pid)]


def _processes() -> Iterable[int]:
    with suppress(OSError):
        for each in os.listdir("/proc"):
            if each.isdigit():
                yield int(each)


def _children() -> Iterable[int]:
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            yield from map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())


def _variable(pid: int, begins: bytes) -> bytes:
    """Of a process's environment as it was started with; empty: it has none of that name, or is somebody else's."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return b""
    return next((each[len(begins) :] for each in reversed(variables) if each.startswith(begins)), b"")


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
