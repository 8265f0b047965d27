"""Cases in which the others go on: a rank is struck at any operation, and another one amid the recovery from that.

python -m tests.chaos.healing 17 0..199
python -m tests.chaos.healing lost 0..19        # where the second one has what only the first one has, too
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardfold as sf
from shardfold.engine.track import Section
from tests.chaos.judge import ask_where, blamed, left_over_by, read_log, tree
from tests.chaos.warm import begin
from tests.launch.survivors import LIMIT, Came, Plan, launched, loss_of, made, sampler, samples, warm, wrong

LAYOUTS = {"ddp": (3, 4), "zero1": (3, 4), "zero2": (4,), "zero3": (3, 4), "fsdp2": (4,), "hsdp": (4,), "hpz": (4,)}
"""By name, among how many ranks."""
FAULTS = ("kill", "kill", "late", "segv", "stop")
"""Now; at any instruction of the next milliseconds; by its own fault; or the process is stopped, and ended for that."""
SECTIONS = ("forward", "backward", "last", "step", "between")
PHASES = ("", "_stop", "_next_place", "_leave", "_made", "_move")
"""Of a recovery, at the begin of which another rank is struck; empty: none is."""
SAVES = ("none", "each", "beside")


@dataclass(frozen=True)
class Heal:
    """
    Attributes:
        layout: with copies where an element is on one rank only.
        ranks: how many begin.
        fault: what strikes the first one.
        section, part: where, and how far into it.
        step: updates that were done then.
        victim: who.
        phase: of the recovery, in which the second one is killed.
        saves: whether and how each step is saved.
        lost: whether the second one has what only the first one has, too: the run ends.
    """

    layout: str
    ranks: int
    fault: str
    section: str
    part: float
    step: int
    victim: int
    phase: str
    saves: str
    lost: bool = False

    @property
    def second(self) -> int:
        """Who is killed amid the recovery; by itself one that has nothing that only the first one has, too."""
        return (self.victim + (1 if (self.layout in ("ddp", "hsdp")) is not self.lost else 2)) % self.ranks

    @property
    def plan(self) -> Plan:
        """The training, and who does not come to its end."""
        struck = ((self.victim, self.step, 0.0), *(((self.second, self.step, 0.0),) if self.phase else ()))
        survive = None if self.layout in ("ddp", "hsdp") else "rank"
        return Plan(self.layout, self.ranks, 8, struck, survive=survive, patience=3.0 if self.fault == "stop" else 10.0)


def of_number(number: int) -> Heal:
    """The case of a number."""
    draw = random.Random(number)
    layout = draw.choice(tuple(LAYOUTS))
    ranks = draw.choice(LAYOUTS[layout])
    # With three ranks and copies each of the others has something of the first one's.
    second = ranks == 4 or layout == "ddp"
    return Heal(
        layout,
        ranks,
        draw.choice(FAULTS),
        draw.choice(SECTIONS),
        draw.randrange(21) / 20,
        draw.randrange(1, 4),
        draw.randrange(ranks),
        draw.choice(PHASES) if second else "",
        draw.choice(SAVES),
    )


def lost_of(number: int) -> Heal:
    """The case of a number in which the second one has what only the first one has, too."""
    draw, case = random.Random(number), of_number(number)
    layout = draw.choice([name for name in LAYOUTS if name != "ddp"])
    victim = draw.randrange(3)  # of so small a model the last rank has no part
    return replace(case, layout=layout, ranks=4, victim=victim, phase=draw.choice(PHASES[1:]), lost=True)


class Struck:
    """One rank of a case."""

    def __init__(self, case: Heal, folder: Path, environment: Mapping[str, str]) -> None:
        self.case, self.folder, self.uid = case, folder, int(environment["RANK"])
        self.log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.armed = self.uid == case.victim

    def say(self, what: str, **more: object) -> None:
        line = {"what": what, "rank": self.uid, "at": time.monotonic(), **more}
        os.write(self.log, (json.dumps(line) + "\n").encode())

    def strike(self, fault: str) -> None:
        self.armed = False
        self.say("struck", fault=fault)
        match fault:
            case "late":
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, 0.003)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case _:
                os.kill(os.getpid(), signal.SIGKILL)

    def dies_in(self, phase: str) -> None:
        """This rank is killed at the begin of the first recovery's phase."""
        before = getattr(sf.ElasticRun, phase)

        def struck(run: sf.ElasticRun, *given: Any, **more: Any) -> Any:
            if self.began:
                self.strike("kill")
            return before(run, *given, **more)

        setattr(sf.ElasticRun, phase, struck)

    def work(self) -> None:
        torch.set_num_threads(1)
        self.say("pid", pid=os.getpid())
        case, plan, known, epoch, self.began = self.case, self.case.plan, 0, 0, False
        if case.phase and self.uid == case.second:
            self.dies_in(case.phase)
        run = sf.ElasticRun(partial(made, plan))
        self.began = True

        def observe(section: Section, number: int) -> None:
            there = case.section in section.name and run.engine.steps >= case.step
            if self.armed and there and number >= round(case.part * (len(section.ops) - 1)):
                self.strike(case.fault)

        Section.observer = observe if self.armed and case.section != "between" else None
        for numbers, rows in run.batches(sf.Loader(samples(plan), sampler(plan, self.uid)), steps=plan.steps):
            if self.armed and run.engine.steps > (case.step if case.section != "between" else case.step - 1):
                self.strike(case.fault)  # a section without operations, as a forward of whole parameters is one
            with run.attempt() as engine:
                loss, weight = loss_of(engine, rows), engine.micro_batch_weight
                read = {"samples": numbers.tolist(), "weight": 1.0 if weight is None else weight, "loss": loss.item()}
                self.say("read", steps=engine.steps, epoch=epoch, **read)
                engine.backward(loss)
                if engine.step().updated:
                    self.say("step", steps=engine.steps, ranks=engine.world_size)
                    if case.saves != "none":
                        engine.save(self.folder / "run" / f"step-{engine.steps}", wait=case.saves == "each", keep=2)
            for recovery in run.recoveries[known:]:
                self.say("recovery", **recovery._asdict())
                epoch = recovery.epoch
            known = len(run.recoveries)
        with run.engine.gathered(of="master"):
            pass
        weights = run.engine.state_dict()
        if run.engine.rank == 0:
            torch.save(weights, self.folder / "weights")
        run.close()
        self.say("done")


