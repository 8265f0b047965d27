"""Where agents meet, and a store of its own for each attempt.

torchrun's ranks meet at a store of their agent's that outlives them: after a restart they find in it the addresses of
the dead attempt, and Gloo connects to those. Here the agent of node 0 opens a new store for every attempt, and the
ranks are told its port. They need nothing special for it: ``init_process_group()`` finds the store by the environment.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from math import ceil
from typing import Any, NamedTuple

from torch.distributed import DistError, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from shardfold.comm._second_line import SecondLine
from shardfold.comm.answered import Answered, StoreLine
from shardfold.errors import ConfigError
from shardfold.launch._mail import Log
from shardfold.launch._open_run import GONE, OpenRun
from shardfold.launch.death import Death
from shardfold.launch.decision import Node
from shardfold.plan.patience import Patience

__all__ = [
    "GONE",
    "Attempts",
    "Endpoint",
    "FixedRendezvous",
    "RankWaits",
    "address_towards",
    "join_store",
    "meeting_of",
    "open_store",
]

POLL = 0.05
ALREADY = 5.0
"""Seconds that a store has to answer whose port is in use on this host."""
LEAVES = 1.0
"""Seconds for the others to be told that this node meets them no more."""
AGAIN = 1.5
"""Seconds that the store where nodes meet has to answer in front of another attempt: whoever lost it has waited for the
patience already, and is to end no more than three seconds behind that."""
CONNECT = timedelta(seconds=60)
NOT_YET = ":0"
"""In place of the time of a node's last sign of life."""


class RankWaits(NamedTuple):
    """What the ranks of a node, or of all, wait for, and whether they shall leave.

    Attributes:
        silent: ranks that say nothing and are waited for.
        late: those that were waited for in vain.
        idle: the epoch in which each of the node's ranks has stopped or come to its end, though nobody is known to be
            gone; -1: not all have.
        why: of one that has stopped so, by its own words; "": none has.
        noticed: whether the node has notice that they shall leave.
    """

    silent: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    idle: int = -1
    why: str = ""
    noticed: bool = False

    def to_json(self) -> str:
        return json.dumps([sorted(self.silent), sorted(self.late), self.idle, self.why, self.noticed])

    @classmethod
    def of_all(cls, texts: Sequence[str | bytes]) -> RankWaits:
        """What nodes have said, together."""
        each = [json.loads(text) for text in texts]
        silent, late = (frozenset[int]().union(*kind) for kind in list(zip(*each, strict=True))[:2])
        epochs, whys = {idle for *_, idle, _, _ in each}, (why for *_, why, _ in each)
        idle = epochs.pop() if len(epochs) == 1 else -1
        return cls(silent, late, idle, next(filter(None, whys), ""), any(noticed for *_, noticed in each))


NOBODY = RankWaits()


def _said_at(told: bytes) -> float:
    """When the node that has the store said that of a majority, by its own clock; 0: it has said nothing yet."""
    return float(told.split()[0]) if told else 0.0


def _answers(sign: bytes) -> float:
    """To what was said when a node's sign of life answers; 0: to nothing."""
    _, _, at = sign.rpartition(b" ")
    return float(at) if at and not sign.endswith(NOT_YET.encode()) else 0.0


