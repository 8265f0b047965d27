"""Going on without a rank that dies, or with one that is new: no process is started again, and nothing comes from a
disk.

    break    whatever this rank has under way is ended, so that the others' waits end too        (``comm/mesh``)
    agree    the launchers make one record of who is in the next epoch                           (``launch/_members``)
    hold     each rank puts what it has of the states aside; the engine and its groups end       (``checkpoint/held``)
    meet     the ranks of the record make process groups and an engine
    go on    from the newest step that they hold whole

``[Note: what is whole]`` Where every element of a state is on two ranks, what one of them had is with another, as it
was: before its update of a step a rank is rolled back, by dropping gradients, and behind it the others are rolled
forward. Under ``ddp`` and ``hsdp`` nothing is sent between the first update of a step and the last, so a rank that
raises there raises for another reason, and says that its states are of no step.

``[Note: in doubt]`` Where the other is a copy, both have to be of one step. No rank updates before it has come through
the program's ``VOTE``, to which all come with what they need for their updates, and behind it each ends its step
whatever becomes of the others. A rank that fails in the vote itself does not know whether others came through: it holds
what it has, ends its step too, and holds what that gives. If any other came through, the newest step that all have is
the new one, or else they may still have either.

``[Note: who joins]`` A rank that is new comes out of :class:`ElasticRun` where the others are about to begin a step,
and has what they have. Where one has died, it comes with the epoch that begins for that; else ranks agree, in a message
that a step has anyway, in front of which step they stop.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from logging import getLogger
from time import monotonic, perf_counter, sleep
from typing import Any, NamedTuple, Protocol, TypeVar

from shardfold.checkpoint.held import Held
from shardfold.checkpoint.messages import SILENCE_OF_DEAD, words
from shardfold.checkpoint.rng import rng_state, set_rng_state
from shardfold.checkpoint.run_lock import RunLock
from shardfold.comm.epoch_watch import EpochWatch
from shardfold.comm.launcher_notes import (
    FILE,
    is_broken,
    is_over,
    note_closed,
    note_elastic,
    note_going_on,
    note_joining,
    note_stopped,
    place_here,
    tell_launcher,
)
from shardfold.comm.membership import EpochPlace
from shardfold.comm.mesh import begin_epoch, states_come
from shardfold.data import Loader, Sampler
from shardfold.engine._rank_shares import RankShares
from shardfold.engine._spare import spare_number, wait_for_place
from shardfold.engine._step import LOST_IN_STEP
from shardfold.engine._virtual_ranks import VirtualRanks
from shardfold.engine.engine import Engine
from shardfold.engine.step_position import Positioned, StepPosition
from shardfold.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    ModelError,
    OrderError,
    ShardfoldError,
    StepError,
    by_rank,
)
from shardfold.plan.checks import check_flags, described, is_integer, known_arguments
from shardfold.plan.patience import Patience
from shardfold.sharding.model import ShardedModel

__all__ = ["ElasticRun", "Recovery", "StepReads", "StepSource", "once_only"]

T = TypeVar("T")
LOG = getLogger("shardfold")
LOST = (*LOST_IN_STEP, CheckpointError)
"""What a rank raises when another one is gone, among other reasons; collectives that are not the engine's raise what
Gloo says, a plain ``RuntimeError``."""
GLOO = ("/gloo/", "Application timeout caused pair closure")
"""What it says: where a connection broke, or that it was ended here."""
LOOK = 0.001
LATE = 2.0
"""Seconds that some ranks may come to meet later than others, besides."""
MOST = 3
"""Attempts in a row that end because a rank is gone, without an update among them, behind which a run ends."""


class StepReads(Protocol):
    """What a rank reads in a step."""

    @property
    def batches(self) -> Sequence[Any]:
        """Its micro-batches."""
        ...


class StepSource(Positioned, Protocol):
    """What is read a step at a time."""

    @property
    def virtual_ranks(self) -> int:
        """The ranks for which it is cut."""
        ...

    def window_of(self, ranks: Sequence[int], count: int) -> StepReads:
        """What these of them read in the next step, as much as ``count`` do: what is missing has weight 0."""
        ...


class Recovery(NamedTuple):
    """How a run went on without a rank, or with one more.

    Attributes:
        epoch: that began.
        ranks: that are in it.
        step: updates that they had done, all of them.
        repeated: whether this rank takes the step once more that it was in.
        agreed: seconds from when this rank stopped until it knew who is in; of a rank that is new 0.
        met: then, until there was an engine.
        moved: then, until it had the states.
    """

    epoch: int
    ranks: int
    step: int
    repeated: bool
    agreed: float
    met: float
    moved: float


@known_arguments
class ElasticRun:
    """A training that goes on with the ranks that are left when one is killed, and with others in its place.

    Args:
        make: ``make(ranks)`` builds a model and gives an engine of it, on a mesh of so many ranks; called once more
            whenever these are others. What the engine had comes from the memory of the ranks that are left, so the
            values that ``make`` gives do not matter then. Every element of every state has to be on two ranks: as in
            the layouts ``ddp``, and ``hsdp`` with two ranks or more along ``inter``, or by ``Runtime(survive="rank")``.

    Attributes:
        engine: the present one; another one behind a recovery.
        recoveries: what this rank went through so far.
        joined: whether this rank has come into a run that was under way: it has the states of the others, loads no
            checkpoint, and goes straight on to the next step.
        position: of such a rank, where the others are in what they read, with ``virtual_ranks``, until it reads too.

    Raises:
        ConfigError: the ranks were not started by ``shardfold run``, or the engine is one that cannot go on so.

    Examples:
        >>> run = sf.ElasticRun(lambda ranks: sf.Engine(nn.Linear(8, 1), optimizer=adam, layout="ddp"))
        >>> for rows in run.batches(sf.Loader(x, sf.Sampler(x, batch_size=2)), steps=3):
        ...     with run.attempt() as trained:
        ...         trained.backward(trained(rows).square().mean())
        ...         report = trained.step()
        >>> run.engine.steps
        3
        >>> run.close()
    """

    def __init__(self, make: Callable[[int], Engine]) -> None:
        if not callable(make):
            raise ConfigError(f"ElasticRun(make={described(make)}): make(ranks) builds a model and gives its engine.")
        number = spare_number()
        self.joined = number is not None
        world = int(os.environ.get("WORLD_SIZE", "1"))
        self._place = _first_place() if number is None else None
        if self._place is None and world > 1 and not self.joined:
            raise ConfigError(
                "ElasticRun: these ranks were not started by `shardfold run`, which keeps the others alive when one "
                "dies: start them with it."
            )
        # Others come to meet later where a save was under way that waits for what who is gone had to write.
        within = max(Patience.of_environment().lost, SILENCE_OF_DEAD + LATE)
        self._within = timedelta(seconds=within)
        self._uid = self._place.rank if self._place is not None else number or 0
        self._make = make
        self._held: Held | None = None  # what this rank had when it stopped, until all have gone on
        self._doubts = False  # whether that is of the step before
        self._lock: RunLock | None = None
        self._watch = EpochWatch()
        self._data: StepPosition | None = None  # what is read, of which the position goes with the states
        self.position: dict[str, Any] | None = None
        self._met, self._joining = 0, False  # the epoch in which it has met others last; whether it has just joined
        self._broken = self._broken_at = 0  # attempts in a row that have come to nothing, and behind how many updates
        self._wholes, self._failed = 0, ""  # what ranks have done together beside steps, and who could not do the last
        self._own: CheckpointError | None = None  # of that, what this rank could not
        self.recoveries: list[Recovery] = []
        if self.joined:
            self._join()
            return
        self.engine = self._made(world)
        if world > 1 and (what := once_only(self.engine.sharded)):
            where = "the mesh has one rank along inter" if set(what) <= {"intra"} else "ranks share it out"
            self.engine.close()
            raise ConfigError(
                f"ElasticRun with states of which each element is on one rank only, as {where}: what a rank has would "
                "be lost with it. Let another rank hold a copy, runtime=Runtime(survive='rank'), or take layout='ddp'."
            )
        if self.engine.copying is not None:
            self.engine.copying.refresh()
        note_elastic()
        self._begin_watch(self.engine)

    @contextmanager
    def attempt(self, *, admits: bool = True) -> Iterator[Engine]:
        """One optimizer step, with all that is sent for it: forward, backward, :meth:`Engine.step`.

        If another rank dies it ends without an exception, when the ranks that are left can go on; the engine then is
        another one, and its ``steps`` tell whether the step was taken. So a loop that chooses its samples by
        ``engine.steps``, ``engine.data_rank`` and ``engine.data_ranks`` takes it once more if it has to. Generators of
        random numbers are then as they were when the attempt began.

        Args:
            admits: whether what follows, should it be broken off, is the next step: then another rank may come in the
                dead one's place. False where that one would not take part, as in an evaluation: see :meth:`whole`.

        Yields:
            :attr:`engine`.

        Raises:
            CollectiveError, OrderError, CheckpointError: as without it, where no rank has died; or the others do not
                stop within the timeout of collectives.
            StepError: no step is whole on the ranks that are left; or attempts end so again and again.
        """
        if admits and self._data is None and not self.engine.micro_batch:
            self._admit()
        turns, random = self.turns, rng_state()
        if not admits:
            note_closed(True)
        try:
            yield self.engine
        except Exception as error:
            if not self._may_be_lost(error):
                raise
            self._count_broken(turns, error)
            self._go_on(error, turns)
            if self.turns == turns:
                set_rng_state(random)
        else:
            self._end_joining()
        finally:
            if not admits:
                note_closed(False)

    @property
    def turns(self) -> int:
        """Steps so far, with those that were skipped as gradients overflowed: samples of either are behind the run."""
        return _turns(self.engine)

    def whole(self, do: Callable[[], T]) -> T:
        """What ranks do together beside their steps, as an evaluation or a save: again until no rank dies in it. All
        ranks call it, and none comes out of it before all have come to the end of ``do``; no other one comes in
        meanwhile.

        Returns:
            What ``do`` has given.

        Raises:
            CheckpointError: on all ranks, with all of them there: one could not write or read. The run may go on.
            CollectiveError, OrderError, CheckpointError, StepError: see :meth:`attempt`.
        """
        number, found = self._wholes + 1, list[T]()
        self._own = None
        while self._wholes < number:
            found.clear()
            with self.attempt(admits=False) as engine:
                self._end_whole(engine, number, self._tried(do, found))
        if self._failed:
            raise self._own or CheckpointError(f"run.whole(): {self._failed.rstrip('.')}.")
        return found[0]

    def _tried(self, do: Callable[[], T], found: list[T]) -> CheckpointError | None:
        """Does it; why it could not be written or read, if so. That is no end of this rank before others say whether
        all are there: a rank that is gone is another reason for it."""
        try:
            found.append(do())
        except CheckpointError as error:
            return error
        return None

    def _end_whole(self, engine: Engine, number: int, own: CheckpointError | None) -> None:
        """All have come to the end of what they do together, and know who could not do it.

        Raises:
            CollectiveError, OrderError: a rank is gone, or is elsewhere.
        """
        comm, copying = engine.sharded.comm, engine.copying
        try:
            engine.sharded.gate.meet("the end of run.whole()", buffers=False)
            if copying is not None and any(comm.anyone([copying.changed], "copies behind a load")):
                copying.refresh()  # no step may follow, with which they would come
            why = "" if own is None else words(own)
            said = comm.job.exchange("all have come to the end of what they do together", f"{number} {why}")
        except LOST:
            if own is None:
                raise
            why = words(own).rstrip(".")
            raise OrderError(f"{why}; run.whole() failed so on this rank, while others went on in it.") from own
        self._wholes, self._failed, self._own = number, by_rank([each.partition(" ")[2] for each in said]), own

    def batches(
        self,
        source: Loader | Sampler,
        *,
        steps: int | None = None,
        epochs: int | None = None,
        together: bool = False,
    ) -> Iterator[Any]:
        """Batches for attempts: ``for batch in run.batches(loader): with run.attempt() as engine: ...``, with a
        backward and a call of :meth:`Engine.step` each, which updates behind the last micro-batch of a step.

        Samples of a step that was not taken come again, and each is in one step that is. The sampler's ``num_ranks`` is
        the number of *virtual ranks* for as long as the run lives: a rank reads for those whose number is its own
        modulo the number of ranks. So samples and size of the global batch, its micro-batches, the scale of gradients
        and the random numbers that are drawn for a micro-batch do not depend on how many ranks there are. For that
        :meth:`Engine.set_micro_batches` is called here, and generators of random numbers begin anew with each
        micro-batch, from (seed, position, virtual rank). A step has ``accumulate`` global batches, of those that
        ``make`` gives its engine.

        Save with ``state={"data": loader}``, between a step and the next batch.

        Args:
            source: a loader; or a sampler, for its indices. It is read as if without an end.
            steps: it ends when so many updates are done, those before a resume included; None: it does not.
            epochs: it ends with the first step that comes to the end of so many epochs.
            together: whether each rank gets an even part of every global batch as one micro-batch, however many ranks
                there are, in the place of one for each virtual rank. For models that compute something over all ranks'
                samples in a forward, as :class:`shardfold.nn.SyncBatchNorm`. A micro-batch counts by its samples, so
                the loss of a rank is a mean over them, or the backward has a ``weight=`` of its own. With fewer ranks
                parts are larger, and so are activations; random numbers follow from the rank.

        Raises:
            ConfigError: it is neither, or ``steps`` or ``epochs`` is no integer >= 0; or ``together`` with
                ``Runtime(exact=True)``, or with fewer samples in a global batch than there are ranks.
        """
        check_flags("run.batches", together=together)
        if together and self.engine.sharded.layout.reduce.ordered:
            raise ConfigError(
                "run.batches(together=True) with Runtime(exact=True): what is computed of a rank's samples at once "
                "depends on how many ranks there are; leave one of them out."
            )
        for name, most in (("steps", steps), ("epochs", epochs)):
            if most is not None and not is_integer(most, 0):
                raise ConfigError(f"run.batches({name}={described(most)}): it is an integer >= 0, or None.")
        self._data = data = VirtualRanks(source, self._accumulate)
        self._go_on_reading(data)
        return self._batches(data, steps, epochs, together)

    def _go_on_reading(self, data: StepPosition) -> None:
        """What is read is known: a rank that has joined reads it from where the others are."""
        if self.position is not None:
            data.go_on_at(self.position)
            self.position = None

    def _batches(self, data: VirtualRanks, steps: int | None, epochs: int | None, together: bool) -> Iterator[Any]:
        known, shares = self.engine, data.shares(self.engine.data_ranks)
        try:
            while True:
                engine = self.engine
                if engine.micro_batch:  # of a step that a loop before has left
                    engine.zero_grad()
                if engine is not known:
                    known, shares = engine, data.shares(engine.data_ranks)
                micro_batches = self._accumulate * (1 if together else max(shares.counts))
                exact = engine.sharded.layout.reduce.ordered
                of = self._accumulate * data.sampler.num_ranks if exact else None
                if together:
                    reads = data.reads_together(engine.data_rank, engine.data_ranks)
                else:
                    reads = data.reads(engine.data_rank, shares)
                while self.engine is engine:
                    data.begin(self.turns)
                    moves = engine.data_ranks > 1 and not (exact or together)
                    if moves and shares.follow(engine.stats().straggler, engine.steps):
                        self._tell_shares(shares)
                        break
                    if steps is not None and engine.steps >= steps:
                        return
                    if epochs is not None and data.sampler.epoch >= epochs:
                        return
                    self._admit()
                    if self.engine is not engine:
                        break
                    for read in reads:
                        engine.set_micro_batches(micro_batches, read.weight, of=of, alone=read.samples)
                        yield read.batch
                        if read.is_last or self.engine is not engine:
                            break
        finally:
            if not self.engine.closed:
                self.engine.set_micro_batches(self._accumulate)

    def _tell_shares(self, shares: RankShares) -> None:
        if self.engine.rank == 0:
            said = ", ".join(map(str, shares.counts))
            LOG.warning("from step %d on ranks read for %s of the virtual ranks", self.engine.steps + 1, said)

    def windows(self, source: StepSource) -> Iterator[Any]:
        """As :meth:`batches`, without an end, where all micro-batches of a step are read together, and each counts by
        how much it has: ``source`` has virtual ranks too, for which it is asked, and a rank that has less than others
        is given batches of weight 0.

        Raises:
            ConfigError: the engine has ``Runtime(exact=True)``: what counts by its part of a step is rounded so.
        """
        if self.engine.sharded.layout.reduce.ordered:
            raise ConfigError(
                "run.windows() with Runtime(exact=True): bits are those of run.batches() alone; use that."
            )
        self._data = data = StepPosition(source, source.virtual_ranks)
        self._go_on_reading(data)
        while True:
            engine = self.engine
            if engine.micro_batch:  # of a step that a loop before has left
                engine.zero_grad()
            mine = range(engine.data_rank, source.virtual_ranks, engine.data_ranks)
            data.begin(self.turns)
            self._admit()
            if self.engine is not engine:
                continue
            window = source.window_of(mine, -(-source.virtual_ranks // engine.data_ranks))
            engine.set_micro_batches(len(window.batches))
            yield window

    def close(self) -> None:
        """As :meth:`Engine.close`."""
        self._watch.close()
        self.engine.close()

    # -- a recovery

    def _may_be_lost(self, error: Exception) -> bool:
        """Whether it may have come because another rank is gone."""
        if self._place is None:  # it is alone, and started by nobody
            return False
        known = is_over(self._place.epoch)
        says = isinstance(error, RuntimeError) and (known or any(words in str(error) for words in GLOO))
        return isinstance(error, LOST) or says

    def _count_broken(self, turns: int, error: BaseException) -> None:
        """An attempt is broken that began behind so many turns.

        Raises:
            StepError: it is one of several, and none has come to an update.
        """
        self._broken = self._broken + 1 if self._broken and self._broken_at == turns else 1
        self._broken_at = turns
        if self._broken == MOST:
            read = "" if self._data is None else f" ({self._data.told(turns)})"
            lost = (
                f"{MOST} attempts in a row at step {self.engine.steps + 1} ended because a rank was gone, and none "
                f"with an update: what ranks read{read} or compute there ends them, and going on would end the others "
                "too; look at these samples, and go on from a checkpoint without them."
            )
            tell_launcher(lost, lost=True)
            raise StepError(lost) from error

    def _admit(self) -> None:
        """Between two steps: if all ranks know that others wait to join, they do.

        Raises:
            CollectiveError, OrderError, CheckpointError, StepError: see :meth:`attempt`.
        """
        comm = self.engine.sharded.comm
        if not (comm.group.stopping or (comm.group.peers.size == 1 and comm.job.is_over())):
            return
        error: BaseException = CollectiveError(
            "ranks have stopped, as another one joins, but it was not heard of again."
        )
        try:
            comm.job.exchange("all have come out of their step", "")
        except LOST as lost:
            error = lost
        self._go_on(error, self.turns)

    def _join(self) -> None:
        """This process waits until it is a rank, and has what the others have."""
        self._place = wait_for_place()
        note_joining(True)
        self._joining = True
        self._held = Held(None, self._uid)
        begin_epoch(self._within)
        begun = perf_counter()
        self._meet(begun, begun)

    def _end_joining(self) -> None:
        """A step was taken, or what else is in an attempt: from now on this rank fits the others."""
        if self._joining:
            note_joining(False)
            self._joining = False

    def _go_on(self, error: BaseException, turns: int) -> None:
        """
        Args:
            error: what this rank raised.
            turns: that it had done when the attempt began.

        Raises:
            CollectiveError, OrderError, CheckpointError, StepError: see :meth:`attempt`.
        """
        random = rng_state()
        self._meet(*self._end_epoch(self.engine, error), turns)
        set_rng_state(random)

    def _end_epoch(self, engine: Engine | None, error: BaseException) -> tuple[float, float]:
        """This rank leaves an epoch and knows its place in the next one; when it stopped, and when it knew."""
        assert self._place is not None
        begun, epoch = perf_counter(), self._place.epoch
        self._stop(engine, str(error).partition("\n")[0])
        self._place = self._next_place(error)
        note_going_on()
        agreed = perf_counter()
        if engine is not None and is_broken(epoch):
            engine.saver.break_off()
        self._leave(engine)
        return begun, agreed

    def _meet(self, begun: float, agreed: float, turns: int | None = None) -> None:
        """Makes an engine with the others of its epoch; ``turns``: that this rank had done; None: it is new."""
        while True:
            assert self._place is not None
            place, engine = self._place, None
            place.enter()
            try:
                with states_come():
                    engine = self._made(place.world)
                met = perf_counter()
                self._move(engine)
                break
            except (RuntimeError, ConfigError, ModelError) as again:  # another one may be gone meanwhile, or not fit
                may_not_fit = turns is not None and place.grown > self._met
                if isinstance(again, ShardfoldError) and not isinstance(again, LOST) and not may_not_fit:
                    raise
                begun, agreed = self._end_epoch(engine, again)
        moved = perf_counter()
        before: Engine | None = getattr(self, "engine", None)
        self.engine, self._met = engine, place.epoch
        if before is not None and (before.leaving or before.sharded.comm.job.notified):
            engine.leave()  # the one before has had notice, by a handler of a signal perhaps until now
        self._begin_watch(engine)
        times = (agreed - begun, met - agreed, moved - met)
        self.recoveries.append(Recovery(place.epoch, place.world, engine.steps, self.turns == turns, *times))
        if place.rank == 0:
            last = "; from here on a death ends the run" if once_only(engine.sharded) else ""
            many = f"{place.world} ranks go" if place.world > 1 else "1 rank goes"
            took = "{:.2f} s to agree, {:.2f} to meet, {:.2f} for the states".format(*times)
            LOG.warning("epoch %d: %s on from step %d (%s)%s", place.epoch, many, engine.steps, took, last)

    def _begin_watch(self, engine: Engine) -> None:
        """What the engine waits for in this epoch ends with it."""

        def end() -> None:
            engine.saver.break_off()
            engine.sharded.comm.sever()

        if self._place is not None:
            self._watch.watch(self._place.epoch, end)

    def _stop(self, engine: Engine | None, why: str) -> None:
        """This rank does nothing more in its epoch."""
        assert self._place is not None
        self._watch.rest()
        if engine is None:  # it could not be made, and others may wait for this rank in it
            begin_epoch(self._within)
            tell_launcher(why, follows=True)
            note_stopped(self._place.epoch)
            return
        comm = engine.sharded.comm
        if comm.mesh.world > 1:
            comm.job.give_up(why, follows=True)
        tell_launcher(why, follows=True)
        comm.mesh.break_off()
        comm.transport.close()
        note_stopped(self._place.epoch)
        if self._held is None:
            self._held = Held(engine.sharded, self._uid, self._state(engine), copies=_has_copies(engine))
        elif self._doubts:
            self._held.add(engine.sharded, self._state(engine), copies=_has_copies(engine))
        self._doubts = False

    def _doubt(self) -> None:
        """Nobody knows yet whether other ranks take the step that the engine is about to take: what it has before that
        is held, too."""
        engine = self.engine
        self._held = Held(engine.sharded, self._uid, self._state(engine), copies=_has_copies(engine))
        self._doubts = True

    def _state(self, engine: Engine) -> dict[str, Any]:
        """What goes on with the states of the step that the engine is at."""
        return {} if self._data is None else {"data": self._data.at(_turns(engine))}

    def _next_place(self, error: BaseException) -> EpochPlace:
        """What this rank is in the next epoch, once the launchers have agreed.

        Raises:
            BaseException: ``error``: no rank is gone, as far as the launcher knows.
            CollectiveError: it took too long.
        """
        assert self._place is not None
        epoch, begun = self._place.epoch, monotonic()
        patience = 2 * Patience.of_environment().lost  # that a launcher is gone is known behind one
        while (place := place_here()) is None or place.epoch <= epoch:
            waited, over = monotonic() - begun, is_over(epoch)
            if not over and waited > patience:
                if isinstance(error.__cause__, CheckpointError):  # of this rank alone: see _end_whole()
                    tell_launcher(str(error))
                raise error
            if waited > self._timeout:
                raise CollectiveError(
                    f"rank {self._place.rank} has stopped, as another rank is gone, but not all others have within "
                    f"{self._timeout:.0f} s: look at their output."
                ) from error
            sleep(LOOK)
        return place

    def _leave(self, engine: Engine | None) -> None:
        """The engine and all process groups of the epoch end."""
        if engine is not None:
            self._lock = self._lock or engine.saver.leave()
            with suppress(RuntimeError):  # what it would tell others, who are gone or have left
                engine.close()
        begin_epoch(self._within)

    def _move(self, engine: Engine) -> None:
        """What the ranks hold together comes into a new engine."""
        held, lock = self._held, self._lock
        assert held is not None
        # Where the last message of whole() came to one rank and not to another one, all had done what is inside.
        own = json.dumps([self._wholes, self._failed])
        ends = engine.sharded.comm.job.exchange("what ranks have done together", own)
        self._wholes, self._failed = max(map(json.loads, ends))
        with held.together(engine.sharded.comm.job.exchange, engine.rank) as folder:
            report = engine.load(folder, state=self._state(engine))
            if self._data is None:
                self.position = report.state.get("data")
            if engine.copying is not None:  # before what it comes from is gone
                engine.copying.refresh()
        if lock is not None:
            engine.saver.go_on(lock)
        held.drop()
        self._held = self._lock = None

    def _made(self, ranks: int) -> Engine:
        """
        Raises:
            ConfigError: it is no engine, or one that cannot go on without a rank.
        """
        engine = self._make(ranks)
        if not isinstance(engine, Engine):
            raise ConfigError(f"ElasticRun: make({ranks}) gave {described(engine)}: it has to give an Engine.")
        if what := unfit(engine.sharded):
            engine.close()
            raise ConfigError(f"ElasticRun cannot go on without a rank where {what}.")
        self._timeout, self._accumulate = engine.sharded.comm.job.timeout, engine.accumulate
        engine.sharded.run.ask_in_doubt(self._doubt)
        if self._place is not None:
            engine.sharded.comm.job.heed(partial(is_over, self._place.epoch))
        return engine


def _turns(engine: Engine) -> int:
    """See :attr:`ElasticRun.turns`."""
    return engine.steps + (0 if engine.loss_scale is None else engine.loss_scale.skipped)


def _first_place() -> EpochPlace | None:
    """What the launcher says that this rank is; it says so when all launchers have met."""
    deadline = monotonic() + Patience.of_environment().lost
    while (place := place_here()) is None and FILE in os.environ and monotonic() < deadline:
        sleep(LOOK)
    return place


def _has_copies(engine: Engine) -> bool:
    """Whether this rank has what another one has."""
    return engine.copying is not None and engine.copying.whole


def once_only(model: ShardedModel) -> list[str]:
    """The axes over which some state is split so that each element is on one rank; none: each is on two or more."""
    mesh = model.comm.mesh
    for segment in model.segments():
        if segment.table.is_copied(trainable=segment.spec.trainable):
            continue
        over = set(segment.table.master.over if segment.spec.trainable else segment.table.rest.over)
        if mesh.parts(axis for axis in mesh.data if axis not in over) < 2:
            return sorted(over) or list(mesh.data)
    return []


def unfit(model: ShardedModel) -> str:
    """What stands against it; empty: nothing does."""
    mesh, layouts = model.comm.mesh, model.rules.layouts
    reasons = {
        "ranks share a model along other axes than inter and intra": any(
            size > 1 and axis not in mesh.data for axis, size in mesh.sizes.items()
        ),
        "ranks come together every so many steps (Outer), or send signs": bool(mesh.sizes.rare)
        or any(layout.outer is not None or layout.signs is not None for layout in layouts),
        "averages of the weights are kept, of which there are no copies": bool(model.run.averages)
        and model.layout.copied,
        "reductions keep what their format has lost": any(s.format_state is not None for s in model.segments()),
        "devices have streams of their own (it was tried on CPUs over Gloo only)": mesh.on_streams,
        "torch.distributed was started by others, or another engine is open": mesh.world > 1 and not mesh.is_alone,
        "the optimizer is not one of those whose update goes element by element (AdamW, Adam, SGD)": (
            model.updater is None or not model.updater.fused
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")
