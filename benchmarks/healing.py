"""From the SIGKILL of a rank to the next step that the others take: here, and with torchft, on the same model in turns.

    python -m venv X && X/bin/pip install torchft-nightly torch numpy         in an environment of its own
    python benchmarks/healing.py --torchft X/bin/python --rounds 10           a table; without --torchft ours alone

Three ranks of data parallelism (here ``ddp`` under ``shardfold.ElasticRun``; there three replica groups of one rank,
with its ``DistributedDataParallel`` over Gloo) train eight blocks of 256 with AdamW. At a drawn moment one is killed,
then another one: 3 to 2 to 1. torchft's lighthouse waits a second for groups that are to join, and as long for a sign
of life (``--wait``; by itself it waits a minute, and five seconds). Steps that were begun and are not taken come again
with the same samples here, and are dropped there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

RANKS, WIDTH, ROWS, BLOCKS = 3, 256, 16, 8
REST = 0.02
"""Seconds between two steps."""
BEFORE, BEHIND = 30, 5
"""Steps of each rank in front of a kill, and behind it, until the next."""
STARTS, GOES_ON = 180.0, 90.0
LIGHTHOUSE = """
import sys, time
from torchft.coordination import LighthouseServer
wait = int(float(sys.argv[1]) * 1000)
times = dict(join_timeout_ms=wait, quorum_tick_ms=100, heartbeat_timeout_ms=wait)
server = LighthouseServer(bind="[::]:0", min_replicas=1, **times)
print(server.address(), flush=True)
time.sleep(1e6)
"""


def model() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def notes(folder: Path, rank: int) -> Callable[..., None]:
    """Writes what a rank has to say to a file of its own."""
    file = os.open(folder / f"log-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def say(*words: object) -> None:
        os.write(file, (json.dumps([time.monotonic(), rank, *words]) + "\n").encode())

    return say


def ours(folder: Path) -> None:
    """One rank, started by ``shardfold run``."""
    import shardfold as sf

    say = notes(folder, int(os.environ["RANK"]))
    say("pid", os.getpid())
    run = sf.ElasticRun(lambda _: sf.Engine(model(), optimizer=adamw, layout="ddp"))
    while True:
        with run.attempt() as engine:
            x = torch.randn(ROWS, WIDTH)
            engine.backward((engine(x) - x).square().mean())
            say("step" if engine.step().updated else "lost", engine.steps, engine.world_size)
        time.sleep(REST)


def torchft(rank: int, folder: Path) -> None:
    """One replica group of one rank."""
    from datetime import timedelta

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo  # pyright: ignore

    say, module = notes(folder, rank), model()
    say("pid", os.getpid())

    def load(state: Any) -> None:
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])

    manager: Any = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"module": module.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"r{rank}",
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=30),
    )
    replica = DistributedDataParallel(manager, module)
    optimizer: Any = Optimizer(manager, adamw(module.parameters()))
    while True:
        x = torch.randn(ROWS, WIDTH)
        optimizer.zero_grad()
        (replica(x) - x).square().mean().backward()
        before = manager.current_step()
        optimizer.step()
        say("step" if manager.current_step() > before else "lost", manager.current_step(), manager.num_participants())
        time.sleep(REST)


@contextmanager
def started_ours(folder: Path) -> Iterator[None]:
    root = Path(__file__).parents[1]
    around = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-m", "shardfold", "run", "--standalone", "--nproc-per-node", str(RANKS)]
    with open(folder / "out", "w") as out:
        run = subprocess.Popen([*command, __file__, "--rank", "ours", str(folder)], env=around, stdout=out, stderr=out)
        try:
            yield
        finally:
            run.terminate()
            run.wait()


@contextmanager
def started_torchft(python: str, wait: float, folder: Path) -> Iterator[None]:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    around = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
    command, pipe, null = [python, "-c", LIGHTHOUSE, str(wait)], subprocess.PIPE, subprocess.DEVNULL
    light = subprocess.Popen(command, env=around, stdout=pipe, stderr=null, text=True)
    groups: list[subprocess.Popen[bytes]] = []
    assert light.stdout is not None
    around["TORCHFT_LIGHTHOUSE"] = light.stdout.readline().strip()
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(RANKS)]
    try:
        with open(folder / "out", "w") as out:
            for rank, store in enumerate(stores):
                given = {**around, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
                command = [python, __file__, "--rank", f"{rank}", str(folder)]
                groups.append(subprocess.Popen(command, env=given, stdout=out, stderr=out))
            yield
    finally:
        for each in (*groups, light):
            each.kill()
            each.wait()


def said(folder: Path) -> list[tuple[Any, ...]]:
    """What ranks have said, by time."""
    found: list[tuple[Any, ...]] = []
    for file in folder.glob("log-*"):
        lines = file.read_text().splitlines(keepends=True)
        found += [tuple(json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(found)


def steps(folder: Path, ranks: int, since: float) -> dict[int, list[float]]:
    """When each rank has taken steps that so many had a part in."""
    found: dict[int, list[float]] = {}
    for at, rank, what, *more in said(folder):
        if what == "step" and more[1] == ranks and at > since:
            found.setdefault(rank, []).append(at)
    return found


def until(folder: Path, ranks: set[int], count: int, since: float, limit: float) -> dict[int, list[float]]:
    deadline = time.monotonic() + limit
    while True:
        found = steps(folder, len(ranks), since)
        if all(len(found.get(rank, ())) >= count for rank in ranks):
            return found
        if time.monotonic() > deadline:
            raise SystemExit(
                f"no {count} steps of ranks {ranks} within {limit:.0f} s: {(folder / 'out').read_text()[-3000:]}"
            )
        time.sleep(0.01)


def killed(started: Callable[[Path], Any], dice: random.Random) -> list[tuple[float, float, int]]:
    """One run: of each kill the seconds until the first of the others takes a step, until all have, and how many steps
    these have lost."""
    figures: list[tuple[float, float, int]] = []
    with tempfile.TemporaryDirectory() as place, started(folder := Path(place)):
        left, since, limit = set(range(RANKS)), 0.0, STARTS
        for victim in dice.sample(range(RANKS), RANKS - 1):
            until(folder, left, BEFORE, since, limit)
            pid = next(more[0] for _, rank, what, *more in said(folder) if what == "pid" and rank == victim)
            time.sleep(dice.uniform(0.0, 0.03))
            since = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            left.remove(victim)
            first = [each[0] - since for each in until(folder, left, BEHIND, since, GOES_ON).values()]
            lost = sum(at > since and what == "lost" for at, _, what, *_ in said(folder))
            figures.append((min(first), max(first), lost))
            limit = GOES_ON
    return figures


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft", help="a Python that has torchft; without it ours alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wait", type=float, default=1.0, help="seconds that torchft's lighthouse waits")
    parser.add_argument("--rank", nargs=2, metavar=("WHICH", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.rank is not None:
        which, folder = given.rank
        return ours(Path(folder)) if which == "ours" else torchft(int(which), Path(folder))
    contenders: dict[str, Callable[[Path], Any]] = {"shardfold": started_ours}
    if given.torchft:
        contenders["torchft"] = partial(started_torchft, given.torchft, given.wait)
    took: dict[str, list[tuple[float, float, int]]] = {name: [] for name in contenders}
    dice = random.Random(7)
    for number in range(given.rounds):
        for name, started in contenders.items():
            took[name] += (found := killed(started, dice))
            print(number, name, *(f"{first:.2f} {last:.2f} s, {lost} lost;" for first, last, lost in found), flush=True)
    print("| | kills | first to go on: median | max | all: median | max | steps lost by a rank |\n" + "|---" * 7 + "|")
    for name, figures in took.items():
        first, last, lost = zip(*figures, strict=True)
        middle = [f"{value:.2f}" for each in (first, last) for value in (statistics.median(each), max(each))]
        print(f"| {name} | {len(figures)} | {' | '.join(middle)} | {sum(lost) / len(lost):.1f} |")


if __name__ == "__main__":
    main(sys.argv[1:])
