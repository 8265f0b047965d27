"""What a rank leaves for its launcher: why it fails, how far it came, and in which run folder, which is read when it
has ended, however it ended; that it lives, for whom it waits, and its stack when it is asked. And what the launcher
leaves for it: that it shall leave, until when it may write for others, and what it is behind the death of a rank that
the others go on without.

The launcher has opened a file of these parts for it. A rank that was started by another launcher has none.

``[Note: who may write]`` A process that was stopped, and goes on when the run has long gone on without it, could write
an old checkpoint over a newer one. So a launcher gives each of its ranks a lease, again and again while it knows that
the run is still theirs, and a rank whose lease is over writes nothing: it waits for the next one, which comes at once
where launcher and rank were stopped together, and never where the other hosts have given this one up.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from shardfold.comm.membership import EpochPlace
from shardfold.errors import CollectiveError
from shardfold.plan.patience import Patience

__all__ = [
    "AWAITED",
    "BEAT",
    "BROKEN",
    "CLOSED",
    "DIGITS",
    "DISMISSED",
    "ELASTIC",
    "FILE",
    "FOLDER",
    "GIVEN_UP",
    "JOINING",
    "LEASE",
    "MARK",
    "MEETS",
    "MOST",
    "NOTICE",
    "OVER",
    "PLACE",
    "REVOKED",
    "SPARE",
    "STACK",
    "STACKS",
    "STEP",
    "STOPPED",
    "beat",
    "beat_no_more",
    "called",
    "has_followed",
    "is_broken",
    "is_dismissed",
    "is_given_notice",
    "is_over",
    "last_words",
    "meeting",
    "note_awaited",
    "note_closed",
    "note_elastic",
    "note_exception",
    "note_folder",
    "note_given_up",
    "note_going_on",
    "note_joining",
    "note_step",
    "note_stopped",
    "offer_stack",
    "place_here",
    "refuse_without_lease",
    "tell_launcher",
]

FILE, MARK, SPARE = "SHARDFOLD_FOLLOWS", "SHARDFOLD_RUN", "SHARDFOLD_SPARE"
"""The variables with its name, with those of the launchers around this process, the outermost first, and with the
number of a process that waits to take a rank's place."""
MOST, DIGITS = 4000, 20
STEP, NOTICE, BEAT, LEASE, AWAITED, FOLDER, GIVEN_UP, STACKS = 4096, 5000, 5008, 5032, 5056, 10240, 14336, 20480
"""Where in the file the number of steps is, and what says that the rank shall leave; when it last gave a sign of life,
until when it may write, for which ranks it waits, the run folder, for which ranks it has waited in vain, and its stack;
the reason stands in front."""
ELASTIC, CLOSED, DISMISSED, JOINING, STOPPED, OVER, PLACE = 18432, 18433, 18434, 18435, 18440, 18464, 18496
"""And there, of a run that goes on without a rank that dies: that this rank can, or waits to take one's place; that it
is in what a new rank could not take part in; that it is not needed any more; that it has joined others, and taken no
step with them yet; the epoch in which it has stopped, how many epochs are over, and its place in the present one."""
BROKEN, MEETS = 18400, 18436
"""And how many are over as somebody is gone, so that whoever waits for that one waits in vain; and that it is about to
meet others for the first time."""
NEVER, REVOKED = b"0" * DIGITS, b"%020d" % 1
STACK = getattr(signal, "SIGRTMIN", 0) + 9
"""The signal by which a rank writes its stack and ends; one that programs have no other use for."""
LOOK = 0.02
SHORT = 800  # characters of an exception that are told: how to mend it stands at its end

_file: list[int] = []  # of this process, once it is open
_told: list[str] = []  # what was told last, until an update
_follows: list[bool] = []  # whether that was another rank's fault
_stacks: list[int] = []  # where its stack goes


def tell_launcher(why: str, *, follows: bool = False, lost: bool = False) -> None:
    """Leaves why this rank fails, which the launcher says should the rank end so.

    Args:
        why: a sentence or more, each of which ends with a full stop.
        follows: another rank's end is why; the launcher names that one instead, if it failed.
        lost: so it is, and it is one that the others were to go on without, and now cannot.
    """
    _follows[:] = [follows or lost]
    text = f"{2 if lost else int(follows)}{' '.join(why.split())}".encode()[:MOST]
    _told[:] = [why]
    _write(text + b"\0", 0)


def last_words() -> str:
    """Of the exception by which the interpreter ends; empty: by none."""
    error = getattr(sys, "last_value", None)
    return "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")[:SHORT]


def note_exception() -> None:
    """When the interpreter exits: leaves by which exception, unless something else was told as the reason."""
    if not _told and isinstance(getattr(sys, "last_value", None), Exception):
        tell_launcher(last_words())


def has_followed() -> bool:
    """Whether what this rank has told last was that another rank's end made it fail."""
    return any(_follows)


def note_folder(folder: str) -> None:
    """Leaves in which folder this rank's run is, for the launcher to say there how it ended."""
    if len(name := os.fsencode(folder)) < MOST:
        _write(name + b"\0", FOLDER)


def note_going_on() -> None:
    """Leaves that this rank has not failed by what was told before."""
    if _told:
        _told.clear()
        _follows.clear()
        _write(b"0\0", 0)
        note_given_up(())


def note_step(steps: int, *, goes_on: bool = True) -> None:
    """Leaves how many updates were done, and that this rank goes on, unless what it has told before ends it then."""
    if goes_on:
        note_going_on()
    _write(b"%020d" % steps, STEP)


