"""The ranks of one node as processes: started, heard, watched, and ended with all that they have started.

Both launchers start their ranks here: `shardfold train` on this machine, without torch, and `shardfold run` anywhere.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from shardfold.comm.launcher_notes import (
    AWAITED,
    BEAT,
    BROKEN,
    CLOSED,
    DIGITS,
    DISMISSED,
    ELASTIC,
    FILE,
    FOLDER,
    GIVEN_UP,
    JOINING,
    LEASE,
    MARK,
    MEETS,
    MOST,
    NOTICE,
    OVER,
    PLACE,
    REVOKED,
    STACK,
    STACKS,
    STEP,
    STOPPED,
)
from shardfold.comm.membership import EpochPlace
from shardfold.launch.death import resident
from shardfold.launch.process import die_with_parent, signal_main_thread
from shardfold.launch.run_records import note_end
from shardfold.tiers.limit import process_state, switched

__all__ = ["Outlet", "Worker", "caused", "end_all", "end_hung", "is_awaited", "lingering", "watch"]

UNSEEN = 1.0
"""Seconds between two looks at a rank, from which on this process itself may have been stopped meanwhile."""
ANSWER = 1.0
"""Seconds that a rank has to write its stack; and to end, until it counts as frozen."""
DRAIN = 1.0
"""Seconds at most until what an ended rank has said is shown."""
FRAME = re.compile(r'  File "(.*)", line (\S+) in (.+)')
FRAMES = 3
"""Of a stack that are told: the innermost, and those around it that are neither Python's nor of a package."""
STATES = {
    "D": "D: in the kernel, or frozen",
    "T": "T: stopped",
    "t": "t: traced",
    "R": "R: computing",
    "S": "S: asleep",
}

_Failed = TypeVar("_Failed", bound="Worker")


@dataclass(frozen=True)
class Outlet:
    """Where one stream of a rank goes.

    Attributes:
        shown: whether it is seen here.
        label: written before each line that is shown; "" leaves the stream to the rank as it is.
        file: where it is kept; None if nowhere.
        tail: where its last lines are kept; None if nowhere.
    """

    shown: bool = True
    label: str = ""
    file: Path | None = None
    tail: deque[str] | None = None


