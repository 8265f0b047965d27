"""One node's part in a run that goes on without a rank that dies.

    a rank is killed      its launcher knows at once, and tells its own ranks that the epoch is over
    ranks stop            each breaks what it has under way, so that whoever waits for it fails and stops too
    launchers agree       who is in the next epoch (``_voter``), when all ranks that live have stopped
    ranks meet            at a store of that epoch, which the launcher of the first node in it serves

Launchers talk through the store of their attempt (``_mail``), which node 0 has. As soon as ranks can go on, each
has another one ready: when the launcher is gone that has the present one, the next node's takes its place. What was
said in the old one is lost, as on any network: who is to propose does it again. The store of an epoch that is over is
closed where ranks do not stop by themselves although one is gone: who waits there for it, as in the middle of a
recovery, fails then.

Processes that wait to take a rank's place (``_spares``) come in with the next epoch. Where ranks are missing and one
begins to wait, that is made for it, and ranks stop between two steps. A node whose ranks have all died asks for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousError

from shardfold.comm.answered import Answered, answered
from shardfold.comm.membership import Member, Membership
from shardfold.comm.shared_folders import remove_left
from shardfold.launch._mail import Log, Mail
from shardfold.launch._rendezvous import GONE, Attempts, join_store
from shardfold.launch._voter import Message, Sent, Voter
from shardfold.launch.workers import Worker

__all__ = ["Members"]

QUEUE, ENDED = "shardfold/epochs", "shardfold/ended"
READY = f"{QUEUE}/ready"
LOOK, AWAKE, EACH = 0.05, 0.002, 5e-5
"""Seconds between two looks: at what other launchers say, and at ranks that are about to stop; the last one times the
number of launchers at least, as all look into one store, which else has no time for what they say."""
STUCK = 0.5
"""Seconds that ranks have to stop by themselves: most fail at once in what they send."""
MOST = 3
"""Epochs in a row that begin although no rank has died."""
AGAIN = 0.3
"""Seconds without a decision, behind which a launcher that is to propose does it once more."""
JOIN = 0.5
"""Seconds in which another node's store has to answer that takes the place of one that is gone."""
AT_ONCE = 8
"""Nodes whose stores are asked together for that."""


