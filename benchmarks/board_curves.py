"""Curves of many long runs on `shardfold board` and on others' pages, each with the same losses.

PYTHONPATH=. python benchmarks/board_curves.py [--runs 40] [--steps 100000] tensorboard=X mlflow=Y trackio=Z

X, Y, Z are environments, as of `benchmarks/board_peers.py`. Each page has a store that is filled before, by its own
writer. Then its server is started and asked, as its page asks, for the losses of one run, of all, and of
all again when each has a step more; the clock runs from the start of the server until the first curve. Memory is that
of all its processes at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.board import MADE, MeasuredBoard, make_runs
from benchmarks.board_peers import held, silent_server

STARTS = 150.0  # seconds for what is asked to be there
LOSSES = """
import json, os, sys
folder, place, runs, first, last = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
def losses(run):
    for line in open(f"{folder}/run-{run % 8:03}/metrics.jsonl"):
        row = json.loads(line)
        if first <= row["step"] <= last:
            yield row["step"], row["loss"]
"""
FILL = {
    "tensorboard": """
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
for run in range(min(8, runs)):
    os.makedirs(f"{place}/run-{run:03}", exist_ok=True)
    with open(f"{place}/run-{run:03}/events.out.tfevents.1.host", "ab") as file:
        writer = RecordWriter(file)
        if first == 1: writer.write(Event(wall_time=1.0, file_version="brain.Event:2").SerializeToString())
        for step, loss in losses(run):
            value = Summary.Value(tag="loss", simple_value=loss)
            writer.write(Event(wall_time=1e9 + step, step=step, summary=Summary(value=[value])).SerializeToString())
for run in range(8, runs):
    os.makedirs(f"{place}/run-{run:03}", exist_ok=True)
    name = "events.out.tfevents.1.host"
    if first == 1: os.link(f"{place}/run-{run % 8:03}/{name}", f"{place}/run-{run:03}/{name}")
""",
    "trackio": """
os.environ["TRACKIO_DIR"] = place
from trackio.sqlite_storage import SQLiteStorage
times = None
for run in range(runs):
    rows = list(losses(run))
    SQLiteStorage.bulk_log("board", f"run-{run:03}", [{"loss": loss} for _, loss in rows], [step for step, _ in rows])
""",
    "mlflow": """
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient
client = MlflowClient(f"sqlite:///{place}/mlflow.db")
ids = sorted(each.info.run_id for each in client.search_runs(["0"], max_results=1000))
ids = ids or sorted(client.create_run("0", run_name=f"run-{run:03}").info.run_id for run in range(runs))
for run, name in enumerate(ids):
    found = [Metric("loss", loss, 10**12 + step, step) for step, loss in losses(run)]
    for at in range(0, len(found), 1000):  # of one call, at most
        client.log_batch(name, found[at : at + 1000], synchronous=True)
json.dump(ids, open(f"{place}/ids.json", "w"))
""",
}
SHOW = {
    "tensorboard": ["-m", "tensorboard.main", "--logdir", "{place}", "--port", "{port}", "--reload_interval", "1"],
    "trackio": [
        "-c",
        "import sys, trackio; trackio.show(open_browser=False, block_thread=True, server_port=int(sys.argv[1]))",
        "{port}",
    ],
    "mlflow": ["-m", "mlflow", "ui", "--backend-store-uri", "sqlite:///{place}/mlflow.db", "--port", "{port}"],
}


def asked(url: str, body: Any = None) -> bytes:
    """Empty where there is no answer yet."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=STARTS) as reply:
            return reply.read()
    except (urllib.error.URLError, OSError):
        return b""


class Page:
    """What the page of a peer asks its server for."""

    def __init__(self, name: str, place: Path, port: int, runs: int) -> None:
        self.name, self.place, self.url, self.runs = name, place, f"http://127.0.0.1:{port}", runs

    def curves(self, runs: int) -> list[bytes]:
        """The losses of so many runs; empty where they are not there."""
        if self.name == "tensorboard":
            asks = (f"{self.url}/data/plugin/scalars/scalars?tag=loss&run=run-{run:03}" for run in range(runs))
            return [asked(each) for each in asks]
        if self.name == "trackio":
            wanted = [{"run": f"run-{run:03}"} for run in range(runs)]
            return [asked(f"{self.url}/api/get_logs_batch", {"project": "board", "runs": wanted, "max_points": 3000})]
        ids = json.loads((self.place / "ids.json").read_text())[:runs]
        query = urllib.parse.urlencode({"run_ids": ids, "metric_key": "loss", "max_results": 1000}, doseq=True)
        return [asked(f"{self.url}/ajax-api/2.0/mlflow/metrics/get-history-bulk-interval?{query}")]

    def until(self, runs: int, step: int) -> int:
        """Ask until all of them have that step; bytes of the last answer."""
        until = time.perf_counter() + STARTS
        while time.perf_counter() < until:
            found = self.curves(runs)
            if all(found) and sum(each.count(str(step).encode()) for each in found) >= runs:
                return sum(map(len, found))
            time.sleep(0.005)
        raise SystemExit(f"{self.name} has no step {step} of {runs} runs within {STARTS:g} s")


