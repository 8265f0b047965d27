"""Three hosts, as network namespaces, of which one gets slow, or its link: what steps say of it, and what they move.

python -m tests.launch.slow_rank named 10      # ten faults of each kind: who is named, by what, behind how many steps
python -m tests.launch.slow_rank moved 5       # one host gets half as fast, five times: how long steps take then

What ranks compute is a sleep, so they do not compete for the cores of this machine; where a quota is to stop them they
compute, in turns. What else this machine does comes behind them, and each counts as alone on its cores, as on hosts of
their own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardfold as sf
from shardfold.comm import cores
from shardfold.engine.pace import RECORD
from shardfold.launch.namespaces import INTERFACE, Namespaces
from shardfold.launch.options import Options
from shardfold.launch.run_script import run as run_script
from tests.chaos.judge import ask_where, read_log, take_away
from tests.chaos.warm import begin
from tests.launch.survivors import warm

HOSTS, WIDTH, SEED = 3, 256, 3
KINDS = ("computation", "data", "link")
"""What gets slow."""
QUOTAS = {"quota": (0.4, 0.1, 0.37), "quick quota": (0.4, 0.005, 0.5), "quota of short steps": (0.02, 0.1, 0.23)}
"""Or a control group lets a rank compute in a part of each period: seconds of a step and of a period, and that part."""
GROUPS = Path("/sys/fs/cgroup/cpu")
COMPUTING = 0.3
"""How much of a step computes where a quota is to act: less than a rank's share of two cores."""
STEP, MORE = 0.4, 0.3
"""Seconds of a step, and by how much of it one gets longer."""
RATE = "78mbit"
"""Of a link, over which a step sends 1.4 MB in each direction: so that a step takes 1.3 times as long."""
SOON = 8
"""Records within which a fault is to be known: steps, or as many short ones as are told of together."""
FIRST, EVERY, LASTS = 240, 40, 14
"""Records in front of the first fault, from one to the next, and of each."""
VIRTUAL, ROWS, EACH = 15, 16, 0.008
"""Where work moves: micro-batches of a step, rows of one, and seconds of a row."""
VICTIM, FROM, STEPS = 1, 32, 76


