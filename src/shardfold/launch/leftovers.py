"""What ranks have started and what outlives them: found, and ended.

A process that gives itself a session of its own (``setsid``, a daemon, a server of a logger) is in no group that a
signal would reach, and if its rank is killed nobody knows it. It is found in three ways:

    its environment   is its rank's, with the launcher's mark in it
    its parent        is the launcher, once those that have started it have ended: on Linux orphans come to it
    a control group   of version 2, where the system lets the launcher make one: whatever starts in it stays in it

Should the launcher itself be killed, a small process that waits for its end looks for the first and the last, and
removes what ranks had in shared memory. What shall outlive a run has an empty variable ``SHARDFOLD_RUN``. On systems
without ``/proc`` nothing is found.

Orphans become zombies when they end, and the launcher waits for them: as process 1 of a container it would else run out
of numbers for processes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from shardfold.comm.launcher_notes import MARK
from shardfold.comm.shared_folders import NAMED, folders_around
from shardfold.launch.process import adopt_orphans
from shardfold.tiers.limit import is_doomed

__all__ = ["Leftovers", "has_group"]

LOOK = 0.05
GROUP = "shardfold-"
"""With which the name of a control group begins."""
NEW, GONE, KILLED = 60.0, 1.0, 5.0
"""Seconds in which a group has its lock, in which what was killed is gone, and for which what a signal does not end, as
it is another user's, is waited for."""
SWEEP = """
import fcntl, glob, os, shutil, signal, sys, time
mark, begins, group = (each.encode() for each in sys.argv[1:4])
sys.stdin.buffer.read()
def inside():
    found = set()
    for folder, _, _ in os.walk(group) if group else ():
        try:
            with open(folder + b"/cgroup.procs", "rb") as file:
                found |= set(file.read().split())
        except OSError:
            pass
    return found
again = True
while again:
    again, there = False, inside()
    for name in os.listdir(b"/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(b"/proc/" + name + b"/environ", "rb") as file:
                    variables = file.read().split(b"\\0")
                given = [each[len(begins):] for each in variables if each.startswith(begins)]
                if (given and mark in given[-1].split(b":")) or (name in there and given[-1:] != [b""]):
                    os.kill(int(name), signal.SIGKILL)
                    again = True
            except OSError:
                pass
for pid in inside():
    try:
        with open(os.path.dirname(group) + b"/cgroup.procs", "wb") as file:
            file.write(pid)
    except OSError:
        pass
until = time.monotonic() + 5
while group and os.path.exists(group) and time.monotonic() < until:  # what was killed is in it until it is gone
    for folder, _, _ in os.walk(group, topdown=False):
        try:
            os.rmdir(folder)
        except OSError:
            time.sleep(0.02)
for folder in (each for begin in sys.argv[4:] for each in glob.glob(begin + "*")):
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(lock, fcntl.LOCK_EX)  # until what was killed is gone
        shutil.rmtree(folder)
    except OSError:
        pass
"""
"""Of the process that waits: at the end of its standard input it acts."""


_watchers = set[int]()  # of this process


