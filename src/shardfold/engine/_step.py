"""The optimizer step: all ranks agree what was used and whether it is finite, then each updates what it owns.

agree     which parameters any rank used, whether gradients overflowed on any, in one small message
reduce    what came too late for backward
follow    the program's section ``step``: CLAMP and NORM up to the marker STEP, then UPDATE and ALL_GATHER of each unit
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from logging import getLogger

import torch
import torch.distributed as dist

from shardfold.activations.modes import Replacements
from shardfold.comm.agreement import Meeting
from shardfold.comm.expected import Expectation
from shardfold.comm.links import host_of_slow_link
from shardfold.engine._delayed import Delayed
from shardfold.engine.consistency import same_settings, settings
from shardfold.engine.copying import Copying
from shardfold.engine.damage import StepFailure
from shardfold.engine.freeze import Freeze
from shardfold.engine.healing import Healing
from shardfold.engine.replicated import Replicated
from shardfold.engine.rounds import Rounds
from shardfold.engine.runner import STEP, Runner
from shardfold.engine.stats import Clock
from shardfold.engine.track import Track
from shardfold.errors import (
    CollectiveError,
    ConfigError,
    NonFiniteError,
    OrderError,
    ShardfoldError,
    StepError,
    UsageError,
)
from shardfold.numerics.alarm import Alarm
from shardfold.numerics.scaling import Scaler
from shardfold.numerics.token_weights import Shares
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.plan.layout import Tier
from shardfold.plan.report import StepReport, TierSeconds
from shardfold.sharding.changes import Changes
from shardfold.sharding.checksums import Checksums
from shardfold.sharding.model import ShardedModel

__all__ = ["LOST_IN_STEP", "Stepper"]

LOG = getLogger("shardfold")
LOST_IN_STEP = (CollectiveError, OrderError, dist.DistError)
"""What a rank raises when another one is gone, among other reasons."""
ALONE = ("FETCH", "FILL", "STORE", "UPDATE", "MIRROR")
"""What of a step sends nothing to other ranks."""


class Stepper:
    """Takes the steps of one engine.

    Args:
        model: whose shards are updated.
        updater: that updates them.
        runner: the passes, between which steps are taken.
        changes: told that parameters have new values.
        scaler: of the loss, or None.
        alarm: looks for what is not finite.
        shares: weights of the micro-batches.
        replaced: forwards whose modes a budget may still choose.
        replicated: compares gradients of what ranks have alike.
        clock: takes a lap.
        rounds: of outer steps; None: there are none.
        freeze: of the variance of an optimizer that sends signs behind it; None: it sends gradients.
        checksums: of what is in memory; None: nobody asked for them.
        copying: keeps the copies that ranks hold of each other's states; None: they hold none.
    """

    def __init__(
        self,
        model: ShardedModel,
        updater: ShardedOptimizer,
        runner: Runner,
        changes: Changes,
        scaler: Scaler | None,
        alarm: Alarm,
        shares: Shares,
        replaced: Replacements,
        replicated: Replicated,
        clock: Clock,
        rounds: Rounds | None,
        freeze: Freeze | None,
        checksums: Checksums | None = None,
        copying: Copying | None = None,
    ) -> None:
        self._model, self._updater, self._runner, self._changes = model, updater, runner, changes
        self._scaler, self._alarm, self._shares, self._replaced, self._clock = scaler, alarm, shares, replaced, clock
        self._replicated, self._checksums, self._copying = replicated, checksums, copying
        self._healing = Healing(model, copying) if copying is not None else None
        self._handlers, self._norms = runner.handlers, runner.handlers.norms
        self.rounds, self.freeze = rounds, freeze
        runner.expect_steps(self.expectation)
        runner.agreement.hear_failures(self._hear_failure)
        self._lost: BaseException | None = None  # what says that another rank is gone, told when the step is done
        self._delayed: list[Delayed] = []  # updates of the last step that are still to arrive

    def step(self) -> StepReport:
        """See :meth:`Engine.step`; at the boundary, with gradients."""
        damage = self._handlers.damage
        with self._model.comm.agreement.uninterrupted():
            try:
                report = self._step()
                self._runner.foresee(failed=damage.happened if damage.later and not self._delayed else None)
                return report
            except ShardfoldError as error:
                if self.rounds is not None and not isinstance(error, (OrderError, CollectiveError)):
                    self.rounds.tell(error)
                raise
            finally:
                self._handlers.withdraw()  # where no update was

    def _step(self) -> StepReport:
        model, run, runner, scaler = self._model, self._model.run, self._runner, self._scaler
        assert model.optimizer is not None
        runner.away.come_back()
        if self.rounds is not None:
            self.rounds.tell(None)
        lr = float(model.optimizer.param_groups[0]["lr"]) if model.optimizer.param_groups else None
        said = self._meet()
        if self._clock.pace is not None and self._clock.pace.asks:
            self._clock.pace.answer(host_of_slow_link(runner.agreement))
            self._warn_of_straggler()
        if said.flags[1]:
            self._replaced.agree(partial(model.comm.control, op=dist.ReduceOp.MAX, group=True))
        bits = said.bits
        if said.flags[2]:
            self._handlers.withdraw()  # of other gradients
            runner.visible.compare("engine.step()")
            bits = ()
        scale = self._handlers.lifted
        stands = self._verify()
        if said.flags[0] and self._copying is not None:
            self._copying.refresh()
        updated = self._update(bits, drops=not stands)
        if self._checksums is not None:
            self._checksums.rest()
        findings = self._alarm.report.findings if self._alarm.report is not None else ()
        if scaler is not None and stands:
            scaler.update(not updated)
            self._alarm.settle()
        if not updated:  # neither weights, moments, counts nor the schedule have moved
            took = self._lap(skipped=True)
            if scaler is not None and stands and scaler.exhausted:
                raise self._alarm.failure()
            return StepReport(
                run.steps,
                updated=False,
                skipped=True,
                lr=lr,
                loss_scale=scale,
                findings=findings,
                tiers=took,
                straggler=self._clock.straggler,
            )
        run.count_step(goes_on=self._lost is None)
        if self.freeze is not None:
            runner.orders.keep_stepped()
            self.freeze.follow()
        model.optimizer._opt_called = True  # pyright: ignore  # torch warns of a schedule that runs ahead
        if run.lr_schedule is not None:
            run.lr_schedule.step()
        for call in run.after_step:
            call()
        took = self._lap()
        if (problem := self._take_lost() or run.take_unwritten() or self._not_back(run.steps)) is not None:
            raise problem
        norm = self._norms.norm
        return StepReport(
            run.steps,
            updated=True,
            lr=lr,
            loss_scale=scale,
            norm=norm,
            findings=findings,
            tiers=took,
            straggler=self._clock.straggler,
        )

    def _take_lost(self) -> BaseException | None:
        lost, self._lost = self._lost, None
        return lost

    def _verify(self) -> bool:
        """Whether this step's gradients can be used: they are not of bytes that had changed.

        Raises:
            StepError: on every rank: bytes in memory have changed that nobody wrote, and no rank has them as they were.
        """
        if self._checksums is not None:
            number, agreement = self._model.run.steps + 1, self._runner.agreement
            heal = self._healing.heal if self._healing is not None else None
            try:
                return self._checksums.verify(agreement.exchange, agreement.peers.ranks, number, heal)
            except StepError as error:
                self._model.run.spoil(f"step {number} found changed memory ({str(error).partition('.')[0]})")
                raise
        return True

    def _lap(self, *, skipped: bool = False) -> TierSeconds:
        """A step is over; what slower tiers took of it."""
        comm, clock, runner = self._model.comm, self._clock, self._runner
        took = clock.end_step(comm.waited, self._handlers.tier_seconds, comm.messages, runner.outside, skipped=skipped)
        runner.leave()
        if clock.pace is not None:
            agreement = runner.agreement
            if clock.pace.hear(agreement.take_besides(), agreement.host_of) and not clock.pace.asks:
                self._warn_of_straggler()
            if (told := clock.pace.told(clock.spent)) is not None:
                agreement.tell_besides(told)
        return took

    def _warn_of_straggler(self) -> None:
        """The first rank warns, of what all have found."""
        peers = self._runner.agreement.peers
        if peers.rank == min(peers.ranks):
            LOG.warning("%s.", self._clock.straggler or "no rank and no link makes steps longer any more")

    def _meet(self) -> Meeting:
        """All that take this step together are about to take it, with the same settings of the optimizer: flags, of
        copies that are to come anew, of modes that wait to be chosen, and of gradients that users changed. With them
        comes what :meth:`_agree` asks, where all that take the step run one program.

        Raises:
            OrderError: they are about to do different things.
            UsageError, ConfigError: on every rank: some rank refuses the step, or has other settings than others, with
                which what ranks have alike would drift apart. Nothing was done.
        """
        model, runner, group = self._model, self._runner, self._model.comm.group
        by_hand, refusal = self._take_visible()
        hidden, what = refusal is None, STEP
        told = settings(model.optimizer) if group.peers.size > 1 else []
        flags = [self._copies_changed, self._replaced.waits, by_hand, not hidden]
        bits = self._told() if hidden and group is runner.agreement else ()
        why = str(refusal) if refusal is not None else "of gradients that were changed by hand" if by_hand else ""
        met = runner.meet(what, flags=flags, alike=" ".join(told), bits=bits, expected=self._is_plain, why=why)
        said, apart = met.flags, met.apart
        if group is not runner.agreement:  # stages may have other groups of parameters
            said = group.meet(what, flags=[*map(bool, said[:3]), bool(said[3] or apart)]).flags
        if apart:
            try:
                same_settings(runner.agreement, told)
            except ConfigError as error:
                refusal = refusal or error
        if said[3] or apart:
            if hidden:
                runner.visible.show()  # nothing is done here, either
            group.refuse("engine.step()", refusal)
        return met._replace(flags=said)

    @property
    def _copies_changed(self) -> bool:
        return self._copying is not None and self._copying.changed

    def _told(self) -> list[bool]:
        """What this rank says of its gradients."""
        for unit in self._model.units:
            unit.gradients.complete()  # one rank: nothing was sent, so nothing is complete
        overflows = self._scaler is not None and self._overflowed()  # reads the losses too: the alarm stops no host
        return self._handlers.told(overflows, self._alarm.raised(), self._shares.any)

    @property
    def _is_plain(self) -> bool:
        """Whether nothing in a step asks the other ranks for more, once all have said what they say in its meeting."""
        comm = self._model.comm
        alone = self._scaler is None and self.rounds is None and self.freeze is None
        damage, behind = self._handlers.damage, self._runner.orders.tracks["behind"].ops
        tells = self._replicated.on or (damage.together and not damage.later) or bool(behind)
        tells = tells or (self._clock.pace is not None and self._clock.pace.asks)
        return alone and comm.group is comm.agreement and not tells and self._checksums is None

    def expectation(self) -> tuple[Expectation, list[bool]]:
        """What this rank says of the next step when its last backward is over, with the flags of :meth:`_meet`."""
        asks = self._shares.any or self._alarm.raised() or self._copies_changed
        flags = [asks, self._replaced.waits, self._runner.visible.touched, False]
        told = tuple(self._handlers.told(False, False, False))
        return Expectation(STEP, " ".join(settings(self._model.optimizer)), told), flags

    def _take_visible(self) -> tuple[bool, UsageError | None]:
        """Whether users did anything to gradients on this rank, and why it is refused: the others, which come to the
        step, are to hear of it before it is raised."""
        try:
            return self._runner.visible.before_step(), None
        except UsageError as error:
            return self._runner.visible.touched, error

    def _update(self, said: Sequence[int], *, drops: bool = False) -> bool:
        """The update; False if gradients overflowed on any rank, or if it ``drops`` them, in which case no rank has
        changed anything. ``said``: see :meth:`_agree`."""
        model, handlers, runner = self._model, self._handlers, self._runner
        model.comm.meter.begin_step()
        used, weighed, overflowed = self._agree(said)
        self.settle()
        if overflowed or drops:
            for unit in model.units:
                unit.forget_gradients()
            self._end_round()
            runner.end_step(skipped=True)
            return False
        self._replicated.check_gradients()
        if weighed:
            sums = model.comm.control(self._shares.sums(), dist.ReduceOp.SUM, group=True)
            handlers.set_factors(self._shares.factor(sums, model.comm.group.peers.size))
        try:
            self._follow(used)
        except NonFiniteError:
            if not handlers.damage.begun:
                self._end_round()  # in which it counts as a skipped step does
            raise
        finally:
            if weighed:  # what this step's gradients were multiplied by is none of the next one's
                handlers.set_factors()
        written = self._copies_changed  # by hooks around the optimizer's step
        for unit in model.units:
            unit.forget_gradients()
            torch.autograd.graph.increment_version([p for s in unit.trainable for p in s.parameters])
        if self._copying is not None and not written:
            self._copying.follow()
        self._changes.updated()
        if self.freeze is not None:
            handlers.set_factors()
        self._end_round()
        runner.end_step()
        self._refuse_half(handlers.damage, self._model.run.steps + 1)
        return True

    def _end_round(self) -> None:
        if self.rounds is not None:
            self.rounds.after_step()

    def _not_back(self, step: int) -> StepError | None:
        """What is to be raised on every rank where some rank's states of that step are not where they rest."""
        damage = self._handlers.damage
        if not damage.unwritten:
            return None
        error = StepError(
            f"step {step} is done, but not all states are back where they rest: {damage.unwritten}. Nothing is lost: "
            "what is not in the file stays in host memory. Make room there and go on, or save and start again with "
            "TMPDIR set to a folder that has room."
        )
        error.__cause__ = damage.cause
        return error

    def _refuse_half(self, damage: StepFailure, step: int) -> None:
        """
        Raises:
            StepError: on every rank: some rank could not do its part of the updates.
        """
        run = self._model.run
        if damage.unfinished:
            run.spoil(f"step {step} ended half-way ({damage.unfinished})")
            raise StepError(
                f"step {step} ended half-way: {damage.unfinished}. Some weights and moments are of this step "
                "and others of the one before, or gone, so engine.step() and engine.save() are refused from now on: "
                "engine.load() of a checkpoint puts all of them right."
            ) from damage.cause

    def _agree(self, said: Sequence[int]) -> tuple[dict[str, list[list[bool]]], bool, bool]:
        """Which parameters any rank used, whether micro-batches have weights on any, and whether any overflowed; as
        ranks have ``said`` in their meeting, or as they say now, if that was not of these gradients."""
        scaler, control, handlers = self._scaler, self._model.comm.control, self._handlers
        if said:
            used, late, flags = handlers.heard(said)
        else:
            for unit in self._model.units:
                unit.gradients.complete()
            overflows = scaler is not None and self._overflowed()
            used, late, flags = handlers.agree_on_use(overflows, self._alarm.raised(), self._shares.any)
        overflowed, raised, weighed, late_anywhere = flags
        self._runner.reduce_late(late)
        self._runner.sum_shared()
        if scaler is not None and late_anywhere and not overflowed:  # what came late was not among what was looked at
            overflowed = bool(control([float(self._overflowed())], dist.ReduceOp.MAX, group=True)[0])
        self._alarm.look(overflowed=overflowed, raised=raised)
        return used, weighed, overflowed

    def _overflowed(self) -> bool:
        """Whether a gradient of this rank is inf or NaN: one read of the device, in which the losses come along."""
        return self._norms.overflowed(self._alarm.read(self._norms.summed()))

    def _follow(self, used: dict[str, list[list[bool]]]) -> None:
        """Runs the program's section, its updates inside of the optimizer's own step.

        Raises:
            NonFiniteError: on every rank that takes this step together with this one: the norm is not finite and
                ``Clip.error_if_nonfinite`` is set.
        """
        runner = self._runner
        damage, run = self._handlers.damage, self._model.run
        self._norms.begin_step()
        self._handlers.take_used(used)
        damage.begin_step()
        with runner.between(runner.orders.tracks["step"]) as track:
            try:
                track.reach("STEP")
            except NonFiniteError as error:
                raise NonFiniteError(f"{error}\n{self._alarm.examine()}") from None
            except LOST_IN_STEP as error:
                if run.in_doubt is None or track.ops[track.at].verb != "VOTE":
                    raise
                run.in_doubt()
                self._lost = error
                track.walk.move_to(track.walk.reach("STEP").stop)
            try:
                self._updater.around(partial(self._run, track, used))
            except BaseException as error:
                if damage.begun:
                    words = str(error).partition("\n")[0]
                    run.spoil(f"step {run.steps + 1} ended half-way ({type(error).__name__}: {words})")
                raise
            if not self._delayed and not damage.later:
                self._tell(damage)

    def _tell(self, damage: StepFailure) -> None:
        """All hear whether any rank could not do its part of the updates; where another rank is gone, this one's part
        of the step counts as far as it was done."""
        if self._lost is None:
            try:
                damage.tell(self._model.comm)
                return
            except LOST_IN_STEP as error:
                self._lost = error
        if damage.lacks:
            self._model.run.spoil(f"step {self._model.run.steps + 1} ended half-way ({damage.lacks})")

    def _hear_failure(self) -> None:
        """Some rank could not do its part of the last step's updates, which all hear of now.

        Raises:
            StepError: on every rank.
        """
        self._handlers.damage.hear(self._model.comm)
        self._refuse_half(self._handlers.damage, self._model.run.steps)

    def settle(self) -> None:
        """What the last step began to update is done, and what it gave comes to where it is read; all ranks do it.

        Raises:
            StepError: on every rank: some rank could not do its part of the updates.
        """
        if not self._delayed:
            return
        delayed, self._delayed = self._delayed, []
        handlers, runner, model = self._handlers, self._runner, self._model
        handlers.cursor.end()
        model.tiers.forget_spares()
        for each in delayed:
            each.settle()
        handlers.damage.tell(model.comm)
        if not handlers.damage.unfinished:
            model.run.tell_later(self._not_back(model.run.steps))
        assert handlers.optimizer is not None
        with model.comm.agreement.uninterrupted(), torch.no_grad():
            model.gate.secure()  # what users wrote into parameters that others come over now
            handlers.optimizer.take_updated()
            model.comm.meter.arrive()
            with runner.between(runner.orders.tracks["arrive"]) as track:
                track.finish()
        for unit in model.units:
            torch.autograd.graph.increment_version([p for s in unit.trainable for p in s.parameters])
        self._changes.updated()
        self._refuse_half(handlers.damage, model.run.steps)

    def _run(self, track: Track, used: dict[str, list[list[bool]]]) -> None:
        """The optimizer's step, with whatever hooks it has around it."""
        track.run(track.walk.next(("RELEASE",)))  # it reads shards, and may write them: before the second cursor does
        self._model.let_go()
        if not self._updater.fused:
            host = self._model.layout.updates_on is Tier.HOST
            with torch.no_grad(), self._handlers.updating() if host else nullcontext():
                whole = self._norms.coefficient if self._runner.orders.meets != "signs" else lambda device: None
                self._updater.step_whole(self._model.units, used, whole, self._handlers.damage.begin)
        cursor, tracks = self._handlers.cursor, self._runner.orders.tracks
        with cursor.following(tracks["beside"]):
            self._finish(track)
        self._model.tiers.forget_spares()
        if tracks["behind"].ops:
            self._updater.hold(self._model.units, used, self._norms.coefficient(torch.device("cpu")))
            cursor.begin(tracks["behind"])
            self._delayed = Delayed.over(cursor, self._model.units)

    def _finish(self, track: Track) -> None:
        """The updates, and what brings what they give to where it is read. Behind a vote nothing is sent that they
        need: where another rank is gone this one does its own all the same."""
        if self._lost is None:
            try:
                track.finish()
                return
            except LOST_IN_STEP as error:
                if self._copying is None:
                    raise
                self._lost = error
        track.do([number for number in track.walk.rest() if track.ops[number].verb in ALONE])
        track.walk.move_to(len(track.ops))
