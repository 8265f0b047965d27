"""Who is stuck, and where: one thread per process that looks when the main thread has not moved for a while.

While training runs this costs one wake-up a second and no message. A rank that waits for a collective says so in the
store after the first second (:meth:`Watchdog.publish`); what a rank does that is *not* in one of the engine's waits is
read off its main thread's stack by this thread: a collective of the user's own (``torch.distributed`` called from
outside of Shardfold), or simply the line it is at. From what all ranks published a waiting rank can tell whether
another is late or will never come.

A rank that is stuck in a collective of the user's own cannot read the sentence with which the others gave up; this
thread reads it and has it raised there (as an asynchronous exception, when the broken collective returns).

That this thread runs is the sign of life that the launcher looks at. A rank that gives none, as its process is stopped
or a call holds the interpreter, while others wait for it, is dead to them: the launcher asks for its stack and ends it.
"""

from __future__ import annotations

import ctypes
import json
import linecache
import os
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from logging import getLogger
from pathlib import Path
from socket import gethostname
from types import FrameType
from typing import Any, Protocol, cast

import torch.distributed as dist

from shardfold.comm.answered import Answered
from shardfold.comm.launcher_notes import beat, beat_no_more, note_awaited, offer_stack
from shardfold.errors import OrderError
from shardfold.tiers.collection import AtCollection
from shardfold.tiers.limit import boot_id, process_state
from shardfold.torch_internals import default_store, when_groups_end

__all__ = ["Watchdog", "Whereabouts"]

PLACE = "shardfold/watch"  # in the store
PROCESS = "shardfold/process"
TICK = 1.0  # seconds between two looks
STILL = 2  # looks without a move until a collective of the user's own is published
BUSY = 5  # looks without a move until anything else is
BLOCKED = 2  # looks in a wait until the launcher is told for whom
HERE = str(Path(__file__).parent.parent)
MODULES = str(Path(HERE, "nn"))  # their collectives are the model's, as if the user had written them
LOG = getLogger("shardfold")


@dataclass(frozen=True)
class Whereabouts:
    """What one rank published.

    Attributes:
        kind: ``wait`` (for a collective of an engine), ``user`` (in a collective of the user's own), ``busy``
            (elsewhere), ``gave up`` (told to raise).
        what: where, for people.
        engine: whose collective.
        issued: collectives issued so far, by engine.
        log: the last of them, ``[number, text]``, of that engine.
        nonce: differs from one publication to the next.
        needs_help: whether it waits for the others to take part in what it still needs of a pass.
        meeting: which of the messages of that engine it waits for, if that is a meeting; 0: it is none.
    """

    kind: str
    what: str
    engine: str = ""
    issued: dict[str, int] = field(default_factory=dict)
    log: list[tuple[int, str]] = field(default_factory=list)
    nonce: int = 0
    needs_help: bool = False
    meeting: int = 0

    @property
    def blocked(self) -> bool:
        return self.kind in ("wait", "user")


class Watched(Protocol):
    """What is asked of an engine."""

    sequence: int  # collectives issued so far

    def take_part(self) -> bool:
        """Takes part in what another rank still needs of a pass; False if this rank is in one itself."""
        ...

    @property
    def gave_up(self) -> bool:
        """Whether this rank raised that sentence."""
        ...

    @property
    def on_streams(self) -> bool:
        """Whether the device waits for its collectives, and the host goes on."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds that a collective may take."""
        ...

    @property
    def is_passed(self) -> bool:
        """Whether the device has done the collective that was waited for last."""
        ...

    def lost(self) -> str | None:
        """Why other ranks will not come to what this one has issued."""
        ...

    def contradiction(self, others: Mapping[int, Whereabouts]) -> str | None:
        """What proves that this rank and another will never meet."""
        ...

    def late(self, others: Mapping[int, Whereabouts]) -> list[int]:
        """The ranks that have not come."""
        ...

    def give_up(self, message: str, late: Collection[int] = ()) -> bool:
        """From here on this engine raises ``message``; the device waits no longer. Whether it did.

        ``late``: for whom it has waited as long as it waits at all.
        """
        ...

    def follow_abort(self, message: str) -> None:
        """This rank raises what another one gave it up with."""
        ...

    def aborted(self) -> str | None:
        """The sentence with which some rank gave it up."""
        ...


