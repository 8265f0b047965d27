"""Starts Shardfold itself as one process per rank on this machine, without torch, and sees all of them to their end.

Rank 0 owns the terminal: its output passes through. What the other ranks say is kept, and shown when they fail. The
first rank that fails is the one reported; the others, whose collectives can not finish without it, are ended. No
process outlives the launcher: each runs in its own session, so that signals reach it once and from here only, and on
Linux the kernel ends it should the launcher itself be killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import IO

from shardfold.launch.process import (
    INTERRUPTED,
    SAID,
    die_with_parent,
    exit_status,
    free_port,
    how,
    num_cores,
    python_module,
)

__all__ = ["launch", "launch_local", "rank_environment"]

TAIL_LINES = 20
GRACE = 3.0  # seconds between asking a rank to end and killing it


def rank_environment(rank: int, num_procs: int, port: int) -> dict[str, str]:
    """Return the environment of one rank, in torchrun's words."""
    environment = dict(os.environ)
    # More threads than cores make every collective wait for the rank that is scheduled last.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_procs)))
    environment.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_procs),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_procs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return environment


class RankProcess:
    """One rank: its process, the last lines of its standard error, and a thread that awaits its end."""

    def __init__(self, rank: int, argv: list[str], environment: dict[str, str]) -> None:
        self.rank = rank
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.shows_stderr = rank == 0
        self.shown: deque[str] = deque(maxlen=TAIL_LINES)
        self.process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            # Safe here: all ranks are started before the launcher has threads of its own.
            preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
        )
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)

    def watch(self, ended: queue.Queue[RankProcess]) -> None:
        """Start the threads; the rank is put into `ended` at the moment its process ends."""
        self._reader.start()

        def wait() -> None:
            self.process.wait()
            ended.put(self)

        threading.Thread(target=wait, daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace")
                self.tail.append(text.rstrip("\n"))
                if self.shows_stderr:
                    sys.stderr.write(text)
                    sys.stderr.flush()
                    self.shown.append(text.rstrip("\n"))

    def send(self, number: int) -> None:
        """Send a signal to the rank and to what it has started; nothing happens if it has ended."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def drain(self) -> None:
        """Wait until all that an ended rank has said is read."""
        if self._reader.is_alive():
            # A grandchild may hold the pipe open longer than the rank lived: do not wait for that.
            self._reader.join(timeout=1.0)


class Interrupts:
    """Forwards the first SIGINT, SIGTERM or SIGHUP to all ranks; the second kills them."""

    def __init__(self, ranks: list[RankProcess]) -> None:
        self.ranks = ranks
        self.received = 0
        self._first = signal.SIGINT  # what the first one is forwarded as
        self._told: set[RankProcess] = set()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received += 1
        if self.received == 1:
            self._first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self.forward()
        else:
            for rank in self.ranks:
                rank.send(signal.SIGKILL)

    def forward(self) -> None:
        """Send the first signal to each rank that has not had it."""
        for rank in self.ranks:
            if rank not in self._told:
                self._told.add(rank)
                rank.send(self._first)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        # Python handles signals in its main thread only; elsewhere the caller's own handling stays.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def launch_local(argv: list[str], num_procs: int) -> int:
    """Run `shardfold ARGV` as `num_procs` ranks on this machine and return the exit status to end with."""
    return launch([*python_module("shardfold"), *argv], num_procs)


def launch(command: list[str], num_procs: int) -> int:
    """Run any command as `num_procs` ranks: 0, the first failure's status, or 130 after an interruption."""
    port = free_port()
    ended: queue.Queue[RankProcess] = queue.Queue()
    ranks: list[RankProcess] = []
    interrupts = Interrupts(ranks)
    try:
        with interrupts.installed():
            for rank in range(num_procs):
                ranks.append(RankProcess(rank, command, rank_environment(rank, num_procs, port)))
                if interrupts.received:  # arrived between two starts: the newest may not have seen it
                    interrupts.forward()
            for rank in ranks:
                rank.watch(ended)
            failed = first_failure(ended, num_procs)
            if failed is None:
                return max(rank.process.returncode for rank in ranks)
            end(ranks)
    finally:
        for rank in ranks:
            rank.send(signal.SIGKILL)
            rank.drain()
    returncode = failed.process.returncode
    if interrupts.received and returncode in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL):
        return INTERRUPTED  # before it could stop cleanly, or by the second signal
    report(failed, ranks)
    return exit_status(returncode)


def first_failure(ended: queue.Queue[RankProcess], num_procs: int) -> RankProcess | None:
    """Wait until all ranks have ended in good order, or return the first that has not."""
    for _ in range(num_procs):
        rank = ended.get()
        if rank.process.returncode not in (0, INTERRUPTED):
            return rank
    return None


def end(ranks: list[RankProcess]) -> None:
    """End the ranks that still run: ask, wait a little, kill."""
    for rank in ranks:
        # What they would say now is the echo of the failure, not its cause.
        rank.shows_stderr = False
        rank.send(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.send(signal.SIGKILL)
            rank.process.wait()


def report(failed: RankProcess, ranks: list[RankProcess]) -> None:
    """Say on standard error which rank failed and how, then its last words unless they are on the screen."""
    lines = list(failed.tail)
    returncode = failed.process.returncode
    shown = list(ranks[0].shown)
    if returncode == SAID and lines:
        # All ranks find the same fault in the same input; rank 0 may have said so already.
        if lines[-1] not in shown:
            print("\n".join(lines), file=sys.stderr)
        return
    others = len(ranks) - 1
    ended = (
        "" if not others else f"; the other {others} ranks were ended" if others > 1 else "; the other rank was ended"
    )
    message = f"Error: rank {failed.rank} of {len(ranks)} {how(returncode)}{ended}."
    if not lines:
        print(message, file=sys.stderr)
    elif failed.rank == 0 and shown[-1:] == lines[-1:]:
        print(f"{message} Its last words are above.", file=sys.stderr)
    else:
        print(
            "\n".join([f"{message} The last lines of its standard error:", *(f"  {line}" for line in lines)]),
            file=sys.stderr,
        )
