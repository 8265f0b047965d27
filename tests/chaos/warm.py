"""A launcher whose ranks are forks of itself: all that it does with processes is real, only imports are not done again.

Launchers start ranks by ``subprocess.Popen``. In a process that :func:`begin` has forked this means :class:`Forked`
there: a child in a session of its own, with the environment, the streams and the preparation that are asked for, and
without the launcher's descriptors.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from shardfold.launch import workers
from shardfold.launch.process import die_with_parent

Work = Callable[[Mapping[str, str]], None]
"""What a rank does, given its environment."""
STACKS = signal.SIGUSR2
"""A launcher or a rank that gets it writes where it is."""
ANSWERS = 2.0
"""Seconds that a child has to ask the C library for a name."""
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNET, CLONE_NEWUTS = 0x40000000, 0x04000000


def keep_orphans() -> None:
    """From now on what descendants of this process leave behind is a child of it."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


class Forked:
    """As ``subprocess.Popen``, but for the program: the child does ``work``."""

    work: Work

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str],
        stdin: int | None,
        stdout: int | IO[bytes] | None,
        stderr: int | IO[bytes] | None,
        start_new_session: bool,
        preexec_fn: Callable[[], None] | None,
    ) -> None:
        self.args, self.returncode = command, None
        self.stdin = None
        theirs: list[int] = []
        ours: list[IO[bytes] | None] = []
        for number, given in ((1, stdout), (2, stderr)):
            reader = None
            if given is None:
                end = os.dup(number)
            elif given == subprocess.PIPE:
                there, end = os.pipe()
                reader = os.fdopen(there, "rb")
            elif given == subprocess.DEVNULL:
                end = os.open(os.devnull, os.O_RDWR)
            elif given == subprocess.STDOUT:
                end = os.dup(theirs[0])
            else:
                assert not isinstance(given, int)
                end = os.dup(given.fileno())
            theirs.append(end)
            ours.append(reader)
        self.stdout, self.stderr = ours
        sys.stdout.flush()
        sys.stderr.flush()
        # A child that is sent a signal while it has its parent's handlers would lose it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = _forked(start_new_session)
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        else:
            if preexec_fn is not None:
                preexec_fn()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _become(env, theirs, lambda: self.work(env))
        for end in theirs:
            os.close(end)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        return self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            found, status = os.waitpid(self.pid, options)
            if found:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def begin(
    launch: Callable[[], int], work: Work, environment: Mapping[str, str], out: Path, err: Path, host: str = ""
) -> int:
    """Forks a launcher, which ends with what ``launch`` returns; its process.

    Args:
        work: of each of its ranks.
        environment: of the launcher, and so of its ranks.
        out, err: files for what is written.
        host: a network namespace that it is in, which is its host's name, too; empty: this process's.
    """

    def run() -> int:
        Forked.work = staticmethod(work)
        names: Any = SimpleNamespace(**{**vars(subprocess), "Popen": Forked})
        workers.subprocess = names
        return launch()

    streams = [os.open(each, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for each in (out, err)]
    pid = os.fork()
    if not pid:
        os.setsid()
        die_with_parent()
        if host:
            _enter(host)
        _become(environment, streams, run)
    for each in streams:
        os.close(each)
    return pid


def _forked(new_session: bool) -> int:
    """As ``os.fork``, but for a child that would find the C library's lock on names of hosts taken, which nobody ever
    returns: threads of a launcher ask for names when they open a store, and that of a store for each who connects.
    Such a child is ended, and another one forked. Its session is there when this returns, as behind ``Popen``: signals
    are sent to that."""
    while True:
        reader, writer = os.pipe()
        if not (pid := os.fork()):
            if new_session:
                os.setsid()
            with suppress(OSError):
                socket.getnameinfo(("127.0.0.1", 0), 0)
            os.close(reader)
            os.close(writer)
            return 0
        os.close(writer)
        answered, _, _ = select.select([reader], [], [], ANSWERS)
        os.close(reader)
        if answered:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _enter(host: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{host}") as space:
        if libc.setns(space.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS):
            raise OSError(ctypes.get_errno(), f"{host} cannot be entered")
    socket.sethostname(host)


def _let_go() -> None:
    """Of all files but the first three. Their numbers stay taken: what the parent had may still be closed here when it
    is collected (a map of memory, a socket), and would else close whatever has its number by then."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for each in os.listdir("/proc/self/fd"):
        if int(each) > 2:
            with suppress(OSError):  # that of the list itself
                os.fstat(int(each))
                os.dup2(nowhere, int(each), inheritable=False)


def _become(environment: Mapping[str, str], streams: Sequence[int], work: Callable[[], int | None]) -> None:
    """In a child: forgets its parent, does the work, and ends as Python ends."""
    status, interrupted = 1, False
    try:
        os.dup2(streams[0], 1)
        os.dup2(streams[1], 2)
        _let_go()
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        atexit._clear()
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        faulthandler.register(STACKS, all_threads=True)
        os.environ.clear()
        os.environ.update(environment)
        status = work() or 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        interrupted = isinstance(error, KeyboardInterrupt)
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(status)