def is_given_notice() -> bool:
    """Whether the launcher was told that its ranks shall leave."""
    with suppress(OSError):
        return _opened() is not None and os.pread(_file[0], 1, NOTICE) == b"1"
    return False


def offer_stack() -> None:
    """From now on this process writes where its threads are when it gets :data:`STACK`, whatever it does, and ends: the
    signal's handler is not Python's, and behind it comes what the signal does without one."""
    if _stacks or _opened() is None or not hasattr(faulthandler, "register"):
        return
    with suppress(OSError, RuntimeError, ValueError):
        _stacks.append(os.open(os.environ[FILE], os.O_RDWR))
        os.lseek(_stacks[0], STACKS, os.SEEK_SET)
        faulthandler.register(STACK, _stacks[0], all_threads=True, chain=True)


def beat() -> None:
    """Leaves that this process lives; once begun it is done each second, by a thread that needs no other."""
    _write(b"%020d" % time.monotonic_ns(), BEAT)


def beat_no_more() -> None:
    """Leaves that no sign of life is to be expected."""
    _write(NEVER, BEAT)


def note_awaited(ranks: Iterable[int]) -> None:
    """Leaves which ranks, that say nothing, this one waits for; none: it does not wait."""
    _write(_listed(ranks), AWAITED)


def note_given_up(ranks: Iterable[int]) -> None:
    """Leaves for which ranks this one has waited until it gave up: should it fail, the launcher ends those that still
    run, and names them."""
    _write(_listed(ranks), GIVEN_UP)


def note_elastic() -> None:
    """Leaves that this rank can go on without another one that dies."""
    _write(b"1", ELASTIC)


def note_closed(closed: bool) -> None:
    """Leaves whether what this rank does now, should it be broken off, goes on without ranks that are new in it."""
    _write(b"%d" % closed, CLOSED)


@contextmanager
def meeting() -> Iterator[None]:
    """Inside, this rank waits for others in PyTorch, where Python does not hear of Ctrl-C, and leaves that it does."""
    _write(b"1", MEETS)
    try:
        yield
    finally:
        _write(b"0", MEETS)


def note_joining(joining: bool) -> None:
    """Leaves whether this rank is about to take its first step with others that it has joined: should it fail, as it
    does not fit them, they go on without it."""
    _write(b"%d" % joining, JOINING)


def is_dismissed() -> bool:
    """Whether the run has ended without this process, which has waited to take a rank's place."""
    with suppress(OSError):
        return _opened() is not None and os.pread(_file[0], 1, DISMISSED) == b"1"
    return False


def note_stopped(epoch: int) -> None:
    """Leaves that this rank does nothing more in an epoch: neither it sends, nor are its states changed."""
    _write(b"%020d" % (epoch + 1), STOPPED)


def is_over(epoch: int) -> bool:
    """Whether the launcher knows that an epoch is over: a next one comes."""
    with suppress(OSError):
        return _opened() is not None and int(os.pread(_file[0], DIGITS, OVER).strip(b"\0") or b"0") > epoch
    return False


def is_broken(epoch: int) -> bool:
    """Whether the launcher knows that somebody of an epoch is gone: what waits there for all ranks waits in vain."""
    with suppress(OSError):
        return _opened() is not None and int(os.pread(_file[0], DIGITS, BROKEN).strip(b"\0") or b"0") > epoch
    return False


def place_here() -> EpochPlace | None:
    """What the launcher says that this rank is; None: it knows of no epochs."""
    with suppress(OSError):
        if _opened() is not None:
            return EpochPlace.from_text(os.pread(_file[0], STACKS - PLACE, PLACE).partition(b"\0")[0].decode())
    return None


def called(rank: int) -> int:
    """The number by which launchers name this process, which now is that rank."""
    place = place_here()
    return place.uid if place is not None and place.rank == rank else rank


def refuse_without_lease(what: str) -> None:
    """To be called in front of what would change something that outlives the run.

    Raises:
        CollectiveError: the launcher has not said for ``Patience.lost`` seconds that the run is still this rank's.
    """
    deadline = time.monotonic() + Patience.of_environment().lost
    while (until := _lease()) is not None and time.monotonic_ns() >= until:
        if until == int(REVOKED) or time.monotonic() > deadline:
            raise CollectiveError(
                f"{what} is not written: this process was stopped or cut off, its launcher has not confirmed since "
                "that the run is still its own, and others may have gone on with it; end this one."
            )
        time.sleep(LOOK)


def _lease() -> int | None:
    """Until when this rank may write, by the monotonic clock in nanoseconds; None: nobody limits it."""
    with suppress(OSError):
        if _opened() is not None and (text := os.pread(_file[0], DIGITS, LEASE)).isdigit():
            return int(text)
    return None


def _listed(ranks: Iterable[int]) -> bytes:
    text = ",".join(map(str, ranks))
    if len(text) >= MOST:  # no part of a number: it would be another rank's
        text = text[:MOST].rpartition(",")[0]
    return text.encode() + b"\0"


def _write(text: bytes, at: int) -> None:
    with suppress(OSError):
        if _opened() is not None:
            os.pwrite(_file[0], text, at)


def _opened() -> int | None:
    if not _file and (place := os.environ.get(FILE)):
        _file.append(os.open(place, os.O_RDWR))
    return _file[0] if _file else None
