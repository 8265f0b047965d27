"""A server over a tiny model in this process, clients that speak bytes, and what a model answers alone."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from shardfold.tools.answering.opened_model import OpenConfig, OpenedModel
from shardfold.tools.serve._endpoint import endpoint
from shardfold.tools.serve._web_app import WebApp
from shardfold.tools.serve.answer_loop import AnswerLoop
from shardfold.tools.serve.text_ranks import TextRanks
from shardfold.tools.serve.web_side import WebSide

__all__ = ["Pace", "Served", "alone", "asked", "chunks", "paced", "pieces", "process", "served", "spoken"]

NAME = "tiny"
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


class Served:
    """What a test asks.

    Attributes:
        url: of the server.
        app, answers, ranks: its parts.
        model: what it serves, of which folder.
    """

    def __init__(
        self, folder: Path, web: WebSide, app: WebApp, answers: AnswerLoop, ranks: TextRanks, model: OpenedModel
    ) -> None:
        self.folder = folder
        self.url, self.web, self.app, self.answers, self.ranks, self.model = web.url, web, app, answers, ranks, model

    def post(self, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        """Ask by one request; the status, and the object."""
        return asked(self.url, path, fields)

    def chat(self, text: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        return self.post(CHAT, **{"model": NAME, "messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any, **fields: Any) -> tuple[int, dict[str, Any]]:
        return self.post(COMPLETION, **{"model": NAME, "prompt": prompt, **fields})


@contextmanager
def served(folder: Path, *, rows: int = 4, queue: int = 60, cache: int = 2**24, **options: Any) -> Iterator[Served]:
    """A server of a folder's model, which has a thread of its own here."""
    adapters = options.pop("adapters", {})
    model = OpenedModel.open(OpenConfig(model=folder), adapters)
    ranks = TextRanks(model.engine, cache=cache, rows=rows, context=model.context)
    ranks.start()
    web, app, answers = endpoint(
        ranks,
        model.tokenizer,
        names=(NAME, *adapters),
        template="model",
        stops=model.stops,
        most=rows + queue,
        address=("127.0.0.1", 0),
        **{"keys": (), **options},
    )
    web.start()
    thread = threading.Thread(target=answers.run)
    thread.start()
    try:
        yield Served(folder, web, app, answers, ranks, model)
    finally:
        answers.put("end")
        answers.put("cut")
        thread.join()
        web.stop()
        ranks.end()
        model.close()


class Pace:
    """Steps of a server's model are made once they are allowed.

    Attributes:
        begun: steps that were made, and the one that waits.
    """

    def __init__(self, step: Callable[[], None]) -> None:
        self._step, self._allowed, self._waits = step, threading.Semaphore(0), True
        self.begun = 0

    def __call__(self) -> None:
        self.begun += 1
        if self._waits:
            self._allowed.acquire()
        self._step()

    def allow(self, steps: int) -> None:
        self._allowed.release(steps)

    def release(self) -> None:
        """Every step from now on."""
        self._waits = False
        self._allowed.release()


@contextmanager
def paced(server: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    """So that an answer lasts as long as a test needs it, on a fast machine too."""
    with monkeypatch.context() as patch:
        pace = Pace(server.ranks.step)
        patch.setattr(server.ranks, "step", pace)
        try:
            yield pace
        finally:
            pace.release()


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and where it listens."""
    command = [sys.executable, "-m", "shardfold", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as made:
        try:
            assert made.stdout is not None
            said = ""
            for line in made.stdout:
                said += line
                if (url := re.search(r"(http://\S+) answers", line)) is not None:
                    yield made, url[1]
                    return
            raise AssertionError(said)
        finally:
            made.kill()


def spoken(url: str, *sent: bytes, shut: bool = False, timeout: float = 60) -> bytes:
    """All that the server says to some bytes, until it closes the connection."""
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout) as sock:
        for each in sent:
            try:
                sock.sendall(each)
            except OSError:  # it does not listen to the end
                break
        if shut:
            sock.shutdown(socket.SHUT_WR)
        found = b""
        try:
            while more := sock.recv(65536):
                found += more
        except ConnectionResetError:
            pass
        return found


def request(url: str, path: str, body: bytes, *headers: str, kind: str = "application/json") -> bytes:
    """The bytes of a POST that ends its connection."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {urlsplit(url).netloc}",
        "Connection: close",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def answered(said: bytes) -> tuple[int, dict[str, Any]]:
    """Status and object of a whole response."""
    head, _, body = said.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = b"".join(_unchunked(body))
    elif (length := re.search(rb"content-length: (\d+)", head.lower())) is not None:
        body = body[: int(length[1])]  # others may stand behind it
    return int(head.split(b" ")[1]), json.loads(body) if body.startswith(b"{") else {"text": body.decode()}


def _unchunked(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


def asked(url: str, path: str, fields: Any, *headers: str) -> tuple[int, dict[str, Any]]:
    """Ask by one request of JSON."""
    return answered(spoken(url, request(url, path, json.dumps(fields).encode(), *headers)))


def chunks(url: str, path: str, **fields: Any) -> list[dict[str, Any]]:
    """The pieces of a stream, which ends as it should."""
    return pieces(spoken(url, request(url, path, json.dumps({"stream": True, **fields}).encode())))


def pieces(said: bytes) -> list[dict[str, Any]]:
    """Those of a whole response that is a stream."""
    head, _, body = said.partition(b"\r\n\r\n")
    assert b" 200 " in head and b"text/event-stream" in head, said
    events = b"".join(_unchunked(body)).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""], events
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def alone(folder: Path, text: str, most: int) -> str:
    """What transformers says greedily behind a prompt, each token from a forward of all before it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(most):
            tokens.append(int(plain(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            if tokens[-1] == tokenizer.eos_token_id:
                break
    return tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)