def filled(name: str, python: str, folder: Path, place: Path, runs: int, steps: tuple[int, int]) -> None:
    words = [python, "-c", LOSSES + FILL[name], str(folder), str(place), str(runs), *map(str, steps)]
    subprocess.run(words, check=True, stderr=subprocess.DEVNULL)


def peer(name: str, python: str, folder: Path, place: Path, runs: int, steps: int) -> dict[str, float]:
    filled(name, python, folder, place, runs, (1, steps))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [each.replace("{place}", str(place)).replace("{port}", str(port)) for each in SHOW[name]]
    names = {"TRACKIO_DIR": str(place), "GRADIO_ANALYTICS_ENABLED": "False"}
    began = time.perf_counter()
    process = silent_server([python, *words], names)
    try:
        page, found = Page(name, place, port, runs), dict[str, float]()

        def timed(what: str, runs: int, step: int, begun: float) -> None:
            found[what + "_bytes"] = page.until(runs, step)
            found[what + "_s"] = time.perf_counter() - begun

        timed("first", 1, steps, began)
        timed("all", runs, steps, time.perf_counter())
        filled(name, python, folder, place, runs, (steps + 1, steps + 1))
        timed("tick", runs, steps + 1, time.perf_counter())
        memory, cpu = held(process.pid)
        return {**found, "mib": memory / 2**20, "cpu_s": cpu}
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ours(folder: Path, runs: int, steps: int) -> dict[str, float]:
    began = time.perf_counter()
    board = MeasuredBoard(folder)
    try:
        ids = [row["id"] for row in json.loads(board.ask("/api/runs"))["runs"]]
        found = dict[str, float]()

        def timed(what: str, path: str, begun: float, right: Callable[[Any], bool]) -> Any:
            _, found[what + "_bytes"], told = board.timed(path, right)
            found[what + "_s"] = time.perf_counter() - begun
            return told

        read: Callable[[Any], bool] = lambda told: told["read"] >= 1  # noqa: E731
        timed("first", f"/api/curves?id={ids[0]}&key=loss&pixels=1000", began, read)
        every = "/api/curves?key=loss&pixels=1000&" + "&".join(f"id={run}" for run in ids)
        cursor = timed("all", every, time.perf_counter(), read)["cursor"]
        append(folder, steps + 1)
        news: Callable[[Any], bool] = lambda told: len(told["series"]) == runs  # noqa: E731
        timed("tick", f"{every}&after={cursor}", time.perf_counter(), news)
        return {**found, "mib": board.memory("VmRSS"), "cpu_s": board.cpu()}
    finally:
        board.process.terminate()
        board.process.wait()


def append(folder: Path, step: int) -> None:
    """A step more of each run."""
    for path in sorted(folder.glob("run-*/metrics.jsonl"))[:MADE]:  # the others are links to these
        with path.open("a") as file:
            file.write(json.dumps({"step": step, "loss": 2.0, "seconds": 0.1 * step}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="NAME=FOLDER", help="a page, and the environment that it is in")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100_000)
    given = parser.parse_args()
    print("page | first curve s | all s | all bytes | a step more s | bytes | MiB | seconds of processors")
    with tempfile.TemporaryDirectory() as place:
        make_runs(folder := Path(place, "runs"), given.runs, given.steps)
        found = {"shardfold": ours(folder, given.runs, given.steps)}  # which gives its runs the step that peers fill in
        for each in [None, *given.peers]:
            name, _, python = (each or "shardfold").partition("=")
            if each is not None:
                (own := Path(place, name)).mkdir()
                found[name] = peer(name, f"{python}/bin/python", folder, own, given.runs, given.steps)
            one = found[name]
            print(
                f"{name} | {one['first_s']:.2f} | {one['all_s']:.2f} | {one['all_bytes']:,.0f} | {one['tick_s']:.3f} | "
                f"{one['tick_bytes']:,.0f} | {one['mib']:.0f} | {one['cpu_s']:.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