class Members:
    """Which ranks are in, on one node in one attempt.

    Args:
        uids: the ranks of this node, by local rank.
        workers: the same, as processes.
        meeting: of all launchers; its store is asked by a thread of its own.
        open_store: makes a store for an epoch: its address, its port, and what it lives as long as.

    Attributes:
        without: local ranks that the others go on without.
        gone: sentences about ranks of other hosts that are not in an epoch that has begun, to be told.
        failed: why the run cannot go on; empty: it can.
    """

    def __init__(
        self,
        uids: Sequence[int],
        workers: Sequence[Worker],
        meeting: Attempts,
        open_store: Callable[[], tuple[str, int, Any]],
    ) -> None:
        self._agent, self._begun = meeting.node_rank, meeting.num_nodes
        self._several = self._begun > 1 or meeting.opened is not None  # launchers, or there may be
        self._each = len(uids)
        self._meeting, self._store = meeting, meeting.store
        self._ready: Any = None  # a store of this node that may take the place of the present one
        self._prepared = 0  # for how many nodes
        self._told_ready = ""  # where it is, as others are told
        self._others: dict[int, tuple[str, int]] = {}  # where such a store is, by node
        self._open_store = open_store
        self._mine = {uid: worker for uid, worker in zip(uids, workers, strict=True)}
        self._waiting: dict[int, Worker] = {}  # those that may take a rank's place, by number
        self.without: set[int] = set()
        self.gone: list[str] = []
        self._given_up = set[int]()  # nodes of which others hear nothing any more, as they have said
        self.failed = ""
        self._voter: Voter | None = None
        self._lock = threading.RLock()
        self._wake, self._over = threading.Event(), False
        self._mail: Mail | None = None  # in the present store
        self._places: Log | None = None  # there, too: where stores of nodes are that may take its place
        self._tried = 0.0
        self._offered: tuple[str, int, Any] | None = None  # a store that the next epoch may take
        self._served: list[Any] = []  # that of the present one, then of the one before, which ranks still leave
        self._told_end = False  # whether others were told that a rank of this node has come to its end
        self._vain = 0  # epochs in a row that nobody's death has begun
        self._idle = 0.0  # since when all ranks of this node have stopped
        self._lost = 0.0  # since when the present epoch is over
        self._thread = threading.Thread(target=self._run, name="shardfold-members", daemon=True)
        self._thread.start()

    def ended(self, worker: Worker) -> None:
        """A rank of this node has ended; on any thread."""
        self._wake.set()

    def close(self) -> None:
        """The attempt is over, and ranks have ended."""
        self._over = True
        self._wake.set()
        self._thread.join(LOOK)
        self._offered, self._served = None, []
        remove_left()

    @property
    def ranks(self) -> set[int]:
        """Those of all nodes in the present epoch, by their first numbers; none: it is not known yet."""
        return set() if self._voter is None else {each.uid for each in self._voter.record.members}

    def by_rank(self) -> dict[int, Worker]:
        """The ranks of this node by what they are in the present epoch."""
        members = () if self._voter is None else self._voter.record.members
        return {rank: self._mine[each.uid] for rank, each in enumerate(members) if each.uid in self._mine}

    def are_elastic(self) -> bool:
        """Whether every rank of this node that lives can go on without another, and none has come to its end."""
        ranks = list(self._mine.values())
        return all(each.is_elastic for each in ranks if each.returncode is None) and not self._has_ended()

    def standing(self) -> tuple[int, str]:
        """The epoch in which each rank of this node has stopped or come to its end, though nobody is known to be gone;
        -1: not all have. And why one has stopped so; "": none has."""
        voter = self._voter
        if voter is None or voter.needed:
            return -1, ""
        epoch, here = voter.record.epoch, self._here(voter)
        ranks = [self._mine[member.uid] for member in here if member.uid in self._mine]  # one may be just coming in
        stopped = [each for each in ranks if each.returncode is None and each.has_stopped(epoch)]
        idle = len(ranks) == len(here) and all(each.returncode == 0 or each in stopped for each in ranks)
        return epoch if idle else -1, next((each.why for each in stopped), "")

    def add(self, uid: int, worker: Worker) -> None:
        """A process that is to wait for a place; its number is no other's."""
        with self._lock:
            self._waiting[uid] = worker
        self._wake.set()

    def waits(self, worker: Worker) -> bool:
        """Whether it is one that may take a rank's place, and has none, be it because it has ended before."""
        return worker in list(self._waiting.values())

    def takes(self, worker: Worker) -> bool:
        """Whether the others go on without this rank, which has ended."""
        with self._lock, suppress(RuntimeError):  # the store is gone, which is told elsewhere
            self._look_anywhere()
        return worker.local_rank in self.without and not self.failed

    def lose(self, node: int) -> bool:
        """A node is not heard of any more; whether the others go on without it."""
        with self._lock:
            if self._voter is None or not self._are_elastic():
                return False
            if node == self._meeting.hub:
                return self._move() and not self.failed
            if node not in self._voter.suspects:
                self._take(self._voter.suspect(node))
            return not self.failed

    def move_from(self, store: Any) -> bool:
        """The launcher is gone that had this store; whether another one has taken its place."""
        with self._lock:
            return self._store is not store or self._move()

    # -- the thread

    def _run(self) -> None:
        try:
            self._begin()
            while not self._over:
                with self._lock:
                    self._look_anywhere()
                looks = self._several or bool(self._served) or bool(self._waiting)
                busy = self._voter is not None and self._voter.needed
                self._wake.wait(pause(self._voter, self._meeting.num_nodes) if looks or busy else None)
                self._wake.clear()
        except RuntimeError:  # the store is gone, and no other one can take its place; or all is over
            if not self._over and not self.failed:
                hub = self._meeting.host_of(self._meeting.hub)
                self.failed = f"the launcher on host {hub} does not answer any more"
        except Exception as error:  # ranks that wait for a place are not to wait without end
            self.failed = self.failed or f"no next epoch could be made ({error})"

    def _begin(self) -> None:
        """Every rank learns its place in epoch 0, which is what the launchers have started."""
        remove_left()  # of a run that was killed with all of its processes
        if self._several:
            self._mail, self._places = Mail(self._store, self._agent), Log(self._store, READY)
        if self._meeting.came_later:
            (record,) = self._said([f"{QUEUE}/record"])
            with self._lock:
                self._voter = Voter(self._agent, Membership.from_json(record))
            return
        mine = [[uid, worker.local_rank] for uid, worker in self._mine.items()]
        if self._agent:
            self._store.set(f"{QUEUE}/ranks/{self._agent}", json.dumps(mine))
            record = Membership.from_json(self._said([f"{QUEUE}/first"])[0])
        else:
            record = self._first(mine)
        with self._lock:
            self._voter = Voter(self._agent, record)
            self._publish(record)
            self._say_record(record)

    def _first(self, mine: list[list[int]]) -> Membership:
        """The record of epoch 0, which node 0 makes of what all others say, and says to them."""
        keys = [f"{QUEUE}/ranks/{node}" for node in range(1, self._begun)]
        each = [mine, *map(json.loads, self._said(keys) if keys else ())]
        members = [Member(uid, node, local) for node, said in enumerate(each) for uid, local in said]
        record = Membership(0, tuple(sorted(members, key=lambda member: member.uid)), size=len(members))
        if self._meeting.opened is not None:
            record = replace(record, most=self._meeting.opened.most * self._each, nodes=self._begun)
        if keys:
            self._store.set(f"{QUEUE}/first", record.to_json())
        return record

    def _said(self, keys: list[str]) -> list[Any]:
        """What others say once they have begun, at which one may be gone: a call that waited for it would keep all
        others from the store for a minute, with them the one that finds out who is gone.

        Raises:
            RuntimeError: the attempt is over before.
        """
        while not self._store.check(keys):
            if self._over:
                raise RuntimeError
            time.sleep(pause(None, self._begun))
        return list(self._store.multi_get(keys))

    def _look_anywhere(self) -> None:
        """The same as :meth:`_look`, in another store if the present one is gone.

        Raises:
            RuntimeError: there is none.
        """
        try:
            self._look()
        except GONE:
            if not self._move():
                raise

    def _stand_by(self) -> None:
        """A store of this node is ready to take the place of the present one, and it is known where the others' are."""
        lives = any(worker.returncode is None for worker in self._mine.values())  # and says what it can
        assert self._places is not None
        if self._ready is None and lives and self._are_elastic():
            address, port, self._ready = self._open_store()
            self._prepared = self._meeting.prepare(self._ready)
            self._told_ready = json.dumps([self._agent, address, port, self._meeting.host])
            self._places.say(self._told_ready)
        if self._ready is None or self._voter is None:
            return
        self._meeting.open()
        self._meeting.let_vote(self._voter.record.agents)
        if self._prepared < self._meeting.num_nodes:
            self._prepared = self._meeting.prepare(self._ready, self._prepared)
        if len(self._others) < self._meeting.num_nodes:
            for node, address, port, host in map(json.loads, self._places.read()):
                self._others[node], self._meeting.hosts[node] = (address, port), host

    def _move(self) -> bool:
        """The store of the next node takes the place of the one that is gone; whether there is one."""
        if self._voter is None or self._over or self._ready is None or not self._are_elastic():
            return False
        gone, unreached = self._meeting.hub, list[int]()
        for node, joined in self._stores_behind(gone):
            try:
                store = joined.result()
                self._meeting.move_to(store, node, self._others[node], unreached)
                self._store, self._mail, self._places = store, Mail(store, self._agent), Log(store, READY)
                self._told_end = False
                self._places.say(self._told_ready)  # to those that come later
                self._say_record(self._voter.record)
                self._take(self._voter.suspect(gone))
            except (*GONE, RendezvousError):
                unreached.append(node)
                continue
            return True
        return False

    def _stores_behind(self, gone: int) -> Iterator[tuple[int, Future[Any]]]:
        """Those that may take the place of that node's, in order; some are asked at once, as several may be gone."""
        later = [node for node in sorted(self._others) if node > gone]
        for first in range(0, len(later), AT_ONCE):
            asked = later[first : first + AT_ONCE]
            yield from zip(asked, [*map(self._asked, asked)], strict=True)

    def _asked(self, node: int) -> Future[Any]:
        """A node's store, once it answers; or RendezvousError, RuntimeError or OSError, where it does not in time."""
        asked, place = Future[Any](), self._others[node]

        def ask() -> None:
            try:
                asked.set_result(self._joined(place))
            except Exception as error:
                asked.set_exception(error)

        if node == self._agent:
            asked.set_result(self._ready)
        else:
            threading.Thread(target=ask, name="shardfold-next-store", daemon=True).start()
        return asked

    def _joined(self, place: tuple[str, int]) -> Any:
        line = self._meeting.line_to(*place)
        store = answered(lambda: join_store(*place, JOIN), 2 * JOIN, line)
        return Answered(store, self._meeting.patience.lost, line)

    def _look(self) -> None:
        """Goes as far as it is known what is to be done."""
        if self._voter is None:
            return
        for uid in self._dead(self._voter):
            worker = self._mine[uid]
            known = worker.local_rank in self.without
            if worker.is_left_behind and self._are_elastic() and not (known and self._voter.needed):
                self.without.add(worker.local_rank)
                self._vain = 0
                self._take(self._voter.lose())
        if self._several:
            if not self._told_end and self._has_ended():
                self._store.set(ENDED, "")
                self._told_end = True
            self._stand_by()
            self._read()
        self._offer(self._voter)
        if self._voter.record.epoch and not self._voter.needed and self._in_vain():
            self._take(self._voter.lose())
        if self._voter.needed:
            self._stop()
        if self._voter.waits and time.monotonic() - self._tried > AGAIN:
            self._take(self._voter.retry())
        elif self._voter.asks and time.monotonic() - self._tried > AGAIN:
            self._take(self._voter.ask())

    def _offer(self, voter: Voter) -> None:
        """Who waits here for a place."""
        spares = tuple(
            Member(uid, self._agent, worker.local_rank)
            for uid, worker in sorted(self._waiting.items())
            if worker.returncode is None and worker.is_elastic
        )
        if spares != voter.spares and self._are_elastic() and not self._has_ended():
            self._take(voter.offer(spares))

    def _has_ended(self) -> bool:
        """Whether a rank of this node has come to its end: then no other one joins."""
        return any(worker.returncode == 0 for worker in list(self._mine.values()))

    def _in_vain(self) -> bool:
        """Whether ranks that were about to go on have all stopped again although none is gone: what they made took too
        long, or a link failed. Then they may try once more, a few times."""
        assert self._voter is not None
        here, epoch, now = self._here(self._voter), self._voter.record.epoch, time.monotonic()
        idle = bool(here) and all(self._mine[each.uid].has_stopped(epoch) for each in here)
        self._idle = (self._idle or now) if idle else 0.0
        if not idle or self._vain >= MOST or now - self._idle < AGAIN:  # others may be about to say that one joins
            return False
        if self._several and self._store.check([ENDED]):  # they miss who has come to its end, which ends the run
            return False
        self._vain += 1
        return True

    def _here(self, voter: Voter) -> list[Member]:
        return [member for member in voter.record.members if member.agent == self._agent]

    def _dead(self, voter: Voter) -> list[int]:
        """Members of this node that have ended."""
        return [member.uid for member in self._here(voter) if self._mine[member.uid].returncode is not None]

    def _is_untold(self, worker: Worker) -> bool:
        """Whether the others can go on without it, and the next look is going to find that out: a record without it
        before that would call it failed."""
        return worker.is_left_behind and worker.local_rank not in self.without

    def _are_elastic(self) -> bool:
        """Whether all ranks of this node that live can go on without another; where none lives, those that lived could
        have, and others may on another node."""
        left = [worker for worker in self._mine.values() if worker.returncode is None]
        if not left and not self._several:
            return False
        return all(worker.is_elastic for worker in left or self._mine.values())

    def _read(self) -> None:
        """Hears what other launchers have said."""
        assert self._voter is not None and self._mail is not None
        for message in self._mail.read():
            self._given_up |= message.suspects
            self._take(self._voter.receive(message))

    def _stop(self) -> None:
        """All ranks of this node that live have stopped: whoever decides hears of them."""
        assert self._voter is not None
        epoch = self._voter.record.epoch
        dead = [uid for uid in self._dead(self._voter) if not self._is_untold(self._mine[uid])]
        live = [member for member in self._here(self._voter) if member.uid not in dead]
        if self._has_ended() and not self._voter.broken:
            return
        if self._voter.broken:
            self._lost = self._lost or time.monotonic()
            if time.monotonic() - self._lost > STUCK:
                self._served.clear()
        if self._voter.mine is not None and tuple(live) == self._voter.mine:
            return
        for member in live:
            self._mine[member.uid].end_epoch(epoch)
            if self._voter.broken:
                self._mine[member.uid].break_epoch(epoch)
        if all(self._mine[member.uid].has_stopped(epoch) for member in live):
            self._offered = self._offered or self._open_store()
            admits = all(self._mine[member.uid].admits for member in live)
            self._take(self._voter.stop(live, *self._offered[:2], admits=admits))

    def _take(self, done: tuple[Voter, Sent]) -> None:
        """What this node knows now, and what it says; what it says to itself is heard at once."""
        before, (voter, said) = self._voter, done
        self._tried = time.monotonic()
        queue, out = deque(said), list[Message]()
        while queue:
            message = queue.popleft()
            if message.target == self._agent:
                voter, more = voter.receive(message)
                queue.extend(more)
            else:
                out.append(message)
        self._voter = voter  # before a word of it is out: what was promised stays so, whatever becomes of the store
        if before is not None and voter.record.epoch > before.record.epoch:
            self._publish(voter.record)
            self._note_gone(before.record, voter.record)
            self._say_record(voter.record)
        if voter.in_minority:
            self.failed = self._cut_off(voter)
        elif not voter.is_member and self._dead(before or voter) != [each.uid for each in self._here(before or voter)]:
            self.failed = "the others have gone on without this host"
        if out and self._mail is not None:
            self._mail.send(out)

    def _cut_off(self, voter: Voter) -> str:
        """Why nothing goes on here: who does not answer, and that those who do are too few."""
        silent = [self._meeting.host_of(node) for node in voter.record.agents if node in voter.suspects]
        s, does = ("s", "do") if len(silent) > 1 else ("", "does")
        few = "no more than half of the hosts are reachable from here, and the others may go on"
        return f"the launcher{s} on host{s} {', '.join(silent)} {does} not answer any more, so {few}"

    def _note_gone(self, before: Membership, record: Membership) -> None:
        """Who of other hosts was in the epoch before, and is not in this one."""
        left = set(record.members)
        then = f"; epoch {record.epoch} has {len(left)} rank{'s' * (len(left) != 1)}"
        gone = [each for each in before.members if each not in left and each.agent != self._agent]
        for node in sorted({each.agent for each in gone}):
            uids = [str(each.uid) for each in gone if each.agent == node]
            ranks = f"rank{'s' * (len(uids) > 1)} {', '.join(uids)}"
            host = self._meeting.host_of(node)
            lost = self._voter is not None and node in self._voter.suspects | self._given_up
            who = f"host {host} is lost, with {ranks}" if lost else f"{ranks} on host {host} ended"
            self.gone.append(f"{who}{then}")

    def _say_record(self, record: Membership) -> None:
        """Launchers that come later are told which record there is, by the one that has the store."""
        if self._meeting.opened is not None and self._agent == self._meeting.hub:
            self._store.set(f"{QUEUE}/record", record.to_json())

    def _publish(self, record: Membership) -> None:
        """The ranks of this node go on in an epoch."""
        if record.epoch:
            self._served, self._offered = [self._offered, *self._served[:1]], None
        self._lost = 0.0
        for member in record.members:
            if member.agent == self._agent:
                if member.uid in self._waiting:
                    self._mine[member.uid] = self._waiting.pop(member.uid)
                    self._vain = 0
                self._mine[member.uid].take_place(record.place(member.uid))


def pause(voter: Voter | None, launchers: int) -> float:
    """Seconds until the next look; of the launcher that proposes no more of them with more launchers."""
    if voter is not None and voter.ballot is not None:
        return AWAKE
    return max(AWAKE if voter is not None and voter.needed else LOOK, EACH * launchers)
