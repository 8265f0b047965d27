"""Draws docs/pictures/recovery.png: three ranks of which one is killed, and a spare that takes its place, over time.

    python benchmarks/recovery_picture.py --picture docs/pictures/recovery.png

A real run on this machine: `shardfold run --spares 1` starts the ranks, which train a small model under ``zero2`` with
copies, and say when each part of going on began and ended, by the clock that processes of a machine share.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardfold as sf
from shardfold.engine import _spare

RANKS, LATER = 3, 20
"""Ranks, and steps that they take with the spare waiting before one of them is killed."""
WAIT = 120.0
INK, MUTED = "#22252b", "#6b7480"
PARTS = {
    "step": ("#9ecae1", "a step"),
    "break": ("#c2410c", "a step that is broken off"),
    "stop": ("#f59e0b", "stop, hold the states"),
    "agree": ("#7c3aed", "launchers agree"),
    "meet": ("#2171b5", "meet: groups, an engine"),
    "states": ("#15803d", "states"),
    "wait": ("#e7e9ec", "a spare waits"),
}


class Told(sf.ElasticRun):
    """A run whose parts are written down.

    Args:
        file: where; a line for each part, with seconds by the clock of the machine.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        super().__init__(make)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            with self.file.open("a") as lines:
                lines.write(json.dumps([what, begun, time.monotonic()]) + "\n")

    def _stop(self, engine: Any) -> None:
        with self.told("stop"):
            super()._stop(engine)

    def _next_place(self, error: BaseException) -> Any:
        with self.told("agree"):
            return super()._next_place(error)

    def _made(self, ranks: int) -> sf.Engine:
        with self.told("meet"):
            return super()._made(ranks)

    def _move(self, engine: sf.Engine) -> None:
        with self.told("states"):
            super()._move(engine)

    def _join(self) -> None:
        note = _spare.note_elastic

        def waits() -> None:
            note()
            self.file.with_suffix(".waits").touch()

        _spare.note_elastic = waits
        super()._join()


def make(ranks: int) -> sf.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    return sf.Engine(model, optimizer=adamw, layout="zero2", runtime=sf.Runtime(survive="rank"))


def trained(folder: Path) -> None:
    """On one rank."""
    torch.set_num_threads(1)
    uid = int(os.environ.get("SHARDFOLD_SPARE", os.environ["RANK"]))
    run = Told(folder / f"rank-{uid}")
    (folder / f"pid-{uid}").write_text(str(os.getpid()))
    samples = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    loader = sf.Loader(samples, sf.Sampler(samples, batch_size=32))
    for x in run.batches(loader):
        known, begun = run.engine, time.monotonic()
        with run.attempt() as engine:
            engine.backward((engine(x) - x).square().mean())
            engine.step()
        if run.engine is not known:
            begun_stop = next(a for what, a, _ in reversed(parts(run.file)) if what == "stop")
            with run.file.open("a") as lines:
                lines.write(json.dumps(["break", begun, begun_stop]) + "\n")
            continue
        with run.file.open("a") as lines:
            lines.write(json.dumps(["step", begun, time.monotonic()]) + "\n")
        (folder / f"step.{uid}").write_text(str(engine.steps))
        os.replace(folder / f"step.{uid}", folder / f"step-{uid}")
    run.close()


def parts(file: Path) -> list[tuple[str, float, float]]:
    return [tuple(json.loads(line)) for line in file.read_text().splitlines()]


def awaited(file: Path, least: int = 0) -> None:
    deadline = time.monotonic() + WAIT
    while not file.exists() or int(file.read_text() or 0) < least:
        assert time.monotonic() < deadline, f"{file} never came"
        time.sleep(0.002)


def taken(folder: Path) -> int:
    """Steps of rank 0."""
    return int((folder / "step-0").read_text() or 0)


def killed(folder: Path) -> float:
    """Runs, kills rank 1 of three, and ends the run; when it was killed."""
    words = ["--standalone", f"--nproc-per-node={RANKS}", "--spares=1", __file__, "--rank", str(folder)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-m", "shardfold", "run", *words], env=environment)
    try:
        awaited(folder / f"rank-{RANKS}.waits")
        awaited(folder / "step-0", taken(folder) + LATER)
        at = time.monotonic()
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
        awaited(folder / f"step-{RANKS}", 1)
        awaited(folder / "step-0", taken(folder) + 4)
        return at
    finally:
        run.terminate()
        run.wait(WAIT)


def draw(folder: Path, at: float, picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(13, 2.9), dpi=110, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    found = {uid: parts(folder / f"rank-{uid}") for uid in range(RANKS + 1)}
    end = 1.0
    for uid, each in found.items():
        shown = [(what, 1e3 * (a - at), 1e3 * (b - at)) for what, a, b in each]
        if uid == RANKS:
            first = min(a for _, a, _ in shown)
            shown.append(("wait", -1e4, first))
        steps = [a for what, a, _ in shown if what == "step" and a > 0]
        end = max([end, *sorted(steps)[:3]])
        for what, begin, stop in shown:
            axes.barh(uid, stop - begin, left=begin, height=0.7, color=PARTS[what][0], edgecolor="white", linewidth=0.4)
    axes.plot([0, 0], [0.5, 1.5], color=INK, linewidth=2)
    axes.text(end / 150, 1, "killed", va="center", fontsize=9, color=INK)
    names = [f"rank {uid}" for uid in range(RANKS)]
    axes.set_yticks(range(RANKS + 1), [*names, "spare"], fontsize=9, color=INK)
    axes.set_xlim(-end / 8, end)
    axes.invert_yaxis()
    axes.tick_params(length=0, labelsize=8.5, colors=MUTED)
    axes.set_xlabel("milliseconds behind the SIGKILL", color=MUTED, fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    handles = [Patch(color=color, label=word) for color, word in PARTS.values()]
    figure.legend(handles=handles, loc="upper center", ncols=len(PARTS), frameon=False, fontsize=8.5)
    figure.subplots_adjust(left=0.06, right=0.99, top=0.88, bottom=0.17)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("recovery.png"))
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        return trained(options.rank)
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder), killed(Path(folder)), options.picture)
    print(options.picture)


if __name__ == "__main__":
    main()
