"""When the groups of ranks come together: behind which steps which fragment is sent, used and taken in.

Every group counts its own steps, skipped ones too, and all count alike, as each calls ``step()`` as often. What is sent
has a number among what all ranks do together, so groups that are not where the others are raise, and name both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from itertools import pairwise
from typing import Any

from torch.autograd.graph import increment_version

from shardfold.engine._quorum import Quorum
from shardfold.engine._vote import Vote
from shardfold.engine.runner import Runner
from shardfold.optim.global_weights import GlobalWeights
from shardfold.optim.present_groups import OuterMeeting
from shardfold.plan.outer import Outer
from shardfold.plan.program import ROUND
from shardfold.sharding.changes import Changes
from shardfold.sharding.model import ShardedModel

__all__ = ["Flight", "Rounds"]


class Flight(Enum):
    """How far a fragment is on its way."""

    NONE = "nothing is sent"
    SENT = "outer gradients are on their way"
    USED = "the global weights' change is on its way, or there"


class Rounds:
    """The rounds of one engine.

    Args:
        outer: how long they are.
        model: whose groups come together.
        runner: has the program.
        changes: told that parameters have new values.
        weights: that all groups share.

    Attributes:
        steps: of this group, skipped ones too, since the first round began.
        flights: by fragment.
        vote: whether all come in time; None: all are waited for, or there is a quorum.
        quorum: which groups are gone on with; None: all.
    """

    def __init__(
        self, outer: Outer, model: ShardedModel, runner: Runner, changes: Changes, weights: GlobalWeights
    ) -> None:
        self.outer, self.weights = outer, weights
        self._model, self._runner, self._changes = model, runner, changes
        self.steps = 0
        mesh = model.comm.mesh
        self.vote = Vote(mesh.asked, mesh.world, outer.deadline) if outer.deadline is not None else None
        self.quorum: Quorum | None = None
        if outer.quorum is not None:
            leads = not any(place for axis, place in mesh.coords.items() if axis != outer.axis)
            self.vote = None
            self.quorum = Quorum(mesh.asked, weights.group, weights.groups, outer, leads=leads)
            if weights.pairs is not None:
                count = sum(segment.spec.numel for segment in model.trainable())
                rules = f"{mesh.world} ranks, {count} elements and {replace(outer, runs=None)}"
                self.quorum.meet_runs(weights.pairs.store, mesh.world, rules)
        self._learned = 0.0  # tokens since the last outer step, or steps where nobody tells of tokens
        self._in_a_row = [0] * outer.fragments  # outer steps in a row that were put off
        self.flights = [Flight.NONE] * outer.fragments
        self._ended: list[int | None] = [None] * outer.fragments  # behind which step all groups had the same of it
        self._told = False  # other groups have been told that this one may not come

    def tell(self, error: Exception | None) -> None:
        """This group's step has raised, which other groups read where they wait for it in vain; None: it goes on."""
        if error is None and not self._told:
            return
        words = str(error).partition("\n")[0]
        text = f"raised {type(error).__name__} in engine.step(): {words}" if error is not None else ""
        self._model.comm.agreement.say_stopped(text)
        self._told = error is not None

    def after_step(self) -> None:
        """A step is done, or skipped: what is due behind it is done too."""
        self.steps += 1
        outer = self.outer
        if self.quorum is not None:
            self._meet_some(self.quorum, everyone=False)
            return
        for fragment in range(outer.fragments):
            if outer.due(self.steps, fragment) and not self._put_off(fragment):
                if not outer.delay:
                    self._model.comm.job.meet(f"the outer step behind step {self.steps}")
                self._send(fragment)
        for fragment, flight in enumerate(self.flights):
            if flight is Flight.SENT and outer.due(self.steps, fragment, outer.turn):
                self._use(fragment)
        for fragment, flight in enumerate(self.flights):
            if flight is Flight.USED and outer.due(self.steps, fragment, outer.delay):
                self._take(fragment)

    def told(self, tokens: float | None) -> None:
        """So many tokens are what the step learns from that is about to be taken; None: as many as any other."""
        self._learned += 1.0 if tokens is None else tokens

    def _meet_some(self, quorum: Quorum, *, everyone: bool, now: bool = False) -> None:
        """An outer step of the groups that are there, if they are enough."""
        due = now or self.outer.due(self.steps, 0)
        meeting = quorum.turn(due=due, everyone=everyone, steps=self.steps, tokens=self._learned)
        if meeting is None:
            if due:
                self._model.run.count_put_off()
            return
        self.weights.catch_up(meeting)
        self._send(0)
        self._use(0)
        if not quorum.settled(meeting, whole=self.weights.is_whole):
            self.weights.forget()
            self.flights[0] = Flight.NONE
            self._model.run.count_put_off()
            return
        with self.weights.taken_whole() if now else nullcontext():
            self._take(0)
        self.steps, self._learned = meeting.steps, 0.0

    def _put_off(self, fragment: int) -> bool:
        """Whether some group is late, so that the outer step waits for the next turn; all ranks decide the same."""
        if self.vote is None or self._in_a_row[fragment] >= self.outer.most_put_off or self.vote.taken():
            self._in_a_row[fragment] = 0
            return False
        self._in_a_row[fragment] += 1
        self._model.run.count_put_off()
        return True

    def end_now(self) -> None:
        """Every fragment is sent, used and taken in now, what is in flight first; all ranks call it. Where a fragment
        has just been, and all groups have the same of it, there is nothing to bring together: one more outer step would
        only follow its momentum."""
        outer = self.outer
        if self.quorum is not None:
            self._meet_some(self.quorum, everyone=outer.runs is None, now=True)
            return
        for fragment in range(outer.fragments):
            due = outer.due(self.steps, fragment) and not (outer.delay or outer.stays or self._in_a_row[fragment])
            if due or self._ended[fragment] == self.steps:
                continue
            self._ended[fragment] = self.steps
            for do in (self._use, self._take, self._send, self._use):
                do(fragment)
            with self.weights.taken_whole():
                self._take(fragment)

    def hold_still(self) -> None:
        """What is in flight has come: only to take it in is left, so that it can be read; and all groups have the same
        global weights. All ranks call it."""
        if self.quorum is not None and self.outer.runs is None:  # other runs are not asked
            self._align(self.quorum)
        for fragment, flight in enumerate(self.flights):
            if flight is Flight.SENT:
                self._use(fragment)
        for unit in self._model.units:
            self.weights.arrive((unit,))

    def _align(self, quorum: Quorum) -> None:
        """Groups that have missed outer steps catch up."""
        said = self._model.comm.job.exchange("outer steps", f"{self.weights.group} {quorum.version} {self.steps}")
        versions, steps = dict[int, int](), 0
        for words in said:
            group, version, done = map(int, words.split())
            versions[group], steps = version, max(steps, done)
        groups, newest = tuple(sorted(versions)), max(versions.values())
        behind = tuple(group for group in groups if versions[group] < newest)
        source = next(group for group in groups if versions[group] == newest)
        shares = (1.0 / len(groups),) * len(groups)
        self.weights.catch_up(OuterMeeting(groups, shares, behind, source, steps))
        quorum.begin_anew()

    def begin_anew(self, steps: int = 0, version: int = 0) -> None:
        """So many steps are done. At the first, nothing is in flight; else what was sent and is not taken in yet is
        there."""
        outer, fragments = self.outer, range(self.outer.fragments)
        if not steps:
            self.weights.forget()
        self.steps = steps
        if self.quorum is not None:
            self.quorum.begin_anew(version)
        self._ended = [None] * outer.fragments
        flies = [any(outer.due(steps, fragment, behind) for behind in range(outer.delay)) for fragment in fragments]
        self.flights = [Flight.USED if each else Flight.NONE for each in flies]

    def forget(self) -> None:
        """The model was given other values, the same to all groups: a round begins with them."""
        self.begin_anew()
        for segment in self._model.trainable():
            self.weights.begin_anew(segment)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        said = {"steps": self.steps, "groups": self._model.comm.mesh.sizes.groups, **self._plan()}
        return said if self.quorum is None else {**said, "version": self.quorum.version}

    def _plan(self) -> dict[str, Any]:
        """What has to be the same where a round goes on: when what is sent, and which units a fragment begins with."""
        ops = self._runner.orders.bound.program.outer_send
        first = [after.unit for op, after in pairwise(ops) if op.verb == "FRAGMENT" and after.verb != "FRAGMENT"]
        return {"every": self.outer.every, "delay": self.outer.delay, "fragments": self.outer.fragments, "first": first}

    def goes_on(self, said: Mapping[str, Any]) -> bool:
        """Whether a round that a checkpoint tells of goes on here."""
        return "steps" in said and {name: said.get(name) for name in self._plan()} == self._plan()

    def _send(self, fragment: int) -> None:
        self._run("outer_send", fragment)
        self.flights[fragment] = Flight.SENT

    def _use(self, fragment: int) -> None:
        if self.flights[fragment] is Flight.SENT:
            self._run("outer_step", fragment)
            self.flights[fragment] = Flight.USED

    def _take(self, fragment: int) -> None:
        if self.flights[fragment] is Flight.USED:
            self._model.let_go()
            self._run("outer_take", fragment)
            self.flights[fragment] = Flight.NONE
            for segment in self._model.trainable():
                increment_version(segment.parameters)
            self._changes.updated()

    def _run(self, section: str, fragment: int) -> None:
        assert section in ROUND
        name = f"{section}.{fragment}"
        self._model.comm.meter.ran(name)
        with self._runner.between(self._runner.orders.tracks[name]) as track:
            track.finish()