class Attempts(RendezvousHandler):
    """Gives each round of another handler a fresh store for the ranks, and the agents a place to tell of deaths.

    Args:
        inner: where the nodes meet.
        host: this node's name.
        address: of its store, should it be node 0; None: what ``inner`` says.
        port: for the store; None: any that is free.
        timeout: seconds to wait for node 0's word.
        patience: how long nothing may be heard of a node.
        meets: host and port of the store behind ``inner``, which may be another node's; None: it looks by itself.
        opened: says where an attempt is that takes in nodes which come later; None: none does.

    Attributes:
        came_later: whether this node has come into an attempt that was under way.
    """

    def __init__(
        self,
        inner: RendezvousHandler,
        host: str,
        address: str | None,
        port: int | None,
        timeout: float,
        patience: Patience,
        meets: tuple[str, int] | None = None,
        opened: OpenRun | None = None,
    ) -> None:
        self.patience, self.meets, self._met, self._vain = patience, meets, False, False
        self.opened, self.came_later = opened, False
        self._place: tuple[str, int] | None = None  # of the attempt's store
        self._told_open, self._let_in = False, 0  # whether others were told of it, and how many nodes have come later
        self.inner, self.host, self.address, self.port, self.timeout = inner, host, address, port, timeout
        self.store: Any = None
        self.node_rank, self.num_nodes = 0, 1
        self.hub = 0  # the node that has the store
        self.hosts: dict[int, str] = {}  # names, by node, as far as they are known
        self.finished = False
        self._beaten = 0.0
        self._beats: dict[int, tuple[bytes, float]] = {}  # of each node: its last sign of life, and when it came
        self._lost: set[int] = set()  # nodes that have long given none
        self._without: set[int] = set()  # those of them that the others go on without
        self._awaits = NOBODY  # which ranks those of this node wait for, and did in vain, as others were told
        self._awaited: tuple[float, RankWaits] = 0.0, NOBODY  # and those of others; behind which sign of life
        self._put = 0, 0  # how often nodes had said theirs, and how many are gone, when that was put together last
        self.voting: Collection[int] = ()  # nodes of which a majority has to be there; empty: any number is enough
        self._majority = 0.0, 0.0  # when one was last heard of; and when that was last asked
        self._told_majority = b""
        self._moved = 0.0  # when the store became another node's; 0: it did not
        self._unreached: Collection[int] = ()  # nodes that could not be asked whether they have it
        self._endpoint = Endpoint(inner)

    def get_backend(self) -> str:
        return self.inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self.store, self.hub, self.hosts = None, 0, {}  # closes the dead attempt's
        self.finished, self._beats, self._lost, self._without = False, {}, set(), set()
        self._awaits, self._awaited, self._put = NOBODY, (0.0, NOBODY), (0, 0)
        self.voting, self._moved, self._unreached, self._majority = (), 0.0, (), (0.0, 0.0)
        self._endpoint = Endpoint(self.inner)
        if self._met and self.meets is not None:  # torch's handler would wait without end for a thread of its own
            self._await_answer(*self.meets)
        if self.opened is not None and (came := self._come_in(self.opened)) is not None:
            return came
        self._met = True
        try:
            met = self.inner.next_rendezvous()
        except GONE as error:
            said = str(error).splitlines()[0].rstrip(".")
            raise RendezvousClosedError(f"the store where nodes meet does not answer ({said})") from error
        self.node_rank, self.num_nodes = met.rank, met.world_size
        if met.rank == 0:
            address = self.address or met.bootstrap_store_info.master_addr  # pyright: ignore[reportOptionalMemberAccess]
            self.store = open_store(address, self.port or 0)
            port = self.store.port
            self.prepare(self.store)
            met.store.set("shardfold/store", json.dumps([address, port, self.host]))
        else:
            asked = Answered(met.store, self.patience.lost)
            wait_for(asked, ["shardfold/store"], time.monotonic() + self.timeout)
            address, port, self.hosts[0] = json.loads(asked.get("shardfold/store"))
            # A node that is cut off shall notice: what it asks would wait until TCP gives up.
            store = join_store(address, port, self.timeout)
            self.store = Answered(store, self.patience.lost, self.line_to(address, port))
        self._place = address, port
        return RendezvousInfo(met.store, met.rank, met.world_size, RendezvousStoreInfo(address, port))

    def host_of(self, node: int) -> str:
        """Its name, for a sentence."""
        return self.hosts.get(node, f"of node {node}")

    # -- nodes that come later

    def _come_in(self, opened: OpenRun) -> RendezvousInfo | None:
        """This node comes into an attempt that is under way; None: there is none, and nodes meet as at first."""
        last, self._place, self.came_later = self._place, None, False
        if last is not None and self._told_open:
            opened.take_back()
        self._told_open, self._let_in = False, 0
        place = opened.find(first=not self._met)
        if place is None or place == last:
            return None
        try:
            store: Any = Answered(join_store(*place, ALREADY), self.patience.lost, self.line_to(*place))
            if store.check(["shardfold/death"]):
                return None
            number = store.add("shardfold/knocks", 1)
            wait_for(store, [f"shardfold/knock/{number}"], time.monotonic() + self.patience.lost)
            self.node_rank = int(store.get(f"shardfold/knock/{number}"))
            self.num_nodes, self.hub = map(int, json.loads(store.get("shardfold/nodes")))
        except (RendezvousError, *GONE):
            return None
        self.store, self._place, self.came_later = store, place, True
        return RendezvousInfo(store, self.node_rank, self.num_nodes, RendezvousStoreInfo(*place))

    def open(self) -> None:
        """The ranks can go on with others: nodes that come later are taken in, where the attempt's store is here."""
        if self.opened is None or self._told_open or self.node_rank != self.hub or self._place is None:
            return
        self._told_open = True
        self.opened.tell(*self._place)

    def _grow(self) -> None:
        """Learns of nodes that have come later, and, where the store is here, lets them in."""
        if self.opened is None:
            return
        if self.node_rank != self.hub:
            self.num_nodes = max(self.num_nodes, json.loads(self.store.get("shardfold/nodes"))[0])
            return
        knocks = self.store.add("shardfold/knocks", 0)
        while self._let_in < knocks:
            self._let_in += 1
            node, self.num_nodes = self.num_nodes, self.num_nodes + 1
            self.prepare(self.store, node)
            self.store.set(f"shardfold/knock/{self._let_in}", str(node))

    def prepare(self, store: Any, first: int = 0) -> int:
        """What all nodes, from the ``first`` on, may ask of a store is there; how many nodes these are in all."""
        nodes = self.num_nodes
        for rank in range(first, nodes):
            store.set(f"shardfold/beat/{rank}", f"of node {rank}{NOT_YET}")
            store.set(f"shardfold/awaits/{rank}", NOBODY.to_json())
        if not first:
            store.set("shardfold/majority", "")
            store.set("shardfold/awaited", NOBODY.to_json())
        store.set("shardfold/nodes", json.dumps([nodes, self.node_rank]))
        return nodes

    def line_to(self, address: str, port: int) -> StoreLine:
        """Over which another node's store is asked, and another way to it."""

        def reach() -> Callable[[], None]:
            store = self._opened(address, port)
            store.check(["shardfold/death"])

            def show() -> None:
                self._show(store, time.monotonic())

            return show

        return StoreLine(SecondLine(reach), self.patience.beat / 2)

    def _opened(self, address: str, port: int) -> Any:
        """Another connection to a store, which is there at once or not at all."""
        socket.create_connection((address, port), timeout=self.patience.beat / 2).close()
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=CONNECT)

    def _show(self, store: Any, now: float) -> bytes:
        """Give a sign of life there, which answers to what the node that has the store has said last of a majority."""
        told: bytes = store.get("shardfold/majority") if self.voting else b""
        store.set(f"shardfold/beat/{self.node_rank}", f"{self.host}:{now} {_said_at(told)}")
        return told

    def move_to(self, store: Any, hub: int, place: tuple[str, int], unreached: Collection[int] = ()) -> None:
        """From now on the attempt's store is that of another node, as the one that had it is gone: nothing was said in
        it yet. ``place``: where it is; ``unreached``: nodes that could have had it and did not answer."""
        self._place, self._told_open, self._let_in = place, False, 0
        self._lost.add(self.hub)
        self._without.add(self.hub)
        if hub == self.node_rank:
            for node in self._lost:
                store.set(f"shardfold/told/{node}", "")
            store.add("shardfold/told", len(self._lost))
            store.set("shardfold/without", json.dumps(sorted(self._without)))  # for nodes that come later
        elif self.opened is not None:
            self.num_nodes = json.loads(store.get("shardfold/nodes"))[0]
        self.store, self.hub, self.finished = store, hub, False
        self._moved, self._unreached, self._told_majority = time.monotonic(), unreached, b""
        self._beaten, self._beats, self._awaits, self._awaited = 0.0, {}, NOBODY, (0.0, NOBODY)
        self._put = 0, 0

    def _await_answer(self, host: str, port: int) -> None:
        """
        Raises:
            RendezvousTimeoutError: no store answers there; the kernel of a frozen host still takes connections.
        """
        said: list[TCPStore] = []

        def ask() -> None:
            with suppress(*GONE):
                limit = timedelta(seconds=AGAIN)
                said.append(TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(AGAIN)
        if not said:
            self._vain = True
            raise RendezvousTimeoutError(f"nobody answers at {host}:{port}")

    def num_nodes_waiting(self) -> int:
        return 0 if self.finished else self._endpoint.num_nodes_waiting(needed=not self.voting)

    def is_closed(self) -> bool:
        return self.inner.is_closed()

    def set_closed(self) -> None:
        self.inner.set_closed()

    def get_run_id(self) -> str:
        return self.inner.get_run_id()

    def shutdown(self) -> bool:
        # In a thread that may be left behind: it waits for another one, which may ask a store that does not answer.
        ending = threading.Thread(target=self._shut_down, daemon=True)
        ending.start()
        alone = time.monotonic() - self.ours_since > self.patience.lost  # nobody is there to be told
        ending.join(0.0 if self._vain or alone else LEAVES)
        return True

    def _shut_down(self) -> None:
        if self.opened is not None and self._told_open:
            self.opened.take_back()
        with suppress(RendezvousError, *GONE):
            self.inner.shutdown()

    def tell(self, death: Death) -> None:
        """Tell the other agents of a death in this attempt."""
        with suppress(*GONE):
            if self.store is not None:
                self._tell(self.store, death)

    def _tell(self, store: Any, death: Death) -> None:
        if Log(store, "shardfold/deaths").say(death.to_json()) == 1:
            store.set("shardfold/death", death.to_json())

    def tell_no_more(self) -> None:
        """Note that this node tells of no other death in this attempt."""
        try:
            if self.store is not None:
                self._tell_no_more(self.store, self.node_rank)
        except GONE:
            if not self.voting:
                self._part()

    def _tell_no_more(self, store: Any, rank: int) -> None:
        store.set(f"shardfold/told/{rank}", "")
        store.add("shardfold/told", 1)

    def _part(self) -> None:
        """This node ends its ranks as the store has not answered. If it does by now, the others learn so: they would
        else name one of their ranks, which fails because of that."""

        def tell() -> None:
            with suppress(*GONE):
                if self._place is not None:
                    store = self._opened(*self._place)
                    self._tell(store, Death(-1, 0, self.host, 0, at=time.time()))
                    self._tell_no_more(store, self.node_rank)

        telling = threading.Thread(target=tell, name="shardfold-part", daemon=True)
        telling.start()
        telling.join(LEAVES)

    def first(self) -> Death | None:
        """Return the earliest death of this attempt that none other caused, once all tell of no more or are lost.

        That is no later than one of them would be.
        """
        earliest: Death | None = None
        if self.store is None:
            return None
        try:
            deadline = time.monotonic() + self.patience.lost + 2 * self.patience.beat
            while self.store.add("shardfold/told", 0) < self.num_nodes and time.monotonic() < deadline:
                if self.node_rank == self.hub:
                    self._look_for_lost(time.monotonic())
                time.sleep(POLL)
            for death in map(Death.from_json, Log(self.store, "shardfold/deaths").read()):
                if earliest is None or death.order < earliest.order:
                    earliest = death
        except GONE:
            if earliest is None:
                return Death(-1, 0, self.host_of(self.hub), 0, at=time.time(), follows=True)
        return earliest

    def heard(self) -> Death | None:
        """Return the death in this attempt that an agent was the first to tell of.

        Raises:
            RendezvousError: the node that has the store does not answer.
        """
        try:
            if self.store is not None and self.store.check(["shardfold/death"]):
                return Death.from_json(self.store.get("shardfold/death"))
        except GONE as error:
            raise RendezvousError(f"the launcher on host {self.host_of(self.hub)} does not answer any more") from error
        return None

    def without(self) -> set[int]:
        """The nodes that the others go on without, as the one that has the store has found."""
        with suppress(*GONE):
            if self.num_nodes > 1 and self.store.check(["shardfold/without"]):
                self._without |= set(json.loads(self.store.get("shardfold/without")))
        return self._without

    def beat(self, goes_on: Callable[[int], bool], why: Callable[[], str] = str) -> Death | None:
        """Give a sign of life; on the node that has the store, also return the loss of one that has long given none,
        unless the run ``goes_on`` without it, and ``why`` it does not, where that is known; on the others that of the
        former, once the store has moved there."""
        now = time.monotonic()
        if (self.num_nodes == 1 and self.opened is None) or now - self._beaten < self.patience.beat:
            return None
        self._beaten = now
        with suppress(*GONE):
            self._grow()
            told = self._show(self.store, now)
            lost: Death | None = None
            if self.node_rank == self.hub:
                lost = self._look_for_lost(now, goes_on, why)
            elif self.hub:  # whose launcher may not know that it has the store
                lost = self._look_for_lost(now, goes_on, why, [self.hub])
            if self.voting:
                self._hear_majority(now, told)
            return lost
        return None

    def let_vote(self, nodes: Collection[int]) -> None:
        """Of these a majority has to be there."""
        self.voting = nodes

    @property
    def ours_since(self) -> float:
        """When a majority of the nodes was last heard of, which could not go on without this one before: by the
        monotonic clock of this node, and no later than it was."""
        return self._majority[0] if self.voting and self._majority[1] else time.monotonic()

    def _hear_majority(self, now: float, told: bytes) -> None:
        """The node that has the store hears all; the others are told how long ago it has heard enough of them."""
        if self.node_rank == self.hub:
            # This node may have stood still, and its store may bring only now what others sent before that: a sign
            # of life is as old as what it answers to.
            signs = {node: value for node, (value, _) in self._beats.items()}
            heard = [now if node == self.node_rank else _answers(signs.get(node, b"")) for node in self.voting]
            since = max(self._majority[0], sorted(heard, reverse=True)[len(heard) // 2])
            self._majority = since, now
            self.store.set("shardfold/majority", f"{now} {now - since}")
        elif told:
            since, asked = self._majority
            if told != self._told_majority:  # it was written behind the last time that this was asked
                since = max(since, (asked or now) - float(told.split()[1]))
            self._majority, self._told_majority = (since, now), told

    def _heard_of(self, node: int) -> float:
        """When; 0: not since the store is where it is."""
        value, at = self._beats.get(node, (NOT_YET.encode(), 0.0))
        return 0.0 if value.endswith(NOT_YET.encode()) else at

    def awaited(self, ours: RankWaits) -> RankWaits:
        """What the ranks of all nodes wait for; other nodes are told of ``ours``. Asked as often as signs of life are
        given. The node that has the store reads what each says when one says something new, and tells all."""
        if self.num_nodes == 1:
            return ours
        if self._beaten == self._awaited[0]:
            return self._awaited[1]
        with suppress(*GONE):
            if self._awaits != ours:
                self.store.set(f"shardfold/awaits/{self.node_rank}", ours.to_json())
                self.store.add("shardfold/awaits", 1)
                self._awaits = ours
            if self.node_rank == self.hub:
                self._put_together()
            self._awaited = self._beaten, RankWaits.of_all([self.store.get("shardfold/awaited")])
        return self._awaited[1]

    def _put_together(self) -> None:
        """What the ranks of all nodes wait for."""
        known = self.store.add("shardfold/awaits", 0), len(self._without)
        if known != self._put:
            keys = [f"shardfold/awaits/{node}" for node in range(self.num_nodes) if node not in self._without]
            self.store.set("shardfold/awaited", RankWaits.of_all(self.store.multi_get(keys)).to_json())
            self._put = known

    def _look_for_lost(
        self,
        now: float,
        goes_on: Callable[[int], bool] = lambda node: False,
        why: Callable[[], str] = str,
        among: Collection[int] = (),
    ) -> Death | None:
        """The loss of a node (``among`` these, else of all) whose last sign of life is too old, of which the others are
        told in its place; of one that they go on without, they are told that.

        The clock of this node alone is asked.
        """
        others = [rank for rank in among or range(self.num_nodes) if rank not in (self.node_rank, *self._lost)]
        keys = [f"shardfold/beat/{rank}" for rank in others]
        lost: Death | None = None
        values = self.store.multi_get(keys) if keys else []
        for rank, value in zip(others, values, strict=True):
            if self._beats.get(rank, (b"", now))[0] != value:
                self._beats[rank] = (value, now)
        for rank, value in zip(others, values, strict=True):
            if now - self._beats[rank][1] > self._may_be_silent(rank) and not self._has_told(rank):
                self._lost.add(rank)
                if goes_on(rank):
                    self._without.add(rank)
                    self.store.set("shardfold/without", json.dumps(sorted(self._without)))
                    self._tell_no_more(self.store, rank)
                    continue
                host = self.hosts.get(rank) or value.decode().rpartition(":")[0]
                lost = Death(-1, 0, host, 0, at=time.time(), why=why())
                self._tell(self.store, lost)
                self._tell_no_more(self.store, rank)
        return lost

    def _has_told(self, rank: int) -> bool:
        return self.store.check([f"shardfold/told/{rank}"])

    def _may_be_silent(self, rank: int) -> float:
        """Seconds. All notice at nearly the same time that the store has moved: a node that has not come there has half
        of the patience to come; if enough others have, half of that, or none where it did not answer before."""
        if not self._moved or self._heard_of(rank):
            return self.patience.lost
        come = 1 + sum(bool(self._heard_of(node)) for node in self.voting)
        if come <= len(self.voting) // 2:
            return self.patience.echo
        return 0.0 if rank in self._unreached else self.patience.echo / 2

    def finish(self) -> bool:
        """Note that this node's ranks have ended well, and return whether all nodes' have."""
        with suppress(*GONE):
            if not self.finished:
                self.store.set(f"shardfold/done/{self.node_rank}", "")
            self.finished = True
            self._grow()
            others = [node for node in range(self.num_nodes) if node not in self._without]
            return self.store.check([f"shardfold/done/{node}" for node in others])
        return False

    def resume(self) -> None:
        """Take back that this node's ranks have all ended: others have come in."""
        if self.finished:
            self.finished = False
            with suppress(*GONE):
                self.store.delete_key(f"shardfold/done/{self.node_rank}")

    def leave(self) -> None:
        """Note that this node asks nothing more of the attempt's store."""
        with suppress(*GONE):
            if self.store is not None:
                self.store.add("shardfold/left", 1)

    def let_leave(self, wait: float) -> None:
        """On the node that has the store, wait until all nodes have left it; nodes may be lost, hence the limit."""
        with suppress(*GONE):
            deadline = time.monotonic() + wait
            while self.node_rank == self.hub and self.store is not None and time.monotonic() < deadline:
                if self.store.add("shardfold/left", 0) >= self.num_nodes - len(self._lost):
                    return
                time.sleep(POLL)


class Endpoint:
    """Where new nodes would come, asked by a thread of its own: behind a link that is cut an answer takes long, and
    this node's signs of life are not to wait for it.

    Args:
        inner: asked.
    """

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner
        self._waiting = 0
        self._failure: Exception | None = None
        self._asking: threading.Thread | None = None

    def num_nodes_waiting(self, *, needed: bool) -> int:
        """As was said last.

        Raises:
            RendezvousError, RuntimeError, OSError: it does not answer, and is ``needed``: the ranks could not go on.
        """
        if self._failure is None and (self._asking is None or not self._asking.is_alive()):
            self._asking = threading.Thread(target=self._ask, name="shardfold-endpoint", daemon=True)
            self._asking.start()
        if self._failure is not None and needed:
            raise self._failure
        return self._waiting if self._failure is None else 0

    def _ask(self) -> None:
        try:
            self._waiting = self._inner.num_nodes_waiting()
        except (RendezvousError, *GONE) as error:
            self._failure = error


class FixedRendezvous(RendezvousHandler):
    """A fixed number of nodes, each with its rank, that begin every attempt together.

    Args:
        host, port: where node 0 listens. Port None: a single node, which nobody has to find.
        rank, num_nodes: of this node.
        name: of the job; others with the same address do not meet it.
        timeout: seconds to wait for the others.
        patience: how long node 0 may say nothing.
    """

    def __init__(
        self, host: str, port: int | None, rank: int, num_nodes: int, name: str, timeout: float, patience: Patience
    ) -> None:
        self.patience = patience
        self.host, self.port, self.rank, self.num_nodes, self.name = host, port, rank, num_nodes, name
        self.timeout = timeout
        self.round = 0
        self.store: Any = None

    def get_backend(self) -> str:
        return "static"

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self.timeout
        if self.store is None:
            if self.rank == 0:
                self.store = open_store(self.host, self.port or 0)
            else:
                assert self.port is not None
                self.store = join_store(self.host, self.port, self.timeout)
        self.round += 1
        store = PrefixStore(f"{self.name}/{self.round}", self.store)
        asked = store if self.rank == 0 else Answered(store, self.patience.lost)
        if asked.add(f"node/{self.rank}", 1) > 1:
            raise ConfigError(f"two nodes call themselves node {self.rank}: give each its own --node-rank.")
        wait_for(asked, [f"node/{rank}" for rank in range(self.num_nodes)], deadline)
        return RendezvousInfo(store, self.rank, self.num_nodes, RendezvousStoreInfo(self.host, self.store.port))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to close: a death is told in the attempt's store."""

    def get_run_id(self) -> str:
        return self.name

    def shutdown(self) -> bool:
        return True


def open_store(host: str, port: int) -> Any:
    unknown = unresolved(host)
    if unknown:
        raise ConfigError(
            f"the name {host!r} of the first node is not known on this host ({unknown}): give --master-addr an address "
            "that all nodes reach, or let the name be resolved."
        )
    try:
        return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=CONNECT)
    except (DistError, RuntimeError, ValueError) as error:
        reason = "is in use" if "EADDRINUSE" in str(error) else f"cannot be opened ({str(error).splitlines()[0]})"
        raise ConfigError(
            f"port {port} of {host} {reason}: give another --master-port; one machine needs none, and takes a free one."
        ) from None


def unresolved(host: str) -> str:
    """Why a name has no address here; "" if it has one."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def await_store(host: str, port: int, timeout: float) -> None:
    """Return once somebody listens there.

    Raises:
        RendezvousTimeoutError: nobody does within so many seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        # Tried in Python first, as a signal cannot interrupt the store's own attempts.
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(2.0, timeout))).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError(f"nobody answers at {host}:{port} ({error})") from error
            time.sleep(0.2)


