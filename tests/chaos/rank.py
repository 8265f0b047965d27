"""What each rank of a case does: trains, saves, goes on from the latest checkpoint, and is struck."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from errno import EIO
from pathlib import Path
from typing import Any

import torch

import shardfold as sf
from shardfold.engine.track import Section
from shardfold.errors import CheckpointError
from tests.chaos.case import DISKS, SECTIONS, STEPS, Case
from tests.support.models import Small, batches
from tests.support.options import grouped
from tests.support.saving import Disk

ROWS = 24
"""Of a global batch: they divide by 1 to 4, and each part by that of micro-batches."""
MICRO = 2
EVERY = 2
CHAOS = "chaos has struck"


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Whose epsilon does not let rounding turn a small gradient's sign into a step."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def model() -> Small:
    torch.manual_seed(0)
    return Small(layers=2).double()


def engine(layout: str, folder: Path, timeout: float) -> sf.Engine:
    options: dict[str, Any] = {"layout": layout}
    if layout == "disk":
        table = sf.PRESETS["zero3"].edit("master", "moments", tier="disk", folder=str(folder / "disk"))
        options = {"layout": table}
    elif layout in ("hsdp", "hpz"):
        options["mesh"] = {"inter": 2, "intra": 2}
    elif layout == "stages":
        mesh = {"pipeline": 2, "intra": int(os.environ["WORLD_SIZE"]) // 2}
        options = {"layout": "zero1", "pipeline": "1f1b", "mesh": mesh}
    return sf.Engine(model(), optimizer=adamw, accumulate=MICRO, **grouped(timeout=timeout, **options))


class Rank:
    """One of an attempt.

    Args:
        case: None: nothing strikes.
    """

    def __init__(
        self, layout: str, saves: str, case: Case | None, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.layout, self.saves, self.case, self.folder = layout, saves, case, folder
        self.rank, self.world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self.attempt = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self.armed = case is not None and self.rank == case.struck and self.attempt == 0
        self.engine: sf.Engine | None = None
        self._log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(self, what: str, **more: object) -> None:
        line = {"what": what, "rank": self.rank, "attempt": self.attempt, "at": time.monotonic(), **more}
        os.write(self._log, (json.dumps(line) + "\n").encode())

    # -- moments

    def place(self, name: str, step: int) -> None:
        """Here is one that is no operation."""
        if self.case is None or self.rank != self.case.struck:
            return
        late = name == "between" and step > self.case.step and self.case.moment in SECTIONS
        if self.armed and (late or (self.case.moment == name and step >= self.case.step)):
            self.strike()  # late: a section without operations, as a forward pass of whole parameters is one
        if self.attempt == 1 and self.case.again == name:
            self.strike()

    def observe(self, section: Section, number: int) -> None:
        """Here is an operation."""
        assert self.case is not None and self.engine is not None
        case = self.case
        there = case.moment in SECTIONS and case.moment in section.name and self.engine.steps >= case.step
        if self.armed and there and number >= round(case.part * (len(section.ops) - 1)):
            self.strike(str(section.ops[number]))

    def strike(self, op: str = "") -> None:
        self.armed = False
        assert self.case is not None
        fault = self.case.fault
        if fault in ("child", "launcher kill"):
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            op = f"{op} {child.pid}"
        self.say("struck", pid=os.getpid(), launcher=os.getppid(), op=op)
        match fault:
            case "kill" | "child" | "torn":
                os.kill(os.getpid(), signal.SIGKILL)
            case "late":
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, 0.003)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(7)
            case "quit":
                os._exit(0)
            case "return":
                sys.exit()
            case "raise":
                raise RuntimeError(CHAOS)
            case "eio":
                raise OSError(EIO, os.strerror(EIO))
            case "oom":
                self._wait_for("acted")
                taken = [bytearray(1 << 20) for _ in range(1024)]
                raise AssertionError(f"{len(taken)} MiB were there")
            case "stop" | "pause":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow" | "host dead" | "cut" | "one way" | "freeze" | "flap" | "loss" | "slow link":
                self._wait_for("acted")
            case "hang":
                ctypes.PyDLL(None).sleep(600)
            case "loop":
                while True:
                    pass
            case "launcher pause":
                os.kill(os.getppid(), signal.SIGSTOP)
            case "launcher kill":
                os.kill(os.getppid(), signal.SIGKILL)
            case "term" | "notice term":
                os.kill(os.getppid(), signal.SIGTERM)
            case "int":
                os.kill(os.getppid(), signal.SIGINT)
            case "notice usr1":
                os.kill(os.getppid(), signal.SIGUSR1)
            case "notice file":
                (self.folder / "leave").touch()
            case _:
                raise AssertionError(fault)

    def _wait_for(self, name: str) -> None:
        while not (self.folder / name).exists():
            time.sleep(0.005)

    # -- work

    def run(self) -> None:
        torch.set_num_threads(1)
        self.place("begin", STEPS)
        self.engine = trained = engine(
            self.layout, self.folder, Case().timeout if self.case is None else self.case.timeout
        )
        if self.armed:
            Section.observer = self.observe
        self.place("made", STEPS)
        with self._disk():
            try:
                self._train(trained)
            finally:
                self.say("stands", steps=trained.steps)
            with self._room():
                trained.close()
        self.place("closed", STEPS)
        self.say("done")

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Its calls, at one of which a fault may strike."""
        case = self.case
        if not self.armed or case is None or case.fault not in ("torn", "eio"):
            with nullcontext():
                yield
            return

        def at(number: int, _: str) -> None:
            if self.armed and number >= case.call and self.engine is not None and self.engine.steps >= case.step:
                self.strike()

        with Disk(self.folder / "run", at).watched():
            yield

    @contextmanager
    def _room(self) -> Iterator[None]:
        """A save for which there is none fails on all ranks, and they go on."""
        try:
            yield
        except CheckpointError as error:
            if self.case is None or self.case.fault != "full":
                raise
            if self.armed:
                self.armed = False
                self.say("struck", pid=os.getpid(), launcher=os.getppid(), op=str(error))

    def _train(self, trained: sf.Engine) -> None:
        kept = self.folder / "run"
        if (kept / "latest").exists():
            self.place("loading", STEPS)
            trained.load(kept)
            self.say("loaded", steps=trained.steps)
        while trained.steps < STEPS:
            step = trained.steps
            tokens, targets = (each.chunk(trained.data_ranks)[trained.data_rank] for each in batch(step))
            self.place("between", step)
            loss = self._backward(trained, tokens, targets)
            trained.step()
            self.say("step", steps=trained.steps, loss=loss, part=trained.data_rank, parts=trained.data_ranks)
            if trained.leaving:
                trained.save(kept / f"step-{trained.steps}", keep=2, wait=True)
                self.say("left", steps=trained.steps)
                return
            self.place("evaluation", step)
            if step == 2:
                trained.module.eval()
                if self.layout == "stages":
                    trained.eval_batch((tokens, targets), compute)
                else:
                    trained(tokens, targets)
                trained.module.train()
            if self.saves == "each" or (self.saves == "beside" and trained.steps % EVERY == 0):
                if self.case is not None and self.case.fault not in DISKS:
                    self.place("saving", step)
                with self._room():
                    trained.save(kept / f"step-{trained.steps}", keep=2, wait=self.saves == "each")
                    if self.saves == "each":
                        self.say("saved", steps=trained.steps)
            if step == 3:
                with trained.gathered():
                    self.place("gathered", step)
        weights = trained.state_dict()
        if self.rank == 0:
            torch.save(weights, self.folder / "weights")

    def _backward(self, trained: sf.Engine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Of all micro-batches; the mean of their losses."""
        if self.layout == "stages":
            return trained.train_batch((tokens, targets), compute).item()
        total = 0.0
        for rows in zip(tokens.chunk(MICRO), targets.chunk(MICRO), strict=True):
            loss = trained(*rows)
            trained.backward(loss)
            total += loss.item() / MICRO
        return total


def compute(part: Any, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss of a micro-batch that goes through stages."""
    return part(*rows)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batches(1, rows=ROWS, seed=step)[0]


def work(layout: str, saves: str, case: Case | None, folder: Path, environment: Mapping[str, str]) -> None:
    """Of one rank, to its end."""
    sys.path[:] = [each for each in sys.path if each]
    Rank(layout, saves, case, folder, environment).run()