class Sleeper(nn.Module):
    """Takes its time."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).double()
        self.seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return self.body(x)


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)  # pyright: ignore[reportArgumentType]


def victim_of(record: int, count: int) -> int | None:
    """The host that is slow in a record, of so many faults; None: none is."""
    number, since = divmod(record - FIRST, EVERY)
    return number % HOSTS if 0 <= number < count and since < LASTS else None


class Turns(Sleeper):
    """Computes a part of its time, when its turn comes, and may be stopped by a quota."""

    def __init__(self, group: Path, rank: int, step: float, period: float) -> None:
        super().__init__(WIDTH)
        self.group, self.rank, self.seconds = group, rank, step
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text(f"{period * 1e6:.0f}")
        (group / "cpu.shares").write_text("262144")  # the most: other work of the machine comes behind it
        (group / "cgroup.procs").write_text(f"{os.getpid()}")
        os.sched_setaffinity(0, [cores.allowed()[rank % len(cores.allowed())]])

    def limit(self, microseconds: int) -> None:
        """Of each period; -1: no more."""
        (self.group / "cpu.cfs_quota_us").write_text(f"{microseconds}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.seconds * self.rank / HOSTS
        time.sleep(early)
        end = time.thread_time() + self.seconds * COMPUTING
        while time.thread_time() < end:
            pass
        time.sleep(self.seconds * (1 - COMPUTING) - early)
        return self.body(x)


def steady(case: Slowed, group: Path, say: Callable[..., None], rank: int) -> None:
    """A rank that is told of by steps, some of which take longer."""
    turns = Turns(group, rank, case.step, case.quota[0]) if case.quota else None
    model = turns or Sleeper(WIDTH)
    engine = sf.Engine(model, optimizer=sgd, layout="ddp")
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    for step in range((FIRST + case.count * EVERY) * case.record):
        late, was = (victim_of(at // case.record, case.count) == rank for at in (step, step - 1))
        if turns is None:
            more = MORE * STEP * late
            model.seconds = STEP + more * (case.kind == "computation")
            time.sleep(more * (case.kind == "data"))
        elif late != was:
            turns.limit(round(1e6 * case.quota[0] * case.quota[1]) if late else -1)
        engine.backward(engine(x).square().mean())
        found = engine.step().straggler
        said = None if found is None else [found.rank, found.host, found.kind, round(found.factor, 3)]
        say("step", steps=step + 1, straggler=said)
    engine.close()


def samples() -> torch.Tensor:
    return torch.randn(4000, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def sampler(rank: int) -> sf.Sampler:
    return sf.Sampler(4000, ROWS, seed=SEED, rank=rank, num_ranks=VIRTUAL, fill_last=True)


def plain() -> list[float]:
    """Losses in one process, without an engine."""
    model, rows, found = Sleeper(), samples(), list[float]()
    optimizer = sgd(model.parameters())
    virtual = [sampler(rank) for rank in range(VIRTUAL)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses: list[float] = []
        for each in virtual:
            x = rows[next(iter(each.batches()))]
            each.advance()
            loss = (model(x) - x).square().mean()
            (loss / VIRTUAL).backward()
            losses.append(loss.item())
        optimizer.step()
        found.append(statistics.fmean(losses))
    return found


def relieved(say: Callable[..., None], rank: int) -> None:
    """A rank of a run in which one is half as fast from a step on."""
    run = sf.ElasticRun(lambda ranks: sf.Engine(Sleeper(), optimizer=sgd, layout="ddp"))
    total, count, began, mine = 0.0, 0.0, time.perf_counter(), 0
    for x in run.batches(sf.Loader(samples(), sampler(rank)), steps=STEPS):
        with run.attempt() as engine:
            weight = engine.micro_batch_weight
            engine.module.seconds = EACH * len(x) * (2 if rank == VICTIM and engine.steps >= FROM else 1)
            loss = (engine(x) - x).square().mean()
            engine.backward(loss)
            total += loss.item() * (1.0 if weight is None else weight)
            count += 1.0 if weight is None else weight
            mine += weight != 0
            if engine.step().updated:
                loss = engine.mean(total / max(count, 1), weight=count)
                say("step", steps=engine.steps, loss=loss, seconds=time.perf_counter() - began, passes=mine)
                total, count, began, mine = 0.0, 0.0, time.perf_counter(), 0
    run.close()


@dataclass(frozen=True)
class Slowed:
    """
    Attributes:
        kind: of ``KINDS`` or ``QUOTAS``; ``moves``: micro-batches do.
        count: of faults.
    """

    kind: str
    count: int = 1

    @property
    def step(self) -> float:
        """Seconds of one."""
        return QUOTAS[self.kind][0] if self.quota else STEP

    @property
    def quota(self) -> tuple[float, ...]:
        """Seconds of a period, and the part of it; empty: there is none."""
        return QUOTAS.get(self.kind, ())[1:]

    @property
    def record(self) -> int:
        """Steps that are told of together."""
        return max(1, ceil(RECORD / self.step))

    def work(self, folder: Path, environment: Any) -> None:
        """Of one rank, to its end."""
        rank, log = int(environment["RANK"]), os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

        def say(what: str, **more: object) -> None:
            line = {"what": what, "rank": rank, "at": time.monotonic(), **more}
            os.write(log, (json.dumps(line) + "\n").encode())

        torch.set_num_threads(1)
        cores.machine = socket.gethostname
        if not self.quota:  # which does not act on what is scheduled in real time
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        if self.kind == "moves":
            relieved(say, rank)
        else:
            steady(self, group_of(folder, rank), say, rank)


def group_of(folder: Path, rank: int) -> Path:
    """The control group of a rank."""
    return GROUPS / f"shardfold-slow-{folder.name}-{rank}"


class SlowHosts:
    """A run, whose links are slowed from outside."""

    def __init__(self, case: Slowed, folder: Path) -> None:
        self.case, self.folder, self.links = case, folder, Namespaces(HOSTS)

    def run(self) -> list[dict[str, Any]]:
        """What ranks have said, by time."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDFOLD_RUN", "SHARDFOLD_FOLLOWS")
        around = {name: value for name, value in os.environ.items() if name not in names}
        around |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        given, err = partial(self.case.work, self.folder), self.folder / "err"
        pids = [
            begin(partial(self._launch, node), given, around, self.folder / "out", err, space)
            for node, space in enumerate(self.links.spaces)
        ]
        try:
            ends = self._watch(pids)
        finally:
            self.links.close()
            for rank in range(HOSTS):
                take_away(group_of(self.folder, rank))
        assert ends == [0] * HOSTS, err.read_text(errors="replace")[-3000:]
        return read_log(self.folder)

    def _launch(self, node: int) -> int:
        os.chdir(self.folder)
        given: dict[str, Any] = {"nnodes": f"{HOSTS}", "nproc_per_node": "1", "no_python": True, "node_rank": node}
        return run_script(Options(master_addr=Namespaces.address(0), master_port=29500, **given), "slow_rank", [])

    def _watch(self, pids: list[int]) -> list[int]:
        """Until each launcher has ended."""
        ends, slow = dict[int, int](), None
        deadline = time.monotonic() + 120 + 2 * self.case.step * self.case.record * (FIRST + EVERY * self.case.count)
        while len(ends) < len(pids):
            for node, pid in enumerate(pids):
                if node not in ends and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    ends[node] = os.waitstatus_to_exitcode(ended[1])
            if self.case.kind == "link" and (now := victim_of(self._steps(), self.case.count)) != slow:
                for node, rate in ((slow, None), (now, RATE)):
                    if node is not None:
                        self.links.limit(rate, node)
                slow = now
            if time.monotonic() > deadline:
                there = [pid for node, pid in enumerate(pids) if node not in ends]
                ask_where(there)
                for pid in there:
                    os.kill(pid, signal.SIGKILL)
                raise TimeoutError(f"{self.case} is not over")
            time.sleep(0.005)
        return [ends[node] for node in range(len(pids))]

    def _steps(self) -> int:
        """Those that rank 0 has said to have done."""
        with suppress(ValueError, OSError):  # a line is being written
            return max((each["steps"] for each in read_log(self.folder) if each["what"] == "step"), default=0)
        return 0