class Entries:
    """What all ranks published, in the store. A look costs one operation there, and a second one if anything is new,
    however many ranks there are.

    Args:
        store: shared by all ranks.
        rank, world: this rank and how many there are.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"{PLACE}/{r}" for r in range(world)]
        self._count = 0  # publications of all ranks, when they were last read
        self._texts = [""] * world

    def open(self) -> None:
        """Every rank has an entry, so that all can be read at once; whoever comes first makes them."""
        if self._store.add(f"{PLACE}/ranks", 1) == 1:
            self._store.multi_set(self._keys, [""] * len(self._keys))
            self._store.set(f"{PLACE}/open", "")
        else:
            self._store.wait([f"{PLACE}/open"])

    def put(self, text: str) -> None:
        """Replaces this rank's entry."""
        self._store.set(self._keys[self._rank], text)
        self._store.add(f"{PLACE}/count", 1)

    def read(self) -> list[str]:
        """All entries, by rank."""
        count = self._store.add(f"{PLACE}/count", 0)
        if count != self._count:  # what is published meanwhile is read now, and once more at the next look
            self._texts, self._count = [text.decode() for text in self._store.multi_get(self._keys)], count
        return self._texts


_watches: dict[int, Watchdog] = {}  # by the id of their store, which they keep alive; those with engines