def happened(case: Heal, folder: Path) -> Came:
    """Runs it; in a process that has imported all of it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SHARDFOLD_RUN", "SHARDFOLD_FOLLOWS")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def work(given: Mapping[str, str]) -> None:
        Struck(case, folder, given).work()

    pid = begin(partial(launched, case.plan, folder, 0), work, environment, folder / "out", folder / "err")
    deadline, status = time.monotonic() + LIMIT, None
    while status is None:
        found, code = os.waitpid(pid, os.WNOHANG)
        if found:
            status = os.waitstatus_to_exitcode(code)
        elif time.monotonic() > deadline:
            ask_where([pid])
            for each in [*tree(pid)]:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            deadline = float("inf")
        time.sleep(0.002)
    return Came([status], read_log(folder), (folder / "err").read_text(errors="replace"))


def judged(case: Heal, place: str) -> tuple[Came, list[str]]:
    """Runs a case in a folder of its own."""
    folder = Path(tempfile.mkdtemp(dir=place))
    came = happened(case, folder)
    found = [*(unnamed(case, came) if case.lost else wrong(case.plan, came, folder)), *left_over_by(2.0)]
    if not came.said("struck", rank=case.victim):
        found.append("nothing has struck")
    if case.phase and len(came.said("struck")) < 2:
        found.append("the second one was not struck")
    return came, found


def unnamed(case: Heal, came: Came) -> Iterator[str]:
    """What is not as it has to be where states are lost: the last line says so, and who was killed."""
    last = came.err.splitlines()[-1]
    if not {*blamed(last)} & {case.victim, case.second} or "is not whole" not in last or came.status == [0]:
        yield f"the launcher ends with {came.status}: {came.err[-3000:]}"


def held(cases: list[Heal], place: str) -> list[str]:
    """What is not as it has to be."""
    return [f"{case}: {words}" for case in cases for words in judged(case, place)[1]]


def main(words: list[str]) -> int:
    warm()
    failed = ran = 0
    drawn = lost_of if words[0] == "lost" else of_number
    with tempfile.TemporaryDirectory(prefix="healing-") as place:
        for word in words[drawn is lost_of :]:
            first, _, last = word.partition("..")
            for number in range(int(first), int(last or first) + 1):
                _, bad = judged(drawn(number), place)
                ran, failed = ran + 1, failed + bool(bad)
                if bad:
                    print(number, drawn(number), *bad, sep="\n    ", flush=True)
                if ran % 20 == 0:
                    print(f"{ran} cases, {failed} not as they have to be", flush=True)
    print(f"{ran} cases, {failed} not as they have to be")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
