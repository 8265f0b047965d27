"""What tests of saves share: an engine, training that is the same on every rank, and ways to make the disk fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardfold as sf
from shardfold.checkpoint import draft
from shardfold.checkpoint.run_lock import LOCK
from shardfold.checkpoint.verify import verify
from tests.support.models import Small, batches
from tests.support.options import grouped

CALLS = ("open", "pwrite", "write", "fsync", "ftruncate", "mkdir", "rename", "replace", "unlink")


def engine(layout: str = "zero3", **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(
        Small(layers=2), optimizer=partial(torch.optim.AdamW, lr=1e-2), **grouped(layout=layout, **options)
    )


def train(engine: sf.Engine, steps: int = 1) -> None:
    for tokens, targets in batches(steps, rows=4, seed=engine.steps):
        engine.backward(engine(tokens, targets))
        engine.step()


class Disk:
    """Every call of the file system that this process makes below a folder, counted; ``at`` is called at one of them.

    Args:
        root: calls with a path below it, and those with a descriptor of a file below it, count.
        at: called before the call with its number (from 0) and its name, in the thread that makes it.
    """

    def __init__(self, root: Path, at: Callable[[int, str], None]) -> None:
        self._root, self._at = str(root), at
        self.calls = 0

    @contextmanager
    def watched(self) -> Iterator[Disk]:
        real = {name: getattr(os, name) for name in CALLS}
        exchange = draft._swap
        try:
            for name, call in real.items():
                setattr(os, name, partial(self._call, name, call))
            draft._swap = partial(self._call, "exchange", exchange)
            yield self
        finally:
            for name, call in real.items():
                setattr(os, name, call)
            draft._swap = exchange

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._below(args[0]):
            number, self.calls = self.calls, self.calls + 1
            self._at(number, name)
        return call(*args, **kwargs)

    def _below(self, what: Any) -> bool:
        try:
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        except OSError:
            return False
        return str(path).startswith(self._root)


@contextmanager
def failing(root: Path, name: str, number: int, code: int) -> Iterator[None]:
    """The ``number``-th call ``name`` of the file system below ``root`` fails."""
    seen: list[str] = []

    def at(_: int, call: str) -> None:
        seen.append(call)
        if call == name and seen.count(name) == number:
            raise OSError(code, os.strerror(code))

    with Disk(root, at).watched():
        yield
    assert seen.count(name) >= number, f"{name} was called {seen.count(name)} times"


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def left_over(root: Path) -> list[str]:
    """Everything in a folder of checkpoints that is neither a checkpoint nor ``latest`` nor whose it is."""
    return sorted(p.name for p in root.iterdir() if p.name not in ("latest", LOCK) and not (p / "index.json").exists())


def whole(root: Path) -> int:
    """The step of the latest checkpoint of a folder, which loads and is as it was written."""
    found = verify(root)
    assert found.ok, found.damage
    with sf.Checkpoint(root) as checkpoint:
        expected = torch.load(root.parent / f"expected-{checkpoint.index.step}.pt")
        for name, values in expected.items():
            there = checkpoint.parameter(name) if name in checkpoint.parameters else checkpoint.buffer(name)
            assert torch.equal(there, values), name
        return checkpoint.index.step


def expect(engine: sf.Engine, root: Path) -> None:
    """Keeps what a checkpoint of now must have."""
    state = engine.state_dict()
    if engine.rank == 0:
        torch.save(state, root.parent / f"expected-{engine.steps}.pt")
