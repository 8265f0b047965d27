"""`shardfold train --elastic`, `train face` and `tune`: ranks of the command are killed, the one that prints and writes
first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import shardfold as sf
from shardfold.comm import launcher_notes
from shardfold.launch.run_records import OwnRecord, read_records
from shardfold.tools.observe.run_folder import Run
from shardfold.tools.observe.run_status import RunStatus
from tests.support.clients import needs
from tests.tools.tune import support

ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(sys.platform != "linux", reason="launchers leave notes for ranks in a memfd")
STEPS, KILLED = 60, (9, 30)
"""Steps of a run, and those behind which a rank is killed."""


def command(folder: Path, out: str, *options: str) -> list[str]:
    """Of a small run on one text."""
    settings = ["--size", "tiny", "--context", "16", "--d-model", "32", "--sample", "0"]
    settings += ["--steps", f"{STEPS}", "--eval-every", "20", "--eval-windows", "8", "--data", str(folder / "text")]
    return [sys.executable, "-m", "shardfold", "train", "lm", *settings, "--out", str(folder / out), *options]


def rows(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's figures that are whole."""
    try:
        text = (folder / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def begun(folder: Path, run: list[str]) -> tuple[subprocess.Popen[str], Path]:
    """A run on three ranks, and its folder."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(run, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True), folder / "run"


def killed(
    folder: Path, run: list[str], steps: int = STEPS, spares: int = 0
) -> tuple[dict[int, dict[str, float]], str]:
    """The figures of a run whose first rank is killed twice, by step, and what it printed; with spares, once so many
    wait."""
    process, place = begun(folder, run)
    await_spares(process, spares)
    first = len(rows(place))
    for behind in KILLED:
        kill(process, place, first + behind)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-6000:]
    assert "the 2 other ranks go on" in err and ("3 ranks go on" if spares else "1 rank goes on") in err, err
    lines = rows(place)
    found = {int(each["step"]): each for each in lines}
    assert len(found) == len(lines) >= steps - len(KILLED), "a step is told of twice, or more are missing than died"
    assert steps in found
    return found, out


def await_spares(run: subprocess.Popen[str], spares: int) -> None:
    """Returns when so many of a run wait."""
    deadline = time.monotonic() + 120
    while run.poll() is None and sum(map(waits, Path("/proc").glob("[0-9]*"))) < spares:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waits(process: Path) -> bool:
    """Whether a process is a spare of a launcher of this one's, and waits."""
    try:
        if f"PPid:\t{os.getpid()}\n" not in Path(process.parent, parent_of(process), "status").read_text():
            return False
        entries = [each.partition("=") for each in (process / "environ").read_text().split("\0")]
        given = {name: value for name, _, value in entries}
        if launcher_notes.SPARE not in given:
            return False
        with open(given[launcher_notes.FILE], "rb") as notes:
            notes.seek(launcher_notes.ELASTIC)
            return notes.read(1) == b"1"
    except (OSError, KeyError):
        return False


def parent_of(process: Path) -> str:
    return next(line.split()[1] for line in (process / "status").read_text().splitlines() if line.startswith("PPid"))


def kill(run: subprocess.Popen[str], folder: Path, behind: int) -> None:
    """Rank 0, when so many steps have been told."""
    deadline = time.monotonic() + 120
    while run.poll() is None and len(rows(folder)) < behind:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    first = next(each for each in read_records(folder)[0] if each.rank == 0)
    assert first.lives, f"rank 0 does not live: {first}"
    os.kill(first.pid, signal.SIGKILL)


def compare(folder: Path, deaths: int) -> None:
    """A run with the same on one rank, to its end."""
    alone = command(folder, "alone", "--procs", "1", "--micro-batch", "6")
    subprocess.run(alone, cwd=ROOT, capture_output=True, check=True, timeout=240)
    expected, lines = rows(folder / "alone"), rows(folder / "run")
    found = {int(each["step"]): each for each in lines}
    assert len(found) == len(lines) >= STEPS - deaths, "a step is told of twice, or more are missing than died"
    for row in expected:
        mine = found.get(int(row["step"]), row)
        assert abs(mine["loss"] - row["loss"]) < 1e-4, row["step"]
        told = "held_out_bits_per_byte"
        assert abs((mine.get(told) or 0) - (row.get(told) or 0)) < 1e-4 or told not in mine
    assert RunStatus.of(folder / "run").state == "done"
    assert sf.Checkpoint(folder / "run").index.step == STEPS


@linux
@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero3", "offload"])
def test_ranks_of_train_are_killed_and_it_comes_to_the_same(layout: str, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(3000)))
    given = ("--layout", layout, "--procs", "3", "--micro-batch", "2", "--elastic", "--save-every", "20")
    _, out = killed(tmp_path, command(tmp_path, "run", *given))
    folder = tmp_path / "run"
    compare(tmp_path, len(KILLED))
    assert [each.rank for each in read_records(folder)[0] if each.rank >= 0] == [0]
    assert "Written to" in out  # by the rank that was the last of three


