"""The processes of one node that wait to take the place of ranks that die, or that are started anew for ranks that
have."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker as Place

from shardfold.launch._members import Members
from shardfold.launch.process import how
from shardfold.launch.workers import Worker

__all__ = ["Spares"]

ENDS = 5.0
"""Seconds that those which are not needed any more have to end."""


class Spares:
    """They are started when ranks can go on without one that dies: a script that has no ``ElasticRun`` has no use for
    them, and ranks begin sooner without them.

    Args:
        count: that shall wait at any time.
        anew: how many processes may be started in the place of others that were killed, over the whole attempt.
        places: of the ranks of this node.
        node, num_nodes: which of how many this is.
        start: starts a process.
        say: tells people.

    Attributes:
        places: of all that were started, by local rank. Their numbers are above those of the ranks that began.
    """

    def __init__(
        self,
        count: int,
        anew: int,
        places: list[Any],
        node: int,
        num_nodes: int,
        start: Callable[[Any], Worker],
        say: Callable[[str], None],
    ) -> None:
        self._count, self._anew, self._ranks = count, anew, len(places)
        self._world = places[0].world_size if places else 0
        self._node, self._num_nodes = node, num_nodes
        self._start, self._say = start, say
        self._processes: list[Worker] = []
        self._known: set[int] = set()  # local ranks of those that were told to have a place
        self._gone: set[int] = set()  # of those that have ended without one
        self._begun = False
        self.places: dict[int, Any] = {}

    def keep(self, ranks: list[Worker], members: Members) -> None:
        """Starts as many as shall be there; says which have died before they were needed.

        Args:
            ranks: of this node, with those that have joined.
            members: who is in.
        """
        if not (self._count or self._anew) or not members.are_elastic():
            return
        if not self._begun:
            self._begun = True
            for _ in range(self._count):
                self._add(members)
        for worker in self._processes:
            if worker.returncode is not None and members.waits(worker) and worker.local_rank not in self._gone:
                self._tell(worker)
        if any((worker.returncode or 0) > 0 for worker in self._processes):  # as one that does not fit the others
            self._anew = 0
        lives = sum(worker.returncode is None for worker in ranks)
        waiting = len(self._waiting(members))
        for _ in range(min(self._ranks + self._count - lives - waiting, self._anew)):
            self._anew -= 1
            self._add(members)

    def _add(self, members: Members) -> None:
        local_rank = self._ranks + len(self._processes)
        uid = self._world + len(self._processes) * self._num_nodes + self._node
        place = Place(local_rank, uid, uid, self._world, self._world)
        self.places[local_rank] = place
        worker = self._start(place)
        self._processes.append(worker)
        members.add(uid, worker)

    def _tell(self, worker: Worker) -> None:
        """One has ended that had no place."""
        code = worker.returncode or 0
        if code >= 0:  # the next would end alike
            self._anew = 0
        self._gone.add(worker.local_rank)
        number, why = self.places[worker.local_rank].global_rank, worker.why and f" ({worker.why})"
        self._say(f"shardfold run: spare {number} {how(code)}{why} before it was needed; the ranks go on.")

    def _waiting(self, members: Members) -> list[Worker]:
        return [worker for worker in self._processes if worker.returncode is None and members.waits(worker)]

    def come_in(self, members: Members) -> list[Worker]:
        """Those that have got a place since this was asked."""
        out = {worker.local_rank for worker in self._processes if members.waits(worker)} | self._known
        new = [worker for worker in self._processes if worker.local_rank not in out]
        self._known |= {worker.local_rank for worker in new}
        return new

    def dismiss(self, members: Members) -> None:
        """The run has come to its end: those that wait end too, by themselves; one that is still about to is killed."""
        if self._count and not self._begun:
            self._say("shardfold run: no spare was started, as no rank has made an sf.ElasticRun.")
        waiting = self._waiting(members)
        for worker in waiting:
            worker.dismiss() if worker.is_elastic else worker.send(signal.SIGKILL)
        for worker in waiting:
            worker.join(ENDS)