class _ControlGroup:
    """A control group of version 2 for ranks and all that they start, within this process's own. It is locked as long
    as this process lives; one that is not, as all processes of its run were killed at once, is removed by the next run.

    Attributes:
        folder: of it; None: the system has none, or lets this process make none.
        door: a file descriptor; who writes ``0`` to it comes in. None: as above.
    """

    def __init__(self, name: str) -> None:
        self.folder, self.door, self._lock = None, None, None
        with suppress(OSError, StopIteration):
            mounts = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
            root = next(words[1] for words in mounts if words[2] == "cgroup2")
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::"))
            _remove_ownerless(Path(root, own))
            folder = Path(root, own, f"{GROUP}{name}")
            folder.mkdir()
            self.folder = folder
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.door = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)

    def processes(self) -> set[int]:
        """The numbers of those that are in it."""
        found = set[int]()
        for folder, _, _ in os.walk(self.folder) if self.folder is not None else ():
            with suppress(OSError):
                found |= set(map(int, Path(folder, "cgroup.procs").read_text().split()))
        return found

    def close(self) -> None:
        if self.folder is None:
            return
        if self.door is not None:
            os.close(self.door)
            self.door = None
        for pid in self.processes():  # which stay, and go back to this process's own
            with suppress(OSError):
                self.folder.parent.joinpath("cgroup.procs").write_text(str(pid))
        until = time.monotonic() + GONE
        while self.folder.exists() and time.monotonic() < until:  # what was killed is in it until it is gone
            for folder, _, _ in os.walk(self.folder, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    time.sleep(LOOK)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_ownerless(around: Path) -> None:
    """Remove groups that are nobody's any more. One that was just made may not have its lock yet."""
    for folder in around.glob(f"{GROUP}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < NEW:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rmdir(folder)
            finally:
                os.close(lock)


def has_group() -> bool:
    """Whether this process may make a control group of version 2 within its own."""
    group = _ControlGroup(uuid.uuid4().hex)
    group.close()
    return group.folder is not None


class Leftovers:
    """Of one launcher, from now until :meth:`close`.

    Attributes:
        mark: the value of ``SHARDFOLD_RUN`` for its ranks: its own name behind those of launchers around it.
        door: where ranks come into their control group; None: there is none.
    """

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self.mark = ":".join(filter(None, [os.environ.get(MARK, ""), self._name]))
        self._watcher: subprocess.Popen[bytes] | None = None
        self._group = _ControlGroup(self._name)
        self._adopted_before = adopt_orphans(True)
        self._own = set(_children())  # that are no orphans, ranks of all attempts among them
        if Path("/proc/self/environ").exists():
            with suppress(OSError):
                held = [f"{base}/{NAMED}{self._name}-" for base in folders_around()]
                given = [self._name, f"{MARK}=", str(self._group.folder or ""), *held]
                self._watcher = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", SWEEP, *given],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env={name: value for name, value in os.environ.items() if name != MARK},
                    cwd="/",
                )
                _watchers.add(self._watcher.pid)

    @property
    def door(self) -> int | None:
        return self._group.door

    def knows(self, rank: int) -> None:
        """A rank has been started, which its worker waits for, however late it ends."""
        self._own.add(rank)

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
        deadline = time.monotonic() + KILLED
        while left and time.monotonic() < deadline:  # what is killed may have started another one meanwhile
            _send(left, signal.SIGKILL)
            left = self.found()
        return there

    def reap(self) -> None:
        """Waits for orphans that have ended."""
        for pid in self._orphans():
            with suppress(OSError):
                os.waitpid(pid, os.WNOHANG)

    def _orphans(self) -> Iterator[int]:
        """Children that this process has not started: what it starts is of its session, or known."""
        for pid in set(_children()) - self._own - _watchers:
            with suppress(OSError):
                if os.getsid(pid) != os.getsid(0):
                    yield pid

    def close(self) -> None:
        """The launcher ends by itself: nobody has to wait for that."""
        if self._watcher is not None and self._watcher.stdin is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher.stdin.close()
            self._watcher = None
        self.reap()
        adopt_orphans(self._adopted_before)
        self._group.close()

    def found(self) -> list[int]:
        """The numbers of the processes that carry the mark, are orphans or in the control group, and may not stay; not
        of those that have ended, or that are frozen and end when they go on."""
        self.reap()
        name, begins = self._name.encode(), f"{MARK}=".encode()
        inside, found = self._group.processes() | set(self._orphans()), list[int]()
        for pid in _processes():
            mark = _variable(pid, begins)
            if (name in (mark or b"").split(b":") or (pid in inside and mark != b"")) and not is_doomed(pid):
                found.append(pid)
        return found


def _processes() -> Iterable[int]:
    with suppress(OSError):
        for each in os.listdir("/proc"):
            if each.isdigit():
                yield int(each)


def _children() -> Iterable[int]:
    with suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            yield from map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())


def _variable(pid: int, begins: bytes) -> bytes | None:
    """Of a process's environment as it was started with; None: it has none of that name, or is somebody else's."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((each[len(begins) :] for each in reversed(variables) if each.startswith(begins)), None)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