def join_store(host: str, port: int, timeout: float) -> Any:
    """Connect to a store, however late it is opened."""
    await_store(host, port, timeout)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=CONNECT)


def wait_for(store: Any, keys: list[str], deadline: float) -> None:
    """Wait until all keys are there; short looks, as a signal cannot interrupt the store's own waiting."""
    missing = keys
    while missing:
        try:
            missing = [key for key in missing if not store.check([key])]
        except GONE as error:
            raise RendezvousClosedError("the launcher on node 0 does not answer any more") from error
        if missing and time.monotonic() > deadline:
            raise RendezvousTimeoutError(f"not there in time: {', '.join(missing).replace('node/', 'node ')}")
        if missing:
            time.sleep(POLL)


def meeting_of(node: Node, host: str, name: str, conf: dict[str, str], patience: Patience) -> Attempts:
    """Return the handler for a node: nodes with ranks of their own meet here, others in torch's way.

    Args:
        node: as planned.
        host: its name.
        name: of the job.
        conf: options of ``--rdzv-conf``; ``join_timeout`` or ``timeout`` in seconds, 600 by default.
        patience: how long nothing may be heard of a node.
    """
    timeout = float(conf.get("join_timeout", conf.get("timeout", 600)))
    if node.backend == "static":
        assert node.rank is not None
        alone = node.nodes[1] == 1
        port = None if alone else node.port
        inner = FixedRendezvous(node.host, port, node.rank, node.nodes[1], name, timeout, patience)
        return Attempts(inner, host, node.host, node.port if alone else None, timeout, patience)
    words = {
        "join_timeout": str(int(timeout)),
        "keep_alive_interval": str(patience.keep_alive),
        "keep_alive_max_attempt": "3",
        "read_timeout": str(max(1, ceil(2 * patience.lost))),  # of each question, so the store may not be there late
        **_at_home(node),
        **conf,
    }
    meets = (node.host, node.port or 0) if node.backend == "c10d" else None
    opened = (
        OpenRun(*meets, name, node.nodes[1], patience) if meets is not None and node.nodes[0] < node.nodes[1] else None
    )
    return Attempts(_handler(node, name, words, timeout), host, None, None, timeout, patience, meets, opened)


