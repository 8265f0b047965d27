"""Trainings on several hosts, as network namespaces, of which some are cut off while they run: no process is killed.

python -m tests.launch.partitions 3             # each host and each cut of so many: how long until the others go on
python -m tests.launch.partitions 5 c10d
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from pathlib import Path
from threading import Event
from typing import Any

import torch

import shardfold as sf
from shardfold.checkpoint import save
from shardfold.checkpoint.files import write_file
from shardfold.launch.namespaces import INTERFACE, Namespaces
from shardfold.launch.options import Options
from shardfold.launch.run_script import run as run_script
from tests.chaos.judge import ask_where, busy, read_log, tree
from tests.chaos.warm import begin
from tests.launch.survivors import LIMIT, TOLERANCE, Plan, loss_of, made, plain, sampler, samples, warm

MARGIN, ON = 3.0, 2.0
"""Seconds behind the patience, within which a host that is cut off has ended; and within which the others go on."""


@dataclass(frozen=True)
class Parted:
    """
    Attributes:
        hosts: with a rank each.
        away: those that are cut off from the rest; they reach each other.
        behind: which step of rank 0.
        heals: seconds until they reach the others again; None: they do not.
        frozen: whether their processes stand still meanwhile, instead.
        leaves: whether their ranks end with status 0, instead.
        killed: a rank that is killed before, behind the first step; -1: none.
        backend: how hosts meet.
        patience: of the launchers.
        steps: updates of the run.
        layout, survive: of the states.
        saves: whether each is waited for, or is ``beside`` the training; ``unwritten``, ``unwritten beside``: amid one
            whose files the disks do not take, of those who are cut off and of the last of the others.
    """

    hosts: int = 3
    away: tuple[int, ...] = (0,)
    behind: int = 3
    heals: float | None = None
    frozen: bool = False
    leaves: bool = False
    killed: int = -1
    backend: str = "static"
    patience: float = 3.0
    steps: int = 10
    layout: str = "ddp"
    survive: str | None = None
    saves: str = "beside"

    @property
    def small(self) -> set[int]:
        """The hosts of the side that is no majority."""
        there = set(range(self.hosts)) - set(self.away)
        return set(self.away) if len(there) > self.hosts // 2 else there

    @property
    def stuck(self) -> set[int]:
        """Whose disk takes nothing."""
        return {*self.away, max({*range(self.hosts)} - {*self.away})} if "unwritten" in self.saves else set()

    @property
    def mends(self) -> bool:
        """Whether it is over before anybody gives anybody up."""
        return self.heals is not None and self.heals < 0.75 * self.patience

    @property
    def plan(self) -> Plan:
        """The training."""
        return Plan(self.layout, self.hosts, self.steps, (), survive=self.survive)


@dataclass
class Found:
    """What a run came to.

    Attributes:
        ends: of each launcher: its status, None if it had to be ended, and seconds behind the cut.
        log: what ranks have said, by time.
        errs: what each launcher wrote.
        cut: when, by the clock of the log.
        named: what ``latest`` named, each time that it was another one, and when.
    """

    ends: dict[int, tuple[int | None, float]]
    log: list[dict[str, Any]]
    errs: list[str]
    cut: float
    named: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])

    def said(self, what: str, **more: object) -> list[dict[str, Any]]:
        return [each for each in self.log if each["what"] == what and more.items() <= each.items()]


def work(case: Parted, folder: Path, environment: Any) -> None:
    """Of one rank, to its end: it saves behind each step."""
    uid, log = int(environment["RANK"]), os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(what: str, **more: object) -> None:
        line = {"what": what, "rank": uid, "at": time.monotonic(), **more}
        os.write(log, (json.dumps(line) + "\n").encode())

    torch.set_num_threads(1)
    plan, known = case.plan, 0
    if uid in case.stuck:
        save.write_file = partial(unwritten, say, uid not in case.away)
    run = sf.ElasticRun(partial(made, plan))
    for _, rows in run.batches(sf.Loader(samples(plan), sampler(plan, uid)), steps=plan.steps):
        with run.attempt() as engine:
            engine.backward(loss_of(engine, rows))
            if engine.step().updated:
                say("step", steps=engine.steps, ranks=engine.world_size)
                engine.save(folder / "run" / f"step-{engine.steps}", wait="beside" not in case.saves, keep=2)
        for recovery in run.recoveries[known:]:
            say("recovery", **recovery._asdict())
        known = len(run.recoveries)
        if case.killed == uid:
            os.kill(os.getpid(), signal.SIGKILL)
        if case.leaves and uid in case.away and run.engine.steps >= case.behind:
            os._exit(0)
        time.sleep(0.1)
    weights = run.engine.state_dict()
    if run.engine.rank == 0:
        torch.save(weights, folder / "weights")
    run.close()
    say("done")


def unwritten(say: Callable[[str], None], once: bool, path: Path, parts: Any, tick: Callable[[int], None]) -> Any:
    """Of a save: a disk that takes no byte, for as long as the process lives, or until nobody is to write there."""
    say("writes")
    if not once:
        Event().wait()
    save.write_file = write_file
    while True:
        tick(0)
        time.sleep(0.01)


class Partition:
    """The launchers of a case, from their begin to the end of the last one."""

    def __init__(self, case: Parted, links: Namespaces, folder: Path) -> None:
        self.case, self.links, self.folder = case, links, folder
        self.pids: list[int] = []
        self.named: list[tuple[float, int]] = []

    def run(self) -> Found:
        case, folder = self.case, self.folder
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDFOLD_RUN", "SHARDFOLD_FOLLOWS")
        around = {name: value for name, value in os.environ.items() if name not in names}
        around |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        errs = [folder / f"err-{node}" for node in range(case.hosts)]
        given = partial(work, case, folder)
        for node, (space, err) in enumerate(zip(self.links.spaces, errs, strict=True)):
            self.pids.append(begin(partial(self._launch, node), given, around, folder / "out", err, space))
        ends, cut = self._watch()
        texts = [err.read_text(errors="replace") for err in errs]
        return Found(ends, read_log(folder), texts, cut, self.named)

    def _launch(self, node: int) -> int:
        os.chdir(self.folder)
        case, first = self.case, Namespaces.address(0)
        given: dict[str, Any] = {"nnodes": f"{case.hosts}", "nproc_per_node": "1", "patience": case.patience}
        if case.backend == "static":
            given |= {"node_rank": node, "master_addr": first, "master_port": 29500}
        else:
            given |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"{first}:29500"}
        return run_script(Options(no_python=True, **given), "partitions", [])

    def _watch(self) -> tuple[dict[int, tuple[int | None, float]], float]:
        """Until each launcher has ended."""
        case, ends, waiting = self.case, dict[int, tuple[int | None, float]](), dict(enumerate(self.pids))
        deadline, cut, heals = time.monotonic() + LIMIT, 0.0, float("inf")
        while waiting and time.monotonic() < deadline:
            for node, pid in list(waiting.items()):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ends[node] = os.waitstatus_to_exitcode(status), time.monotonic() - cut
                    del waiting[node]
            if not cut and self._is_time():
                self._cut()
                cut = time.monotonic()
                heals = float("inf") if case.heals is None else cut + case.heals
            if time.monotonic() >= heals:
                heals = float("inf")
                self._heal()
            self._look()
            time.sleep(0.005)
        ask_where(waiting.values())
        for node, pid in waiting.items():
            ends[node] = None, time.monotonic() - cut
            for each in tree(pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            os.waitpid(pid, 0)
        return ends, cut

    def _is_time(self) -> bool:
        case = self.case
        try:
            log = read_log(self.folder)
        except ValueError:  # a line is being written
            return False
        if "unwritten" in case.saves:
            return {each["rank"] for each in log if each["what"] == "writes"} == case.stuck
        return any(each["what"] == "step" and each["steps"] >= case.behind for each in log)

    def _cut(self) -> None:
        if self.case.leaves:
            return
        if self.case.frozen:
            self._send(signal.SIGSTOP)
        else:
            self.links.part(self.case.away)

    def _heal(self) -> None:
        if self.case.frozen:
            self._send(signal.SIGCONT)
        else:
            self.links.rejoin(self.case.away)

    def _send(self, number: int) -> None:
        for node in self.case.away:
            for pid in [*tree(self.pids[node])]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _look(self) -> None:
        """At what ``latest`` names."""
        with suppress(OSError, ValueError):
            step = int((self.folder / "run" / "latest").read_text().removeprefix("step-"))
            if not self.named or self.named[-1][1] != step:
                self.named.append((time.monotonic(), step))


def wrong(case: Parted, found: Found, folder: Path) -> Iterator[str]:
    """What is not as it has to be."""
    if case.leaves:
        yield from unnamed(case, found)
        return
    small = set[int]() if case.mends else case.small
    large = [node for node in range(case.hosts) if node not in small]
    if {found.ends[node][0] for node in large} != {0}:
        yield f"launchers end with {found.ends}: {[err[-1500:] for err in found.errs]}"
        return
    for node in small:
        if unsaid := [other for other in large if f"-{node} is lost, with rank {node};" not in found.errs[other]]:
            yield f"launchers of nodes {unsaid} do not say that the host of node {node} is lost"
        status, behind = found.ends[node]
        last = found.errs[node].splitlines()[-1]
        told = "not answer any more, so no more than half of the hosts are reachable from here" in last
        if case.heals is None and not (told and any(f"-{other}" in last for other in large)):
            yield f"the launcher of node {node} does not say that it is cut off, and from whom: {last}"
        if not status:
            yield f"the launcher of node {node}, which is cut off, ends with {status}"
        if behind > (case.patience + MARGIN) * busy() and not case.frozen:
            yield f"the launcher of node {node} ended {behind:.1f} s behind the cut: {found.errs[node][-300:]}"
    began = min((each["at"] for each in found.said("recovery")), default=float("inf"))
    if case.mends and began < float("inf"):
        yield "somebody was given up"
    if began < float("inf") and (behind := went_on(found)) > (case.patience + ON) * busy():
        yield f"the others went on {behind:.1f} s behind the cut"
    if late := [each for each in found.said("step") if each["rank"] in small and each["at"] > began]:
        yield f"ranks that were cut off went on: {late}"
    steps = [step for _, step in found.named]
    if steps != sorted(steps) or not steps or steps[-1] != case.steps:
        yield f"latest named steps {steps}"
    expected, weights = plain(case.plan).weights, torch.load(folder / "weights")
    far = max(float((weights[name] - value).abs().max()) for name, value in expected.items())
    if far > TOLERANCE:
        yield f"weights are {far} from plain PyTorch's"


def unnamed(case: Parted, found: Found) -> Iterator[str]:
    """What is not as it has to be where a rank ends with status 0 amid the run."""
    (node,) = case.away
    for other, (status, behind) in found.ends.items():
        if not status or f"Error: rank {node} on host " not in found.errs[other].splitlines()[-1]:
            yield f"the launcher of node {other} ends with {status}: {found.errs[other][-1500:]}"
        if behind > 1.5 * case.patience:  # they wait twice as long until they give up by themselves
            yield f"the launcher of node {other} ended {behind:.1f} s later"


def went_on(found: Found) -> float:
    """Seconds from the cut to the next step that is taken."""
    epoch = min(each["at"] for each in found.said("recovery"))
    return min(each["at"] for each in found.said("step") if each["at"] > epoch) - found.cut


def judged(case: Parted, place: str) -> tuple[Found, list[str]]:
    """Runs a case in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir=place))
    links = Namespaces(case.hosts)
    try:
        found = Partition(case, links, folder).run()
    finally:
        links.close()
    return found, [*wrong(case, found, folder)]


