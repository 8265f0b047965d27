"""The agent of one node, on torch's elastic agent: starts ranks, watches them, says what died, starts them again."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from shardfold import accelerator
from shardfold.comm.launcher_notes import SPARE
from shardfold.errors import ConfigError
from shardfold.launch import hosts
from shardfold.launch._members import Members
from shardfold.launch._rendezvous import Attempts, RankWaits, address_towards, meeting_of, open_store
from shardfold.launch._spares import Spares
from shardfold.launch.death import Death, OomWatch, host_name, others_told
from shardfold.launch.decision import Node, script_command
from shardfold.launch.leftovers import Leftovers
from shardfold.launch.options import Options, streams
from shardfold.launch.process import SAID, exit_status, give_defaults, interface_towards, leads_home, num_cores
from shardfold.launch.scheduler import find_task, scheduler_step
from shardfold.launch.workers import Outlet, Worker, caused, end_all, end_hung, lingering, watch
from shardfold.plan.patience import PATIENCE, Patience
from shardfold.tiers.limit import memory_limit

__all__ = ["Agent", "run_node"]

AFTER_DEATH = 5.0  # seconds that the other ranks have before they are killed
AFTER_SIGNAL = 30.0
LEAVE = 3.0
LATER = 1000
"""Processes of a node that has come later have numbers from so many times its own on."""
SAME = 3
"""Attempts that fail alike, one after the other, until the ranks are not started again."""


class Notice:
    """That the ranks of a node shall leave by themselves, in so many seconds; then the signal is forwarded.

    Attributes:
        number: of the signal that gave it, SIGTERM if a file did; None: nobody has.
        stopped: the signal by which ranks are ended; None: none came, and the time to leave is not over.
        elsewhere: whether another node has it: ranks are told here too, as that one may have none any more.
    """

    def __init__(self, seconds: float | None, file: str | None) -> None:
        self.seconds, self.file = seconds, file
        self.number: signal.Signals | None = None
        self.stopped: signal.Signals | None = None
        self.elsewhere = False
        self._until, self._waits, self._by_file = 0.0, False, ""

    def hear(self, number: int, frame: FrameType | None) -> None:
        """The handler of these signals.

        Raises:
            SignalException: it is no notice.
        """
        if number in (signal.SIGTERM, signal.SIGUSR1) and self.take(signal.Signals(number)):
            return
        self.stopped = signal.Signals(number)
        if not self._waits:
            self._stop()

    @contextmanager
    def later(self) -> Iterator[None]:
        """Inside, ranks are started, and what else cannot be left half done: signals wait until its end.

        Raises:
            SignalException: one came that is no notice.
        """
        self._waits = True
        try:
            yield
        finally:
            self._waits = False
        self._stop()

    def _stop(self) -> None:
        if self.stopped is not None:
            raise SignalException(f"received signal {self.stopped}", self.stopped)

    def take(self, number: signal.Signals) -> bool:
        """Whether a signal is notice: the first one is, if there shall be notice at all, and each SIGUSR1."""
        if self.seconds is None or self.number is not None:
            return self.seconds is not None and number == signal.SIGUSR1
        self.number, self._until = number, time.monotonic() + self.seconds
        return True

    def look(self, workers: Sequence[Worker]) -> None:
        """Pass it on to ranks, also to those that were started since.

        Raises:
            SignalException: they had their time; or what the signal's handler raised was lost, as Python ignores what
                is raised while an object is collected or a process forks.
        """
        self._stop()
        if self.file is not None and self.number is None and os.path.exists(self.file):
            self.take(signal.SIGTERM)
            self._by_file = f"the file {self.file}"
        if self.number is not None or self.elsewhere:
            for worker in workers:
                worker.give_notice()
            if self.number is not None and time.monotonic() >= self._until:
                self.stopped = self.number
                raise SignalException("the time that ranks had to leave is over", self.number)

    @property
    def told(self) -> str:
        """What is added to the sentence of a failure."""
        had = "" if self.number is None else f"; ranks had notice of an end ({self._by_file or self.number.name})"
        came = "" if self.stopped in (None, self.number) else f"; {self.stopped.name} had come"
        return had + came


class Agent(SimpleElasticAgent):
    """torch's agent decides when ranks are started and how often; how they are started, watched and ended is here."""

    def __init__(self, spec: WorkerSpec, meeting: Attempts, node: Node, options: Options, command: list[str]) -> None:
        super().__init__(spec)
        self.meeting, self.node, self.options = meeting, node, options
        self.script, self.arguments = command[0], command[1:]
        self.host = node.name or host_name()
        self.labelled = node.name is not None
        self.workers: list[Worker] = []
        self._lingers = ""  # who was said to run on alone
        self._missed = 0.0  # since when ranks have stopped though nobody is gone
        self.death: Death | None = None  # the first of this attempt
        self._is_told = False  # whether it is, or was, and ranks are started again
        self.oom = OomWatch()
        self.logs = log_folder(options)
        self.patience, self.leftovers = Patience(options.patience), Leftovers()
        self.notice = Notice(options.notice, options.notice_file)
        self._interface = ""  # that ranks find each other by, where this host's name is of no use for it
        self._ours_until = 0.0  # by the monotonic clock: so long the run is this node's, as was last heard
        self.members: Members | None = None  # of this attempt
        self.spares: Spares | None = None
        self._without: set[int] = set()  # local ranks of which it was said that the others go on
        self.alike: list[tuple[Any, ...]] = []  # how attempts failed, those of the same kind at the end

    # What torch's agent asks for.

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.death, self._is_told, self.oom, self.workers, self._lingers = None, False, OomWatch(), [], ""
        self._interface, self._without, self._missed = "", set(), 0.0
        several = (worker_group.group_world_size or 1) > 1 or self.meeting.opened is not None
        if several and "GLOO_SOCKET_IFNAME" not in os.environ and not leads_home(host_name()):
            self._interface = interface_towards(str(worker_group.master_addr))
        with self.notice.later():
            try:
                for place in worker_group.workers:
                    self.workers.append(self._start(worker_group, place))
            finally:
                watch(self.workers, self._ended)
        self.members = self._members_of(worker_group)
        self.spares = self._spares_of(worker_group)
        return {worker.local_rank: worker.process.pid for worker in self.workers}

    def _assign_worker_ranks(self, *given: Any) -> Any:  # pyright: ignore
        """None, where this node has come later: its processes wait for a place in the next epoch."""
        return [] if self.meeting.came_later else super()._assign_worker_ranks(*given)  # pyright: ignore

    def _stop_workers(self, worker_group: WorkerGroup, *_: Any, **__: Any) -> None:
        self._shutdown()

    def _ended(self, worker: Worker) -> None:
        if self.members is not None:
            self.members.ended(worker)

    def _members_of(self, group: WorkerGroup) -> Members:
        """Who is in, in one epoch after the other."""
        uids = [place.global_rank for place in sorted(group.workers, key=lambda place: place.local_rank)]
        first, port = str(group.master_addr), 0

        def opened() -> tuple[str, int, Any]:
            address = first if self.meeting.node_rank == 0 else address_towards(first) or host_name()
            store = open_store(address, port)
            return address, store.port, store

        meeting = self.meeting
        return Members(uids, tuple(self.workers), meeting, opened)

    def _spares_of(self, group: WorkerGroup) -> Spares:
        """Who may come in."""
        places = sorted(group.workers, key=lambda place: place.local_rank)
        meeting, given = self.meeting, self.options

        def started(place: Any) -> Worker:
            with self.notice.later():
                worker = self._start(group, place)
                self.workers.append(worker)
                watch([worker], self._ended)
            return worker

        if not meeting.came_later:
            return Spares(given.spares, given.replace, places, meeting.node_rank, meeting.num_nodes, started, say)
        there = group.spec.local_world_size + given.spares
        return Spares(there, given.replace, [], LATER * meeting.node_rank, 1, started, say)

    def _place_of(self, group: WorkerGroup, worker: Worker) -> Any:
        if self.spares is not None and worker.local_rank in self.spares.places:
            return self.spares.places[worker.local_rank]
        return group.workers[worker.local_rank]

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        given, passed_over = self.options.shutdown_timeout, self.notice.stopped is signal.SIGUSR1
        failing = [] if self.death or self.notice.stopped is None else self._failing()
        if self.notice.stopped is not None:
            self.death = self.death or self._failed_before(self.notice.stopped)
        grace = AFTER_SIGNAL if self.death is None else AFTER_DEATH
        grace = grace if given is None else min(grace, given) if self.death else given
        if self.death is None and time.monotonic() < self._ours_until:  # what ranks save when they are asked to end
            for worker in self.workers:
                worker.lease(grace)
        if self.death is None and any(worker.returncode is None for worker in self.workers):
            self._note_end("stopped", 0, f"it was asked to end by {death_sig.name}")
        end_all(self.workers, death_sig, grace)
        if passed_over:  # ranks went on, and may have failed meanwhile
            self.death = self.death or self._failed_before(signal.SIGKILL)
        if failing and self.death is None:  # its end took longer than it was given
            self.death = self._own(self._worker_group, failing[0], "")
        if self.members is not None:
            if self.death is None:
                self._tell_gone_since(self.members)
            self.members.close()
        self.leftovers.end(LEAVE if given is None else min(LEAVE, given))

    def _exit_barrier(self) -> None:
        self.meeting.leave()
        self.meeting.let_leave(LEAVE)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        asked = time.monotonic()
        self.notice.look(self.workers)
        self.leftovers.reap()
        for worker in self.workers:
            worker.look(self.patience.lost)
        self.oom.look(worker.process.pid for worker in self.workers if worker.ended is None)
        assert self.members is not None and self.spares is not None
        ranks = [worker for worker in self.workers if not self.members.waits(worker)]
        had = len(self.workers)
        self.spares.keep(ranks, self.members)
        by_rank = self.members.by_rank()
        awaited = set[int]().union(*(worker.awaits for worker in self.workers))
        given_up = set[int]().union(*(worker.gave_up for worker in self.workers))
        standing = self.members.standing()
        noticed = self.notice.number is not None
        theirs = self.meeting.awaited(RankWaits(frozenset(awaited), frozenset(given_up), *standing, noticed))
        self.notice.elsewhere |= theirs.noticed
        late = given_up | theirs.late
        end_hung(by_rank, awaited | theirs.silent, late, self.patience.lost)
        late_here = [by_rank[rank] for rank in late if rank in by_rank]
        echo = self.patience.echo + self.patience.lost * (len(late_here) < len(late))  # another node judges, and tells
        failed = [worker for worker in ranks if worker.returncode and not self.members.takes(worker)]
        failed.sort(key=lambda worker: worker.ended or 0.0)
        left = [worker for worker in ranks if worker.has_left]
        self._tell_without(worker_group)
        running = self.meeting.num_nodes > 1 or any(worker.returncode is None for worker in ranks)
        if failed and (first := caused(failed, running, echo, late_here, left)) is not None:
            lost = next((worker.why for worker in failed if worker.has_lost), "")
            self.death = self._own(worker_group, first, failed[0].why, lost)
        elif left and self._is_missed(theirs, standing[0]):
            self.death = self._own(worker_group, min(left, key=lambda worker: worker.ended or 0.0), theirs.why)
        else:
            self.death = self._heard() or self._lost_node()
            if self.death is not None and self.death.follows and left:
                first = min(left, key=lambda worker: worker.ended or 0.0)
                self.death = self._own(worker_group, first, self.death.why)
        if self.death is not None and self.death.has_lost:
            self.death = self._lost_with(worker_group, self.death)
        if self.death is not None:
            return self._failed(worker_group, failed)
        if ranks and not by_rank and had == len(self.workers) and self._is_not_taken_in():
            return self._part(worker_group, ranks[-1])
        self._ours_until = min(asked, self.meeting.ours_since) + max(
            self.patience.lease, 2 * self.options.monitor_interval
        )
        for worker in self.workers:  # the run was this node's when it was asked
            worker.lease(self._ours_until - time.monotonic())
        if not self._lingers and (lingers := lingering(ranks, self.patience.lost)):
            self._lingers = lingers
            say(f"shardfold run: {lingers}.")
        if all(worker.returncode == 0 for worker in ranks if worker.local_rank not in self._without):
            for worker in ranks:
                worker.drain()
            if self.meeting.finish():
                self.spares.dismiss(self.members)
                values = {place.global_rank: None for place in worker_group.workers}
                return RunResult(WorkerState.SUCCEEDED, return_values=values)
        return RunResult(WorkerState.HEALTHY)

    # How.

    def _start(self, group: WorkerGroup, place: Any) -> Worker:
        local_rank, count = place.local_rank, group.spec.local_world_size
        cores = None
        environment = {**os.environ, **self._variables(group, place), PATIENCE: f"{self.patience.seconds:g}"}
        # Who comes later meets the others at the store of the epoch in which it comes in.
        if local_rank >= count or self.meeting.came_later:
            environment[SPARE] = str(place.global_rank)
            del environment["MASTER_ADDR"], environment["MASTER_PORT"]
        if self.options.bind_cores_to_rank:
            cores = share_of_cores(self.options.bind_core_list, local_rank % count, count)
            environment["OMP_NUM_THREADS"] = str(len(cores))
        give_defaults(environment, count)
        command = script_command(self.options, self.script, self.arguments, environment["LOCAL_RANK"])
        outlets = self._outlets(local_rank, place.global_rank)
        reads = local_rank == 0 and not self.labelled
        try:
            mark, notice = self.leftovers.mark, self.notice.seconds is not None
            door = self.leftovers.door
            worker = Worker(local_rank, command, environment, outlets, cores, reads, mark, notice, door)
        except OSError as error:
            raise ConfigError(f"{command[0]!r} cannot be run: {error.strerror}.") from None
        self.leftovers.knows(worker.process.pid)
        return worker

    def _variables(self, group: WorkerGroup, place: Any) -> dict[str, str]:
        spec, nodes = group.spec, group.group_world_size
        variables: dict[str, Any] = {
            "RANK": place.global_rank,
            "LOCAL_RANK": place.local_rank,
            "WORLD_SIZE": place.world_size,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_RANK": group.group_rank,
            "GROUP_WORLD_SIZE": nodes,
            "ROLE_NAME": spec.role,
            "ROLE_RANK": place.role_rank,
            "ROLE_WORLD_SIZE": place.role_world_size,
            "MASTER_ADDR": group.master_addr,
            "MASTER_PORT": group.master_port,
            "TORCHELASTIC_RESTART_COUNT": spec.max_restarts - self._remaining_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            # DeepSpeed's further names.
            "CROSS_RANK": group.group_rank,
            "CROSS_SIZE": nodes,
            "LOCAL_SIZE": spec.local_world_size,
        }
        if self._interface:
            variables["GLOO_SOCKET_IFNAME"] = self._interface
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.node.slots is not None:
            visible = hosts.visible_devices(self.node.slots, visible)
        if self.options.virtual_local_rank:
            visible = hosts.visible_devices([place.local_rank], visible)
            variables["LOCAL_RANK"] = 0
        if visible is not None:
            variables["CUDA_VISIBLE_DEVICES"] = visible
        return {name: str(value) for name, value in variables.items()}

    def _outlets(self, local_rank: int, rank: int) -> tuple[Outlet, Outlet]:
        """Where standard output and standard error of a rank go."""
        shown = (
            str(local_rank) in self.options.local_ranks_filter.split(",") if self.options.local_ranks_filter else True
        )
        label = f"[{self.host}:{rank}] " if self.labelled else ""
        if self.options.enable_each_rank_log:
            both = Outlet(False, "", self.logs / f"{STARTED}_rank{rank}.log")
            return both, both
        attempt = self._worker_group.spec.max_restarts - self._remaining_restarts
        outlets: list[Outlet] = []
        for bit, name in ((1, "stdout"), (2, "stderr")):
            teed = streams(self.options.tee, local_rank, "--tee") & bit
            kept = streams(self.options.redirects, local_rank, "--redirects") & bit
            file = self.logs / f"attempt_{attempt}" / str(local_rank) / f"{name}.log" if teed or kept else None
            of_rank = label or f"[{self.options.role}{local_rank}]: " if teed else label
            outlets.append(Outlet(shown and bool(teed or not kept), of_rank, file))
        return outlets[0], outlets[1]

    def _heard(self) -> Death | None:
        """The first death that another node's agent told of; or that the node is gone that has the store, if no other
        one can have it."""
        assert self.members is not None
        store, hub = self.meeting.store, self.meeting.hub
        try:
            return self.meeting.heard()
        except RendezvousError:
            return None if self.members.move_from(store) else Death(-1, 0, self.meeting.host_of(hub), 0)

    def _is_missed(self, waits: RankWaits, idle: int) -> bool:
        """Whether ranks of any node have stopped for want of one of this node that has come to its end: nobody does
        anything more, and nobody is gone; or they have waited as long as a launcher may be silent that is.

        Args:
            waits: of all nodes.
            idle: the epoch in which this node does nothing more.
        """
        self._missed = (self._missed or time.monotonic()) if waits.why else 0.0
        waited = self._missed and time.monotonic() - self._missed > self.patience.lost
        return bool(waits.why) and (waits.idle == idle >= 0 or bool(waited))

    def _lost_node(self) -> Death | None:
        """The loss of a node that the others do not go on without."""
        members = self.members
        assert members is not None
        death = self.meeting.beat(members.lose, lambda: members.failed)
        for node in self.meeting.without():
            members.lose(node)
        if death is not None or not members.failed:
            return death
        return Death(-1, 0, self.host, 0, at=time.time(), why=members.failed)

    def _tell_without(self, group: WorkerGroup) -> None:
        """Say which ranks the others have just gone on without, and which have come in."""
        assert self.members is not None and self.spares is not None
        while self.members.gone:
            say(f"shardfold run: {self.members.gone.pop(0)}.")
        new = self.spares.come_in(self.members)
        if new:
            self.meeting.resume()
        there = " on this host" if self.meeting.num_nodes > 1 else ""
        for worker in self.workers:
            if worker.local_rank in self.members.without and worker.local_rank not in self._without:
                self._without.add(worker.local_rank)
                ranks = [each for each in self.workers if each not in new and not self.members.waits(each)]
                left = sum(each.returncode is None for each in ranks)
                many = f"{left} other ranks{there} go" if left else "others go"
                others = f"other rank{there} goes" if left == 1 else many
                instead = f", with rank {self._place_of(group, new.pop(0)).global_rank} in its place" if new else ""
                without = "" if instead else " without it"
                is_last = not (left or there or instead)  # nobody is there who could go on
                then = "" if is_last else f"; the {others} on{without}{instead}"
                say(self._death_of(group, worker).sentence(then))
        for worker in new:
            say(f"shardfold run: rank {self._place_of(group, worker).global_rank} on host {self.host} has joined.")

    def _tell_gone_since(self, members: Members) -> None:
        """Say without which ranks the others have gone on while all were asked to end."""
        for worker in self.workers:
            if worker.was_killed and worker.local_rank in {*members.without} - self._without:
                self._without.add(worker.local_rank)
                say(self._death_of(self._worker_group, worker).sentence(f"; the others went on{self.notice.told}"))

    def _is_not_taken_in(self) -> bool:
        """Whether this host has come later, and all of its processes have failed: the others go on without it."""
        later = self.meeting.came_later and self.meeting.node_rank != self.meeting.hub
        return later and all((worker.returncode or 0) != 0 for worker in self.workers)

    def _part(self, group: WorkerGroup, last: Worker) -> RunResult:
        """This node leaves the others, who go on: it is told of nothing more, and is not missed at their end."""
        self.death, self._remaining_restarts = self._death_of(group, last), 0
        self.meeting.finish()
        return RunResult(WorkerState.FAILED, failures={})

    def _own(self, group: WorkerGroup, worker: Worker, missed: str, lost: str = "") -> Death:
        """This node's first failure, which the other agents are told of. ``missed``: why one failed that needed it;
        ``lost``: why ranks cannot go on, of one that was killed."""
        death = self._death_of(group, worker, missed)
        death = replace(death, lost=lost) if death.returncode < 0 else death
        self.meeting.tell(death)
        return death

    def _failing(self) -> list[Worker]:
        """The ranks that have said why they fail, behind the time that they have to end by that."""
        if self.notice.stopped is signal.SIGINT:  # which ranks get from the terminal
            return []
        failing = [each for each in self.workers if each.returncode is None and each.why and not each.follows]
        deadline = time.monotonic() + AFTER_DEATH
        for worker in failing:
            worker.join(deadline - time.monotonic())
        return failing

    def _failed_before(self, number: signal.Signals) -> Death | None:
        """This node's first failure, where a rank has failed by itself before a signal ends all of them."""
        if self._is_told or number is signal.SIGINT:  # which ranks get from the terminal
            return None
        members = self.members  # none: the last rank has just been started
        ranks = [worker for worker in self.workers if members is None or not members.waits(worker)]
        ends = (None, 0, -number)
        failed = [each for each in ranks if each.returncode not in ends and not each.follows]
        failed = [each for each in failed if members is None or not members.takes(each)]
        first = min(failed, key=lambda worker: worker.ended or 0.0, default=None)
        return None if first is None else self._own(self._worker_group, first, "")

    def _lost_with(self, group: WorkerGroup, death: Death) -> Death:
        """Of whom the others were to go on without, and cannot: a rank of this node, or a host; else what was said."""
        assert self.members is not None
        gone = [worker for worker in self.workers if worker.local_rank in self.members.without]
        nodes = self.meeting.without()
        if gone:
            cause = self._death_of(group, max(gone, key=lambda worker: worker.ended or 0.0))
        elif nodes:
            cause = Death(-1, 0, self.meeting.host_of(max(nodes)), 0, at=death.at)
        else:
            return death
        cause = replace(cause, lost=death.why)
        self.meeting.tell(cause)
        return cause

    def _death_of(self, group: WorkerGroup, worker: Worker, missed: str = "") -> Death:
        returncode = worker.returncode or 0
        place = self._place_of(group, worker)
        killed = returncode == -signal.SIGKILL and not worker.is_ended_here
        return Death(
            place.global_rank,
            place.world_size,
            self.host,
            returncode,
            worker.resident if returncode < 0 else 0,
            memory_limit() if returncode < 0 else 0,
            self.oom.witness(worker.process.pid, worker.resident) if killed else "",
            time.time() - (time.monotonic() - (worker.ended or 0.0)),
            worker.follows,
            worker.why if returncode else missed,
            worker.steps,
            has_lost=worker.has_lost,
        )

    def _restarts_in_vain(self, death: Death) -> str:
        """Ranks that fail alike behind the same step, attempt after attempt, are not started again: each rank knows the
        same of it. What is added to the sentence."""
        kind = (death.rank < 0, death.returncode, death.steps)
        self.alike = [*self.alike, kind] if self.alike and self.alike[-1] == kind else [kind]
        if death.steps is None or len(self.alike) < SAME or not self._remaining_restarts:
            return ""
        self._remaining_restarts = 0
        return (
            f"; {SAME} attempts in a row have failed so behind step {death.steps}, so there is no other: look at "
            "the batch or the checkpoint of that step"
        )

    def _note_death(self, death: Death) -> None:
        self._note_end("failed", death.rank, death.sentence("").removeprefix("Error: ").removesuffix("."))

    def _note_end(self, state: str, rank: int, words: str) -> None:
        """Say in the run's folder, if it has one, how it ended."""
        for worker in self.workers[:1]:
            worker.note_end(state, rank, words)

    def _failed(self, group: WorkerGroup, failed: list[Worker]) -> RunResult:
        """End the other ranks, say what happened and let torch's agent start all again or give up."""
        assert self.death is not None
        self._note_death(self.death)  # first of all: who looks now finds that, and not that all are gone
        self.meeting.tell_no_more()
        self._shutdown()
        # A rank fails because another is gone: the earliest death is the cause, and only together do agents know it.
        told = self.meeting.first()
        if told is not None and (self.death.follows or not told.follows):
            self.death = told
        if self.death.rank < 0 and self.node.backend == "static":
            self._remaining_restarts = 0  # a node with a rank of its own is not replaced: do not wait for it
        self.meeting.leave()
        self.meeting.let_leave(LEAVE)
        again = self._restarts_in_vain(self.death)
        left = self._remaining_restarts
        restart = group.spec.max_restarts - left + 1
        then = f"; all ranks are started again (restart {restart} of {group.spec.max_restarts})" if left else ""
        self.tell_death(then, again)
        if left:
            self.death = None
        failures = {
            self._place_of(group, worker).global_rank: ProcessFailure(
                local_rank=worker.local_rank,
                pid=worker.process.pid,
                exitcode=worker.returncode or 0,
                error_file="<N/A>",
            )
            for worker in failed
        }
        return RunResult(WorkerState.FAILED, failures=failures)

    def tell_death(self, then: str = "", more: str = "") -> None:
        """Say what has failed, once, and what was done ``then``, if not that the others were ended."""
        if self.death is None or self._is_told:
            return
        death, then = self.death, f"{then or self._others_ended(self.death)}{more}"
        if death.returncode == SAID and self.options.passes_local_rank:
            then += "; --no-local-rank leaves out the --local_rank=N that DeepSpeed's launcher gives to scripts"
        ours = {self._place_of(self._worker_group, worker).global_rank for worker in self.workers}
        mine = death.host != self.host if death.rank < 0 else death.rank in ours
        # Nodes that were started by hand have terminals of their own; others share one output.
        if mine or not (self.labelled or find_task(os.environ)):
            say(death.sentence(f"{then}{self.notice.told}"))
            self._note_death(death)
        self._is_told = True

    def _others_ended(self, death: Death) -> str:
        """What became of the others."""
        if death.rank < 0:
            return "; all ranks were ended"
        here = {self._place_of(self._worker_group, worker).global_rank: worker for worker in self.workers}
        there = (self.members and self.members.ranks) or {*range(death.world_size)}
        there -= {death.rank, *(rank for rank, worker in here.items() if worker.local_rank in self._without)}
        killed = {rank: here[rank].returncode or 0 for rank in there & {*here} if here[rank].was_killed}
        return others_told(len(there), killed, "all others were ended" if death.lost else "")