def found_in(case: Slowed, log: list[dict[str, Any]], hosts: list[str]) -> Iterator[tuple[int | None, Any, bool]]:
    """Of each fault behind how many records somebody was named (None: nobody), what was said, and whether it is so.
    Whose link is slow is known one step after that one is."""
    steps = {each["steps"]: each["straggler"] for each in log if each["what"] == "step" and each["rank"] == 0}
    for number in range(case.count):
        first = (FIRST + number * EVERY) * case.record
        named = [
            (step - first, steps[step]) for step in range(first + 1, first + (LASTS + 9) * case.record) if steps[step]
        ]
        if len(named) < 2:
            yield None, None, False
            continue
        (behind, said), victim = named[case.kind == "link"], number % HOSTS
        kind = "computation" if case.quota else case.kind
        right = [None if kind == "link" else victim, hosts[victim], kind]
        yield ceil(behind / case.record), said, said[:3] == right


def innocent(case: Slowed, log: list[dict[str, Any]]) -> list[Any]:
    """What was said while nobody was slow, and of nobody who had been."""
    said = [each for each in log if each["what"] == "step" and each["rank"] == 0 and each["straggler"]]
    records = [((each["steps"] - 1) // case.record, each) for each in said]
    return [each for record, each in records if record < FIRST or (record - FIRST) % EVERY >= LASTS + 20]


def longer(case: Slowed, log: list[dict[str, Any]]) -> list[float]:
    """How many times as long steps of each fault are as those in front of it."""
    ends = {each["steps"]: each["at"] for each in log if each["what"] == "step" and each["rank"] == 0}

    def seconds(first: int, last: int) -> float:
        return ends[last * case.record] - ends[first * case.record]

    faults = range(FIRST, FIRST + case.count * EVERY, EVERY)
    return [seconds(at, at + LASTS) / seconds(at - LASTS, at) for at in faults]


def judged(case: Slowed, place: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What ranks have said, in a folder of its own, and the names of the hosts."""
    hosts = SlowHosts(case, Path(tempfile.mkdtemp(dir=place)))
    return hosts.run(), hosts.links.spaces


def pace_of(log: list[dict[str, Any]]) -> tuple[float, list[int]]:
    """From the 20th step with a slow rank on: how much of the pace that ranks could have they have; and their
    micro-batches."""
    last = [each["seconds"] for each in log if each["what"] == "step" and each["steps"] > FROM + 20]
    passes = {each["rank"]: each["passes"] for each in log if each["what"] == "step"}
    return VIRTUAL * ROWS * EACH / 2.5 / statistics.median(last), [passes[rank] for rank in range(HOSTS)]


def apart(log: list[dict[str, Any]], losses: list[float]) -> float:
    """How far losses of steps are from those of plain PyTorch."""
    return max(abs(each["loss"] - losses[each["steps"] - 1]) for each in log if each["what"] == "step")


def main(what: str, count: int, kinds: tuple[str, ...], place: str) -> None:
    warm()
    for kind in kinds if what == "named" else ():
        case = Slowed(kind, count)
        log, hosts = judged(case, place)
        each = [*found_in(case, log, hosts)]
        behind = [steps for steps, _, right in each if right and steps is not None]
        took = f"median {statistics.median(behind)}, most {max(behind)}" if behind else ""
        print(f"{kind}: {len(behind)} of {count} named as it is, behind records: {behind} {took}", flush=True)
        print(f"  steps are {', '.join(f'{factor:.2f}' for factor in longer(case, log))} times as long")
        print(*(said for _, said, _ in each), f"otherwise named: {innocent(case, log)}", sep="\n  ", flush=True)
    losses = plain() if what == "moved" else []
    for _ in range(count if what == "moved" else 0):
        log, _ = judged(Slowed("moves"), place)
        part, passes = pace_of(log)
        print(f"{part:.2f} of the ideal; micro-batches {passes}; losses {apart(log, losses):.1e} apart", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(sys.argv[1], int(sys.argv[2]), tuple(sys.argv[3:]) or (*KINDS, *QUOTAS), place)
