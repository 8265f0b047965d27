"""Trainings whose ranks are killed from outside while they run, and what they came to.

python -m tests.launch.survivors ddp 3 50        # 50 kills under a layout on so many ranks: how long until a next step
python -m tests.launch.survivors zero1 3 50 spare   # with one that waits; joined: until one that was started joins
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import shardfold as sf
from shardfold.checkpoint import Checkpoint
from shardfold.comm.agreement import Agreement
from shardfold.comm.launcher_notes import SPARE, note_elastic
from shardfold.comm.shared_folders import NAMED, SHARED
from shardfold.data import seed_of
from shardfold.engine import _spare
from shardfold.engine.handlers import Handlers
from shardfold.engine.track import Section
from shardfold.errors import CheckpointError, CollectiveError
from shardfold.launch import free_port
from shardfold.launch.options import Options
from shardfold.launch.run_script import run as run_script
from tests.chaos.judge import ask_where, read_log, tree
from tests.chaos.warm import begin

ROWS, SAMPLES = 24, 100
"""Of a global batch, which divides by 1 to 4, and of an epoch, which it does not divide."""
LIMIT = 60.0
"""Seconds that a run may take at all, on a busy machine."""
TOLERANCE = 1e-9
"""Between losses and weights in fp64, over some tens of steps: sums in another order differ by 1e-15 of their terms,
and an update is a gradient over at least 1e-4."""


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        layout: a preset's name.
        ranks: how many begin.
        steps: updates of the run.
        kills: whom, behind which of its steps, and how many milliseconds later; -1 - n: the launcher of node
            n, behind that of rank 0; one that is new, behind that of any rank.
        spares: that wait on each host.
        replace: processes that each launcher may start in the place of those that are killed.
        dropout: of the model, which draws random numbers for it.
        accumulate: global batches of a step.
        deadly: a sample that kills who reads it; -1: none.
        rest: seconds between two steps.
        hosts: launchers, among which the ranks are shared out.
        patience: of the launchers.
        width: of the model.
        survive: who holds copies of what the optimizer has on each rank.
        at: an operation of the program in front of which the first of those dies by itself, in the step behind the one
            that is given; or amid: in what ranks do together then; whole: behind it; mean: behind that many steps,
            taken or skipped, and the next, in front of a mean over ranks; empty: it is killed from outside.
        offload: where states rest, as ``Engine(offload=)`` takes it; empty: as the layout says.
        frozen: whether the first part of the model is.
        doubts: a rank that does not hear what came of the vote in that step, which others do; -1: none.
        exact: whether the run is to come to the bits of one in which nobody dies, and is then in fp32.
        precision: of such a run, and ``clip`` the largest norm of its gradients.
        overflow: behind how many steps one comes, in fp16, whose gradients overflow; -1: none does.
        other: the plan that processes have which are started later; None: the same.
        wholes: whether ranks do something together behind each step.
        full: whether they save in it, and the last rank finds no room for that behind every second step.
        alone: behind which step rank 0 finds no checkpoint in it, while the others go on in it; -1: behind none.
        deaf: a rank that does not hear that all have come to the end of it, behind the first kill's step, and has
            notice of an end just then; -1: none.
    """

    layout: str = "ddp"
    ranks: int = 3
    steps: int = 12
    kills: tuple[tuple[int, int, float], ...] = ((1, 4, 0.0),)
    dropout: float = 0.25
    accumulate: int = 1
    deadly: int = -1
    rest: float = 0.0
    hosts: int = 1
    patience: float = 10.0
    width: int = 16
    survive: str | None = None
    at: str = ""
    offload: str = ""
    frozen: bool = False
    doubts: int = -1
    spares: int = 0
    replace: int = 0
    exact: bool = False
    precision: str = "fp32"
    clip: float | None = None
    overflow: int = -1
    other: Plan | None = None
    wholes: bool = False
    full: bool = False
    deaf: int = -1
    alone: int = -1


@dataclass
class Came:
    """What a run came to.

    Attributes:
        status: of its launchers, by host.
        log: what ranks have said, by time.
        err: what was written.
        killed: when, by the clock of the log.
    """

    status: list[int]
    log: list[dict[str, Any]]
    err: str
    killed: list[float] = field(default_factory=list[float])

    def said(self, what: str, **more: object) -> list[dict[str, Any]]:
        return [each for each in self.log if each["what"] == what and more.items() <= each.items()]