STARTED = time.strftime("%Y%m%d%H%M%S")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def log_folder(options: Options) -> Path:
    """Return the folder that this job's files go to, one that is new."""
    if options.enable_each_rank_log:
        folder = Path(options.enable_each_rank_log)
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"--enable-each-rank-log {folder} is a file: give a folder.")
        return folder
    if options.redirects == "0" and options.tee == "0":
        return Path()
    base = Path(options.log_dir) if options.log_dir else None
    if base is not None:
        try:
            base.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--log-dir {base} cannot be made: {error.strerror}.") from None
    return Path(tempfile.mkdtemp(prefix=f"{options.rdzv_id}_", dir=base))


def share_of_cores(listed: str | None, local_rank: int, count: int) -> list[int]:
    """Return the cores of one rank of ``count``: equal shares of neighbours."""
    cores = sorted(os.sched_getaffinity(0)) if listed is None else hosts.parse_cores(listed)
    absent = set(cores) - os.sched_getaffinity(0)
    if absent:
        raise ConfigError(f"--bind-core-list names core {min(absent)}, which this process may not use.")
    share = len(cores) // count
    if not share:
        raise ConfigError(
            f"{count} ranks cannot have a core each of {len(cores)}: start fewer, or leave out the binding."
        )
    return cores[share * local_rank : share * (local_rank + 1)]


