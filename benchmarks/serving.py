"""`shardfold serve` beside `transformers serve`, in turns: tokens per second at several numbers of clients, and a soak.

    python benchmarks/serving.py MODEL [--clients 1 8 32] [--rounds 3]    the table of docs/serve.md
    python benchmarks/serving.py MODEL --soak 600 --clients 64      ours alone, each client its own text
    python benchmarks/serving.py MODEL --soak 200 --clients 64 --pid PID      one that runs at port 8971 already

MODEL is a folder of transformers with a chat template. transformers' server answers in two ways, with and without
``--continuous-batching``: both are contenders. A server is stopped (SIGSTOP) while it is another one's turn, so each
has all cores in its own. In the soak every client compares its greedy answers with those that it got alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

WORDS = "a cat and one red dog went to see the big old tree near her house with some friends".split()  # noqa: SIM905
STARTS = 900.0  # seconds for a server to be there, on a loaded machine


def prompt(number: int) -> str:
    """Of a client: one to twenty-four words that no other has."""
    places = range(1 + number % 24)
    return " ".join(WORDS[(number * 7 + place * (number + 1)) % len(WORDS)] for place in places) + str(number)


def ask(url: str, model: str, text: str, tokens: int, timeout: float = STARTS) -> tuple[str, int]:
    """A greedy answer, and its tokens."""
    asked = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        said = json.loads(response.read())
    return said["choices"][0]["message"]["content"], said["usage"]["completion_tokens"]


@contextmanager
def server(command: list[str], url: str, model: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that has answered once."""
    with open(os.devnull, "wb") as nothing:
        process = subprocess.Popen(command, stdout=nothing, stderr=nothing)
        try:
            until = time.monotonic() + STARTS
            while True:
                try:
                    ask(url, model, "warm", 4)
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        raise SystemExit(f"{' '.join(command)} does not answer") from None
                    time.sleep(0.5)
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.wait()


def rate(url: str, model: str, clients: int, tokens: int) -> tuple[float, list[str]]:
    """Tokens per second of so many clients with two questions each, and the answers."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda number: ask(url, model, prompt(number), tokens), range(2 * clients)))
    return sum(count for _, count in found) / (time.perf_counter() - began), [text for text, _ in found]


def ours(folder: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "shardfold", "serve", str(folder), "--port", str(port), "--name", "model"]


def theirs(python: str, folder: Path, port: int, *more: str) -> list[str]:
    code = "from transformers.cli.transformers import main; main()"
    return [python, "-c", code, "serve", "--port", str(port), "--device", "cpu", *more, str(folder)]


def compare(folder: Path, python: str, clients: list[int], rounds: int, tokens: int) -> None:
    sides = {
        "shardfold": (ours(folder, 8971), "http://127.0.0.1:8971", "model"),
        "transformers": (theirs(python, folder, 8972), "http://127.0.0.1:8972", str(folder)),
        "continuous batching": (
            theirs(python, folder, 8973, "--continuous-batching"), "http://127.0.0.1:8973", str(folder),
        ),
    }  # fmt: skip
    with ExitStack() as held:
        running = {}
        for name, side in sides.items():
            running[name] = held.enter_context(server(*side))
            running[name].send_signal(signal.SIGSTOP)
        print("| clients | shardfold serve, tokens/s | transformers serve | with continuous batching | ratio |")
        print("|---|---|---|---|---|")
        for number in clients:
            rates: dict[str, list[float]] = {name: [] for name in sides}
            texts: dict[str, list[str]] = {}
            for _ in range(rounds):
                for name, (_, url, model) in sides.items():
                    running[name].send_signal(signal.SIGCONT)
                    value, texts[name] = rate(url, model, number, tokens)
                    running[name].send_signal(signal.SIGSTOP)
                    rates[name].append(value)
            mine, *others = (statistics.median(each) for each in rates.values())
            same = [sum(a == b for a, b in zip(texts["shardfold"], each, strict=True)) for each in texts.values()]
            told = " | ".join(
                f"{rate:.0f} ({count} of {2 * number} answers equal)"
                for rate, count in zip(others, same[1:], strict=True)
            )
            print(f"| {number} | {mine:.0f} | {told} | {mine / max(others):.2f} |", flush=True)


def memory(pid: int) -> int:
    """Resident bytes."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def soak(url: str, pid: int, seconds: float, clients: int, tokens: int) -> None:
    expected = [ask(url, "model", prompt(number), tokens)[0] for number in range(clients)]
    until, answers, wrong = time.monotonic() + seconds, 0, 0
    lock = threading.Lock()

    def client(number: int) -> None:
        nonlocal answers, wrong
        while time.monotonic() < until:
            text = ask(url, "model", prompt(number), tokens)[0]
            with lock:
                answers += 1
                wrong += text != expected[number]

    with ThreadPoolExecutor(clients + 1) as pool:
        done = [pool.submit(client, number) for number in range(clients)]
        while time.monotonic() < until:
            time.sleep(min(20.0, seconds / 10))
            print(f"{answers} answers, {wrong} wrong, {memory(pid) / 2**20:.1f} MiB", flush=True)
        for each in done:
            each.result()
    with urllib.request.urlopen(f"{url}/metrics") as response:
        left = [line for line in response.read().decode().splitlines() if line.startswith("shardfold_pages_used")]
    files = len(os.listdir(f"/proc/{pid}/fd"))
    print(f"{answers} answers, {wrong} wrong, {memory(pid) / 2**20:.1f} MiB, {files} open files, {left[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--soak", type=float, default=0.0)
    parser.add_argument("--python", default=sys.executable, help="that runs transformers serve: it needs fastapi")
    parser.add_argument("--pid", type=int, help="of a server of MODEL that runs already")
    given = parser.parse_args()
    if given.soak:
        url = "http://127.0.0.1:8971"
        with nullcontext() if given.pid else server(ours(given.model, 8971), url, "model") as process:
            soak(url, process.pid if process else given.pid, given.soak, given.clients[-1], given.tokens)
    else:
        compare(given.model, given.python, given.clients, given.rounds, given.tokens)


if __name__ == "__main__":
    main()