def model(plan: Plan) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(plan.width, plan.width), nn.GELU(), nn.Dropout(plan.dropout)) for _ in range(3)]
    parts[0].requires_grad_(not plan.frozen)
    whole = nn.Sequential(*parts, nn.BatchNorm1d(plan.width, affine=False, momentum=0.0))
    return whole if plan.exact else whole.double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def schedule(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)


def samples(plan: Plan) -> TensorDataset:
    """Numbered rows."""
    rows = torch.randn(SAMPLES, plan.width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(torch.arange(SAMPLES), rows.float() if plan.exact else rows)


def sampler(plan: Plan, rank: int) -> sf.Sampler:
    """Of a virtual rank."""
    each = ROWS // plan.ranks
    return sf.Sampler(SAMPLES, each, seed=3, rank=rank % plan.ranks, num_ranks=plan.ranks, fill_last=True)


def loss_of(module: Any, rows: torch.Tensor) -> torch.Tensor:
    return (module(rows) - rows).square().mean()


def made(plan: Plan, ranks: int) -> sf.Engine:
    module = model(plan)
    module[-1].eval()  # its statistics are no average over a batch that is cut
    mesh = None
    if plan.layout == "hsdp":
        intra = 2 if ranks % 2 == 0 else 1
        mesh = {"inter": ranks // intra, "intra": intra}
    return sf.Engine(
        module,
        optimizer=adamw,
        layout=plan.layout,
        offload=plan.offload or None,
        lr_schedule=schedule,
        parallel=mesh,
        accumulate=plan.accumulate,
        precision=plan.precision,
        clip_norm=plan.clip,
        loss_scale=sf.LossScale(initial=1024.0, interval=3) if plan.overflow >= 0 else None,
        runtime=sf.Runtime(survive=plan.survive, exact=plan.exact),
    )


@dataclass
class Plain:
    """What plain PyTorch comes to: by step the samples in rising order and the loss, and the weights in the end."""

    samples: list[list[int]]
    losses: list[float]
    weights: dict[str, torch.Tensor]


def plain(plan: Plan) -> Plain:
    """In one process, of which each virtual rank is a part."""
    module, (_, rows) = model(plan), samples(plan).tensors
    module[-1].eval()
    optimizer = adamw(module.parameters())
    rates, found = schedule(optimizer), Plain([], [], {})
    ranks = [sampler(plan, rank) for rank in range(plan.ranks)]
    for _ in range(plan.steps):
        seen, losses = list[int](), list[float]()
        optimizer.zero_grad()
        place = (ranks[0].epoch, ranks[0].consumed)
        for number in range(plan.accumulate):
            for virtual, each in enumerate(ranks):
                torch.manual_seed(seed_of(3, *place, number, virtual))
                mine = next(iter(each.batches()))
                each.advance()
                loss = loss_of(module, rows[mine])
                (loss / (plan.accumulate * plan.ranks)).backward()
                losses.append(loss.item())
                seen += mine
        optimizer.step()
        rates.step()
        found.samples.append(sorted(seen))
        found.losses.append(statistics.fmean(losses))
    found.weights.update((name, value.detach()) for name, value in module.named_parameters())
    return found


def work(plan: Plan, folder: Path, environment: Mapping[str, str]) -> None:
    """Of one rank, to its end."""
    uid, log = int(environment["RANK"]), os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(what: str, **more: object) -> None:
        line = {"what": what, "rank": uid, "at": time.monotonic(), **more}
        os.write(log, (json.dumps(line) + "\n").encode())

    torch.set_num_threads(1)
    say("pid", pid=os.getpid())
    plan = (plan.other if SPARE in environment else None) or plan
    if uid == plan.doubts:
        Handlers.vote = partialmethod(unheard, Handlers.vote, plan)  # pyright: ignore
    if uid == plan.deaf:
        Agreement.exchange = partialmethod(unanswered, Agreement.exchange, plan)  # pyright: ignore
    _spare.note_elastic = lambda: (say("waits"), note_elastic())
    try:
        run, known = sf.ElasticRun(partial(made, plan)), 0
    except SystemExit:
        say("dismissed")
        raise

    def say_recoveries() -> int:
        """What this rank has gone through since it was said last; the epoch that it is in."""
        nonlocal known
        for recovery in run.recoveries[known:]:
            say("recovery", **recovery._asdict(), new=run.joined and not known)
        known = len(run.recoveries)
        return run.recoveries[-1].epoch if known else 0

    say_recoveries()
    behind = run.engine.steps  # the last thing that ranks have done together beside steps
    if plan.at and uid == plan.kills[0][0]:
        Section.observer = partial(die, run, plan)
    for numbers, rows in run.batches(sf.Loader(samples(plan), sampler(plan, uid)), steps=plan.steps):
        with run.attempt() as engine:
            if plan.deadly in numbers:
                os.kill(os.getpid(), signal.SIGKILL)
            loss, weight = loss_of(engine, rows), engine.micro_batch_weight
            read = {"samples": numbers.tolist(), "weight": 1.0 if weight is None else weight, "loss": loss.item()}
            say("read", steps=(turn := run.turns), epoch=say_recoveries(), **read)
            engine.backward(loss * 1e9 if turn == plan.overflow else loss)
            if engine.step().updated:
                say("step", steps=engine.steps, ranks=engine.world_size)
            if plan.overflow >= 0:
                if plan.at == "mean" and plan.kills[0][:2] == (uid, turn) and run.turns > turn:
                    os.kill(os.getpid(), signal.SIGKILL)
                engine.mean(loss.item())
        say_recoveries()
        if plan.wholes and run.engine.steps > behind:
            behind = run.engine.steps
            say("whole", steps=behind, value=came_of(run, plan, uid, folder))
            if plan.at == "whole" and plan.kills[0][:2] == (uid, behind):
                os.kill(os.getpid(), signal.SIGKILL)
        while len(find(folder, "waits")) < due(plan, run.engine.steps):
            time.sleep(0.005)
        time.sleep(plan.rest)
    say("left", noticed=run.engine.leaving)
    with run.engine.gathered(of="master"):
        pass
    weights = run.engine.state_dict()
    with run.engine.gathered(of="exp_avg") as means, run.engine.gathered(of="exp_avg_sq") as squares:
        moments = {f"{name} {n}": value for n, each in enumerate((means, squares)) for name, value in each.items()}
    if run.engine.rank == 0:
        torch.save(weights, folder / "weights")
        torch.save(moments, folder / "moments")
    if plan.spares or plan.replace:
        held, world = run.engine.memory(), run.engine.world_size
        run.close()
        with closing(made(plan, world)) as fresh:  # as full as one that has done a step
            fresh.set_micro_batches(plan.accumulate)
            while not fresh.steps:
                fresh.backward(loss_of(fresh, rows))
                fresh.step()
            if (anew := fresh.memory()).rows != held.rows:
                say("memory", held=str(held.rows), anew=str(anew.rows))
    run.close()
    say("done")


def came_of(run: sf.ElasticRun, plan: Plan, uid: int, folder: Path) -> float | str:
    """What ranks do together, also where a save in it fails as it has to: the number of steps; or what went wrong."""
    steps = run.engine.steps
    try:
        return run.whole(partial(together, run, plan, uid, folder))
    except CheckpointError as error:
        return steps if plan.full and steps % 2 == 0 and "File too large" in str(error) else str(error)


def together(run: sf.ElasticRun, plan: Plan, uid: int, folder: Path) -> float:
    """The number of steps, by a collective of the engine's and by one that is not, and then an evaluation of which each
    rank has another number of batches; below 0, if a save succeeds that cannot."""
    if plan.at == "amid" and plan.kills[0][:2] == (uid, run.engine.steps):
        os.kill(os.getpid(), signal.SIGKILL)
    steps = run.engine.steps
    if plan.full:
        room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        if steps % 2 == 0 and run.engine.rank == run.engine.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, most))
        try:
            run.engine.save(folder / f"saves-{steps}", wait=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
        return -1.0 if steps % 2 == 0 else float(steps)
    most = torch.tensor(float(run.engine.steps))
    if dist.is_initialized():
        dist.all_reduce(most, dist.ReduceOp.MAX)
    if steps == plan.alone and run.engine.rank == 0:
        Checkpoint(folder / "nowhere")
    found, module = run.engine.mean(float(most)), run.engine.module
    assert isinstance(module, nn.Sequential)
    module.eval()
    for _ in range(1 + run.engine.rank):
        with torch.no_grad():
            run.engine(samples(plan).tensors[1][:2])
    module.train()
    module[-1].eval()
    return found


def due(plan: Plan, steps: int) -> int:
    """How many processes have to be ready before ranks go on behind so many steps: imports may take any time."""
    first = plan.kills[0][1] if plan.kills else plan.steps
    spares = plan.hosts * plan.spares if steps >= first - 2 else 0
    return spares + min(plan.replace * plan.hosts, sum(step + 4 <= steps for _, step, _ in plan.kills))


def find(folder: Path, what: str) -> list[dict[str, Any]]:
    """What was said so far; nothing, while a line is being written."""
    try:
        return [each for each in read_log(folder) if each["what"] == what]
    except ValueError:
        return []


def unheard(handlers: Handlers, vote: Any, plan: Plan) -> None:
    """A vote that all come to, of whose answer nothing is heard."""
    vote(handlers)
    steps = {max(segment.steps) for segment in handlers.optimizer._fused.values()}  # pyright: ignore
    if max(steps) == plan.kills[0][1]:
        raise CollectiveError("nothing is heard")


def unanswered(agreement: Agreement, exchange: Any, plan: Plan, what: str, value: str) -> list[str]:
    """What all ranks say of something, of which nothing is heard if it is the end of what they do together."""
    said = exchange(agreement, what, value)
    if what.startswith("all have come to the end") and value.split(maxsplit=1)[0] == str(plan.kills[0][1]):
        agreement.give_notice()
        raise CollectiveError("nothing is heard")
    return said


def die(run: sf.ElasticRun, plan: Plan, section: Section, number: int) -> None:
    if str(section.ops[number]) == plan.at and run.engine.steps == plan.kills[0][1]:
        os.kill(os.getpid(), signal.SIGKILL)


def launched(plan: Plan, folder: Path, node: int) -> int:
    os.chdir(folder)
    given: dict[str, Any] = {
        "nproc_per_node": f"{plan.ranks // plan.hosts}",
        "no_python": True,
        "patience": plan.patience,
        "spares": plan.spares,
        "replace": plan.replace,
    }
    if plan.hosts == 1:
        return run_script(Options(standalone=True, **given), "survivors", [])
    port = int((folder / "port").read_text())
    more = {"nnodes": f"{plan.hosts}", "node_rank": node, "master_addr": "127.0.0.1", "master_port": port}
    return run_script(Options(**given, **more), "survivors", [])


def happened(plan: Plan, folder: Path) -> Came:
    """Runs it; in a process that has imported all of it."""
    if plan.hosts > 1:
        (folder / "port").write_text(str(free_port()))
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDFOLD_RUN", "SHARDFOLD_FOLLOWS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    given = partial(work, plan, folder)
    pids = [
        begin(partial(launched, plan, folder, node), given, environment, folder / "out", folder / "err")
        for node in range(plan.hosts)
    ]
    status, killed, deadline = dict[int, int](), list[float](), time.monotonic() + LIMIT + plan.steps / 3
    kills = list(plan.kills[bool(plan.at) :])
    while len(status) < len(pids):
        for node, pid in enumerate(pids):
            if node not in status:
                found, code = os.waitpid(pid, os.WNOHANG)
                if found:
                    status[node] = os.waitstatus_to_exitcode(code)
        if kills and (victim := ready(plan, folder, *kills[0])):
            killed.append(time.monotonic())
            os.kill(victim if kills[0][0] >= 0 else pids[-1 - kills[0][0]], signal.SIGKILL)
            kills.pop(0)
        if time.monotonic() > deadline:
            hung = [pid for node, pid in enumerate(pids) if node not in status]
            there = [each for pid in hung for each in tree(pid)]
            ask_where(hung)
            for pid in there:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.001)
    err = (folder / "err").read_text(errors="replace")
    return Came([status[node] for node in range(plan.hosts)], read_log(folder), err, killed)