def num_procs(wanted: str | None, chatty: bool) -> int:
    """Return how many ranks this machine gets."""
    if wanted is not None and wanted.isdecimal():
        return int(wanted)
    gpus = accelerator.count(accelerator.found())
    if wanted == "gpu" and not gpus:
        raise ConfigError("--nproc-per-node gpu: there is no GPU that this process sees; give a number, or cpu.")
    if wanted == "cpu" or (wanted == "auto" and not gpus):
        return num_cores()
    if wanted is None and not gpus and chatty:
        say("shardfold run: one process, as there is no GPU here (--nproc-per-node N starts more).")
    return gpus or 1


def run_node(node: Node, options: Options, command: list[str]) -> int:
    """Run the ranks of one node to their end and return the exit status.

    Args:
        node: as planned.
        options: as given.
        command: the script and its arguments.

    Raises:
        ConfigError: an option does not fit this machine, or the port is in use.
    """
    if "LOGLEVEL" not in os.environ:
        for logger in [
            name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")
        ]:
            logging.getLogger(logger).setLevel(logging.CRITICAL)  # what they tell is told here, in a sentence
    conf = dict(pair.strip().split("=", 1) for pair in options.rdzv_conf.split(",")) if options.rdzv_conf else {}
    name = options.rdzv_id if options.rdzv_id != "none" else scheduler_step(os.environ)
    meeting = meeting_of(node, node.name or host_name(), name, conf, Patience(options.patience))
    count = num_procs(node.procs, options.chatty)
    spec = WorkerSpec(
        role=options.role,
        local_world_size=count,
        rdzv_handler=meeting,
        entrypoint=command[0],
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
    )
    agent = Agent(spec, meeting, node, options, command)
    if options.chatty and (options.redirects != "0" or options.tee != "0"):
        say(f"shardfold run: logs are in {agent.logs}")
    with signals(options.signals_to_handle, agent.notice), pid_file(options.save_pid):
        try:
            agent.run()
        except SignalException as stopped:
            agent.tell_death()
            if node.nodes[1] > 1:
                with suppress(RendezvousError):
                    if agent.death is None:
                        meeting.tell(Death(-1, 0, agent.host, -stopped.sigval, at=time.time()))
                    meeting.tell_no_more()
                    meeting.leave()
                    meeting.let_leave(LEAVE)
            if agent.death is None:
                return exit_status(-stopped.sigval)
        except RendezvousError as error:
            say(f"Error: host {agent.host} waited for the other nodes in vain: {error}.")
            return 1
        finally:
            end_all(agent.workers, signal.SIGKILL, 0.0)
            agent.leftovers.end(0.0)
            agent.leftovers.close()
            meeting.shutdown()
    if agent.death is not None:
        return exit_status(agent.death.returncode) or 1
    return exit_status(-agent.notice.number) if agent.notice.number is not None else 0


@contextmanager
def signals(names: str, notice: Notice) -> Iterator[None]:
    """Raise torch's exception at the first of these signals that is no notice; the agent forwards it. One more ends the
    waiting. SIGUSR1 is one of them where there is notice, and then never more than that."""
    before: Mapping[int, Any] = {}
    try:
        numbers = [signal.Signals[name.strip()] for name in names.split(",")]
        numbers += [signal.SIGUSR1] * (notice.seconds is not None and signal.SIGUSR1 not in numbers)
    except KeyError as error:
        raise ConfigError(f"--signals-to-handle {names}: there is no signal {error}.") from None
    before = {number: signal.signal(number, notice.hear) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def pid_file(wanted: bool) -> Iterator[None]:
    path = Path(tempfile.gettempdir(), f"{os.getpid()}.deepspeed")
    if wanted:
        # Everybody may write into that folder: what is there already may be somebody else's link to a file of ours.
        with suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                path.unlink()
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except OSError as error:
            raise ConfigError(f"--save-pid: {path} cannot be made: {error.strerror}.") from None
        with open(fd, "w") as file:
            file.write(str(os.getpid()))
    try:
        yield
    finally:
        if wanted:
            path.unlink(missing_ok=True)
