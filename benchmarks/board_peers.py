"""How light `shardfold board` is beside others' pages: what they install, how soon they answer, what they hold.

    python -m venv X && X/bin/pip install tensorboard        and so on, each in an environment of its own
    python benchmarks/board_peers.py tensorboard=X mlflow=Y trackio=Z gradio=W    the table of docs/board.md

In turns: a page is started on a folder with one run, asked for ``/`` until it answers, and its processes' memory is
read (proportional set size, so that shared pages count once) two seconds later; medians of the rounds. On a machine
with other work seconds of processors tell more than the clock's. Megabytes are
the files of a package and of all that it requires. ``shardfold`` itself is measured by this Python, its megabytes are
those beyond the extra ``cli``. gradio's page is a form of two fields, as it has none of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

STARTS = 150.0  # seconds for a page to be there, on a loaded machine
SETTLES = 2.0
GRADIO = """
import sys
import gradio
gradio.Interface(lambda name, rate: name, ["text", "number"], "text").launch(server_port=int(sys.argv[1]), quiet=True)
"""
TRACKIO = """
import sys, trackio
trackio.show(open_browser=False, block_thread=True, server_port=int(sys.argv[1]))
"""
COMMANDS = {
    "shardfold": ["-m", "shardfold", "board", "{folder}", "--port", "{port}"],
    "tensorboard": ["-m", "tensorboard.main", "--logdir", "{folder}", "--port", "{port}"],
    "mlflow": ["-m", "mlflow", "ui", "--backend-store-uri", "sqlite:///{folder}/mlflow.db", "--port", "{port}"],
    "trackio": ["-c", TRACKIO, "{port}"],
    "gradio": ["-c", GRADIO, "{port}"],
}
PACKAGES = {"shardfold": ("starlette uvicorn", "typer rich pydantic")}
"""What is counted, and what is there already."""
SIZES = """
import re, sys
from importlib.metadata import PackageNotFoundError, distribution
def closure(names):
    found, open = {}, list(names)
    while open:
        name = re.sub(r"[-_.]+", "-", open.pop()).lower()
        try: each = distribution(name)
        except PackageNotFoundError: continue
        if name in found: continue
        found[name] = sum(f.locate().stat().st_size for f in each.files or () if f.locate().is_file())
        for need in each.requires or ():
            if "extra ==" not in need: open.append(re.match(r"[A-Za-z0-9._-]+", need)[0])
    return found
whole, less = closure(sys.argv[1].split()), closure(sys.argv[2].split())
print(sum(size for name, size in whole.items() if name not in less), len(whole.keys() - less.keys()))
"""


def installed(name: str, python: str) -> tuple[int, int]:
    """Bytes, and how many packages."""
    package, without = PACKAGES.get(name, (name, ""))
    said = subprocess.run([python, "-c", SIZES, package, without], check=True, capture_output=True, text=True).stdout
    num_bytes, packages = map(int, said.split())
    return num_bytes, packages


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as reply:
            return reply.status == 200
    except urllib.error.HTTPError:
        return False
    except OSError:
        return False


def silent_server(command: list[str], names: dict[str, str]) -> subprocess.Popen[bytes]:
    """A server in a session of its own that says nothing here."""
    silent = subprocess.DEVNULL
    return subprocess.Popen(command, env={**os.environ, **names}, stdout=silent, stderr=silent, start_new_session=True)


def held(leader: int) -> tuple[int, float]:
    """Bytes that the processes of a session hold, and seconds of processors that they have taken."""
    total, ticks = 0, 0
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    ticks += sum(map(int, fields[11:15]))  # those of its children that have ended, too
                    lines = (folder / "smaps_rollup").read_text().splitlines()
                    total += 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            except (OSError, StopIteration):
                continue  # it has ended
    return total, ticks / os.sysconf("SC_CLK_TCK")


def started(name: str, python: str, folder: Path) -> tuple[float, float, int]:
    """Seconds until the first page, those of processors, and bytes held then."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [each.replace("{folder}", str(folder)).replace("{port}", str(port)) for each in COMMANDS[name]]
    names = {
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    began = time.perf_counter()
    process = silent_server([python, *words], names)
    try:
        while not answers(port):
            if process.poll() is not None or time.perf_counter() - began > STARTS:
                raise SystemExit(f"{name} has no page: status {process.poll()}")
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        taken = held(process.pid)[1]
        time.sleep(SETTLES)
        return seconds, taken, held(process.pid)[0]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="NAME=FOLDER", help="a page, and the environment that it is in")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    pythons = {"shardfold": sys.executable}
    pythons |= {name: f"{folder}/bin/python" for name, _, folder in (each.partition("=") for each in given.peers)}
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        run.mkdir()
        (run / "config.json").write_text("{}")
        rows = [json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 101)]
        (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        for _ in range(given.rounds):
            for name, python in pythons.items():
                found[name].append(started(name, python, Path(place)))
    print("page | packages | MB installed | seconds to the first page | of processors | MiB held")
    for name, python in pythons.items():
        num_bytes, packages = installed(name, python)
        seconds, taken, memory = (statistics.median(each) for each in zip(*found[name], strict=True))
        print(
            f"{name} | {packages} | {num_bytes / 1e6:.1f} | {seconds:.2f} | {taken:.2f} | {memory / 2**20:.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
