"""How the launchers of the nodes agree who is in the next epoch: single-decree Paxos (Lamport, "Paxos Made Simple",
2001), once per epoch, as a machine without clock, socket or process.

Those vote whose ranks are members of the last epoch; a majority of them decides. A node that is not heard of any more
is suspected by somebody who has a clock. From then on nothing that it says is heard but what is decided, so a suspicion
that was wrong costs it its membership, and never gives two records of one epoch. Who sees fewer than a majority that is
not suspected proposes nothing and stops.

    CALL       somebody is gone, and who; or may come in   to the proposer: the first node that is not suspected
    PREPARE    a ballot begins                             to all that vote
    PROMISE    none below it is taken any more             with this node's members, once they all have stopped
    ACCEPT     the record: what an earlier ballot may have decided already, else the members of all who promised, and
               of the spares that wait there as many as are missing
    ACCEPTED   it is taken
    REFUSED    by a promise to a higher ballot
    DECIDED    a majority has taken it

All that is said is about one epoch: who is behind is told the record that there is instead. A machine takes one event
and gives the next machine and what it sends, so that a checker can try every order of events (tests/launch).

``[Note: spares]`` A spare is a process that no record has had yet. Where one waits and members are missing, an epoch is
over too, with nobody gone: ranks then stop between two steps. One that dies before it comes in, or while it does, is a
member that dies. A node without members says in a CALL who waits there, and votes from the epoch on in which one is in.
A node that comes later is such a node, which begins with the last record; its spares may be more than are missing.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
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
        spares: those that wait: of a promise, at the sender's and as far as it was told; of a call, on nodes without
            members.
        admits: of a promise: whether the sender's members can go on together with such.
        broken: whether the sender knows that somebody is gone.
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
    spares: tuple[Member, ...] = ()
    admits: bool = True
    broken: bool = False

    def to_json(self) -> str:
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        said["members"], said["spares"] = Membership.listed(self.members), Membership.listed(self.spares)
        said["suspects"] = sorted(self.suspects)
        return json.dumps({**said, "record": self.record and self.record.to_json()})

    @classmethod
    def from_json(cls, text: str | bytes) -> Message:
        said = json.loads(text)
        said["ballot"], said["taken"] = Ballot(*said["ballot"]), said["taken"] and Ballot(*said["taken"])
        said["members"], said["spares"] = (Membership.members_of(said[name]) for name in ("members", "spares"))
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
        spares: of this node, that wait.
        guests: those that wait on nodes without members, as far as this node was told.
        admits: whether its members, where they have stopped, can go on together with such.
        needed: whether it knows that the epoch is over.
        broken: whether that is so because somebody is gone.
        suspects: nodes of which nothing is heard any more.
        promised: the highest ballot that it was asked by; nothing below counts any more.
        taken: the record that it has taken last, and in which ballot.
        ballot: its own that is under way.
        promises: of that ballot, in the order of nodes: what was taken there, and the members.
        proposed: the record of that ballot.
        accepted: the nodes that have taken it.
    """

    me: int
    record: Membership
    mine: tuple[Member, ...] | None = None
    address: str = ""
    port: int = 0
    spares: tuple[Member, ...] = ()
    guests: tuple[Member, ...] = ()
    admits: bool = True
    needed: bool = False
    broken: bool = False
    suspects: frozenset[int] = frozenset()
    promised: Ballot = NONE
    taken: tuple[Ballot, Membership] | None = None
    ballot: Ballot | None = None
    promises: Sent = ()
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
        return self._num_heard < self.record.majority

    @property
    def waits(self) -> bool:
        """Whether it is the one to propose, and has no ballot under way that may still win."""
        ready = self.needed and self.mine is not None and self.is_member and not self.in_minority
        return ready and self._first == self.me and (self.ballot is None or self.ballot < self.promised)

    @property
    def _heard(self) -> Iterator[int]:
        return (agent for agent in self.record.agents if agent == self.me or agent not in self.suspects)

    @property
    def _num_heard(self) -> int:
        agents = self.record.agents
        return len(agents) - sum(agent in agents for agent in self.suspects if agent != self.me)

    @property
    def _first(self) -> int | None:
        """The node that is to propose."""
        return next(self._heard, None)

    @property
    def asks(self) -> bool:
        """Whether a spare of this node, which has no members, may come in."""
        return not self.is_member and self.record.has_room(self.spares)

    @property
    def _may_grow(self) -> bool:
        """Whether a spare may come in that this node knows of."""
        return self.is_member and self.record.has_room((*self.spares, *self.guests))

    @property
    def _next(self) -> int:
        return self.record.epoch + 1

    # -- events

    def lose(self) -> tuple[Voter, Sent]:
        """A rank of this node is gone."""
        return replace(self, needed=True, broken=True)._go_on()

    def offer(self, spares: Iterable[Member]) -> tuple[Voter, Sent]:
        """These of this node wait now, and no others."""
        offered = replace(self, spares=tuple(spares))
        if not self.is_member:
            return offered.ask()
        return replace(offered, needed=self.needed or offered._may_grow)._go_on()

    def ask(self) -> tuple[Voter, Sent]:
        """A node without members says, once more, who waits here."""
        if self.is_member or not self.spares or (first := self._first) is None:
            return self, ()
        return self, (replace(self._say("CALL", first, record=self.record), spares=self.spares),)

    def stop(
        self, mine: Iterable[Member], address: str = "", port: int = 0, *, admits: bool = True
    ) -> tuple[Voter, Sent]:
        """All ranks of this node that live have stopped, with what they have; and a store that it offers."""
        stopped = replace(self, mine=tuple(mine), address=address, port=port, admits=admits)
        owed = stopped._promise() if stopped.promised > NONE and stopped.promised.agent != self.me else ()
        if owed and stopped.promised.agent == stopped._first:  # which knows, and has begun
            return stopped, owed
        stopped, sent = stopped._go_on()
        return stopped, (*owed, *sent)

    def suspect(self, agent: int) -> tuple[Voter, Sent]:
        """A node is not heard of any more."""
        gone = agent in self.record.agents
        needed, broken = self.needed or gone, self.broken or gone
        return replace(self, suspects=self.suspects | {agent}, needed=needed, broken=broken)._go_on()

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
            "CALL": self._hear_call,
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
        suspects, broken = self.suspects | (message.suspects - {self.me}), self.broken or message.broken
        return replace(self, suspects=suspects, needed=True, broken=broken)

    def _hear_call(self, call: Message) -> tuple[Voter, Sent]:
        """One that has died meanwhile comes in, too, as what is said may arrive in any order: its node then says so."""
        outside = {each for each in call.spares if each.agent not in self.record.agents}
        heard = replace(self, guests=_in_order({*self.guests, *outside}))
        if call.source in self.record.agents:
            return heard._share(call)._go_on()
        return replace(heard, needed=self.needed or heard._may_grow)._go_on()

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
        said = replace(said, members=self.mine, taken=ballot, address=self.address, port=self.port)
        return (replace(said, spares=(*self.spares, *self.guests), admits=self.admits),)

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
        if (first := self._first) is not None and first != self.me:
            call = self._told(self._say("CALL", first, record=self.record))
            return self, (replace(call, spares=self.guests),)
        if self.mine is None:
            return self, ()
        if self.ballot is not None:
            return self._propose()
        ballot = Ballot(self.promised.number + 1, self.me)
        begun = replace(self, ballot=ballot, promises=(), proposed=None, accepted=frozenset())
        said = self._told(begun._say("PREPARE", self.me, ballot, self.record))
        return begun, tuple(replace(said, target=agent) for agent in self.record.agents)

    def _hear_promise(self, message: Message) -> tuple[Voter, Sent]:
        if message.ballot != self.ballot:
            return self, ()
        place = bisect_left(self.promises, message.source, key=lambda each: each.source)
        behind = place + (self.promises[place : place + 1] != () and self.promises[place].source == message.source)
        return replace(self, promises=(*self.promises[:place], message, *self.promises[behind:]))._propose()

    def _propose(self) -> tuple[Voter, Sent]:
        """The record, once all have promised that are heard of."""
        enough = max(self._num_heard, self.record.majority)
        if self.proposed is not None or len(self.promises) < enough or self.ballot is None:
            return self, ()
        promised = {message.source for message in self.promises}
        if not promised.issuperset(self._heard):
            return self, ()
        taken = [message for message in self.promises if message.taken is not None]
        if taken:  # it may be decided
            record = max(taken, key=lambda message: message.taken or NONE).record
        else:
            first = self.promises[0]
            record = self.record.followed_by(self._who(), first.address, first.port)
        proposed = replace(self, proposed=record)
        said = [proposed._say("ACCEPT", agent, self.ballot, record) for agent in sorted(promised)]
        return proposed, tuple(said)

    def _who(self) -> tuple[Member, ...]:
        """All that have promised, and as many spares as are missing, where the fewest are of a node. Ranks of a node
        stand side by side."""
        members = [each for message in self.promises for each in message.members]
        if members and all(message.admits for message in self.promises):
            spares = {each for message in self.promises for each in message.spares}
            while may := [each for each in spares if self.record.admits(each, len(members))]:
                there = Counter(each.agent for each in members)
                taken = min(may, key=lambda each: (there[each.agent], each.agent, each.uid))
                spares.remove(taken)
                members.append(taken)
        return tuple(sorted(members, key=lambda each: (each.agent, each.uid)))

    def _hear_accepted(self, message: Message) -> tuple[Voter, Sent]:
        if message.ballot != self.ballot:
            return self, ()
        heard = replace(self, accepted=self.accepted | {message.source})
        if len(heard.accepted) < self.record.majority or heard.proposed is None:
            return heard, ()
        others = sorted({*self.record.agents, *heard.proposed.agents} - {self.me})
        said = tuple(self._told(self._say("DECIDED", agent, record=heard.proposed)) for agent in others)
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
        gone = any(agent in record.agents for agent in self.suspects)
        spares = (each for each in self.spares if each not in record.members)
        guests = _in_order(each for each in self.guests if each.agent not in record.agents)
        after = type(self)(
            self.me, record, broken=gone, suspects=self.suspects, spares=_in_order(spares), guests=guests
        )
        return replace(after, needed=gone or after._may_grow)._go_on() if after.is_member else after.ask()

    def _told(self, message: Message) -> Message:
        """With what this node knows of others that are gone."""
        return replace(message, suspects=self.suspects, broken=self.broken)

    def _say(self, kind: str, target: int, ballot: Ballot = NONE, record: Membership | None = None) -> Message:
        epoch = record.epoch if kind == "DECIDED" and record is not None else self._next
        return Message(kind, self.me, target, epoch, ballot, record=record)


def _in_order(members: Iterable[Member]) -> tuple[Member, ...]:
    return tuple(sorted(members, key=lambda each: each.uid))
