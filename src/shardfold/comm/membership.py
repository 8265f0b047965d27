"""Who takes part in a run, in one epoch after the other: values only, which ranks and launchers read alike.

A member is a rank that the launchers have started, by the number that it had then, which stays its name for good: what
it is among those that are left follows from the record of its epoch. A rank needs of that record its own place only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from zlib import crc32

__all__ = ["EpochPlace", "Member", "Membership"]


@dataclass(frozen=True)
class Member:
    """A rank that lives.

    Attributes:
        uid: its rank in epoch 0, or a number above these, of one that has come later.
        agent: the node whose launcher has started it.
        local_rank: there, which stays its device's.
    """

    uid: int
    agent: int
    local_rank: int = 0


@dataclass(frozen=True)
class Membership:
    """The record of an epoch, of which there is one.

    Attributes:
        epoch: 0 is what the launchers have started; each record takes the place of the one before.
        members: in the order of their ranks.
        address, port: of the store at which they meet.
        size: how many there shall be: those of epoch 0.
        most: how many there may be with those of nodes that have come later.
        nodes: that have begun; those that come later have higher numbers. 0: none may come.
        grown: the newest epoch in which one came in that was in none before.
    """

    epoch: int
    members: tuple[Member, ...]
    address: str = ""
    port: int = 0
    size: int = 0
    most: int = 0
    nodes: int = 0
    grown: int = 0

    def followed_by(self, members: tuple[Member, ...], address: str, port: int) -> Membership:
        """The record of the next epoch."""
        epoch = self.epoch + 1
        grown = epoch if set(members) - set(self.members) else self.grown
        return replace(self, epoch=epoch, members=members, address=address, port=port, grown=grown)

    def admits(self, spare: Member, there: int) -> bool:
        """Whether a process may come in where so many are."""
        return there < (max(self.size, self.most) if self.nodes and spare.agent >= self.nodes else self.size)

    def has_room(self, spares: Iterable[Member]) -> bool:
        """Whether one of these may join."""
        return any(self.admits(each, len(self.members)) for each in spares)

    @cached_property
    def agents(self) -> tuple[int, ...]:
        """The nodes that have members, in rising order: they decide who is in the next epoch."""
        return tuple(sorted({member.agent for member in self.members}))

    @property
    def majority(self) -> int:
        """How many of these it takes."""
        return len(self.agents) // 2 + 1

    def place(self, uid: int) -> EpochPlace:
        """Of a member."""
        rank = next(rank for rank, member in enumerate(self.members) if member.uid == uid)
        local = sum(member.agent == self.members[rank].agent for member in self.members)
        return EpochPlace(self.epoch, rank, len(self.members), local, self.address, self.port, self.grown, uid)

    def to_json(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        """As JSON, which is said to every node."""
        said = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({**said, "members": self.listed(self.members)}, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> Membership:
        return _read(text)

    @staticmethod
    def listed(members: Iterable[Member]) -> list[list[int]]:
        """Members for JSON. There may be thousands, of which those that stand as the launchers have started them are
        one entry: the first one, how many ranks its node has, and how many nodes there are with as many."""
        nodes: list[list[int]] = []
        for each in members:
            if nodes and (each.uid, each.agent, each.local_rank) == _behind(nodes[-1]):
                nodes[-1][3] += 1
            else:
                nodes.append([each.uid, each.agent, each.local_rank, 1])
        said: list[list[int]] = []
        for uid, agent, local, ranks in nodes:
            if said and said[-1][2:4] == [local, ranks]:
                first, node, _, _, count = said[-1]
                if (uid, agent) == (first + count * ranks, node + count):
                    said[-1][4] += 1
                    continue
            said.append([uid, agent, local, ranks, 1])
        return said

    @staticmethod
    def members_of(said: Sequence[Sequence[int]]) -> tuple[Member, ...]:
        """Members as :meth:`listed` gives them."""
        return tuple(
            Member(uid + node * ranks + rank, agent + node, local + rank)
            for uid, agent, local, ranks, nodes in said
            for node in range(nodes)
            for rank in range(ranks)
        )


def _behind(node: Sequence[int]) -> tuple[int, int, int]:
    """The member that would be the next of a node."""
    uid, agent, local, ranks = node
    return uid + ranks, agent, local + ranks


@lru_cache(maxsize=16)
def _read(text: str) -> Membership:
    """A record; a node is told the same one by many others."""
    said = json.loads(text)
    return Membership(**{**said, "members": Membership.members_of(said["members"])})


@dataclass(frozen=True)
class EpochPlace:
    """What a rank is in an epoch.

    Attributes:
        epoch: as above.
        rank, world: among how many it is which.
        local_world: how many of them are on its node.
        address, port: where they meet.
        grown: the newest epoch in which one came in that was in none before.
        uid: the number by which launchers name it, in all epochs.
    """

    epoch: int
    rank: int
    world: int
    local_world: int
    address: str
    port: int
    grown: int
    uid: int

    def to_text(self) -> str:
        """One line, which its reader can tell from a part of it."""
        text = " ".join(map(str, vars(self).values()))
        return f"{text} {crc32(text.encode()):08x}"

    @classmethod
    def from_text(cls, text: str) -> EpochPlace | None:
        """None: it is none, or not all of one."""
        said, _, code = text.rpartition(" ")
        if not said or code != f"{crc32(said.encode()):08x}":
            return None
        epoch, rank, world, local, address, port, grown, uid = said.split(" ")
        return cls(int(epoch), int(rank), int(world), int(local), address, int(port), int(grown), int(uid))

    def enter(self) -> None:
        """From now on this process is that rank, as if a launcher had started it so: ``DataMesh`` and whatever else
        reads torchrun's variables finds the ranks and the store of this epoch."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(self.world),
            LOCAL_WORLD_SIZE=str(self.local_world),
            MASTER_ADDR=self.address,
            MASTER_PORT=str(self.port),
        )