def held(cases: list[Parted], place: str) -> list[str]:
    """What is not as it has to be."""
    return [f"{case}: {words}" for case in cases for words in judged(case, place)[1]]


def cuts(hosts: int) -> list[tuple[int, ...]]:
    """Each side that may be cut off and is no majority."""
    few = range(1, (hosts - 1) // 2 + 1)
    return [away for size in few for away in combinations(range(hosts), size)]


def figures(hosts: int, backend: str, place: str, given: list[tuple[int, ...]] | None = None) -> None:
    """Each cut of so many hosts, one behind the other."""
    took, ended = list[float](), list[float]()
    for away in given or cuts(hosts):
        case = Parted(hosts, away, backend=backend)
        found, bad = judged(case, place)
        for each in bad:
            print("WRONG", case, each, flush=True)
        if not bad:
            took.append(went_on(found))
            ended += [found.ends[node][1] for node in away]
            first = found.said("recovery")[0]
            parts = " ".join(f"{name} {first[name]:.2f}" for name in ("agreed", "met", "moved"))
            print(f"{away} cut off: on behind {took[-1]:.2f} s ({parts}), ended {ended[-len(away) :]}", flush=True)
    if not took:
        return
    print(f"{hosts} hosts, {backend}, {len(took)} cuts, patience {Parted.patience}; seconds: median, max")
    for name, values in (("to the next step of the others", took), ("until who is cut off has ended", ended)):
        print(f"  {name:<35}{statistics.median(values):>8.2f}{max(values):>8.2f}")


if __name__ == "__main__":
    warm()
    with tempfile.TemporaryDirectory() as place:
        figures(int(sys.argv[1]), "".join(sys.argv[2:]) or "static", place)
