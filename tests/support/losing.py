"""Lives of runs in one folder of checkpoints, drawn by a number: killed, doubled, gone bad, on a full disk.

Each life is a process that trains and saves. What lies in the folder before and behind it says whether anything was
lost without a refusal or an exit status.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import random
import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import isfinite, nan
from pathlib import Path
from typing import NamedTuple

import torch

import shardfold as sf
from shardfold.checkpoint import run_lock
from shardfold.checkpoint.folders import listed, origin
from shardfold.checkpoint.verify import verify
from shardfold.errors import ShardfoldError
from tests.support.models import batches
from tests.support.saving import Disk, die, engine, train

KEEP = 2
CALLS = 30  # of the file system in a save of one rank, about
REFUSED, BROKEN = 3, 4  # exit statuses
SIZES = (80, 160, 320)  # KiB of a small disk; a checkpoint has about 60


class Kept(NamedTuple):
    """A checkpoint: its step, and a digest of its weights."""

    step: int
    digest: str
    finite: bool


@dataclass(frozen=True)
class Life:
    """What one process does.

    Attributes:
        loads: what it goes on from: the latest, the newest that is finite, or nothing.
        steps: that it takes, with a save behind each.
        waits: for each save; else they are written beside the training.
        bad: the number of the step whose loss is NaN, if there is one.
        dies: at which call of the file system; None: at none.
        doubled: at which call it is held while another life goes by.
        elsewhere: it believes to be on another host.
    """

    seed: int
    loads: str
    steps: int
    waits: bool
    bad: int | None
    dies: int | None
    doubled: int | None = None
    elsewhere: bool = False


class Ended(NamedTuple):
    """How a life ended: its exit status, and the checkpoints that it may believe to be there."""

    status: int
    told: list[Kept]


def lives(number: int) -> tuple[list[Life], int | None]:
    """The lives of a case, and the size of its disk."""
    draw = random.Random(number)
    kinds = [draw.choice(("dies", "stranger", "bad", "doubled", "ends")) for _ in range(draw.randint(3, 5))]
    found: list[Life] = []
    for place, kind in enumerate(kinds):
        steps = draw.randint(1, 3)
        found.append(
            Life(
                seed=number * 10 + place,
                loads="nothing" if kind == "stranger" else "finite" if draw.random() < 0.2 else "latest",
                steps=steps,
                waits=draw.random() < 0.5,
                bad=draw.randrange(steps) if kind == "bad" else None,
                dies=draw.randrange(CALLS * steps) if kind == "dies" else None,
                doubled=draw.randrange(CALLS * steps) if kind == "doubled" else None,
                elsewhere=draw.random() < 0.3,
            )
        )
    return found, draw.choice(SIZES) if draw.random() < 0.3 else None


def check(number: int, root: Path) -> None:
    """Lives one case through.

    Raises:
        AssertionError: something was lost.
    """
    found, _ = lives(number)
    place = root / "run"
    _warm()
    for life in found:
        before = kept(place)
        with begun(life, place) as first:
            ended = []
            if life.doubled is not None and first.held():
                other = Life(life.seed + 5, "nothing" if life.seed % 2 else "latest", 2, True, None, None,
                             elsewhere=not life.elsewhere and life.seed % 3 == 0)  # fmt: skip
                with begun(other, place) as second:
                    ended.append((other, second.ended()))
                first.go_on()
            ended.append((life, first.ended()))
        judge(before, kept(place), ended)


@cache
def _warm() -> None:
    """What a first step imports, processes that are forked from this one need not."""
    first = engine("ddp")
    train(first)
    first.close()


def judge(before: list[Kept], after: list[Kept], ended: list[tuple[Life, Ended]]) -> None:
    """
    Raises:
        AssertionError: what was there, or what a life may believe to be, is neither there nor was it to go.
    """
    said = f"before {before}, after {after}, {ended}"
    for life, end in ended:
        assert end.status in (0, REFUSED, -9), said
        if life.loads == "nothing" and before:
            assert end.status in (REFUSED, -9) and not end.told, said
        if end.status == 0:
            assert (end.told and end.told[-1] in after) or len(ended) > 1, said
    told = [each for _, end in ended for each in end.told]
    every = list(dict.fromkeys([*before, *told, *after]))
    names = {each.step: each for each in every}  # a name holds the last of its step
    every = [each for each in every if names[each.step] == each or each in after]
    if len(ended) == 1:
        assert set(every[-KEEP:]) <= set(after), said
    finite = [each for each in every if each.finite]
    assert not finite or any(each.finite for each in after), said
    assert len(after) >= min(KEEP, len(every)), said


def kept(root: Path) -> list[Kept]:
    """The checkpoints of a folder, the oldest first; each is whole."""
    found = []
    for path in listed(root) if root.is_dir() else []:
        assert verify(path).ok, f"{path} is damaged"
        with sf.Checkpoint(path) as checkpoint:
            weights = {name: checkpoint.parameter(name) for name in checkpoint.parameters}
            found.append(Kept(checkpoint.index.step, digest(weights), not checkpoint.index.nonfinite))
    return found


def digest(weights: dict[str, torch.Tensor]) -> str:
    said = hashlib.sha256()
    for name, value in sorted(weights.items()):
        said.update(name.encode() + value.detach().numpy().tobytes())
    return said.hexdigest()[:12]


class Begun:
    """A life under way."""

    def __init__(self, pid: int, said: int, go: int) -> None:
        self._pid, self._said, self._go = pid, os.fdopen(said), go
        self._told: list[Kept] = []
        self._may: list[Kept] = []

    def held(self) -> bool:
        """Waits until it is held, or over."""
        return any(self._heard(line) for line in self._said)

    def _heard(self, line: str) -> bool:
        what, *words = json.loads(line)
        if what in ("told", "may"):
            (self._told if what == "told" else self._may).append(Kept(*words))
        return what == "held"

    def go_on(self) -> None:
        os.write(self._go, b".")

    def ended(self) -> Ended:
        for line in self._said:
            self._heard(line)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return Ended(status, self._may if status == 0 else self._told)

    def close(self) -> None:
        os.close(self._go)
        self._said.close()


@contextmanager
def begun(life: Life, root: Path) -> Iterator[Begun]:
    (said, out), (there, go) = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        status = BROKEN
        gc.freeze()  # what earlier tests left, as groups of processes, whose threads are not here to be ended
        os.close(said)
        os.close(go)
        try:
            status = _live(life, root, out, there)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(out)
    os.close(there)
    made = Begun(pid, said, go)
    try:
        yield made
    finally:
        made.close()


def _live(life: Life, root: Path, out: int, go: int) -> int:
    def say(*words: object) -> None:
        os.write(out, (json.dumps(words) + "\n").encode())

    def at(number: int, name: str) -> None:
        if number == life.dies:
            die()
        if number == life.doubled:
            say("held")
            os.read(go, 1)

    if life.elsewhere:
        here = run_lock._host()
        run_lock._host = lambda: f"elsewhere {here}"
    try:
        trained = engine("ddp")
        with Disk(root, at).watched():
            try:
                _train(life, trained, root, say)
            finally:
                trained.close()
    except ShardfoldError:
        return REFUSED
    return 0


def _train(life: Life, trained: sf.Engine, root: Path, say: Callable[..., None]) -> None:
    there = listed(root) if root.is_dir() else []
    finite = [path for path in there if not origin(path).nonfinite]
    if life.loads != "nothing" and there:
        trained.load(finite[-1] if life.loads == "finite" and finite else root)
    for number in range(life.steps):
        (rows,) = batches(1, rows=4, seed=life.seed + trained.steps)
        loss = trained(*rows)
        trained.backward(loss * nan if number == life.bad else loss)
        trained.step()
        weights = trained.state_dict()
        made = Kept(trained.steps, "", all(isfinite(float(each.sum())) for each in weights.values()))
        trained.save(root / f"step-{trained.steps}", keep=KEEP, wait=life.waits)
        made = made._replace(digest=digest({name: weights[name] for name, _ in trained.module.named_parameters()}))
        say("may", *made)
        if life.waits:
            say("told", *made)


@contextmanager
def small_disk(folder: Path, size: int | None) -> Iterator[bool]:
    """A file system of so many KiB there; whether there is one."""
    folder.mkdir()
    if size is None:
        yield True
        return
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", str(folder)]
    made = subprocess.run(words, check=False, capture_output=True).returncode == 0
    try:
        yield made
    finally:
        if made:
            subprocess.run(["umount", str(folder)], check=True)
