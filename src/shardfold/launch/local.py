"""Starts Shardfold itself as one process per rank on this machine, without torch, and sees all of them to their end.

Rank 0 owns the terminal: its output passes through. What the other ranks say is kept, and shown when they fail. The
first rank that fails is the one reported; the others, whose collectives cannot finish without it, are ended. No
process outlives the launcher: each runs in its own session, so that signals reach it once and from here only, and on
Linux the kernel ends it should the launcher itself be killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from types import FrameType

from shardfold.launch.death import others_told, told
from shardfold.launch.leftovers import Leftovers
from shardfold.launch.process import INTERRUPTED, SAID, exit_status, free_port, give_defaults, python_module
from shardfold.launch.workers import Outlet, Worker, caused, end_all, end_hung, is_awaited, watch
from shardfold.plan.patience import Patience

__all__ = ["GRACE_AFTER_SIGTERM", "launch", "launch_local", "rank_environment"]

TAIL_LINES = 20
LOOK = 1.0  # seconds between two looks at whether a signal has set a time
GRACE = 3.0  # seconds between asking a rank to end and killing it
GRACE_AFTER_SIGTERM = 30.0
"""Seconds that a run has to end in good order once it was asked to by SIGTERM or SIGHUP."""


def rank_environment(rank: int, num_procs: int, port: int) -> dict[str, str]:
    """Return the environment of one rank, in torchrun's words."""
    environment = dict(os.environ)
    give_defaults(environment, num_procs)
    environment.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_procs),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_procs),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    return environment


class LocalRank(Worker):
    """One rank: rank 0 has the terminal, of the others the last lines of standard error are kept."""

    def __init__(
        self, rank: int, num_procs: int, command: list[str], port: int, leftovers: Leftovers, *, held: bool
    ) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        outlets = (Outlet(shown=rank == 0), Outlet(shown=rank == 0, tail=self.tail))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if held else set())
        try:
            environment = rank_environment(rank, num_procs, port)
            super().__init__(rank, command, environment, outlets, mark=leftovers.mark, door=leftovers.door)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interrupts:
    """Forwards the first SIGINT, SIGTERM or SIGHUP to all ranks; the second kills them.

    Attributes:
        received: how many came.
        until: when (of the monotonic clock) the ranks are to have ended; inf as long as there is no such time.
    """

    def __init__(self, ranks: Sequence[LocalRank]) -> None:
        self.ranks = ranks
        self.received = 0
        self.until = float("inf")
        self._first = signal.SIGINT  # what the first one is forwarded as
        self._told: set[LocalRank] = set()

    @property
    def status(self) -> int:
        """What ranks end with that stop in good order, and the command."""
        return exit_status(-self._first)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received += 1
        if self.received == 1:
            self._first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            if self._first == signal.SIGTERM:  # who presses Ctrl-C may press it again
                self.until = time.monotonic() + GRACE_AFTER_SIGTERM
            self.forward()
        else:
            for rank in self.ranks:
                rank.kill()

    def forward(self) -> None:
        """Send the first signal to each rank that has not had it."""
        for rank in self.ranks:
            if rank not in self._told:
                self._told.add(rank)
                rank.send(self._first)

    def ended(self, rank: Worker) -> bool:
        """Whether a rank that has ended did so because of them."""
        return self.received > 0 and rank.returncode in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL)

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


def launch_local(argv: list[str], num_procs: int, *, elastic: bool = False, spares: int = 0) -> int:
    """Run `shardfold ARGV` as `num_procs` ranks on this machine and return the exit status to end with; `elastic`: by
    the launcher under which ranks can go on without one that is killed, which takes longer to start; `spares`: of its
    option."""
    if elastic:
        from shardfold.launch.options import Options
        from shardfold.launch.run_script import run

        options = Options(standalone=True, nproc_per_node=str(num_procs), module=True, spares=spares)
        return run(options, "shardfold", argv)
    return launch([*python_module("shardfold"), *argv], num_procs, held=True)


def launch(command: list[str], num_procs: int, *, held: bool = False) -> int:
    """Run any command as `num_procs` ranks: 0, the first failure's status, or after an interruption 130, and 143 where
    it was no Ctrl-C.

    `held`: Ctrl-C is held back from a rank until it lets it in, which one of ours does before it imports anything.
    """
    port = free_port()
    ended: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    ranks: list[LocalRank] = []
    interrupts = Interrupts(ranks)
    leftovers = Leftovers()
    try:
        with interrupts.installed():
            try:
                for rank in range(num_procs):
                    ranks.append(LocalRank(rank, num_procs, command, port, leftovers, held=held))
                    leftovers.knows(ranks[-1].process.pid)
                    if interrupts.received:  # arrived between two starts: the newest may not have seen it
                        interrupts.forward()
            finally:
                watch(ranks, ended.put)
            failed = first_failure(ended, num_procs, interrupts)
            if failed is None:
                return max(rank.returncode or 0 for rank in ranks)
            note_end(failed, interrupts)  # first of all: who looks now finds that, and not that all are gone
            failed.drain()
            for rank in ranks:
                rank.mute()  # what they would say now is the echo of the failure, not its cause
            end_all(ranks, signal.SIGTERM, GRACE)
    finally:
        end_all(ranks, signal.SIGKILL, 0.0)
        leftovers.end(GRACE)
        leftovers.close()
    returncode = failed.returncode or 0
    if interrupts.ended(failed):
        if time.monotonic() >= interrupts.until:
            given = f"{GRACE_AFTER_SIGTERM:g} s"
            print(f"Error: the ranks did not end within {given} of the signal and were killed.", file=sys.stderr)
        elif ranks[0].returncode != interrupts.status:  # which has said so itself
            print("Error: interrupted before the ranks could end by themselves.", file=sys.stderr)
        return interrupts.status  # before it could stop cleanly, or by the second signal
    report(ranks[failed.local_rank], ranks)
    return exit_status(returncode) or 1


