"""What the board takes: to start, with 200 runs of 100,000 steps, and for each look at what is new.

python benchmarks/board.py [--runs 200] [--steps 100000] [--json FILE]

Rows are as `shardfold train` writes them. Eight files are made and linked as often as there are runs, so that all fit
into the page cache; each is read and kept by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

MADE = 8
TOKEN = "of-a-benchmark-only"


def make_runs(folder: Path, runs: int, steps: int) -> None:
    for number in range(min(MADE, runs)):
        rng = random.Random(number)
        run = folder / f"run-{number:03}"
        run.mkdir(parents=True)
        with (run / "metrics.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                row = {
                    "step": step,
                    "loss": 2 + 8 / (1 + step / 500) + rng.gauss(0, 0.1),
                    "lr": 4e-3 * (1 - step / steps / 2),
                    "grad_norm": rng.uniform(0.2, 1.4),
                    "tokens_per_s": rng.uniform(9e3, 11e3),
                    "seconds": round(step * 0.1, 3),
                    "memory_bytes": 123456789,
                    "held_out_loss": 2.5 if step % 1000 == 0 else None,
                    "skipped": 0,
                }
                file.write(json.dumps(row) + "\n")
    for number in range(runs):
        run = folder / f"run-{number:03}"
        run.mkdir(exist_ok=True)
        if not (run / "metrics.jsonl").exists():
            os.link(folder / f"run-{number % MADE:03}" / "metrics.jsonl", run / "metrics.jsonl")
        (run / "config.json").write_text(
            json.dumps({"size": "demo", "context": 128, "eval_windows": 8, "seed": number})
        )
        (run / "summary.json").write_text(json.dumps({"steps": steps}))


class MeasuredBoard:
    """The command, from the moment it is started."""

    def __init__(self, folder: Path) -> None:
        tokens = folder.parent / "token"
        tokens.write_text(TOKEN + "\n")
        command = [sys.executable, "-m", "shardfold", "board", str(folder), "--port=0", f"--token-file={tokens}"]
        begun = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().partition("/#")[0]
        self.ask("/")
        self.start = time.perf_counter() - begun

    def ask(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.read()

    def timed(self, path: str, is_whole: Callable[[Any], bool] = lambda _: True) -> tuple[float, int, Any]:
        """Seconds, bytes and the answer of a question that is asked until the answer is whole."""
        begun, size = time.perf_counter(), 0
        while True:
            text = self.ask(path)
            size, found = size + len(text), json.loads(text)
            if is_whole(found):
                return time.perf_counter() - begun, size, found

    def memory(self, name: str) -> float:
        """MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name + ":"))

    def cpu(self) -> float:
        """Seconds of all its threads."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, steps: int) -> dict[str, Any]:
    board = MeasuredBoard(folder)
    try:
        found: dict[str, Any] = {
            "start_s": board.start,
            "start_cpu_s": board.cpu(),
            "start_rss_mib": board.memory("VmRSS"),
        }
        found["list_s"], found["list_bytes"], told = board.timed("/api/runs")
        found["list_again_s"] = board.timed("/api/runs?after=" + told["cursor"])[0]
        ids = [row["id"] for row in told["runs"]]
        read = lambda answer: answer["read"] >= 1  # noqa: E731
        before = board.cpu()
        found["first_curve_s"], found["first_curve_bytes"], one = board.timed(f"/api/curves?id={ids[0]}&key=loss", read)
        found["first_curve_cpu_s"] = board.cpu() - before
        found["zoom_s"] = board.timed(f"/api/curves?id={ids[0]}&key=loss&from={steps // 2}&to={steps // 2 + 500}")[0]
        every = "/api/curves?key=loss&pixels=600&" + "&".join(f"id={run}" for run in ids)
        before = board.cpu()
        found["all_s"], _, told = board.timed(every, read)
        found["all_cpu_s"] = board.cpu() - before
        found["all_again_s"], found["all_bytes"], told = board.timed(every, read)
        found["rss_mib"], found["peak_rss_mib"] = board.memory("VmRSS"), board.memory("VmHWM")
        for name, path, cursor in (
            ("tick_s", f"/api/curves?id={ids[0]}&key=loss", one["cursor"]),
            ("tick_all_s", every, told["cursor"]),
        ):
            took: list[float] = []
            before = board.cpu()
            for turn in range(20):
                for number in range(MADE):
                    with (folder / f"run-{number:03}" / "metrics.jsonl").open("a") as file:
                        row = {
                            "step": steps + 20 * ("all" in name) + turn + 1,
                            "loss": 2.0,
                            "seconds": 1e6,
                            "tokens_per_s": 1.0,
                        }
                        file.write(json.dumps(row) + "\n")
                seconds, _, told = board.timed(f"{path}&after={cursor}")
                cursor = told["cursor"]
                took.append(seconds)
            found[name] = statistics.median(took)
            found[name.replace("_s", "_cpu_s")] = (board.cpu() - before) / len(took)
        return found
    finally:
        board.process.terminate()
        board.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "runs")
        make_runs(folder, given.runs, given.steps)
        found = measure(folder, given.steps)
    for name, value in found.items():
        print(f"{name:20}{value:12,.3f}" if isinstance(value, float) else f"{name:20}{value:12,}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