class Worker:
    """One rank: its process, and threads that carry its output. Its end is noted once :func:`watch` is called.

    Attributes:
        ended: time (of the monotonic clock) at which it ended; None while it runs.
        resident: bytes of memory that it held when last looked at.
        silent: seconds without a sign of life, of a rank that has given one and lives.
        follows: whether its engine has said that another rank's end made it fail.
        why: what its engine has said made it fail, or that it was stopped; "" if nothing.

    Args:
        local_rank: of this node.
        command, environment: its own.
        outlets: of its standard output and standard error.
        cores: that it may use; None: all.
        reads_terminal: whether it has this process's standard input.
        mark: by which processes that it starts are found (see ``leftovers``).
        door: of a control group that it comes into; None: it stays in that of this process.
        notice: whether SIGUSR1 is notice to the launcher. Slurm sends it to all processes of a step: a rank passes over
            it unless its script does something with it.
    """

    def __init__(
        self,
        local_rank: int,
        command: list[str],
        environment: Mapping[str, str],
        outlets: tuple[Outlet, Outlet],
        cores: list[int] | None = None,
        reads_terminal: bool = False,
        mark: str = "",
        notice: bool = False,
        door: int | None = None,
    ) -> None:
        self.local_rank = local_rank
        self.ended: float | None = None
        self.resident = 0
        self.silent = 0.0
        self._looked, self._stopped, self._switches, self._ended_for, self._beat = 0.0, 0.0, 0, "", ""
        self._killed, self._until = 0.0, 0.0
        self._muted = False
        self._showing = threading.Lock()
        self._gone = False  # its number may soon be another process's
        self._sent = set[int]()  # by the launcher: signals
        self._over = threading.Event()
        self._pumps: list[tuple[threading.Thread, IO[bytes]]] = []
        self._sign = _sign(self)
        environment = {**environment, FILE: f"/proc/{os.getpid()}/fd/{self._sign}" if self._sign else ""}
        if mark:
            environment[MARK] = mark
        opened = [self._target(outlet) for outlet in outlets]

        def prepare() -> None:  # runs in the child: system calls only, as the launcher may have threads
            die_with_parent()
            if door is not None:
                with suppress(OSError):
                    os.write(door, b"0")
            if notice:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            if cores:
                os.sched_setaffinity(0, cores)

        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=None if reads_terminal else subprocess.DEVNULL,
                stdout=opened[0],
                stderr=subprocess.STDOUT if outlets[1].file and outlets[1] == outlets[0] else opened[1],
                start_new_session=True,
                preexec_fn=prepare if sys.platform == "linux" else None,  # noqa: PLW1509
            )
        finally:
            for target in opened:
                if target is not None and not isinstance(target, int):
                    target.close()
        for stream, outlet, into in zip(
            (self.process.stdout, self.process.stderr), outlets, (sys.stdout, sys.stderr), strict=True
        ):
            if stream is not None:
                pump = threading.Thread(target=self._pump, args=(stream, outlet, into), daemon=True)
                self._pumps.append((pump, stream))

    @staticmethod
    def _target(outlet: Outlet) -> int | IO[bytes] | None:
        if outlet.file is not None:
            outlet.file.parent.mkdir(parents=True, exist_ok=True)
        if outlet.tail is not None or (outlet.shown and (outlet.label or outlet.file)):
            return subprocess.PIPE
        if outlet.file is not None:
            return outlet.file.open("ab")
        return None if outlet.shown else subprocess.DEVNULL

    def listen(self) -> None:
        """Begin to carry its output."""
        for thread, _ in self._pumps:
            thread.start()

    def await_end(self) -> None:
        """Wait for its end, and end what it has started if it failed."""
        # Before the end is reaped, its number still is that of its group: what it has started can be found by it.
        with suppress(ChildProcessError):
            end = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            if end is not None and (end.si_code != os.CLD_EXITED or end.si_status):
                self._signal(signal.SIGKILL)
        self._gone = True
        self.process.wait()
        self.ended = time.monotonic()
        self._over.set()

    @property
    def returncode(self) -> int | None:
        if self.ended is None:
            return None
        code = self.process.returncode
        if code in (None, -STACK):  # frozen, or ended by what asked where it was
            return -signal.SIGKILL
        # Who is made to write where all of its threads are, while these go on, may crash in that.
        return -signal.SIGKILL if self._ended_for and code == -signal.SIGSEGV else code

    @property
    def follows(self) -> bool:
        return not self._ended_for and self._told.startswith(("1", "2"))

    @property
    def has_lost(self) -> bool:
        """Whether its engine has said that it cannot go on without ranks that were killed."""
        return not self._ended_for and self._told.startswith("2")

    @property
    def has_left(self) -> bool:
        """Whether it has ended with status 0, and not as another rank's end made it fail."""
        return self.returncode == 0 and not self.follows

    @property
    def why(self) -> str:
        if self._ended_for:
            return f"{self._ended_for}{self._stack}, and was ended"
        return re.split(r"\.(?: (?=[A-Z])|$)", self._told[1:], maxsplit=1)[0]  # how to mend it stands above

    @property
    def steps(self) -> int | None:
        """Updates that its engine had done; None: it had none, or did not begin where another left off."""
        noted = self._noted(DIGITS, STEP)
        return int(noted) if noted.isdigit() else None

    def note_end(self, phase: str, rank: int, words: str) -> None:
        """Say in the folder of its run, if it has one, how that ended."""
        noted = b"" if self._sign is None else os.pread(self._sign, MOST, FOLDER).partition(b"\0")[0]
        if noted:
            note_end(Path(os.fsdecode(noted)), phase, rank, words)

    @property
    def is_elastic(self) -> bool:
        """Whether it can go on without another rank that dies; of a spare, whether it waits to take one's place."""
        return self._noted(1, ELASTIC) == "1"

    @property
    def is_left_behind(self) -> bool:
        """Whether it has ended such that others can go on without it: killed; or failed, before it had taken a step
        with those that it had come to join."""
        return (self.returncode or 0) < 0 or (bool(self.returncode) and self._noted(1, JOINING) == "1")

    @property
    def meets(self) -> bool:
        """Whether it waits for others to come in PyTorch, where Python does not hear of Ctrl-C."""
        return self._noted(1, MEETS) == "1"

    @property
    def admits(self) -> bool:
        """Whether it can go on together with a rank that is new, should it be stopped now."""
        return self._noted(1, CLOSED) != "1"

    def dismiss(self) -> None:
        """Tell it, which waits to take a rank's place, that the run has ended."""
        if self._sign is not None:
            os.pwrite(self._sign, b"1", DISMISSED)

    def has_stopped(self, epoch: int) -> bool:
        """Whether it does nothing more in an epoch."""
        noted = self._noted(DIGITS, STOPPED)
        return noted.isdigit() and int(noted) > epoch

    def end_epoch(self, epoch: int) -> None:
        """Tell it that an epoch is over, and a next one comes."""
        if self._sign is not None:
            os.pwrite(self._sign, b"%020d" % (epoch + 1), OVER)

    def break_epoch(self, epoch: int) -> None:
        """Tell it that somebody of an epoch is gone, so that it waits there in vain."""
        if self._sign is not None:
            os.pwrite(self._sign, b"%020d" % (epoch + 1), BROKEN)

    def take_place(self, place: EpochPlace) -> None:
        """Tell it what it is from now on."""
        if self._sign is not None:
            os.pwrite(self._sign, place.to_text().encode() + b"\0", PLACE)

    @property
    def awaits(self) -> set[int]:
        """The ranks that say nothing, and for which this one waits."""
        return set() if self.ended is not None else self._listed(AWAITED)

    @property
    def gave_up(self) -> set[int]:
        """The ranks for which this one has waited in vain, and failed."""
        return self._listed(GIVEN_UP) if self.returncode else set()

    def _listed(self, at: int) -> set[int]:
        return {int(rank) for rank in self._noted(MOST, at).split(",") if rank}

    @property
    def _told(self) -> str:
        if self.returncode == -signal.SIGKILL:  # whatever it has said before, by which it did not end
            return ""
        return self._noted(MOST, 0)

    def _noted(self, length: int, at: int) -> str:
        """What it has left at this place."""
        noted = b"" if self._sign is None else os.pread(self._sign, length, at)
        return noted.partition(b"\0")[0].decode(errors="replace")

    @property
    def is_ended_here(self) -> bool:
        """Whether it was ended for what it did, or did not do, by :meth:`end_for`."""
        return bool(self._ended_for)

    @property
    def was_killed(self) -> bool:
        """Whether it was ended by a signal that the launcher has not sent."""
        return (self.returncode or 0) < 0 and -(self.returncode or 0) not in self._sent and not self._ended_for

    @property
    def is_stopped(self) -> bool:
        """Whether its process was stopped when last looked at, and the time before."""
        return self._stopped > 0

    def lease(self, seconds: float) -> None:
        """Let it write for so long what outlives the run; not one that is being ended."""
        if self._sign is not None and not self._ended_for:
            os.pwrite(self._sign, b"%020d" % int((time.monotonic() + seconds) * 1e9), LEASE)

    def give_notice(self) -> None:
        """Tell its engine that the run shall end soon; without one it does not hear it."""
        if self._sign is not None:
            os.pwrite(self._sign, b"1", NOTICE)

    def mute(self) -> None:
        """Show nothing more of what it writes; of a rank that is shown, the tail then is what was shown."""
        with self._showing:
            self._muted = True

    def look(self, patience: float) -> None:
        """Note how much memory it holds; end it if it has been stopped (SIGSTOP) for so many seconds.

        Time in which nobody looked does not count: this process may have been stopped with it, as a scheduler does
        that suspends a job.
        """
        if self.ended is not None:
            return
        if self._ended_for or self._killed:
            self._end()
            return
        self.resident = resident(self.process.pid) or self.resident
        now, switches, beat = time.monotonic(), switched(self.process.pid), self._noted(DIGITS, BEAT)
        passed = now - self._looked if self._looked and now - self._looked < UNSEEN + patience / 10 else 0.0
        self.silent = self.silent + passed if beat.strip("0") and beat == self._beat else 0.0
        # Whoever ran between two looks, and be it for a moment, was switched from.
        if process_state(self.process.pid) == "T" and switches == self._switches:
            self._stopped += passed
            if self._stopped > patience:
                self.end_for(f"its process was stopped (SIGSTOP, state T) for {self._stopped:.0f} s")
        else:
            self._stopped = 0.0
        self._looked, self._switches, self._beat = now, switches, beat

    def end_for(self, why: str) -> None:
        """End it, once it has said where it was, or could have: at one of the next looks, so that others are looked at
        meanwhile."""
        if self._ended_for:
            return
        self._ended_for = why
        self._until = time.monotonic() + (ANSWER if self._ends_with_stack() else 0.0)
        self._end()

    def kill(self) -> None:
        """End it at once; at one of the next looks it counts as gone in any case."""
        if not self._killed:
            self._killed = time.monotonic()
            self.send(signal.SIGKILL)

    def _end(self) -> None:
        """What was begun by :meth:`end_for` or :meth:`kill` goes on."""
        now = time.monotonic()
        if self._killed:  # what is frozen ends when it goes on, and does nothing more: it counts as gone
            if now > self._killed + ANSWER:
                self.ended = now
                self._over.set()
        elif now >= self._until:
            self.kill()

    def _ends_with_stack(self) -> bool:
        """Whether it was told to write where its main thread is and to end, which the handler of a signal does.

        A stopped process gets it when it goes on. The handler is the first that it does then, and the last: a rank that
        went on for a moment more might end its work in it, and be taken for one that had done all of it."""
        if self._sign is None or not self._beat.strip("0"):
            return False
        os.pwrite(self._sign, REVOKED, LEASE)
        with suppress(ProcessLookupError):
            signal_main_thread(self.process.pid, STACK)
            if process_state(self.process.pid) == "T":
                os.kill(self.process.pid, signal.SIGCONT)
        return True

    @property
    def _stack(self) -> str:
        """Where it was, for a sentence; "" if it has not written it."""
        size = 0 if self._sign is None else os.fstat(self._sign).st_size
        if self._sign is None or size <= STACKS:
            return ""
        stack = _frames(os.pread(self._sign, size - STACKS, STACKS).decode(errors="replace"))
        return stack and f", {stack}"

    def send(self, number: int) -> None:
        """Send a signal to the rank and to what it has started."""
        if not self._gone:
            self._sent.add(number)
            self._signal(number)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def join(self, timeout: float) -> None:
        self._over.wait(max(timeout, 0.0))

    def drain(self) -> None:
        """Wait until what an ended rank has said is shown; not for a process of its own that holds the pipe open: the
        pipe has all that the rank has said, so there is no more once it was found empty."""
        deadline = time.monotonic() + DRAIN
        for thread, stream in self._pumps:
            empty = 0
            while thread.ident is not None and thread.is_alive() and empty < 2 and time.monotonic() < deadline:
                empty = 0 if _has_more(stream) else empty + 1
                thread.join(timeout=DRAIN / 20)

    def _pump(self, stream: IO[bytes], outlet: Outlet, into: IO[str]) -> None:
        """Carry its output to the terminal, line by line with its label, and to a file as it is."""
        file = outlet.file.open("ab", buffering=0) if outlet.file is not None else None
        try:
            with stream:
                for line in stream:
                    if file is not None:
                        file.write(line)
                    text = line.decode(errors="replace")
                    with self._showing:
                        if outlet.shown and not self._muted:
                            with suppress(ValueError, OSError):  # the terminal is gone: go on, for the file's sake
                                into.write(outlet.label + text if text.endswith("\n") else f"{outlet.label}{text}\n")
                                into.flush()
                        if outlet.tail is not None and not (outlet.shown and self._muted):
                            outlet.tail.append(text.rstrip("\n"))
        finally:
            if file is not None:
                file.close()


