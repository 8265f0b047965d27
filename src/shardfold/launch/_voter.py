"""How the launchers of the nodes agree who is in the next epoch: single-decree Paxos (Lamport, "Paxos Made Simple",
2001), once per epoch, as a machine without clock, socket or process.

Those vote whose ranks are members of the last epoch; a majority of them decides. A node that is not heard of any more
is suspected by somebody who has a clock. From then on nothing that it says is heard but what is decided, so a suspicion
that was wrong costs it its membership, and never gives two records of one epoch. Who sees fewer than a majority that is
not suspected proposes nothing and stops.

    CALL       somebody is gone, and who                   to the proposer: the first node that is not suspected
    PREPARE    a ballot begins                             to all that vote
    PROMISE    none below it is taken any more             with this node's members, once they all have stopped
    ACCEPT     the record: what an earlier ballot may have decided already, else the members of all who promised
    ACCEPTED   it is taken
    REFUSED    by a promise to a higher ballot
    DECIDED    a majority has taken it

All that is said is about one epoch: who is behind is told the record that there is instead. A machine takes one event
and gives the next machine and what it sends, so that a checker can try every order of events (tests/launch).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from shardfold.comm.membership import Member, Membership

__all__ = ["Ballot", "Message", "Voter"]


class Ballot(NamedTuple):
    """An attempt to decide; of two the higher one counts."""

    number: int
    agent: int


NONE = Ballot(0, -1)


@dataclass(frozen=True)
class Message:
    """From one node's launcher to another's.

    Attributes:
        kind: see the module.
        source, target: nodes.
        epoch: that is to be decided.
        ballot: of which it is; of a refusal the one that was promised.
        members: of a promise: the sender's.
        address, port: of a promise: a store at which they may meet.
        record: what is proposed, or decided; of a promise what its sender has taken; else the last.
        taken: of a promise: the ballot of that.
    """

    kind: str
    source: int
    target: int
    epoch: int
    ballot: Ballot = NONE
    members: tuple[Member, ...] = ()
    record: Membership | None = None
    taken: Ballot | None = None
    address: str = ""
    port: int = 0
    suspects: frozenset[int] = frozenset()

    def to_json(self) -> str:
        said = {**asdict(self), "record": self.record and self.record.to_json(), "suspects": sorted(self.suspects)}
        return json.dumps(said)

    @classmethod
    def from_json(cls, text: str | bytes) -> Message:
        said = json.loads(text)
        said["ballot"], said["taken"] = Ballot(*said["ballot"]), said["taken"] and Ballot(*said["taken"])
        said["members"] = Membership.members_of(said["members"])
        said["record"] = said["record"] and Membership.from_json(said["record"])
        said["suspects"] = frozenset(said["suspects"])
        return cls(**said)


Sent = tuple[Message, ...]


@dataclass(frozen=True)
class Voter:
    """What one node knows.

    Attributes:
        me: this node.
        record: the last one that it knows of.
        mine: its live members, once they all have stopped; None: they still run.
        address, port: of a store that it offers the next epoch.
        needed: whether it knows that the epoch is over.
        suspects: nodes of which nothing is heard any more.
        promised: the highest ballot that it was asked by; nothing below counts any more.
        taken: the record that it has taken last, and in which ballot.
        ballot: its own that is under way.
        promises: of that ballot, by node: what was taken there, and the members.
        proposed: the record of that ballot.
        accepted: the nodes that have taken it.
    """

    me: int
    record: Membership
    mine: tuple[Member, ...] | None = None
    address: str = ""
    port: int = 0
    needed: bool = False
    suspects: frozenset[int] = frozenset()
    promised: Ballot = NONE
    taken: tuple[Ballot, Membership] | None = None
    ballot: Ballot | None = None
    promises: frozenset[Message] = frozenset()
    proposed: Membership | None = None
    accepted: frozenset[int] = frozenset()

    # -- what it is in

    @property
    def is_member(self) -> bool:
        """Whether ranks of this node are in the epoch; one that is none has been left behind."""
        return self.me in self.record.agents

    @property
    def in_minority(self) -> bool:
        """Whether those that it hears of are too few to decide anything."""
        return len(self._heard) < self.record.majority

    @property
    def waits(self) -> bool:
        """Whether it is the one to propose, and has no ballot under way that may still win."""
        ready = self.needed and self.mine is not None and self.is_member and not self.in_minority
        return ready and self._heard[0] == self.me and (self.ballot is None or self.ballot < self.promised)

    @property
    def _heard(self) -> list[int]:
        return [agent for agent in self.record.agents if agent == self.me or agent not in self.suspects]

    @property
    def _next(self) -> int:
        return self.record.epoch + 1

    # -- events

    def lose(self) -> tuple[Voter, Sent]:
        """A rank of this node is gone."""
        return replace(self, needed=True)._go_on()

    def stop(self, mine: Iterable[Member], address: str = "", port: int = 0) -> tuple[Voter, Sent]:
        """All ranks of this node that live have stopped, with what they have; and a store that it offers."""
        stopped = replace(self, mine=tuple(mine), address=address, port=port)
        owed = stopped._promise() if stopped.promised > NONE and stopped.promised.agent != self.me else ()
        stopped, sent = stopped._go_on()
        return stopped, (*owed, *sent)

    def suspect(self, agent: int) -> tuple[Voter, Sent]:
        """A node is not heard of any more."""
        needed = self.needed or agent in self.record.agents
        return replace(self, suspects=self.suspects | {agent}, needed=needed)._go_on()

    def retry(self) -> tuple[Voter, Sent]:
        """Some time has passed without a decision."""
        return replace(self, ballot=None)._go_on()

    def receive(self, message: Message) -> tuple[Voter, Sent]:
        """What another node has said, or this one to itself."""
        if message.kind == "DECIDED":
            return self._take(message.record) if message.record is not None else (self, ())
        if message.epoch <= self.record.epoch:  # it was decided meanwhile, which who begins anew does not know
            late = message.kind in ("CALL", "PREPARE")
            return self, (self._say("DECIDED", message.source, record=self.record),) if late else ()
        if message.source in self.suspects:
            return self, ()
        if message.epoch > self._next:  # this node is behind, and who begins something says what it builds on
            if message.kind not in ("CALL", "PREPARE") or message.record is None:
                return self, ()
            after, sent = self._take(message.record)
            heard, more = after.receive(message)
            return heard, (*sent, *more)
        hear: dict[str, Callable[[Message], tuple[Voter, Sent]]] = {
            "CALL": lambda call: self._share(call)._go_on(),
            "PREPARE": self._hear_prepare,
            "PROMISE": self._hear_promise,
            "ACCEPT": self._hear_accept,
            "ACCEPTED": self._hear_accepted,
            "REFUSED": self._hear_refused,
        }
        return hear[message.kind](message)

    # -- as one that votes

    def _share(self, message: Message) -> Voter:
        """Whom another node suspects, this one does too: else each might wait for one that the other does not hear."""
        return replace(self, suspects=self.suspects | (message.suspects - {self.me}), needed=True)

    def _hear_prepare(self, message: Message) -> tuple[Voter, Sent]:
        heard = self._share(message)
        if message.ballot < self.promised:
            heard, sent = heard._go_on()
            return heard, (heard._say("REFUSED", message.source, self.promised), *sent)
        heard = replace(heard, promised=message.ballot)
        return heard, heard._promise()

    def _promise(self) -> Sent:
        """What it owes to the ballot that it was asked by; nothing while its members run."""
        if self.mine is None:
            return ()
        ballot, record = self.taken if self.taken is not None else (None, None)
        said = self._say("PROMISE", self.promised.agent, self.promised, record)
        return (replace(said, members=self.mine, taken=ballot, address=self.address, port=self.port),)

    def _hear_accept(self, message: Message) -> tuple[Voter, Sent]:
        if message.ballot < self.promised or message.record is None:
            return self, (self._say("REFUSED", message.source, self.promised),)
        taken = replace(self, promised=message.ballot, taken=(message.ballot, message.record), needed=True)
        return taken, (taken._say("ACCEPTED", message.source, message.ballot),)

    # -- as the one that proposes

    def _go_on(self) -> tuple[Voter, Sent]:
        """Whatever is to be done now that something was learned."""
        if not self.needed or self.in_minority or not self.is_member:
            return self, ()
        first = self._heard[0]
        if first != self.me:
            return self, (replace(self._say("CALL", first, record=self.record), suspects=self.suspects),)
        if self.mine is None:
            return self, ()
        if self.ballot is not None:
            return self._propose()
        ballot = Ballot(self.promised.number + 1, self.me)
        begun = replace(self, ballot=ballot, promises=frozenset(), proposed=None, accepted=frozenset())
        said = replace(begun._say("PREPARE", self.me, ballot, self.record), suspects=self.suspects)
        return begun, tuple(replace(said, target=agent) for agent in self.record.agents)

    def _hear_promise(self, message: Message) -> tuple[Voter, Sent]:
        if message.ballot != self.ballot:
            return self, ()
        others = {each for each in self.promises if each.source != message.source}
        return replace(self, promises=frozenset({*others, message}))._propose()

    def _propose(self) -> tuple[Voter, Sent]:
        """The record, once all have promised that are heard of."""
        promised = {message.source for message in self.promises}
        missing = [agent for agent in self._heard if agent not in promised]
        if self.proposed is not None or missing or len(promised) < self.record.majority or self.ballot is None:
            return self, ()
        taken = [message for message in self.promises if message.taken is not None]
        if taken:  # it may be decided
            record = max(taken, key=lambda message: message.taken or NONE).record
        else:
            members = sorted((each for m in self.promises for each in m.members), key=lambda each: each.uid)
            first = min(self.promises, key=lambda message: message.source)
            record = Membership(self._next, tuple(members), first.address, first.port)
        proposed = replace(self, proposed=record)
        said = [proposed._say("ACCEPT", agent, self.ballot, record) for agent in sorted(promised)]
        return proposed, tuple(said)

    def _hear_accepted(self, message: Message) -> tuple[Voter, Sent]:
        if message.ballot != self.ballot:
            return self, ()
        heard = replace(self, accepted=self.accepted | {message.source})
        if len(heard.accepted) < self.record.majority or heard.proposed is None:
            return heard, ()
        others = [agent for agent in self.record.agents if agent != self.me]
        said = tuple(self._say("DECIDED", agent, record=heard.proposed) for agent in others)
        decided, sent = heard._take(heard.proposed)
        return decided, (*said, *sent)

    def _hear_refused(self, message: Message) -> tuple[Voter, Sent]:
        """Another node proposes too; the next ballot of this one is above that."""
        if self.ballot is None or message.ballot <= self.ballot:
            return self, ()
        return replace(self, ballot=None, promised=max(self.promised, message.ballot)), ()

    # -- both

    def _take(self, record: Membership) -> tuple[Voter, Sent]:
        """It is decided."""
        if record.epoch <= self.record.epoch:
            return self, ()
        over = bool(self.suspects & set(record.agents))
        return type(self)(self.me, record, needed=over, suspects=self.suspects)._go_on()

    def _say(self, kind: str, target: int, ballot: Ballot = NONE, record: Membership | None = None) -> Message:
        epoch = record.epoch if kind == "DECIDED" and record is not None else self._next
        return Message(kind, self.me, target, epoch, ballot, record=record)
