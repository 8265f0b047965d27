"""`shardfold serve` beside `transformers serve`, in turns: tokens per second at several numbers of clients, and a soak.

    python benchmarks/serving.py MODEL [--clients 1 8 32] [--rounds 3]    the table of docs/serve.md
    python benchmarks/serving.py MODEL --soak 600 [--clients 64]      ours alone, each client its own text

MODEL is a folder of transformers with a chat template. Each side has all cores in its turn, as nothing asks the other
one meanwhile. In the soak every client compares its greedy answers with those that it got alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def compare(folder: Path, clients: list[int], rounds: int, tokens: int) -> None:
    theirs = [
        sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", "--port", "8972",
        "--device", "cpu", "--continuous-batching", str(folder),
    ]  # fmt: skip
    sides: dict[str, tuple[list[str], str, str]] = {
        "shardfold serve": (ours(folder, 8971), "http://127.0.0.1:8971", "model"),
        "transformers serve": (theirs, "http://127.0.0.1:8972", str(folder)),
    }
    with server(*sides["shardfold serve"]), server(*sides["transformers serve"]):
        print("| clients | shardfold serve, tokens/s | transformers serve, tokens/s | ratio | equal answers |")
        print("|---|---|---|---|---|")
        for number in clients:
            rates: dict[str, list[float]] = {name: [] for name in sides}
            texts: dict[str, list[str]] = {}
            for _ in range(rounds):
                for name, (_, url, model) in sides.items():
                    value, texts[name] = rate(url, model, number, tokens)
                    rates[name].append(value)
            ours_, theirs_ = (statistics.median(each) for each in rates.values())
            same = sum(a == b for a, b in zip(*texts.values(), strict=True))
            print(
                f"| {number} | {ours_:.0f} | {theirs_:.0f} | {ours_ / theirs_:.2f} | {same} of {2 * number} |",
                flush=True,
            )


def memory(process: Any) -> int:
    """Resident bytes."""
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def soak(folder: Path, seconds: float, clients: int, tokens: int) -> None:
    url = "http://127.0.0.1:8971"
    with server(ours(folder, 8971), url, "model") as process:
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
                print(f"{answers} answers, {wrong} wrong, {memory(process) / 2**20:.0f} MiB", flush=True)
            for each in done:
                each.result()
        with urllib.request.urlopen(f"{url}/metrics") as response:
            left = [line for line in response.read().decode().splitlines() if line.startswith("shardfold_pages_used")]
        print(f"{answers} answers, {wrong} wrong, {memory(process) / 2**20:.0f} MiB, {left[0]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--soak", type=float, default=0.0)
    given = parser.parse_args()
    if given.soak:
        soak(given.model, given.soak, given.clients[-1], given.tokens)
    else:
        compare(given.model, given.clients, given.rounds, given.tokens)


if __name__ == "__main__":
    main()