def _sign(worker: Worker) -> int | None:
    """A file without a name that a rank can write to and that goes with its worker; None on other systems."""
    try:
        sign = os.memfd_create("shardfold")
    except (AttributeError, OSError):
        return None
    weakref.finalize(worker, os.close, sign)
    return sign


def caused(
    failed: Sequence[_Failed], running: bool, echo: float, late: Collection[Worker] = (), left: Collection[_Failed] = ()
) -> _Failed | None:
    """Of the ranks that have failed the one that is the cause; None: it may be one that still ends.

    A rank whose process is slow to end is noticed by the others before: they fail and may be gone first. As long as one
    is there for which others have waited in vain, which :func:`end_hung` ends, none of those is the cause, however long
    that takes. If all that have failed did so because of another one, it is the first of those that have ended with
    status 0: the others still needed it.

    Args:
        failed: in the order in which they ended, at least one.
        running: whether other ranks may still run, of this node or of another.
        echo: seconds for which one that failed because of another one is held back, for that one to end.
        late: of this node, those for which others have waited in vain.
        left: of this node, those that have ended with status 0.
    """
    cause = next((worker for worker in failed if not worker.follows), None)
    if cause is None and (is_awaited(late) or (running and time.monotonic() < (failed[0].ended or 0.0) + echo)):
        return None
    cause = cause or next((worker for worker in failed if worker in late), None)
    return cause or min(left, key=lambda worker: worker.ended or 0.0, default=failed[0])


