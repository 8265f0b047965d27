"""Every order in which launchers may hear of things, agree and fail, walked to the end.

A state is what each launcher knows and what is on its way. From it leads a step for each message that may be the next
to arrive, for each launcher that may notice something, and, while faults are left, for each fault:

    dies       a rank; its launcher notices
    crashes    a launcher with its rank, and what it has said and nobody heard may be lost, and what all have said if it
               is the first one, which has the store through which they talk; the others notice at some time, each by
               itself; one of a minority, or that the others have gone on without, ends by itself, and is as one that
               has crashed
    doubts     a launcher that lives is suspected by one of the others, as behind a link that is cut for a while
    comes      a process that may take the place of a rank, at any launcher, once at each; it may die as any rank. One
               comes with a launcher that comes later, which knows one of the records that others have

The machine is pure, so what it does in one of its states with one event is computed once. States of the whole are
numbers into these tables: some microseconds each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardfold.comm.membership import Member, Membership
from shardfold.launch._voter import Message, Voter


class World(NamedTuple):
    """
    Attributes:
        voters: numbers, by node; -1: it has crashed.
        dead: processes that are gone, as bits: the rank of a node has its number, what comes there is so many further
            as there are nodes.
        come: of which nodes one has come, as bits.
        under_way: messages that have not arrived, as bits.
        faults: that may still come.
        records: that any launcher has decided or heard of, as bits.
    """

    voters: tuple[int, ...]
    dead: int
    come: int
    under_way: int
    faults: int
    records: int


class Violation(AssertionError):
    """What must not be; says which, and the way there."""


class Walk:
    """Of all states from the first on.

    Args:
        agents: launchers, with a rank each.
        faults: how many may come.
        machine: what each launcher runs.
        ballots: of one epoch, behind which no launcher begins another: duels of two could go on for ever.
        most: states, more of which are refused.
        spares: how many processes may come that take the place of ranks; none is a fault.
        late: how many launchers come later, each with such a process.
    """

    def __init__(
        self,
        agents: int,
        faults: int,
        machine: type[Voter] = Voter,
        *,
        ballots: int = 2,
        most: int = 10**7,
        spares: int = 0,
        late: int = 0,
    ) -> None:
        self.agents, self.ballots, self.most, self.spares = agents + late, ballots, most, spares
        self.begun, self.machine = agents, machine
        self._voters: list[Voter] = []
        self._messages: list[Message] = []
        self._records: list[Membership] = []
        self._numbers: dict[Any, int] = {}
        self._done: dict[tuple[int, Any], tuple[int, int]] = {}
        self._stale: dict[tuple[int, int], bool] = {}
        members = tuple(Member(uid, uid) for uid in range(agents))
        record = Membership(0, members, size=agents, most=agents + late, nodes=agents if late else 0)
        voters = (*(self._number(self._voters, machine(agent, record)) for agent in range(agents)), *[-1] * late)
        self.first = World(voters, 0, 0, 0, faults, 1 << self._number(self._records, record))
        self.cut = 0  # states in which a duel would go on

    def _number(self, table: list[Any], value: Any) -> int:
        if value not in self._numbers:
            self._numbers[value] = len(table)
            table.append(value)
        return self._numbers[value]

    def act(self, world: World, agent: int, *event: Any) -> World:
        """What follows from an event at a node."""
        number, under_way = self._after(world.voters[agent], event)
        voters = (*world.voters[:agent], number, *world.voters[agent + 1 :])
        rest = under_way = world.under_way | under_way
        while rest:
            message = rest.bit_length() - 1
            rest ^= 1 << message
            target = voters[self._messages[message].target]
            if target < 0 or self.is_stale(target, message):
                under_way ^= 1 << message
        record = 1 << self._number(self._records, self._voters[number].record)
        return world._replace(voters=voters, under_way=under_way, records=world.records | record)

    def is_stale(self, number: int, message: int) -> bool:
        """Whether a launcher does nothing with a message, now or whenever it comes: it need not be waited for."""
        if (number, message) not in self._stale:
            voter, said = self._voters[number], self._messages[message]
            kinds = ("PROMISE", "ACCEPTED", "REFUSED", "ACCEPT", "DECIDED")
            late = said.epoch <= voter.record.epoch and said.kind in kinds
            answers = said.epoch == voter.record.epoch + 1 and said.kind in ("PROMISE", "ACCEPTED")
            self._stale[number, message] = late or (answers and voter.ballot is not None and said.ballot < voter.ballot)
        return self._stale[number, message]

    def _after(self, number: int, event: tuple[Any, ...]) -> tuple[int, int]:
        """What a launcher knows then, and what it sends; what it tells itself is heard at once."""
        if (number, event) not in self._done:
            voter = self._voters[number]
            name, *given = event
            if name == "receive":
                given = [self._messages[given[0]]]
            voter, sent = getattr(voter, name)(*given)
            queue, out = deque(sent), 0
            while queue:
                message = queue.popleft()
                if message.target == voter.me:
                    voter, more = voter.receive(message)
                    queue.extend(more)
                else:
                    out |= 1 << self._number(self._messages, message)
            self._done[number, event] = self._number(self._voters, voter), out
        return self._done[number, event]

    def _to(self, target: int) -> int:
        return sum(1 << number for number, message in enumerate(self._messages) if message.target == target)

    def _by(self, source: int) -> int:
        return sum(1 << number for number, message in enumerate(self._messages) if message.source == source)

    def faulty(self, world: World) -> Iterator[tuple[str, World]]:
        """The faults that may come next."""
        left = world._replace(faults=world.faults - 1)
        for agent, number in enumerate(world.voters):
            if number < 0:
                continue
            voter = self._voters[number]
            gone = self.without(left, agent)
            yield f"{agent} crashes", gone
            yield f"{agent} crashes amid its words", gone._replace(under_way=gone.under_way & ~self._by(agent))
            if max(world.voters[:agent], default=-1) < 0:  # it has the store through which they talk
                said = [
                    n for n, voter in enumerate(world.voters) if voter >= 0 and agent in self._voters[voter].suspects
                ]
                moved = sum(self._by(source) for source in said)  # who suspects it has gone to another store
                yield f"{agent} crashes with all words", gone._replace(under_way=gone.under_way & moved)
            for member in self.live(world, agent):
                gone = self.act(left._replace(dead=left.dead | 1 << member.uid), agent, "lose")
                yield f"rank {member.uid} of {agent} dies", gone
            for spare in voter.spares:
                if not world.dead & 1 << spare.uid:
                    yield f"spare of {agent} dies", left._replace(dead=left.dead | 1 << spare.uid)
            for other in range(self.agents):
                if other != agent and world.voters[other] >= 0 and other not in voter.suspects:
                    yield f"{agent} doubts {other}", self.act(left, agent, "suspect", other)

    def live(self, world: World, agent: int) -> tuple[Member, ...]:
        """The members of a launcher's last record that it has started, and that live."""
        members = self._voters[world.voters[agent]].record.members
        return tuple(each for each in members if each.agent == agent and not world.dead >> each.uid & 1)

    def without(self, world: World, agent: int) -> World:
        """One has ended, and its rank with it."""
        voters = (*world.voters[:agent], -1, *world.voters[agent + 1 :])
        dead = world.dead | 1 << agent | 1 << agent + self.agents
        return world._replace(voters=voters, dead=dead, under_way=world.under_way & ~self._to(agent))

    def calm(self, world: World) -> Iterator[tuple[str, World]]:
        """What may come next without a fault."""
        rest = world.under_way
        while rest:
            number = rest.bit_length() - 1
            rest ^= 1 << number
            message = self._messages[number]
            there = world._replace(under_way=world.under_way ^ 1 << number)
            yield (
                f"{message.kind} {message.source}>{message.target}",
                self.act(there, message.target, "receive", number),
            )
        yield from self.coming(world)
        crashed = [agent for agent, number in enumerate(world.voters) if number < 0]
        known = [(agent, self._voters[number]) for agent, number in enumerate(world.voters) if number >= 0]
        newest = max(voter.record.epoch for _, voter in known) if known else 0
        for agent, voter in known:
            for other in crashed:
                if other not in voter.suspects and other in voter.record.agents:
                    yield f"{agent} misses {other}", self.act(world, agent, "suspect", other)
            over = any(v.needed for _, v in known if v.record == voter.record) or voter.record.epoch < newest
            waits = any(not world.dead >> each.uid & 1 for each in voter.spares)
            first = next(iter(voter._heard), agent)
            deaf = world.voters[first] >= 0 and agent in self._voters[world.voters[first]].suspects
            if voter.asks and not deaf and (there := self.act(world, agent, "ask")) != world:
                yield f"{agent} asks", there
            if voter.in_minority or not (voter.is_member or waits):
                yield f"{agent} leaves", self.without(world, agent)
            mine, spare = self.live(world, agent), self.spare_of(agent)
            dead = len(mine) < sum(each.agent == agent for each in voter.record.members)
            came = (world.come & (1 << self.begun) - 1).bit_count()
            if came < self.spares and not (world.come | world.dead >> self.agents) >> agent & 1:
                there = world._replace(come=world.come | 1 << agent)
                yield f"a spare comes to {agent}", self.act(there, agent, "offer", (spare,))
            if any(world.dead >> each.uid & 1 for each in voter.spares):
                yield f"{agent} sees its spare dead", self.act(world, agent, "offer", ())
            if voter.is_member and over and voter.mine != mine:
                yield f"{agent} stops", self.act(world, agent, "stop", mine)
            if voter.is_member and dead and not voter.needed:
                yield f"{agent} sees its rank dead", self.act(world, agent, "lose")
            if voter.waits:
                if voter.promised.number < self.ballots:
                    yield f"{agent} tries again", self.act(world, agent, "retry")
                else:
                    self.cut += 1

    def spare_of(self, agent: int) -> Member:
        return Member(agent + self.agents, agent)

    def coming(self, world: World) -> Iterator[tuple[str, World]]:
        """A launcher that comes later, with a record that one of the others has."""
        known = {self._voters[number].record: None for number in world.voters if number >= 0}
        for agent in range(self.begun, self.agents):
            for record in known if world.voters[agent] < 0 and not world.come >> agent & 1 else ():
                number = self._number(self._voters, self.machine(agent, record))
                voters = (*world.voters[:agent], number, *world.voters[agent + 1 :])
                there = world._replace(voters=voters, come=world.come | 1 << agent)
                came = self.act(there, agent, "offer", (self.spare_of(agent),))
                yield f"{agent} comes in epoch {record.epoch}", came

    # -- what must be

    def check(self, world: World) -> None:
        """
        Raises:
            Violation: two records of an epoch, or one that too few can have taken.
        """
        records = [record for number, record in enumerate(self._records) if world.records >> number & 1]
        by_epoch = {record.epoch: record for record in records}
        if len(by_epoch) < len(records):
            raise Violation("two records of an epoch")
        for epoch, record in by_epoch.items():
            if not epoch:
                continue
            new = {each.uid for each in set(record.members) - set(by_epoch[epoch - 1].members)}
            if any(uid < self.agents for uid in new) or any(
                each.uid in new for before in range(epoch) for each in by_epoch[before].members
            ):
                raise Violation("a member comes back")
            if len(set(record.members)) < len(record.members):
                raise Violation("a member is there twice")
            first = [each for each in record.members if each.agent < self.begun]
            if len(record.members) > self.agents or len(first) > self.begun:
                raise Violation("more members than there shall be")
            if record.members and not set(record.members) & set(by_epoch[epoch - 1].members):
                raise Violation("those that come have nobody to go on with")

    def settled(self, world: World) -> bool:
        """Whether each launcher that lives has the newest record, or is none of its members any more; and whether none
        is needed where a majority is there."""
        newest = max((record for n, record in enumerate(self._records) if world.records >> n & 1),
                     key=lambda record: record.epoch)  # fmt: skip
        for agent, number in enumerate(world.voters):
            if number < 0:
                continue
            voter = self._voters[number]
            if agent not in newest.agents:
                waits = any(not world.dead >> each.uid & 1 for each in voter.spares)
                heard = (self._voters[n] for a, n in enumerate(world.voters) if n >= 0 and a in newest.agents)
                deaf = voter.in_minority or any(agent in other.suspects or other.in_minority for other in heard)
                if waits and newest.has_room(voter.spares) and newest.members and not deaf:
                    return False
                continue
            if voter.record != newest or (voter.needed and not voter.in_minority):
                return False
            waits = any(not world.dead >> each.uid & 1 for each in voter.spares)
            if waits and newest.has_room(voter.spares) and newest.members and not voter.in_minority:
                return False
        return True

    def run(self) -> dict[str, int]:
        """Walks every state; how many there are.

        Raises:
            Violation: with the way to the state in which something is wrong.
        """
        seen: dict[World, tuple[World, str] | None] = {self.first: None}
        queue, back, ends = deque([self.first]), dict[World, list[World]](), list[World]()
        made = 0
        while queue:
            world = queue.popleft()
            try:
                self.check(world)
            except Violation as wrong:
                raise Violation(f"{wrong}: {way(seen, world)}") from None
            made = max(made, world.records.bit_count() - 1)
            before = self.cut
            after = list(self.calm(world))
            for _, there in after:
                back.setdefault(there, []).append(world)
            if not after:
                if self.cut == before and not self.settled(world):
                    raise Violation(f"nobody goes on, and not all have the record: {way(seen, world)}")
                ends.append(world)
            for name, there in (*after, *(self.faulty(world) if world.faults else ())):
                if there not in seen:
                    seen[there] = world, name
                    queue.append(there)
            if len(seen) > self.most:
                raise Violation(f"more than {self.most} states")
        count, rest, reached = len(ends), list(ends), set(ends)
        while rest:
            for world in back.get(rest.pop(), ()):
                if world not in reached:
                    reached.add(world)
                    rest.append(world)
        if (stuck := next((world for world in seen if world not in reached), None)) is not None:
            raise Violation(f"from here nothing leads to an end: {way(seen, stuck)}")
        return {"states": len(seen), "ends": count, "records": made, "cut": self.cut}


def way(seen: dict[World, tuple[World, str] | None], world: World) -> str:
    found: list[str] = []
    while (before := seen[world]) is not None:
        world, name = before
        found.append(name)
    return " / ".join(found[::-1])
