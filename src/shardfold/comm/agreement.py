"""How ranks agree on what comes next, and how none waits for ever for one that went elsewhere.

``[Note: nothing is issued before it is agreed]`` Gloo ends the process when ranks bring different shapes to a
collective, and gives wrong sums in silence when the shapes happen to be equal. So every collective of an engine has a
number, and ranks can only disagree at two places, each of which asks before it acts:

    meet       before each pass, step or gathered(): one small reduction tells whether all ranks are about to do the
               same. (A pass that sends nothing at first is announced: the answer is looked at before it sends. What all
               ranks have told before that they expect to do needs no meeting, see ``expected``.) Ranks that still
               evaluate, or that need units which their last pass has given back already, are helped by the others; else
               all raise, each naming what every rank asked for.
    ask        while the order of units is not known: a small reduction tells who needs which unit next.

A rank that waits for a meeting of one engine while another rank needs more of a pass of a second engine takes part in
that when it sees so, and goes on waiting.

``[Note: an interruption inside an operation]`` What is raised from outside (Ctrl+C, a timer) may fall between counting
an operation, sending it, waiting for it and noting that it is done. Then this rank no longer knows which operations it
has taken part in, and nothing that it sends afterwards can be paired: it gives up on all ranks, see
:meth:`Agreement.whole`.

What cannot be asked (a collective of the user's own in the middle, a rank that left) shows as ranks that do not move:
see ``watchdog``. Waiting is done in slices; after each, a rank reads whether somebody gave up and what the others do.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from hashlib import sha256
from logging import getLogger
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple, NoReturn, TypeVar
from weakref import WeakMethod
from zlib import crc32

import torch
import torch.distributed as dist

from shardfold import accelerator
from shardfold.comm._watchdog import Watchdog, Whereabouts
from shardfold.comm.answered import Answered
from shardfold.comm.expected import Coming, Expectation, Place, Sequel, Started
from shardfold.comm.launcher_notes import (
    called,
    has_followed,
    is_given_notice,
    last_words,
    note_given_up,
    tell_launcher,
)
from shardfold.comm.mesh import DataMesh
from shardfold.comm.peers import Peers
from shardfold.errors import CollectiveError, ConfigError, OrderError, ShardfoldError, UsageError, by_rank
from shardfold.plan.axes import Axes
from shardfold.plan.patience import CONTRADICTIONS, Patience

__all__ = ["ALIKE", "Agreement", "Claim", "Meeting", "MessageCount"]

SLICE = timedelta(seconds=1)
# Places in a message; MORE holds the section's number + 1, and LEAVING, that a rank has notice of an end (1) or knows
# that an epoch is over (2), is heard and changes nothing else. Behind the flags: three hashes, each in front of its
# complement, of what ranks are about to do, of what they have to have alike for it, and of their bits; then the bits.
MEETS, ASKS, EVALUATES, MORE, NOT_EVALUATED, EXPECTS, FAILED, LEAVING = range(8)
FLAGS, HEADER = 8, 12
NOTICED, OVER = 1, 2
CAUGHT = 2  # of the flags, in front of a backward: a rank has dropped a pass
CODE = 4  # bytes of the hash
ALSO = HEADER + 2 * CODE
SAME = ALSO + 2 * CODE
BITS = SAME + 2 * CODE
MESSAGE = "a message"
SHOWN, AHEAD = 8, 8192  # operations that are published, and those that are kept where the host runs ahead
SHORT = 200  # characters of what ranks compare that are shown where it differs
CALLED = "called"  # behind what ranks compare: the number by which their launcher names them
SETTLE = 2.0  # seconds that published whereabouts are behind what they tell of
ALIKE = "build the same model with the same arguments on every rank"
LOG = getLogger("shardfold")
Said = TypeVar("Said")


class Meeting(NamedTuple):
    """What a meeting found.

    Attributes:
        together: all ranks, or those that are being helped and this is one of them, do what they asked for.
        flags: those that any rank set.
        more: if this rank is asked to help: the section of which others need more; None: they evaluate.
        apart: what they have to have alike for it differs.
        bits: those that any rank set.
    """

    together: bool
    flags: list[int]
    more: int | None = None
    apart: bool = False
    bits: Sequence[int] = ()


class MessageCount(NamedTuple):
    """Small messages between the hosts of ranks.

    Attributes:
        sent: of all.
        blocking: of those that this rank waited for where it sent them: round trips, in which it does nothing else.
    """

    sent: int = 0
    blocking: int = 0

    def plus(self, other: MessageCount) -> MessageCount:
        return MessageCount(self.sent + other.sent, self.blocking + other.blocking)

    def since(self, before: MessageCount) -> MessageCount:
        return MessageCount(self.sent - before.sent, self.blocking - before.blocking)


class Claim(NamedTuple):
    """Something of many parts that ranks compare.

    Attributes:
        texts: one for each part.
        over: axes; ranks that differ on others may say other things. None: all say the same.
        hint: how to mend a difference.
        name: of all parts together, which is shown with the one that differs, and may differ itself.
    """

    texts: Sequence[str]
    over: Axes | None = None
    hint: str = ALIKE
    name: str = ""


class Agreement:
    """The collectives of one engine on one rank, by number.

    Args:
        mesh: whose collectives they are.
        patience: seconds until ranks that wait for each other in vain raise.
        timeout: seconds until a collective that nobody gave up is an error.
        peers: the ranks that run this program; None: all of the mesh.
        job: of all ranks, where ``peers`` are some of them: when one of the two is given up, so is the other, on every
            rank.

    Attributes:
        peers: as above; only they meet, ask, and tell each other.
        messages: among them so far.
        job: as above; itself, where the peers are all ranks.
    """

    def __init__(
        self,
        mesh: DataMesh,
        patience: float,
        timeout: float,
        peers: Peers | None = None,
        job: Agreement | None = None,
    ) -> None:
        self._mesh = mesh
        self._job = job  # kept so, and not as itself, which would be a cycle
        self.peers = peers if peers is not None else Peers(mesh)
        self._patience, self.timeout = patience, timeout
        self.sequence = 0  # collectives issued by this engine so far
        self.places = 0  # how many bits a round of asking has at most
        self._room = 0  # bytes of each message for what ranks tell besides
        self._besides, self._heard_besides = b"", b""  # what this one does, and what all have
        self.control_bytes = 0  # in meetings and rounds of asking, since they were last read
        self.waited = 0.0  # seconds that the host waited for collectives
        self.messages = MessageCount()
        # On streams the host runs ahead of what may be waited for in vain.
        self._log: deque[tuple[int, Any]] = deque([(0, "nothing")], maxlen=AHEAD if mesh.on_streams else SHOWN)
        self._passed: Any = None  # an event: on streams, behind the collective that was waited for last
        self._detail = ""  # what the last of them is for on this rank
        # A meeting whose answer is still to be looked at.
        self._announced: tuple[str, Place, torch.Tensor, Any] | None = None
        self._sequel = Sequel()
        self._hear_failure: Callable[[], None] = lambda: None
        self._expected: Coming | None = None  # what this rank has told of the next meeting, till the answer is read
        self._begun: Started | None = None  # what it has begun without one, and is in
        self._meets = False  # whether it waits in a meeting
        self._needs_help = False  # whether the last of them is a meeting that asks for more of a pass
        self.take_part: Callable[[], bool] = lambda: False  # see Watched
        self.where: Callable[[object], str] = lambda doing: ""  # the part of a program that runs; None: of a message
        self.notified = False  # whether this rank was told that it shall leave
        self.leaving = False  # whether all ranks know that one was
        self.is_over: Callable[[], bool] = lambda: False  # whether they shall stop between two steps, as others join
        self.stopping = False  # whether all ranks know that they shall
        self._given_up: str | None = None  # the sentence with which this engine was given up
        self._aborted = False  # whether that is this rank's
        self._unmoved: tuple[Any, float] = (None, 0.0)  # what the others published, and since when
        self._unheard: set[int] | None = None  # who had said nothing at the last warning; None: there was none
        self._process = os.getpid()
        self._watch: Watchdog | None = None
        if self.peers.size > 1:
            self._watch = Watchdog.of(mesh.default_store, mesh.rank, mesh.world)
            self._watch.join(self.peers.name, self)
        if mesh.on_streams:
            mesh.listen(self.lost, self._say_left)
        else:
            exits = WeakMethod(self.exits)
            mesh.listen(lambda: None, lambda: None if (method := exits()) is None else method())

    @property
    def job(self) -> Agreement:
        return self if self._job is None else self._job

    @property
    def _store(self) -> Any:
        """What all peers can read; None: as of :attr:`Peers.store`."""
        store = self.peers.store
        return None if store is None else Answered(store, self.timeout)

    @property
    def _dead(self) -> str | None:
        return self.job._given_up

    def _end(self, message: str) -> None:
        """This engine is given up, here."""
        self._given_up = message
        self._mesh.give_up()

    def waits_told(self) -> list[str]:
        """How long ranks and launchers wait, in lines: the engine's own limits, and what the launcher's follow from."""
        launchers = Patience.of_environment().limits()
        limits = {**launchers, CONTRADICTIONS: self._patience, "a collective": self.timeout}
        return ["seconds that anybody waits:", *(f"  {what:<52}{each:>10g}" for what, each in limits.items())]

    def give_notice(self) -> None:
        """This rank shall leave; the others hear of it with its next message."""
        self.notified = True

    @property
    def is_noticed(self) -> bool:
        """Whether this rank was told that it shall leave."""
        return self.job.notified or is_given_notice()

    def heed(self, is_over: Callable[[], bool]) -> None:
        """From now on ranks are told, with their messages, that one of them shall stop between two steps."""
        self.is_over = is_over

    def connect(self, take_part: Callable[[], bool], where: Callable[[object], str]) -> None:
        """Methods of who runs the program, who is not kept alive by them (see the attributes)."""
        take, say = WeakMethod(take_part), WeakMethod(where)
        self.take_part = lambda: (alive := take()) is not None and alive()
        self.where = lambda doing: alive(doing) if (alive := say()) is not None else ""

    def make_room(self, places: int) -> None:
        """A round of asking has at most so many bits from now on."""
        self.places = places

    def make_room_besides(self, room: int) -> None:
        """So many bytes come with each message, as many on all ranks, of which each rank writes others."""
        self._room, self._besides = room, bytes(room)

    def tell_besides(self, told: bytes) -> None:
        """With the messages from now on."""
        self._besides = told

    def take_besides(self) -> bytes:
        """What all ranks have told so in the last message that was read, since it was last taken."""
        taken, self._heard_besides = self._heard_besides, b""
        return taken

    def host_of(self, rank: int) -> str:
        """The name of the host of a rank; empty where it is not known."""
        with suppress(RuntimeError):  # the process that served the store may have died
            return self._watch.host_of(rank) if self._watch is not None else ""
        return ""

    def take_control_bytes(self) -> int:
        """Bytes of meetings and rounds of asking, since they were last taken."""
        taken, self.control_bytes = self.control_bytes, 0
        return taken

    def begin_message(self) -> None:
        """A message that is no meeting is about to be sent: what ranks have told before is looked at first."""
        self._take_expected()

    def count(self, *, blocking: bool = True) -> None:
        """A message is sent."""
        self.messages = self.messages.plus(MessageCount(1, int(blocking)))
        self._begun = None

    def close(self) -> None:
        """The other ranks learn that this one has left."""
        if self._watch is not None:
            self._say_left()
            self._watch.leave(self.peers.name)
            self._watch = None

    def exits(self) -> None:
        """The interpreter does, and this engine is not closed. If that is because another rank has given it up and left
        a collective of the user's that this one was in, what was raised there says nothing, and the launcher learns
        it."""
        store = self.job.peers.store
        if self._dead is None and store is not None:
            with suppress(RuntimeError):  # the process that served it may have died
                if (told := _abort_in(Answered(store, SETTLE))) is not None:
                    self.follow_abort(told[1])

    def _say_left(self) -> None:
        """The others learn up to where they find this rank; and, if the interpreter ends by an exception, which."""
        if (store := self._store) is None:  # a mesh is closed by itself when the interpreter exits
            return
        with suppress(RuntimeError):  # the process that served the store may have died
            if why := last_words():
                store.set(f"why/{self.peers.rank}", why)
            store.append("left", f"{self.peers.rank}:{self.sequence} ")

    def _left(self) -> dict[int, int]:
        """The ranks that have closed their engine, and the last operation that each issued."""
        store = self._store
        entries = store.get("left").decode().split() if store is not None and store.check(["left"]) else []
        return {int(rank): int(number) for rank, number in (entry.split(":") for entry in entries)}

    def say_stopped(self, why: str) -> None:
        """Ranks of other groups, which meet these here now and then, read it where they wait in vain; empty: these go
        on after all."""
        if self.job is not self and (store := self.job._store) is not None:
            with suppress(RuntimeError):  # the process that served the store may have died
                store.set(f"stopped/{min(self.peers.ranks)}", why)

    def _stopped(self) -> str:
        """What other groups have said so, by rank."""
        sizes, store, said = self._mesh.sizes, self.job._store, dict[int, str]()
        if store is None or not sizes.rare:
            return ""
        for row in sizes.rows(sizes.meeting):
            if self.peers.rank not in row and store.check([key := f"stopped/{min(row)}"]):
                said.update(dict.fromkeys(row, str(store.get(key).decode())))
        return _by_text({rank: text for rank, text in said.items() if text})

    def lost(self) -> str | None:
        """Why other ranks will not come to something that this one has issued; None: nothing tells so.

        Over Gloo the host finds that out where it waits. On streams it runs ahead, and the device waits.
        """
        try:
            if (message := self.aborted()) is not None:
                return message
            early = {r: n for r, n in self._left().items() if n < self.sequence and r != self.peers.rank}
            if not early:
                return None
            rank = min(early)
            why = f"why/{rank}"
            ended = self._store.get(why).decode() if self._store.check([why]) else "it has closed its engine"
        except RuntimeError as error:
            return f"the store that all ranks share is gone ({str(error).splitlines()[0]}), and with it a rank."
        return (
            f"rank {self.peers.rank} has issued operation {self.sequence}, but rank {rank} left after operation "
            f"{early[rank]} ({ended}): look at its output."
        )

    @property
    def is_passed(self) -> bool:
        """Whether the device has done the collective that was waited for last."""
        return self._passed is None or self._passed.query()

    @property
    def on_streams(self) -> bool:
        """Whether the device waits for this engine's collectives, and the host goes on."""
        return self._mesh.on_streams

    def give_up(self, message: str, late: Collection[int] = (), *, follows: bool = False) -> bool:
        """By another thread, while the device waits in vain and this rank's own one for the device: from here on this
        engine raises ``message`` on every rank. Whether the device did wait in vain.

        ``late``: the ranks for which it has waited as long as it waits at all. ``follows``: what the launcher was told
        of another rank is why.
        """
        self.job._end(message)
        tell_launcher(message, follows=follows or bool(late))
        if late:
            note_given_up(late)
        with suppress(RuntimeError):  # the process that served the store may have died
            if self.aborted() is None:
                self._tell_abort(message, late)
            else:
                self.follow_abort(message)
        return self._mesh.end_kernels()

    @property
    def doing(self) -> str:
        return self._detail or str(self._log[-1][1])

    def refuse_given_up(self) -> None:
        """
        Raises:
            OrderError: this rank has raised because ranks cannot go on together; with the same sentence.
        """
        if self._dead is not None:
            raise OrderError(self._dead)

    def issue(self, what: Any, detail: str = "") -> None:
        """Gives the next collective its number; ``what`` prints as its name, which is the same on every rank."""
        self._begin_sending(what)
        self.sequence += 1
        self._log.append((self.sequence, what))
        self._detail, self._needs_help, self._meets = detail, False, False

    def aside(self, what: str) -> None:
        """Some ranks do what others do not, or another number of times, as inside ``gathered()``: it gets no number."""
        self._begin_sending(what)
        self._detail, self._needs_help, self._meets = what, False, False

    def _begin_sending(self, what: Any) -> None:
        self.refuse_given_up()
        if os.getpid() != self._process:
            raise UsageError(
                f"{what}: this process was forked from one that has an engine, whose connections to the other ranks "
                "it cannot use; make an engine in each process that trains."
            )
        self._confirm()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Inside, what all ranks do together is under way: an interruption is :meth:`interrupted`, and goes on."""
        try:
            yield
        except BaseException as error:
            self.interrupted(error)
            raise

    def interrupted(self, error: BaseException) -> None:
        """What was raised from outside has hit what all ranks do together: this engine is given up on every rank. An
        ``Exception`` comes from inside, from a place where it is known how far that was."""
        if isinstance(error, Exception) or self._dead is not None or self._watch is None or self._store is None:
            return
        with suppress(OrderError, RuntimeError):  # the process that served the store may have died
            self._abort(
                f"rank {self.peers.rank} was interrupted ({type(error).__name__}) at operation {self.sequence}, "
                f"{self.doing}, so ranks cannot pair their operations any more: close the engine, make it anew and "
                "load a checkpoint."
            )

    # -- asking before acting

    def meet(
        self,
        what: str,
        *,
        evaluating: bool = False,
        evaluated: bool = False,
        more: int | None = None,
        flags: Sequence[bool] = (),
        alike: str = "",
        bits: Sequence[bool] = (),
        expected: bool = False,
        place: Place | None = None,
        why: str = "",
    ) -> Meeting:
        """Whether all ranks are about to do ``what``; without a message where all have expected just that.

        Ranks may evaluate different numbers of batches: when one asks for a forward in evaluation and all have
        evaluated since the last step, those who want something else help it and meet again. So they do when one needs
        more of the pass that the others have ended.

        Args:
            what: the same text on every rank, or it is a disagreement.
            evaluating: whether ``what`` is a forward in evaluation.
            evaluated: whether this rank evaluated since the last step.
            more: the number of the section that this rank needs more of.
            flags: up to 4, of which the answer tells whether any rank set them.
            alike: a text of which the answer tells whether all ranks that do ``what`` gave the same.
            bits: of which the answer has those that any rank set; at most as many as there is room for.
            expected: whether ranks may begin it without a message, where all of them have expected it. All say so or
                none does, and it has no messages of its own.
            place: see :class:`Started`.
            why: why this rank could not go with the others, if they have begun it already.

        Raises:
            OrderError: on every rank, naming what each asked for.
        """
        mine = Expectation(what, alike, tuple(map(bool, bits)))
        kind = [1, 0, evaluating, 0 if more is None else more + 1, not evaluated]
        with self.uninterrupted():
            agreed = self._take_expected()
            if agreed is not None and agreed.what == what and agreed != mine:
                why = why or "with other settings or gradients than behind its last backward"
            if expected and agreed == mine and not any(flags):
                return self._start(mine, place)
            said = self._until_met(partial(self._say, kind, what, flags, bits, alike))
            if said[EXPECTS] and not said[ASKS]:
                return self._start(mine, place)
        if said[MEETS] and said[ASKS]:
            raise self._disagree(what, why)
        if _alike(said):
            if not evaluating:  # of which ranks may do different numbers
                # What comes with flags does so the next time, too: they would be told in a meeting again.
                self._sequel.note(what, expected=expected and not any(said[FLAGS:HEADER]))
            return Meeting(True, said[FLAGS:HEADER], apart=not _alike(said, ALSO), bits=said[BITS : BITS + len(bits)])
        if said[MORE]:
            return Meeting(more is not None, said[FLAGS:HEADER], said[MORE] - 1)
        if said[EVALUATES] and not said[NOT_EVALUATED]:
            return Meeting(evaluating, said[FLAGS:HEADER])
        raise self._disagree(what, why)

    def _until_met(self, say: Callable[[], list[int]], said: list[int] | None = None) -> list[int]:
        """What all ranks say who meet; those who say what they expect come to what they do, and to a meeting for it.
        ``said``: in the first message, where that is sent."""
        said = say() if said is None else said
        while said[EXPECTS] and not said[ASKS] and not _settled(said):
            if said[FAILED]:
                self._hear_failure()
            said = say()
        return said

    @property
    def next(self) -> str | None:
        """What ranks may expect to meet for next, all the same; None: nothing."""
        return self._sequel.next

    def hear_failures(self, hear: Callable[[], None]) -> None:
        """A method, called on all ranks before what they do next, where one said :meth:`expect` that it has failed;
        its object is not kept alive."""
        method = WeakMethod(hear)
        self._hear_failure = lambda: alive() if (alive := method()) is not None else None

    def expect(
        self, mine: Expectation, flags: Sequence[bool] = (), *, evaluated: bool = False, failed: bool = False
    ) -> None:
        """Tells the others what this rank is to do next, without waiting; all ranks do it at the same place. ``flags``
        and ``evaluated`` as of :meth:`meet`: what is to be told by one is told in a meeting, and where all have
        evaluated, some may do so once more. ``failed``: what it did last."""
        with self.uninterrupted():
            kind = [1, 0, 0, 0, not evaluated, 1, failed]
            values = self._message(kind, mine.what, flags, mine.bits, mine.alike)
            work = self._begin(values, mine.what, meets=True)
            self.count(blocking=False)
            self._expected = Coming(mine, values, work)
            self._mesh.begin_meeting(work)

    def _take_expected(self) -> Expectation | None:
        """What all ranks have said that they do next, if they did; now they do it, or something else."""
        if self._expected is None:
            return None
        (mine, values, work), self._expected = self._expected, None
        self.wait(work, control=True)
        self._mesh.end_meeting()
        said = self._heard(values)
        if said[FAILED]:
            self._hear_failure()
        return mine if _settled(said) else None

    def _start(self, mine: Expectation, place: Place | None) -> Meeting:
        """All ranks have expected that. It counts as an operation, as the meeting of a rank that meets for it does."""
        self._begun = Started(mine, self.sequence, place)
        self.issue(MESSAGE, f"the meeting before {mine.what}")
        self._sequel.note(mine.what, expected=True)
        return Meeting(True, [0] * (HEADER - FLAGS), bits=mine.bits)

    def _awaits(self, other: Whereabouts) -> bool:
        """Whether another rank has met for something when this one began what all had expected."""
        begun, met = self._begun, other.engine == self.peers.name and other.meeting == self.messages.sent + 1
        return (
            begun is not None
            and met
            and not other.needs_help
            and max(number for number, _ in other.log) == begun.sequence + 1
        )

    def _answer(self, others: Mapping[int, Whereabouts]) -> bool:
        """Whether a rank has met for something while this one, which waits for data, does what all had expected: then
        this rank comes to that meeting, as from where it began.

        Raises:
            OrderError: on every rank: it is for something else, or it tells what others had to know before they began.
        """
        if self._begun is None or not any(map(self._awaits, others.values())):
            return False
        (what, alike, bits), sequence, place = self._begun
        said = self._say([1, 0, 0, 0, 1], what, (), bits, alike, sequence)
        if not _alike(said):
            raise self._disagree(what)
        told = said[FLAGS:HEADER]
        if place is not None and told[CAUGHT]:
            self.compare(what, place)
        if told[-1]:
            self._abort_refused(what)
        if (place is None and any(told)) or not _alike(said, ALSO):
            self._abort(
                f"{what}: another rank came to it with other gradients or settings than it had behind its last "
                "backward, after others had begun it: change them before that backward, or on every rank."
            )
        return True

    def announce(self, what: str, place: Place) -> None:
        """As :meth:`meet` where no rank can need help, and without waiting: the others' answer is looked at before this
        rank's next collective, so that its pass runs while they are still coming to theirs. ``place``: where this rank
        is, which all :meth:`compare` if one has dropped something.

        Raises:
            OrderError: later, by :meth:`issue`, on every rank, naming what each asked for.
        """
        if self.peers.size > 1:
            with self.uninterrupted():
                self._take_expected()
                self._sequel.note(what, expected=False)
                flags = [number == CAUGHT and place.caught for number in range(3)]
                values = self._message([1, 0, 0, 0, 1], what, flags)
                work = self._begin(values, what, meets=True)
                self._announced = what, place, values, work
                self.count(blocking=False)
                self._mesh.begin_meeting(work)

    def _confirm(self) -> None:
        """What was announced is what all ranks do."""
        if self._announced is None:
            return
        (what, place, values, work), self._announced = self._announced, None
        self._meets = True
        self.wait(work, control=True)
        self._mesh.end_meeting()
        say = partial(self._say, [1, 0, 0, 0, 1], what, [number == CAUGHT and place.caught for number in range(3)])
        said = self._until_met(say, self._heard(values))
        if said[ASKS] or not _alike(said):
            raise self._disagree(what)
        if said[FLAGS + CAUGHT]:
            self.compare(what, place)
        if said[HEADER - 1]:  # which who announces does not set
            self._abort_refused(what)

    def _abort_refused(self, what: str) -> NoReturn:
        """This rank has begun what it cannot take back."""
        told = by_rank(dict(self._by_rank(self.exchange(f"refused/{self.sequence}", ""))))
        self._abort(f"{what} was refused on another rank, after others had begun it: {told}.")

    def ask(self, bits: Sequence[bool]) -> list[int]:
        """One round of asking: for each place whether any rank set it."""
        what = "more of the pass under way"
        with self.uninterrupted():
            self.begin_message()
            said = self._say([0, 1, 0, 0, 0], what, (), bits)
        if said[MEETS]:
            raise self._disagree(what)
        return said[BITS : BITS + len(bits)]

    def _say(
        self,
        kind: Sequence[int],
        what: str,
        flags: Sequence[bool],
        bits: Sequence[bool] = (),
        alike: str = "",
        sequence: int | None = None,
    ) -> list[int]:
        """The greatest over all ranks of each byte of a message; of one form for meetings and for asking, because ranks
        that do not do the same must find that out from it."""
        values = self._message(kind, what, flags, bits, alike, sequence)
        if self.peers.size > 1:
            work = self._begin(values, what, meets=bool(kind[MEETS]), again=sequence is not None)
            self._needs_help, self._meets = bool(kind[MORE]), bool(kind[MEETS])
            self.count()
            self.wait(work, control=True)
        return self._heard(values)

    def _heard(self, values: torch.Tensor) -> list[int]:
        """What all ranks said, once it is there; every rank reads it at the same place of its program."""
        said = values.tolist()
        self.leaving |= said[LEAVING] == NOTICED
        self.stopping |= said[LEAVING] == OVER
        if self._room:
            self._heard_besides = bytes(said[-self._room :])
        return said

    def _message(
        self,
        kind: Sequence[int],
        what: str,
        flags: Sequence[bool] = (),
        bits: Sequence[bool] = (),
        alike: str = "",
        sequence: int | None = None,
    ) -> torch.Tensor:
        # With the number of operations so far: a rank that left a pass by an exception and goes on is behind the
        # others, and on streams that shows nowhere else until devices wait in vain.
        padded = [*flags, *[False] * (HEADER - FLAGS - len(flags))]
        number, told = self.sequence if sequence is None else sequence, list(map(int, bits))
        codes = [byte for text in (f"{number} {what}".encode(), alike.encode(), bytes(told)) for byte in _code(text)]
        kind = [*map(int, kind), *[0] * (FLAGS - len(kind))]
        kind[LEAVING] = OVER if self.job.is_over() else NOTICED * self.is_noticed
        values = [*kind, *map(int, padded), *codes, *told]
        tensor = torch.zeros(BITS + self.places + self._room, dtype=torch.uint8)
        tensor[: len(values)] = torch.tensor(values, dtype=torch.uint8)
        if self._room:
            tensor[-self._room :] = torch.frombuffer(bytearray(self._besides), dtype=torch.uint8)
        return tensor

    def _begin(self, message: torch.Tensor, what: str, *, meets: bool, again: bool = False) -> Any:
        text = f"the meeting before {what}" if meets else f"a round of asking for {what}"
        self.aside(text) if again else self.issue(MESSAGE, text)
        self.control_bytes += message.nbytes
        return self.peers.reduce(message, dist.ReduceOp.MAX)

    def _disagree(self, what: str, why: str = "") -> OrderError:
        number, what = self.sequence, f"{what} ({why})" if why else what
        mine = json.dumps([number, what, self._sequel.last])
        said = [json.loads(text) for text in self.exchange(f"meeting/{number}", mine)]
        apart = any(theirs != number for theirs, _, _ in said)
        if len({text for _, text, _ in said}) == 1:  # what came before is not the same: one began what all had expected
            said = [(n, f"{text} behind {before}", before) for n, text, before in said]
        asked = _by_text(
            {r: f"{text} (operation {n} there)" if apart else text for r, (n, text, _) in self._by_rank(said)}
        )
        last = min(theirs for theirs, _, _ in said) - 1
        return self._give_up(_different(last, asked))

    def compare(self, what: str, place: Place) -> None:
        """All ranks are about to do ``what``, and one has dropped a pass before: the others have to have left the same
        micro-batch out. Under layouts with whole parameters a forward sends nothing, so that no rank misses one.

        Raises:
            OrderError: on every rank: they are not at the same place of a step.
        """
        said = dict(self._by_rank([Place(*json.loads(text)) for text in self.exchange("caught", json.dumps(place))]))
        if len({(each.forwards, each.micro_batch) for each in said.values()}) == 1:
            return
        dropped = ", ".join(str(rank) for rank, each in said.items() if each.caught)
        places = _by_text({r: f"{each.forwards} forwards, {each.micro_batch} backwards" for r, each in said.items()})
        raise self._give_up(
            f"before {what} the ranks are at different micro-batches: rank {dropped} went on behind an exception that "
            f"it caught, or called engine.reset(), and others did not (in training, since the last step: {places}). If "
            "one rank leaves a micro-batch out, all have to: tell the others, as by engine.max_over_ranks([failed])."
        )

    def refuse(self, what: str, error: ShardfoldError | None) -> NoReturn:
        """Raises on every rank what some of them found wrong with their arguments, when all have met for ``what``.

        Raises:
            ShardfoldError: this rank's own, as it is.
            ConfigError: on ranks that have none; it names the others and what they found.
        """
        said = self.exchange(f"refused/{self.sequence}", "" if error is None else str(error))
        if error is not None:
            raise error
        told = by_rank(dict(self._by_rank(said)))
        raise ConfigError(f"{what} was refused on another rank, so nothing was done here either: {told}.")

    def same(self, parts: Mapping[str, Claim | str]) -> None:
        """Every rank must say the same of each part; texts that are long, or many, are compared by their hash.

        Raises:
            ConfigError: on every rank, naming the first part that differs and the ranks whose is not that of the first
                that should say the same.
        """
        mine = {what: _shortened(part) for what, part in parts.items()} | {CALLED: str(called(self.peers.rank))}
        said = [json.loads(text) for text in self.exchange(f"same/{self.sequence}", json.dumps(mine))]
        numbers = {rank: each[CALLED] for rank, each in self._by_rank(said)}
        for what, part in parts.items():
            values = dict(self._by_rank([each.get(what) for each in said]))
            over = part.over if isinstance(part, Claim) else None
            for row in [self.peers.ranks] if over is None else self._mesh.sizes.rows(over):
                alike = [rank for rank in row if rank in values]
                if other := [rank for rank in alike if values[rank] != values[alike[0]]]:
                    shown = self._shown_apart(part, values, other[0], alike[0])
                    who, whom = ", ".join(numbers[rank] for rank in other), numbers[alike[0]]
                    hint = part.hint if isinstance(part, Claim) else ALIKE
                    raise ConfigError(f"{what} of rank {who} differ from rank {whom}'s{shown}: {hint}.")

    def _shown_apart(self, part: Claim | str, values: Mapping[int, str], *ranks: int) -> str:
        """What two ranks, that differ in a part, say of it; every rank calls it."""
        if isinstance(part, Claim):
            return f" ({' and '.join(self._first_apart(part, *ranks))})"
        return f" ({' and '.join(values[rank] for rank in ranks)})" if len(part) <= SHORT else ""

    def _first_apart(self, part: Claim, *ranks: int) -> list[str]:
        """What each of two ranks says where they first say something else; every rank calls it."""
        texts = part.texts
        codes = [crc32(text.encode()) for text in texts] if self.peers.rank in ranks else []
        said = dict(self._by_rank(self.exchange(f"same/{self.sequence}", json.dumps(codes))))
        one, other = (json.loads(said[rank]) for rank in ranks)
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        text = f"{part.name and f'{part.name}, '}{texts[at] if at < len(texts) else 'no more'}"
        said = dict(self._by_rank(self.exchange(f"same/{self.sequence}", text)))
        return [said[rank] for rank in ranks]

    def exchange(self, what: str, value: str) -> list[str]:
        """What every peer says of ``what``, in their order; through the group, which notices at once that a rank is
        gone, and costs as many messages for a thousand ranks as for two.

        Raises:
            OrderError: another rank gave up, or ranks wait for each other in vain.
            CollectiveError: a rank is gone.
        """
        if self.peers.size == 1:
            return [value]

        def send(begin: Callable[[], Any], num_bytes: int) -> None:
            self.issue("an exchange of words", f"what every rank says of {what!r}")
            self.count()
            self.wait(begin(), control=True)
            self.control_bytes += num_bytes

        with self.uninterrupted():
            self.begin_message()
            return [text.decode() for text in self.peers.exchange(value.encode(), send)]

    def _by_rank(self, said: Sequence[Said]) -> Iterator[tuple[int, Said]]:
        """What each peer said, with its rank of the job."""
        return zip(self.peers.ranks, said, strict=True)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """If ``what`` fails on this rank, the others, which wait for it, raise too and say why."""
        try:
            yield
        except (OrderError, CollectiveError):  # which the others know of
            raise
        except Exception as error:
            if self._store is not None and self.aborted() is None:
                with suppress(RuntimeError):  # the process that served the store may have died
                    self._tell_abort(f"{what} failed on rank {self.peers.rank}: {error}")
            raise

    # -- waiting

    def wait(self, work: Any, *, control: bool = False) -> None:
        """Waits for a collective; for data on streams of a device that orders these only.

        Raises:
            OrderError: ranks wait for each other in vain, or another gave up.
            CollectiveError: it failed, or took longer than the timeout.
        """
        with self.uninterrupted():
            if self._mesh.on_streams and not control:
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._failure(error) from error
                # Nothing is ordered by it: the watchdog asks it whether the device has come so far.
                self._passed = accelerator.current_stream(self._mesh.device).record_event()
                return
            begun = perf_counter()
            try:
                self._wait(work, monotonic())
            finally:
                self.waited += perf_counter() - begun

    def _wait(self, work: Any, begun: float) -> None:
        published = False
        while True:
            try:
                work.wait(SLICE)
                break
            except RuntimeError as error:
                if "timed out" not in str(error).lower():
                    raise self._failure(error) from error
            try:
                if not published:
                    self._publish(self.doing)
                    published = True
                published = not self._help_elsewhere() and self._look(begun)
            except RuntimeError as error:
                if isinstance(error, ShardfoldError):
                    raise
                raise self._alone(error) from error
        if published and self._watch is not None:
            self._watch.end_wait()

    def _failure(self, error: RuntimeError) -> Exception:
        """Why a collective failed, as far as the store knows."""
        what = f"rank {self.peers.rank}: operation {self.sequence}, {self.doing}, failed"
        try:
            self._check()
            left, stopped = sorted(self._left()), self._stopped()
        except (RuntimeError, ValueError) as gone:  # the store went with its rank
            if isinstance(gone, OrderError):
                return gone
            left, stopped = [], ""
        self._mesh.end_kernels(lost=True)
        closed = f"rank {', '.join(map(str, left))} has closed its engine" if left else ""
        tell_launcher(stopped or (closed and f"{closed}, and {self.doing} takes all ranks"), follows=True)
        if stopped:
            return CollectiveError(f"{what}: {stopped}{self._here()}")
        if left:
            return CollectiveError(f"{what}: {closed}.{self._here()}")
        return CollectiveError(
            f"{what} ({str(error).splitlines()[0]}); another rank has probably died or left the training loop: look at "
            f"its output.{self._here()}"
        )

    def _alone(self, error: RuntimeError) -> CollectiveError:
        """A collective is not over, and the store is silent."""
        message = (
            f"rank {self.peers.rank}: operation {self.sequence}, {self.doing}, is not over, and the store that all "
            f"ranks share cannot be asked why ({str(error).splitlines()[0]}): the link to the host of rank 0 is cut, "
            "or its process is gone; look at its output, and at the network between the hosts."
        )
        self._give_up(message)
        return CollectiveError(f"{message}{self._here()}")

    def _here(self) -> str:
        """Behind a sentence about what is waited for: the program around that, in lines of its own; of a message the
        program that runs meanwhile."""
        return f"\n{where}" if (where := self.where(None if self._detail else self._log[-1][1])) else ""

    def _publish(self, what: str) -> None:
        assert self._watch is not None
        log = [(number, str(entry)) for number, entry in list(self._log)[-SHOWN:]]
        meeting = self.messages.sent if self._meets else 0
        self._watch.begin_wait(what, self.peers.name, log, needs_help=self._needs_help, meeting=meeting)
        self._unmoved: tuple[Any, float] = (None, 0.0)
        self._unheard = None

    def _help_elsewhere(self) -> bool:
        """Whether another rank needed more of a pass of another engine, and got it.

        That rank comes to where this one waits only when it has it, and this one would come to that engine's next
        meeting only behind it.
        """
        assert self._watch is not None
        for entry in self._watch.read().values():
            if entry.engine != self.peers.name and self._watch.help(entry):
                self._watch.end_wait()
                return True
        return False

    def _look(self, begun: float) -> bool:
        """After a slice in vain: raises if waiting on makes no sense. Whether what is published is still so."""
        assert self._watch is not None
        self._check()
        others = {rank: entry for rank, entry in self._watch.read().items() if rank in self.peers.ranks}
        now = monotonic()
        if self._answer(others):
            return False
        if (message := self.contradiction(others)) is not None:
            self._abort(message)
        state: Any = tuple((rank, entry.nonce) for rank, entry in sorted(others.items()))
        if state != self._unmoved[0]:
            self._unmoved = state, now
        stuck = len(others) + 1 == self.peers.size and all(entry.blocked for entry in others.values())
        if stuck and now - self._unmoved[1] > max(1.0, self._patience - 2 * SETTLE) and self._nothing_moves(others):
            self._abort(f"no rank can go on: {self._describe(others, now - begun)}.")
        unheard = {*self.peers.ranks} - {*others, self.peers.rank}
        # Who is busy says so only some seconds later, as may be when a short patience is over: then once more.
        if now - begun > self._patience and (self._unheard is None or (self._unheard and not unheard)):
            self._unheard = unheard
            LOG.warning(
                "waiting for %.0f s: %s.%s%s",
                now - begun,
                self._describe(others, now - begun),
                " Still waiting." * (not stuck),
                self._here(),
            )
        if now - begun > self.timeout:
            message = (
                f"rank {self.peers.rank}: operation {self.sequence}, {self.doing}, did not finish within "
                f"{self.timeout:.0f} s: {self._describe(others, now - begun)}."
            )
            late = self.late(others)
            self._tell_abort(message, late)
            self._give_up(message, follows=bool(late))
            note_given_up(late)
            raise CollectiveError(f"{message}{self._here()}")
        return True

    def late(self, others: Mapping[int, Whereabouts]) -> list[int]:
        """Those that have not come. Who waits as well, in whatever, is not to blame; nor who has said nothing yet,
        where another is known to do something else."""
        here = {rank: entry for rank, entry in others.items() if rank in self.peers.ranks}
        unheard = {*self.peers.ranks} - {*here, self.peers.rank}
        return sorted({rank for rank, entry in here.items() if entry.kind == "busy"} or unheard)

    def contradiction(self, others: Mapping[int, Whereabouts]) -> str | None:
        """What proves by itself that this rank and another will never meet."""
        for rank, other in others.items():
            if other.engine != self.peers.name:
                continue
            if (begun := self._begun) is not None and self._awaits(other):
                return _different(begun.sequence, _by_text({self.peers.rank: begun.mine.what, rank: other.what}))
            theirs = dict(other.log)
            for number, entry in list(self._log):
                if number in theirs and theirs[number] != str(entry):
                    mine = f"{entry} on rank {self.peers.rank}"
                    return f"operation {number} is {mine} but {theirs[number]} on rank {rank}."
        return None

    def _nothing_moves(self, others: dict[int, Whereabouts]) -> bool:
        """Every rank is blocked. False if it may be that a collective that all have issued is just slow."""
        name = self.peers.name
        if any(entry.kind != "wait" for entry in others.values()):
            return True
        assert self._watch is not None
        counts = [self._watch.issued(), *(entry.issued for entry in others.values())]
        waits = [(entry.engine, max(n for n, _ in entry.log)) for entry in others.values()] + [(name, self.sequence)]
        return not any(all(count.get(engine, 0) >= number for count in counts) for engine, number in waits)

    def _describe(self, others: dict[int, Whereabouts], seconds: float) -> str:
        texts = {self.peers.rank: f"waits for operation {self.sequence}, {self.doing}"}
        for rank, entry in others.items():
            last = max((number for number, _ in entry.log), default=entry.issued.get(self.peers.name, 0))
            texts[rank] = {
                "wait": f"waits for operation {last}, {entry.what}{self._of_engine(entry.engine)}",
                "user": f"is in {entry.what}, after operation {last}",
                "busy": f"is {entry.what}, after operation {last}",
            }.get(entry.kind, f"has {entry.kind}")
        assert self._watch is not None
        for rank in self.peers.ranks:
            if rank not in texts:  # who moves, or is still in a collective of its own, says so within seconds
                texts[rank] = self._watch.silent(rank, seconds)
        return _by_text({rank: texts[rank] for rank in self.peers.ranks})

    def _of_engine(self, name: str) -> str:
        return f" (of engine {name}, where this is {self.peers.name})" if name != self.peers.name else ""

    # -- giving up

    def aborted(self) -> str | None:
        """The sentence with which some rank gave this engine up."""
        told = self._abort_told()
        return None if told is None else told[1]

    def _abort_told(self) -> tuple[list[int], str] | None:
        """As :func:`_abort_in`; None also without a store."""
        store = self.job._store
        return None if store is None else _abort_in(store)

    def _tell_abort(self, message: str, late: Collection[int] = ()) -> None:
        if self._job is not None:
            self._job._tell_abort(message, late)
            return
        self._aborted = True
        self._store.set("abort", f"{json.dumps([*late])}\n{message}")

    @property
    def gave_up(self) -> bool:
        """Whether this rank raised that sentence."""
        return self._dead is not None

    def _check(self) -> None:
        """Raises what another rank gave up with, if one did."""
        told = self._abort_told()
        if told is not None:
            late, message = told
            self._wake()
            error = self._give_up(message, follows=not self.job._aborted or has_followed())
            if not self.job._aborted:
                self.leave_late(late)
            raise error

    def follow_abort(self, message: str) -> None:
        """This rank ends because of what another one gave up with: the launcher is told."""
        if not self.job._aborted and (told := self._abort_told()) is not None:
            tell_launcher(message, follows=True)
            self.leave_late(told[0])

    def leave_late(self, late: Collection[int]) -> None:
        """The launcher learns for whom another rank has waited in vain, which may take longer to end than this one: as
        long as one of them is there, nobody that waited for it is the cause."""
        note_given_up(rank for rank in late if rank != self.peers.rank)

    def _give_up(self, message: str, *, follows: bool = False) -> OrderError:
        self.job._end(message)
        tell_launcher(message, follows=follows)
        self._mesh.end_kernels()
        return OrderError(f"{message}{self._here()}")

    def _abort(self, message: str) -> NoReturn:
        """Raises ``message`` here and, at their next look, on all other ranks."""
        if self.aborted() is None:
            self._tell_abort(message)
        self._wake()
        raise self._give_up(self.aborted() or message)

    def _wake(self) -> None:
        """Ranks in collectives of the user's own end when this rank leaves the user's groups; first they shall know
        why (see ``watchdog``)."""
        assert self._watch is not None
        deadline = monotonic() + 3 * SETTLE
        stuck = [entry.kind for entry in self._watch.read().values() if entry.kind in ("user", "gave up")]
        if not stuck:
            return
        while "user" in stuck and monotonic() < deadline:
            sleep(SLICE.total_seconds())
            stuck = [entry.kind for entry in self._watch.read().values()]
        LOG.error(
            "rank %d leaves all process groups, because other ranks wait in one of them and would never end: from here "
            "on it cannot use torch.distributed. %s",
            self.peers.rank,
            self.aborted(),
        )
        self._mesh.abandon()


def _abort_in(store: Any) -> tuple[list[int], str] | None:
    """The ranks for which some rank has waited in vain, and its sentence."""
    if not store.check(["abort"]):
        return None
    late, _, message = store.get("abort").decode().partition("\n")
    return json.loads(late), message


def _shortened(part: Claim | str) -> str:
    """What stands for it where it is compared."""
    if isinstance(part, str) and len(part) <= SHORT:
        return part
    return sha256((part if isinstance(part, str) else json.dumps(list(part.texts))).encode()).hexdigest()


def _code(text: bytes) -> tuple[int, ...]:
    """The bytes of a text's hash, and their complement."""
    code = crc32(text).to_bytes(CODE, "big")
    return (*code, *(255 - byte for byte in code))


def _alike(said: Sequence[int], at: int = HEADER) -> bool:
    """Whether all ranks said the same text: the least of each byte of its hash is the greatest."""
    return all(said[i] == 255 - said[i + CODE] for i in range(at, at + CODE))


def _different(last: int, asked: str) -> str:
    return (
        f"after operation {last} the ranks are about to do different things: {asked}. Every "
        "rank must run the same passes, steps and gathered() in one order; to run a part on some ranks only "
        "(evaluation, generation, saving) do it inside `with engine.gathered():` that all ranks enter."
    )


def _settled(said: Sequence[int]) -> bool:
    """Whether all ranks said the same, and nothing that any of them has to hear more of, or may still ask for."""
    if not said[NOT_EVALUATED] or said[FAILED] or any(said[FLAGS:HEADER]):
        return False
    return all(_alike(said, at) for at in (HEADER, ALSO, SAME))


def _by_text(texts: Mapping[int, str]) -> str:
    """``rank 0: ...; ranks 1, 2: ...``"""
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who[:16]))}{' ...' * (len(who) > 16)}: {text}"
        for text, who in ranks.items()
    )