def is_awaited(late: Collection[Worker]) -> bool:
    """Whether one of those for which others have waited in vain is being ended, and is there still."""
    return any(worker.ended is None and worker.is_ended_here for worker in late)


def end_hung(
    workers: Mapping[int, Worker], awaited: Collection[int], given_up: Collection[int], patience: float
) -> None:
    """End those that have given no sign of life for so many seconds while others wait for them, and those for which
    others have waited as long as they wait at all.

    Args:
        workers: of this node, by rank.
        awaited: ranks that say nothing, and for which others wait, of this node or another.
        given_up: ranks for which others have waited in vain, and failed.
        patience: seconds.
    """
    for rank, worker in workers.items():
        if worker.ended is not None:
            continue
        if rank in awaited and worker.silent > patience and not worker.is_stopped:
            why = f"gave no sign of life for {worker.silent:.0f} s while others waited for it"
        elif rank in given_up:
            why = "did not come to where others waited for it until they gave up"
        else:
            continue
        state = process_state(worker.process.pid)
        worker.end_for(f"its process {why} (state {STATES.get(state, state)})")


def lingering(workers: Sequence[Worker], seconds: float) -> str:
    """Who still runs so long after others have ended well, for a sentence; "" if nobody does.

    It is not ended: it may do what is its own, as writing what came of a run. It may as well never end.
    """
    ended = [worker.ended or 0.0 for worker in workers if worker.returncode == 0]
    running = [worker for worker in workers if worker.returncode is None]
    if not ended or not running or time.monotonic() < max(ended) + seconds:
        return ""
    states = ((worker, process_state(worker.process.pid)) for worker in running)
    each = (f"process {w.process.pid} of local rank {w.local_rank} (state {STATES.get(s, s)})" for w, s in states)
    return f"{', '.join(each)} still runs, {seconds:.0f} s after the other ranks here have ended well"