def _handler(node: Node, name: str, words: dict[str, str], timeout: float) -> RendezvousHandler:
    """torch's, once the store that it needs answers: its host may begin late, and be busy; on one machine another
    launcher may have it."""
    deadline, endpoint = time.monotonic() + timeout, f"{node.host}:{node.port}"
    address = node.address or address_towards(node.host)
    while True:
        holds = words.get("is_host") == "True"
        try:
            if node.backend == "c10d" and not holds:
                await_store(node.host, node.port or 0, deadline - time.monotonic())
            low, high = node.nodes
            return get_rendezvous_handler(
                RendezvousParameters(node.backend, endpoint, name, low, high, address, **words)
            )
        except (RendezvousConnectionError, RendezvousTimeoutError) as error:
            if holds:
                words = {**words, "is_host": "False"}
                deadline = time.monotonic() + ALREADY
            elif node.backend != "c10d" or time.monotonic() > deadline:
                said = str(error.__cause__ or error).splitlines()[0].rstrip(".")
                raise ConfigError(
                    f"the store at {endpoint}, where nodes meet, cannot be reached ({said}): is the host of "
                    "--rdzv-endpoint up, and its port open?"
                ) from None


def _at_home(node: Node) -> dict[str, str]:
    """Whether this is the host whose store all meet at, as torch's rendezvous is told it: torch itself compares names,
    which are the same in each network namespace, and others than the endpoint's in many a cluster."""
    if node.backend != "c10d":
        return {}
    try:
        addresses = {each[4][0] for each in socket.getaddrinfo(node.host, None)}
    except OSError:
        return {}
    return {"is_host": str(any(map(_is_local, addresses)))}


def address_towards(host: str) -> str | None:
    """This host's address on the way to another one: its name, which torch would take, is known to others only where
    somebody has seen to that. None: there is no way."""
    with suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # nothing is sent
                return str(probe.getsockname()[0])
    return None


def _is_local(address: str | int) -> bool:
    """Whether an interface of this host has the address: only then can a socket be bound to it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in str(address) else socket.AF_INET) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True