class Watchdog:
    """This process's thread, its entry in the store, and everybody else's.

    Args:
        store: shared by all ranks and by all engines of this process.
        rank, world: this rank and how many there are.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store, self.rank, self.world = store, rank, world
        self._answered = Answered(store, threading.TIMEOUT_MAX)
        self._entries = Entries(self._answered, rank, world)
        self._engines: dict[str, weakref.ref[Watched]] = {}
        self._main = threading.get_ident()
        self._lock = threading.Lock()
        self._nonce = 0
        self._said: str = ""  # the kind of what is published now
        self._waiting = False  # whether the main thread is in one of the engine's own waits
        self._noted = False  # whether the launcher was told for whom this rank waits
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._unregister: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, store: Any, rank: int, world: int) -> Watchdog:
        """The one of this process for that store."""
        return _watches.get(id(store)) or cls(store, rank, world)

    # -- engines come and go

    def join(self, engine: str, watched: Watched) -> None:
        """An engine is made; one that nobody closes leaves when it is collected."""
        if not self._engines:
            self._entries.open()
            self._answered.set(f"{PROCESS}/{self.rank}", json.dumps([_same_processes(), os.getpid(), gethostname()]))
        self._engines[engine] = weakref.ref(watched)
        self._answered.allow(max(each.timeout for _, each in self._present()))
        AtCollection(watched, self.leave, engine)
        _watches[id(self._store)] = self
        if self._thread is None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="shardfold-watch", daemon=True)
            self._thread.start()
            self._unregister = when_groups_end(self._end)

    def leave(self, engine: str) -> None:
        """An engine is closed; with the last of them the thread ends."""
        self._engines.pop(engine, None)
        if not self._engines:
            self._end()

    def _end(self) -> None:
        """The thread has ended when this returns: nobody is there to be watched, or the process group is no more."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._unregister()
            self._stop.set()
            if threading.current_thread() is not thread:  # it may be the one that collects
                thread.join()
            _watches.pop(id(self._store), None)

    # -- the store

    def issued(self) -> dict[str, int]:
        """How many collectives each engine of this process has issued."""
        return {name: watched.sequence for name, watched in self._present()}

    def help(self, entry: Whereabouts) -> bool:
        """Takes part in what the rank that published ``entry`` still needs of a pass, if this one has not yet."""
        watched = dict(self._present()).get(entry.engine)
        if not entry.needs_help or watched is None or watched.gave_up or not entry.log:
            return False
        if watched.sequence + 1 != max(number for number, _ in entry.log):  # of a meeting that this rank has been at
            return False
        return watched.take_part()

    def _present(self) -> list[tuple[str, Watched]]:
        return [(name, watched) for name, ref in list(self._engines.items()) if (watched := ref()) is not None]

    def publish(
        self,
        kind: str,
        what: str,
        *,
        engine: str = "",
        log: list[tuple[int, str]] | None = None,
        needs_help: bool = False,
        meeting: int = 0,
    ) -> None:
        """Says where this rank is; stays until :meth:`clear`, or :meth:`end_wait`."""
        with self._lock:
            self._nonce += 1
            entry = Whereabouts(kind, what, engine, self.issued(), log or [], self._nonce, needs_help, meeting)
            self._entries.put(json.dumps(asdict(entry)))
            self._said = kind

    def begin_wait(
        self, what: str, engine: str, log: list[tuple[int, str]], *, needs_help: bool, meeting: int = 0
    ) -> None:
        """The main thread is in one of an engine's own waits; the others read what it waits for."""
        self._waiting = True
        self.publish("wait", what, engine=engine, log=log, needs_help=needs_help, meeting=meeting)

    def end_wait(self) -> None:
        """It has what it waited for."""
        self.clear()
        self._waiting = False

    def clear(self) -> None:
        """This rank moves again."""
        with self._lock:
            if self._said:
                self._said = ""
                self._entries.put("")

    def read(self) -> dict[int, Whereabouts]:
        """What the other ranks have published, by rank; a rank that moves has published nothing."""
        found: dict[int, Whereabouts] = {}
        for rank, text in enumerate(self._entries.read()):
            if rank != self.rank and text:
                entry = json.loads(text)
                found[rank] = Whereabouts(**{**entry, "log": [(n, what) for n, what in entry["log"]]})
        return found

    def silent(self, rank: int, seconds: float) -> str:
        """What is known of a rank that has published nothing while this one waited so long."""
        said = f"has said nothing for {seconds:.0f} s"
        if not self._answered.check([f"{PROCESS}/{rank}"]):
            return said
        where, pid, _ = json.loads(self._answered.get(f"{PROCESS}/{rank}"))
        if not where or where != _same_processes():
            return said
        state = process_state(pid)
        if not state or state in "ZX":
            return f"{said}: its process {pid} is gone"
        return f"{said}: its process {pid} is stopped (state T)" if state == "T" else f"{said} (process {pid})"

    def host_of(self, rank: int) -> str:
        """The name of a rank's host; empty where that is not known."""
        told = f"{PROCESS}/{rank}"
        return json.loads(self._answered.get(told))[2] if self._answered.check([told]) else ""

    # -- the thread

    def _run(self) -> None:
        still, blocked, before = 0, 0, -1
        offer_stack()
        try:
            beat()
            while not self._stop.wait(TICK) and not self._is_over():
                beat()
                moved = sum(self.issued().values())
                still = still + 1 if moved == before and not self._waiting else 0
                blocked = blocked + 1 if moved == before and self._waits_for_others() else 0
                before = moved
                try:
                    self._look(still)
                    self._note_awaited(blocked)
                except (
                    RuntimeError
                ):  # of the store (some kinds raise no DistError): its rank is gone, and so is the run
                    return
        finally:
            beat_no_more()

    def _waits_for_others(self) -> bool:
        """Whether this rank is where it goes on only with others: the main thread, or on streams the device."""
        return self._waiting or self._said == "user" or any(not each.is_passed for _, each in self._present())

    def _note_awaited(self, blocked: int) -> None:
        """The launcher learns which ranks say nothing while this one has waited for some looks: it ends those of them
        that give no sign of life."""
        if blocked >= BLOCKED:
            note_awaited(rank for rank, text in enumerate(self._entries.read()) if rank != self.rank and not text)
            self._noted = True
        elif self._noted:
            note_awaited(())
            self._noted = False

    def _is_over(self) -> bool:
        """Whether the process group is no longer the one that this thread was started for."""
        return not dist.is_initialized() or default_store() is not self._store

    def _look(self, still: int) -> None:
        if still == 0:
            if self._said in ("user", "busy"):
                self.clear()
            return
        if any(watched.gave_up for _, watched in self._present()):
            # It raised already. Where the user's code now waits for the others, as in a ``finally:``, it shall: they
            # raise too and come there, so it is not to be woken, nor another exception to hide the first.
            return
        if self._end_waiting_device(still):
            return
        frames = sys._current_frames()
        frames.pop(threading.get_ident())  # this one, which would keep all of them, and what they hold, alive
        frame = frames.get(self._main)
        called = next(filter(None, map(_user_collective, [frame, *self._of_autograd(frames)])), None)
        if called is None:
            if self._said == "user":
                self.clear()
            if still == BUSY:
                self.publish("busy", f"at {_place(frame)}")
        elif still >= STILL and self._said != "user":
            self.publish("user", called)
        elif self._said == "user":
            for _, watched in self._present():
                if (message := watched.aborted()) is not None:
                    watched.follow_abort(message)
                    self._raise_in_main(message)
                    return

    def _of_autograd(self, frames: Mapping[int, FrameType]) -> list[FrameType]:
        """What runs on threads that nobody started from Python: on a device, a backward and the collectives of modules
        in it are on autograd's, while the main thread waits for it."""
        started = {thread.ident for thread in threading.enumerate() if not thread.name.startswith("Dummy-")}
        return [frame for ident, frame in frames.items() if ident not in started]

    def _end_waiting_device(self, still: int) -> bool:
        """[Note: a device that waits in vain] On streams the host issues a collective and runs on. Where other ranks do
        not come to it, it is the device that waits, and soon the host for the device, in a call of the user's that no
        exception can reach. So this thread looks whether they will come, and if not, it has the device's wait ended
        and the sentence raised."""
        if still < STILL:
            return False
        for name, watched in self._present():
            passed = watched.is_passed
            if not watched.on_streams or (passed and still < BUSY):
                continue
            # Behind the engine's last it may be a collective of the user's that the device waits in.
            late: list[int] = []
            message = watched.lost() if passed else self._why_in_vain(watched)
            if message is None and not passed and still * TICK > watched.timeout:
                late = watched.late(self.read())
                message = (
                    f"rank {self.rank}: its device has not finished what was issued up to operation {watched.sequence} "
                    f"of engine {name} within {watched.timeout:.0f} s."
                )
            if message is None:
                continue
            if not passed:  # first, so that it is raised where the host waits, and not somewhere behind that
                self._raise_in_main(message)
                watched.give_up(message, late)
                return True
            if watched.give_up(message):
                self._raise_in_main(message)
                return True
        return False

    def _why_in_vain(self, watched: Watched) -> str | None:
        return watched.lost() or watched.contradiction(self.read())

    def _raise_in_main(self, message: str) -> None:
        """[Note: a rank in a user's collective] ends when another rank leaves the group; this is what it then raises,
        because what Gloo says ("connection closed by peer") names nothing."""
        LOG.error(message)

        def say(error: OrderError) -> None:
            OrderError.__init__(error, message)

        gave_up = type(OrderError.__name__, (OrderError,), {"__init__": say, "__module__": __name__})
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), ctypes.py_object(gave_up))
        self.publish("gave up", message)
        self._stop.set()