@linux
@pytest.mark.soak
def test_ranks_of_train_are_killed_and_it_comes_to_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(3000)))
    given = ("--layout", "zero2", "--procs", "3", "--micro-batch", "2", "--elastic", "--exact", "--save-every", "20")
    killed(tmp_path, command(tmp_path, "run", *given))
    quiet = command(tmp_path, "quiet", *given)
    subprocess.run(quiet, cwd=ROOT, capture_output=True, check=True, timeout=240)
    mine, expected = (sf.Checkpoint(tmp_path / name) for name in ("run", "quiet"))
    assert all(torch.equal(mine.parameter(name), expected.parameter(name)) for name in expected.parameters)


@linux
@pytest.mark.soak
def test_a_spare_of_train_takes_the_place_of_the_rank_that_prints(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("".join(f"{n} squared is {n * n}.\n" for n in range(3000)))
    given = ("--layout", "zero3", "--procs", "3", "--micro-batch", "2", "--elastic", "--save-every", "20")
    run, folder = begun(tmp_path, command(tmp_path, "run", *given, "--spares", "1"))
    kill(run, folder, 40)
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, err[-6000:]
    assert "ranks go on from step 4" in err, err
    assert [each.rank for each in read_records(folder)[0] if each.rank >= 0] == [0, 1, 2] or "joined" not in err
    compare(tmp_path, 1)
    assert "Written to" in out


@linux
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("layout", "spares"), [("ddp", 0), ("zero2", 0), ("zero2", 2)])
def test_ranks_of_train_face_are_killed_and_it_comes_to_the_same(layout: str, spares: int, tmp_path: Path) -> None:
    """Its batch normalization has the images of the whole step, on however many ranks."""
    sizes = ["--identities", "11", "--shots", "4", "--held-out", "5", "--size", "16", "--width", "16", "--far", "0.1"]
    fixed = [sys.executable, "-m", "shardfold", "train", "face", *sizes, "--embedding", "12", "--head", "replicated"]
    steps = 10 * STEPS if spares else STEPS
    fixed += ["--steps", f"{steps}", "--layout", layout, "--lr", "1e-4"]  # Adam makes much of roundings, by the rate
    given = ["--procs", "3", "--batch", "4", "--elastic", "--spares", f"{spares}", "--out", str(tmp_path / "run")]
    found, _ = killed(tmp_path, [*fixed, *given], steps, spares)
    quiet = [*fixed, "--procs", "3", "--batch", "4", "--out", str(tmp_path / "quiet")]
    subprocess.run(quiet, cwd=ROOT, capture_output=True, check=True, timeout=240)
    apart = [abs(found.get(int(row["step"]), row)["loss"] / row["loss"] - 1) for row in rows(tmp_path / "quiet")]
    assert max(apart[: KILLED[0]]) < 1e-6 and max(apart) < 2e-4, apart  # roundings grow from the first death on
    assert RunStatus.of(tmp_path / "run").state == "done"


@linux
@pytest.mark.soak
@pytest.mark.timeout(900)
@needs("transformers", "peft")
@pytest.mark.parametrize(("layout", "spares"), [("ddp", 0), ("zero3", 0), ("zero3", 2)])
def test_ranks_of_tune_are_killed_and_it_comes_to_the_same(layout: str, spares: int, tmp_path: Path) -> None:
    support.model_folder(tmp_path / "base")
    support.write_rows(tmp_path / "rows.jsonl", support.chats(90))
    steps, rate = (10 * STEPS, "1e-4") if spares else (STEPS, "1e-2")  # roundings grow with both
    fixed = [sys.executable, "-m", "shardfold", "tune", "sft", "--model", str(tmp_path / "base"), "--lr", rate]
    fixed += ["--data", str(tmp_path / "rows.jsonl"), "--steps", f"{steps}", "--cache", str(tmp_path / "cache")]
    given = ["--procs", "3", "--micro-batch", "2", "--elastic", "--layout", layout, "--out", str(tmp_path / "run")]
    given += ["--spares", f"{spares}"]
    found, _ = killed(tmp_path, [*fixed, *given], steps, spares)
    alone = [*fixed, "--procs", "1", "--micro-batch", "6", "--out", str(tmp_path / "alone")]
    subprocess.run(alone, cwd=ROOT, capture_output=True, check=True, timeout=240)
    for row in rows(tmp_path / "alone"):
        assert abs(found.get(int(row["step"]), row)["loss"] - row["loss"]) < 1e-4, row["step"]
    assert RunStatus.of(tmp_path / "run").state == "done"


def test_a_rank_takes_the_place_of_one_that_is_gone(tmp_path: Path) -> None:
    """Its record and, of rank 0, the figures."""
    first, second, third = (Run(tmp_path, steps=9, rank=rank, ranks=3) for rank in range(3))
    first.log(1, loss=3.0)
    first._release()  # pyright: ignore[reportPrivateUsage]  # as the system does for a process that is killed
    second.log(1)
    second.go_on_as(0, 2)
    third.log(1)
    third.go_on_as(1, 2)
    second.log(2, loss=2.0)
    third.log(2)
    said = [(each.rank, each.ranks, each.lives, each.step) for each in read_records(tmp_path)[0]]
    assert said == [(0, 2, True, 2), (1, 2, True, 2)]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2] and RunStatus.of(tmp_path).state == "training"
    with pytest.raises(BlockingIOError):
        OwnRecord(tmp_path, 0, 2)
    for each in (second, third):
        each.close()
    assert RunStatus.of(tmp_path).state == "done"