def first_failure(ended: queue.SimpleQueue[Worker], num_procs: int, interrupts: Interrupts) -> Worker | None:
    """Wait until all ranks have ended in good order, or return the first that has not and is no echo of another."""
    failed: list[Worker] = []
    ranks = interrupts.ranks
    echo = Patience.of_environment().echo
    for left in reversed(range(num_procs)):
        rank = next_end(ended, interrupts, (failed[0].ended or 0.0) + echo if failed else float("inf"))
        if rank is None:
            break
        if rank.returncode not in (0, INTERRUPTED, interrupts.status):
            failed.append(rank)
        if failed and caused(failed, left > 0, echo, given_up(ranks)) is not None:
            break
    ended_well = [rank for rank in ranks if rank.has_left]
    return caused(failed, False, echo, given_up(ranks), ended_well) if failed else None


def given_up(ranks: Sequence[LocalRank]) -> list[Worker]:
    """Those for which others have waited in vain, and failed."""
    late = set[int]().union(*(rank.gave_up for rank in ranks))
    return [rank for rank in ranks if rank.local_rank in late]


def next_end(ended: queue.SimpleQueue[Worker], interrupts: Interrupts, until: float) -> Worker | None:
    """Return the next rank that ends, or None if none does ``until`` then and none is being ended because others have
    waited for it in vain; ranks that were asked to end and do not are killed when their time is over."""
    patience = Patience.of_environment().lost
    while True:
        for rank in interrupts.ranks:
            rank.look(patience)
        awaited, late = set[int]().union(*(rank.awaits for rank in interrupts.ranks)), given_up(interrupts.ranks)
        by_rank = {rank.local_rank: rank for rank in interrupts.ranks}
        end_hung(by_rank, awaited, [rank.local_rank for rank in late], patience)
        now = time.monotonic()
        left = min(interrupts.until, now + LOOK if is_awaited(late) else until) - now
        if left <= 0 < interrupts.until - now:
            return None
        if left <= 0:
            for rank in interrupts.ranks:
                rank.kill()
            left = LOOK
        if (
            frozen := next((r for r in interrupts.ranks if r.ended and r.process.returncode is None), None)
        ) is not None:
            return frozen
        try:
            # Signals are handled between two looks: one may have set a time.
            return ended.get(timeout=min(left, LOOK))
        except queue.Empty:
            continue


def note_end(failed: Worker, interrupts: Interrupts) -> None:
    """Say in the run's folder, if it has one, how it ended."""
    if interrupts.ended(failed):
        failed.note_end("stopped", failed.local_rank, "it was interrupted before it could end by itself")
    else:
        front, ended = told(failed.returncode or 0, reason(failed, interrupts.ranks))
        failed.note_end("failed", failed.local_rank, f"{front}it {ended}")


def reason(failed: Worker, ranks: Sequence[LocalRank]) -> str:
    """Why it failed; of one that ended with status 0, why another one did, which needed it."""
    return failed.why if failed.returncode else next((rank.why for rank in ranks if rank.follows), "")


def report(failed: LocalRank, ranks: Sequence[LocalRank]) -> None:
    """Say on standard error which rank failed and how, then its last words unless they are on the screen."""
    lines = list(failed.tail)
    returncode = failed.returncode or 0
    if returncode == SAID and lines:
        # All ranks find the same fault in the same input; rank 0 may have said so already.
        if lines[-1] not in ranks[0].tail:
            print("\n".join(lines), file=sys.stderr)
        return
    killed = {rank.local_rank: rank.returncode or 0 for rank in ranks if rank is not failed and rank.was_killed}
    ended = others_told(len(ranks) - 1, killed)
    front, itself = told(returncode, reason(failed, ranks))
    message = f"Error: {front}rank {failed.local_rank} of {len(ranks)} {itself}{ended}."
    if not lines:
        print(message, file=sys.stderr)
    elif failed is ranks[0]:
        print(f"{message} Its last words are above.", file=sys.stderr)
    else:
        print(
            "\n".join([f"{message} The last lines of its standard error:", *(f"  {line}" for line in lines)]),
            file=sys.stderr,
        )