def _frames(dumped: str) -> str:
    """The innermost frames of the last thread that faulthandler has written, which is the main one."""
    main = dumped.rpartition("(most recent call first):\n")[2]
    frames = FRAME.findall(main)
    told = [
        f"{Path(file).name}:{line} in {name}"
        for number, (file, line, name) in enumerate(frames)
        if number == 0 or not ("-packages" in file or file.startswith(("<", sys.base_prefix)))
    ]
    return f"at {', called at '.join(told[:FRAMES])}" if told else ""


def watch(workers: Sequence[Worker], told: Callable[[Worker], None] = lambda worker: None) -> None:
    """Begin to carry the output of workers that were just started, and to note their ends; returns at once.

    Args:
        workers: all of a node.
        told: called for each that has ended, in another thread. On Linux in the order in which they ended, however
            late this process gets to see it: that order tells a failure from those that it brought about.
    """
    for worker in workers:
        worker.listen()
    try:
        descriptors = {os.pidfd_open(worker.process.pid): worker for worker in workers}
    except (AttributeError, OSError):  # another system, or an old one: one thread waits for each
        for worker in workers:
            threading.Thread(target=lambda worker=worker: (worker.await_end(), told(worker)), daemon=True).start()
        return
    threading.Thread(target=_note_ends, args=(descriptors, told), daemon=True).start()


def _note_ends(descriptors: dict[int, Worker], told: Callable[[Worker], None]) -> None:
    with select.epoll() as ends:  # hands out what is ready in the order in which it became so
        for descriptor in descriptors:
            ends.register(descriptor, select.EPOLLIN)
        while descriptors:
            for descriptor, _ in ends.poll():
                ends.unregister(descriptor)
                os.close(descriptor)
                worker = descriptors.pop(descriptor)
                worker.await_end()
                told(worker)


def _has_more(stream: IO[bytes]) -> bool:
    """Whether a pipe has bytes that nobody has read; one that was closed has none."""
    with suppress(OSError, ValueError):
        looks = select.poll()
        looks.register(stream, select.POLLIN)
        return bool(looks.poll(0))
    return False


def end_all(workers: Sequence[Worker], number: int, grace: float) -> None:
    """Send all workers a signal, SIGKILL to those that still run after ``grace`` seconds, and await their ends. SIGINT
    does not end who waits in PyTorch for the others, and has nothing to save: they get SIGTERM."""
    for worker in workers:
        worker.send(signal.SIGTERM if number == signal.SIGINT and worker.meets else number)
    deadline = time.monotonic() + grace
    try:
        for worker in workers:
            worker.join(deadline - time.monotonic())
    finally:  # also when a second signal cuts the waiting short
        for worker in workers:
            worker.send(signal.SIGKILL)
        for worker in workers:
            worker.join(10.0)
            worker.drain()