def _user_collective(frame: FrameType | None) -> str | None:
    """The call of ``torch.distributed`` that the stack ends in, if nothing of Shardfold's made it."""
    inside: str | None = None
    innermost = frame
    while frame is not None:
        name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
        if name.startswith(("torch.distributed", "torch.nn.parallel.distributed")):
            inside = frame.f_code.co_name if not frame.f_code.co_name.startswith(("wrapper", "_")) else inside
        elif frame is innermost and not _is_ours(file) and ".wait(" in linecache.getline(file, _line(frame)):
            return f"the wait for a work, at {_place(frame)}"  # of C++, else its own frame would be the innermost
        elif inside is None or _is_ours(file):
            return None
        else:
            return f"torch.distributed.{inside}, called at {_place(frame)}"
        frame = frame.f_back
    return None


def _same_processes() -> str:
    """The same for processes that see each other by their numbers; "" where nothing is known of that."""
    try:
        return boot_id() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _line(frame: FrameType) -> int:
    """Where a thread is in its file; 0: between two lines, of which CPython says None."""
    return cast("int | None", frame.f_lineno) or 0


def _is_ours(file: str) -> bool:
    return file.startswith(HERE) and not file.startswith(MODULES)


def _place(frame: FrameType | None) -> str:
    """The innermost line that is neither torch's nor Python's own."""
    inner = frame
    while frame is not None:
        file = frame.f_code.co_filename
        if "site-packages" not in file and "dist-packages" not in file and not file.startswith(("<", sys.base_prefix)):
            return f"{Path(file).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno}" if inner is not None else "an unknown line"
