"""What ranks tell each other during a save, through the key-value store: no collective, so it may run in a thread.

Each rank counts in the store while it lives (from a thread of its own, as a slow disk is no death), so that whoever
waits for a word of it can tell a rank that is slow from one that is gone.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from time import monotonic, sleep
from typing import Any

from shardfold.checkpoint.standing_thread import StandingThread
from shardfold.errors import CheckpointError, ShardfoldError

__all__ = ["SILENCE_AT_EXIT", "SILENCE_OF_DEAD", "Messages", "ask", "drop", "put", "take", "words"]

BEAT = 1.0  # seconds between two signs of life of a rank
SILENCE, SILENCE_AT_EXIT = 20.0, 8.0  # seconds without one after which it counts as dead
SILENCE_OF_DEAD = 2.5  # the same where ranks leave for a next epoch, in which others join
GONE = "another rank is gone"
PAUSE = 0.02  # seconds between two looks
CHUNK = 1024 * 1024  # bytes of one entry of the store, whose server has a bound for them


class Messages:
    """The words of one save.

    Args:
        store: shared by all ranks; None for one rank.
        name: of the save, the same on all ranks and of no other save.
        rank: this rank.
        gone: set, by another thread, when it is known that some rank is: then who has not spoken is not waited for.
        pulse: the thread that counts.

    Attributes:
        silence: seconds without a sign of life after which a rank counts as dead.
        gone: as given.
    """

    def __init__(self, store: Any, name: str, rank: int, gone: threading.Event, pulse: StandingThread) -> None:
        self._store, self._name, self._rank, self._pulse = store, name, rank, pulse
        self.silence, self.gone = SILENCE, gone
        self._over, self._connected = threading.Event(), threading.Event()
        self._ended: threading.Event | None = None

    def wait_at_most(self, silence: float) -> None:
        """A rank counts as dead after so many seconds from now on."""
        self.silence = silence

    def begin(self) -> None:
        """From now on the others see that this rank lives, until :meth:`end`; nobody waits here for the store."""
        if self._store is None:
            return
        self._ended = self._pulse.do(partial(self._live, self._store))

    def end(self) -> None:
        """This rank has said and heard all; may be called twice."""
        self._over.set()
        if self._ended is not None:
            self._ended.wait(self.silence if self._connected.is_set() else 0.0)
            self._ended = None
        self._store = None

    def say(self, what: str, text: str) -> None:
        """Tells the others.

        Raises:
            CheckpointError: the store is gone.
        """
        if self._store is not None:
            self._ask("set", f"{self._name}/{what}/{self._rank}", text)

    def send(self, what: str, data: bytes) -> None:
        """Tells the others what is too long for one entry of the store: ``+`` and how many it has.

        Raises:
            CheckpointError: the store is gone.
        """
        if self._store is not None:
            count = put(self._line(), f"{self._name}/{what}/{self._rank}", data)
            self.say(what, f"+{count}")

    def receive(self, what: str, rank: int, said: str) -> bytes:
        """What a rank has sent, of which ``said`` was heard.

        Raises:
            CheckpointError: the store is gone.
        """
        return take(self._line(), f"{self._name}/{what}/{rank}", int(said[1:]))

    def drop(self, what: str, rank: int, said: str) -> None:
        """What a rank has sent needs no room in the store any more."""
        drop(self._line(), f"{self._name}/{what}/{rank}", int(said[1:]))

    def told(self, what: str, ranks: Iterable[int]) -> dict[int, str]:
        """What each of ``ranks`` has said so far; waits for nobody.

        Raises:
            CheckpointError: the store is gone.
        """
        keys = {rank: f"{self._name}/{what}/{rank}" for rank in ranks} if self._store is not None else {}
        return {rank: self._ask("get", key).decode() for rank, key in keys.items() if self._ask("check", [key])}

    def check_gone(self) -> None:
        """
        Raises:
            CheckpointError: it is known that some rank is.
        """
        if self.gone.is_set():
            raise CheckpointError(GONE)

    @property
    def why_unheard(self) -> str:
        """Why who has not spoken is not waited for any more."""
        if self.gone.is_set():
            return GONE
        return f"it was not heard of for {self.silence:.3g} s, so it has probably died"

    def hear(self, what: str, ranks: Iterable[int], *, besides: float = 0.0) -> dict[int, str]:
        """Waits for what each of ``ranks`` says, by rank; those that are not there are not heard of any more, or some
        rank is gone, since as many seconds as they may take ``besides``.

        Raises:
            CheckpointError: the store is gone.
        """
        said: dict[int, str] = {}
        waiting = {rank: f"{self._name}/{what}/{rank}" for rank in ranks} if self._store is not None else {}
        begun = looked = monotonic()
        beats: dict[int, tuple[int, float]] = {}  # the last count of each rank, and when it was first seen
        until = float("inf")
        while waiting:
            over = monotonic() >= until
            if self._ask("check", list(waiting.values())):
                return said | {rank: self._ask("get", key).decode() for rank, key in waiting.items()}
            if over:
                return said | self.told(what, waiting)
            if monotonic() - looked > BEAT:
                for rank in list(waiting):
                    if self._ask("check", [waiting[rank]]):
                        said[rank] = self._ask("get", waiting.pop(rank)).decode()
                        continue
                    count = int(self._ask("add", f"{self._name}/alive/{rank}", 0))
                    last, since = beats.get(rank, (count, begun))
                    beats[rank] = (count, since if count == last else monotonic())
                looked = monotonic()
                if waiting and all(looked - beats[rank][1] > self.silence for rank in waiting):
                    break
            if until < float("inf"):
                sleep(PAUSE)
            elif self.gone.wait(PAUSE):
                until = monotonic() + besides
        return said

    def _live(self, store: Any) -> None:
        """Connects, and counts."""
        if hasattr(store, "clone"):  # a connection of its own: another thread may wait for minutes on that of all
            with suppress(CheckpointError):  # the store is gone: who asks it finds out
                self._store = store = ask(store, "clone")
        self._connected.set()
        while True:
            try:
                store.add(f"{self._name}/alive/{self._rank}", 1)
            except RuntimeError:  # the store is gone: whoever waits finds out by itself
                return
            if self._over.wait(BEAT):
                return

    def _line(self) -> Any:
        """The store, over the connection of this save once it has begun: torch tries for twice the timeout of a
        collective to reach one whose process has died.

        Raises:
            CheckpointError: the store does not take the connection.
        """
        begun = monotonic()
        while self._ended is not None and not self._connected.wait(PAUSE):
            if monotonic() - begun > (SILENCE_OF_DEAD if self.gone.is_set() else self.silence):
                raise CheckpointError(
                    "the store through which ranks talk takes no connection, as the process that serves it has "
                    "probably died or left, or the link to it is cut"
                )
        return self._store

    def _ask(self, call: str, *arguments: Any) -> Any:
        return ask(self._line(), call, *arguments)


def put(store: Any, key: str, data: bytes) -> int:
    """Sets entries of a store to what is too long for one; how many.

    Raises:
        CheckpointError: the store is gone.
    """
    packed = zlib.compress(data, 1)
    chunks = [packed[at : at + CHUNK] for at in range(0, len(packed), CHUNK)]
    for number, chunk in enumerate(chunks):
        ask(store, "set", f"{key}/{number}", chunk)
    return len(chunks)


def take(store: Any, key: str, count: int) -> bytes:
    """What :func:`put` has set.

    Raises:
        CheckpointError: the store is gone.
    """
    return zlib.decompress(b"".join(ask(store, "get", f"{key}/{number}") for number in range(count)))


def drop(store: Any, key: str, count: int) -> None:
    """Removes what :func:`put` has set, from a store that can."""
    with suppress(RuntimeError, NotImplementedError):
        for number in range(count):
            store.delete_key(f"{key}/{number}")


def ask(store: Any, call: str, *arguments: Any) -> Any:
    """Calls a key-value store.

    Raises:
        CheckpointError: it is gone.
    """
    try:
        return getattr(store, call)(*arguments)
    except RuntimeError as error:
        raise CheckpointError(
            "the store through which ranks talk is gone, as the process that serves it has died or left, or the link "
            f"to it is cut ({str(error).splitlines()[0]})"
        ) from error


def words(error: BaseException) -> str:
    """An error in a few words, as others are told of it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f" ({error.filename})" if error.filename else "")
    if not isinstance(error, Exception):
        return f"it was interrupted ({type(error).__name__})"
    if isinstance(error, ShardfoldError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