def ready(plan: Plan, folder: Path, uid: int, step: int, later: float) -> int:
    """The process to be killed, if it is time; else 0."""
    try:
        log = read_log(folder)
    except ValueError:  # a line is being written
        return 0
    said = [each for each in log if each["rank"] == max(uid, 0)]
    seen = log if uid >= plan.ranks else said
    there = next((each["at"] for each in seen if each["what"] == "step" and each["steps"] >= step), None)
    if not said or there is None or time.monotonic() < there + later / 1e3:
        return 0
    return next(each["pid"] for each in said if each["what"] == "pid")


def wrong(plan: Plan, came: Came, folder: Path) -> Iterator[str]:
    """What is not as it has to be."""
    each = plan.ranks // plan.hosts
    lost = {-1 - uid for uid, _, _ in plan.kills if uid < 0}
    killed = {uid for uid, _, _ in plan.kills} | {uid for uid in range(plan.ranks) if uid // each in lost}
    came_in = {each["rank"] for each in came.said("recovery", new=True) if plan.other is None} - killed
    left = sorted({uid for uid in range(plan.ranks) if uid not in killed} | came_in)
    waited = {each["rank"] for each in came.said("pid") if each["rank"] >= plan.ranks} - set(left) - killed
    if not plan.replace and plan.other is None and {each["rank"] for each in came.said("dismissed")} != waited:
        yield f"{waited} have waited in vain, and ended by themselves did {came.said('dismissed')}"
    if {status for node, status in enumerate(came.status) if node not in lost} != {0}:
        yield f"launchers end with {came.status}: {came.err[-6000:]}"
        return
    if [each["rank"] for each in sorted(came.said("done"), key=lambda each: each["rank"])] != left:
        yield f"not all that were left came to the end: {came.said('done')}"
    may_come = plan.hosts * (plan.spares + plan.replace) * (plan.other is None)
    told, ended = (
        set(re.findall(f"rank ({words}", came.err)) for words in (r"\d+) differ from", r"\d+) on .* status 1; the ")
    )
    if plan.other is not None and not (ended and told <= ended):
        yield f"it is not said, by one number each, that new ones were not taken in: {came.err}"
    if may_come >= len(killed) and not lost and len(left) != plan.ranks:
        yield f"{left} are there in the end"
    for uid in left:
        steps = [each["steps"] for each in came.said("step", rank=uid)]
        if sorted(steps) != steps or len(set(steps)) < len(steps):
            yield f"rank {uid} took its steps in this order: {steps}"
        wholes = [(each["steps"], each["value"]) for each in came.said("whole", rank=uid)]
        if plan.wholes and uid < plan.ranks and wholes != [(n, n) for n in range(1, plan.steps + 1)]:
            yield f"rank {uid} did this together with the others: {wholes}"
    if plan.deaf >= 0 and not all(each["noticed"] for each in came.said("left")):
        yield f"the notice that rank {plan.deaf} had is forgotten: {came.said('left')}"
    expected = plain(plan)
    for step, (numbers, loss) in enumerate(zip(expected.samples, expected.losses, strict=True)):
        tried = came.said("read", steps=step)
        taken = [each for each in tried if each["epoch"] == max(each["epoch"] for each in tried) and each["weight"]]
        if (read := sorted(number for each in taken for number in each["samples"])) != numbers:
            yield f"step {step + 1} was taken of the samples {read} and not {numbers}"
        elif abs((mean := statistics.fmean(each["loss"] for each in taken)) - loss) > TOLERANCE:
            yield f"the loss of step {step + 1} is {mean} and not {loss}"
    found = torch.load(folder / "weights")
    far = max(float((found[name] - value).abs().max()) for name, value in expected.weights.items())
    if far > TOLERANCE:
        yield f"weights are {far} from plain PyTorch's"
    yield from (f"memory is not a fresh engine's: {each}" for each in came.said("memory"))
    pids = [each["pid"] for each in came.said("pid")]
    if kept := [each.name for pid in pids for each in SHARED.glob(f"{NAMED}*-{pid}-*")]:
        yield f"left in shared memory: {kept}"


def judged(plan: Plan, place: str) -> tuple[Came, list[str]]:
    """Runs a plan in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir=place))
    came = happened(plan, folder)
    return came, [*wrong(plan, came, folder)]


def bits(plan: Plan, place: str) -> tuple[Came, dict[str, Any]]:
    """What an exact run comes to: losses by step and samples, weights and moments."""
    folder = Path(tempfile.mkdtemp(dir=place))
    came, found = happened(plan, folder), dict[str, Any]()
    if came.status != [0]:
        return came, found
    for step in range(plan.steps + (plan.overflow >= 0)):
        tried = came.said("read", steps=step)
        last = max(each["epoch"] for each in tried)
        found |= {
            f"{step} {each['samples']}": each["loss"] for each in tried if each["epoch"] == last and each["weight"]
        }
    return came, {**found, **torch.load(folder / "weights"), **torch.load(folder / "moments")}


def other_bits(plans: Sequence[Plan], place: str) -> list[str]:
    """What of exact runs is not, to the bit, what it is in the first of them."""
    wrong, first = list[str](), dict[str, Any]()
    for plan in plans:
        came, found = bits(plan, place)
        first = first or found
        if not found or {*found} != {*first}:
            wrong.append(f"{plan} ends with {came.status}, {len(found)} of {len(first)} figures: {came.err[-3000:]}")
        elif far := [name for name, value in found.items() if not equal(value, first[name])]:
            wrong.append(f"{plan}: {len(far)} of {len(found)} figures are others, first {far[0]}")
        elif plan.kills and len({each["epoch"] for each in came.said("recovery")}) < len(plan.kills):
            wrong.append(f"{plan}: not all were killed amid their work: {came.said('recovery')}")
    return wrong


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def shrinking(dice: random.Random, layout: str, ranks: int) -> Plan:
    """One rank after the other is killed, until one is left."""
    order = dice.sample(range(ranks), 1 if layout == "hsdp" else ranks - 1)
    kills = tuple((uid, 6 * (n + 1), dice.uniform(0.0, 30.0)) for n, uid in enumerate(order))
    return Plan(layout, ranks, 6 * (len(kills) + 2), kills, rest=0.005)


def changing(dice: random.Random, layout: str, ranks: int, deaths: int, spares: int = 0, every: int = 10) -> Plan:
    """Any rank is killed, one that is new too, and another process takes its place: one that waits, or is started."""
    there, kills = list(range(ranks)), list[tuple[int, int, float]]()
    for number in range(deaths):
        kills.append((there.pop(dice.randrange(ranks)), every * number + 4, dice.uniform(0.0, 30.0)))
        there.append(ranks + number)
    survive = None if layout in ("ddp", "hsdp") else "rank"
    steps = every * deaths + 16
    return Plan(layout, ranks, steps, tuple(kills), rest=0.05, survive=survive, spares=spares, replace=deaths)


def figures(layout: str, ranks: int, count: int, place: str, into: str = "fewer") -> None:
    """Ranks are killed, again and again; how long each time until a next step.

    Args:
        layout, ranks: of the runs.
        count: of kills.
        place: a folder.
        into: ``fewer``: the others go on without it; ``spare``: with one that waits; ``joined``: until a process that
            was started for it has joined, from when the others stop.
    """
    drawn, took = random.Random(7), list[tuple[float, ...]]()
    while len(took) < count:
        plan = (
            shrinking(drawn, layout, ranks) if into == "fewer" else changing(drawn, layout, ranks, 10, into == "spare")
        )
        plan = replace(plan, width=256, survive=None if layout in ("ddp", "hsdp") else "rank")
        came, bad = judged(plan, place)
        for each in bad:
            print("WRONG", plan, each, flush=True)
        for at, then in zip(came.killed, [*came.killed[1:], float("inf")], strict=True):
            behind = [each for each in came.said("recovery") if at < each["at"] < then and not each["new"]]
            epochs = sorted({each["epoch"] for each in behind})
            if len(epochs) <= (into == "joined"):
                continue
            first = next(each for each in behind if each["epoch"] == epochs[into == "joined"])
            begun = first["at"] - first["agreed"] - first["met"] - first["moved"]
            step = min(each["at"] for each in came.said("step") if each["at"] > first["at"])
            since = begun if into == "joined" else at
            parts = (first["agreed"], first["met"], first["moved"], step - first["at"])
            took.append((step - since, begun - since, *parts))
    print(f"{layout}, {ranks} ranks, {len(took)} kills ({into}); seconds: p50, p95, max")
    names = ("to next step", "until it stops", "to agree", "to meet", "states", "first step")
    for name, values in zip(names, zip(*took, strict=True), strict=True):
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        print(f"  {name:<20}{statistics.median(ordered):>8.3f}{p95:>8.3f}{ordered[-1]:>8.3f}", flush=True)


def warm() -> None:
    """What a rank imports and what a first step makes is there before ranks are forked."""
    import shardfold.engine.elastic
    import shardfold.launch._agent  # noqa: F401

    torch.set_num_threads(1)
    plain(Plan(steps=1))
    made(Plan(), 1).close()


def held(plans: Sequence[Plan], place: str) -> list[str]:
    """What is not as it has to be."""
    found: list[str] = []
    for plan in plans:
        came, bad = judged(plan, place)
        found += [f"{plan}: {words}" for words in bad]
        new_alone = all(uid >= plan.ranks for uid, _, _ in plan.kills)  # they have waited
        if not bad and not new_alone and len(came.said("recovery")) < 1:
            found.append(f"{plan}: it was not killed amid its work: {came.log[-3:]}")
    return found


if __name__ == "__main__":
    warm()
    with tempfile.TemporaryDirectory() as place:
        figures(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), place, *sys.argv[4:])
