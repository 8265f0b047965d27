"""64 clients for minutes: each hears what the model says alone, and the process is not larger for it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.tools.serve.support import (
    CHAT,
    COMPLETION,
    alone,
    answered,
    asked,
    pieces,
    process,
    request,
    spoken,
)
from tests.tools.tune.support import model_folder

CLIENTS, MOST = 64, 24
SECONDS = int(os.environ.get("SHARDFOLD_TEST_SECONDS", "600"))
TEXTS = ("one cat", "two dogs run", "x", "red and blue " * 3, "red and blue cat", "no")
GROWTH = 512
"""Bytes of a request that may remain: an answer's tokens alone are more as Python keeps them."""

Heard = dict[int, tuple[str, str | None]]
"""Text and how it ended, by the number of the answer."""


class Load(NamedTuple):
    """What clients did until the time was over."""

    answers: int
    streams: int
    left: int
    refused: int


def _variants(folder: Path, url: str) -> list[tuple[str, dict[str, Any], Heard]]:
    """Requests and what each hears: greedily from transformers, with a seed from a server that serves nobody else."""
    found: list[tuple[str, dict[str, Any], Heard]] = []
    for number, text in enumerate(TEXTS):
        chat: dict[str, Any] = {"model": "tiny", "max_tokens": MOST, "messages": [{"role": "user", "content": text}]}
        plain = {"model": "tiny", "max_tokens": MOST, "prompt": f"<user>{text}<assistant>"}
        said = alone(folder, plain["prompt"], MOST)
        made: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {**chat, "temperature": 0}),
            (COMPLETION, {**plain, "temperature": 0, "logprobs": 3}),
            (CHAT, {**chat, "seed": number, "n": 3, "temperature": 1.3}),
            (CHAT, {**chat, "seed": number + 9, "top_p": 0.9, "logprobs": True, "top_logprobs": 2}),
            (COMPLETION, {**plain, "seed": number, "n": 2, "top_k": 9, "repetition_penalty": 1.2}),
            (COMPLETION, {**plain, "temperature": 0, "stop": [said[9:11] or "a"]}),
        ]
        for path, fields in made:
            heard = _heard([asked(url, path, fields)[1]])
            if not fields.get("temperature", 1) and "stop" not in fields:
                assert heard[0][0] == said
            found.append((path, fields, heard))
    return found


def _heard(bodies: list[dict[str, Any]]) -> Heard:
    """Of a whole answer, or of the pieces of a stream."""
    found: Heard = {}
    for choice in (each for body in bodies for each in body["choices"]):
        told = choice.get("message") or choice.get("delta") or choice
        text, finish = found.get(choice["index"], ("", None))
        text += told.get("content") or told.get("text") or ""
        found[choice["index"]] = text, choice["finish_reason"] or finish
    return found


async def _said(url: str, path: str, fields: dict[str, Any], leaves_after: int = 0) -> bytes:
    """All that the server says, or as much as the client waits for."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        writer.write(request(url, path, json.dumps(fields).encode()))
        return await reader.read(leaves_after or -1)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _client(url: str, number: int, end: float, variants: list[tuple[str, dict[str, Any], Heard]]) -> Load:
    """Asks one after the other: whole answers, streams that are read to the end or left, and what is refused."""
    draw, counts = random.Random(number), [0, 0, 0, 0]
    while time.monotonic() < end:
        path, fields, expected = draw.choice(variants)
        kind = draw.choices((0, 1, 2, 3), (6, 6, 2, 1))[0]
        counts[kind] += 1
        if kind == 0:
            status, body = answered(await _said(url, path, fields))
            assert status == 200 and _heard([body]) == expected, (fields, body, expected)
        elif kind == 1:
            found = _heard(pieces(await _said(url, path, {**fields, "stream": True})))
            assert found == expected, (fields, found, expected)
        elif kind == 2:
            await _said(url, path, {**fields, "stream": True}, draw.randint(1, 3000))
        else:
            status, body = answered(await _said(url, path, {**fields, "temprature": 1}))
            assert status == 400 and "temperature" in body["error"]["message"]
    return Load(*counts)


def _held(pid: int) -> tuple[int, int, int]:
    """Bytes that are resident, open files, threads."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return int(status["VmRSS"].split()[0]) * 1024, files, int(status["Threads"])


def _metrics(url: str) -> dict[str, float]:
    said = spoken(url, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").decode()
    lines = [line for line in said.partition("\r\n\r\n")[2].splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system has no /proc")
def test_64_clients_hear_their_own_answers_and_leave_nothing_behind(tmp_path: Path) -> None:
    """With fewer pages than the texts need. Each answer is that of the same request alone; then nothing is under way,
    and files, threads and memory are those of a time when the server was warm."""
    folder = model_folder(tmp_path / "tiny", scale=4.0)
    with process(str(folder), "--cache", "320KiB") as (made, url):
        variants = _variants(folder, url)
        held: list[tuple[int, int, int]] = []

        async def load() -> Load:
            end = time.monotonic() + SECONDS
            clients = [asyncio.ensure_future(_client(url, number, end, variants)) for number in range(CLIENTS)]
            while time.monotonic() < end and not any(each.done() for each in clients):
                held.append(_held(made.pid))
                await asyncio.sleep(SECONDS / 100)
            return Load(*map(sum, zip(*await asyncio.gather(*clients), strict=True)))

        done = asyncio.run(load())
        end = time.monotonic() + 30
        while (values := _metrics(url))["shardfold_texts"] or values["shardfold_pages_used"]:
            assert time.monotonic() < end, values
        files = _held(made.pid)[1]
    sizes = [size for size, _, _ in held]
    warm, last = statistics.median(sizes[20:35]), statistics.median(sizes[-15:])
    print(f"{done} in {SECONDS} s, {warm / 2**20:.1f} MiB resident when warm and {last / 2**20:.1f} at the end")
    assert len(held) > 90 and min(done) > 0
    assert last - warm < GROWTH * sum(done) + 2**20
    assert files < min(count for _, count, _ in held[1:]) and len({threads for _, _, threads in held[20:]}) == 1
    assert values["shardfold_cancelled_total"] <= done.left
