"""Boards for tests: called without sockets, or as the command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode

import shardfold as sf
from shardfold.tools.board._board_app import BoardApp
from shardfold.tools.board.board_config import BoardConfig

TOKEN = "a-token-of-24-characters"
HERE = "http://127.0.0.1:8765"
SAID = {"Authorization": f"Bearer {TOKEN}", "X-Shardfold-Board": "1"}


def made_run(folder: Path, steps: int = 10, config: Mapping[str, Any] | None = None, **figures: Any) -> Path:
    """A run that is over."""
    with sf.observe.Run(folder, config={"lr": 0.1, **(config or {})}, steps=steps) as run:
        for step in range(1, steps + 1):
            run.log(step, **{"loss": 10.0 / step, "tokens_per_s": 100.0, **figures})
    return folder


class Reply:
    """What was answered.

    Attributes:
        headers: by names in lower case; of several of a name the last.
    """

    def __init__(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        self.status_code, self.content = status, body
        self.headers = {name.lower(): value for name, value in headers}

    @property
    def text(self) -> str:
        return self.content.decode()

    def json(self) -> Any:
        return json.loads(self.content)


def encoded(body: Any, headers: Mapping[str, str]) -> tuple[bytes, dict[str, str]]:
    """A body that is bytes, or becomes JSON."""
    if body is None or isinstance(body, bytes):
        return body or b"", dict(headers)
    return json.dumps(body).encode(), {**headers, "Content-Type": "application/json"}


class AskedBoard:
    """A board that is called in this process."""

    def __init__(self, *folders: Path, **settings: Any) -> None:
        self.app = BoardApp(BoardConfig.load({"folders": folders, **settings}), TOKEN)

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        leaves: bool = False,
    ) -> Reply:
        """With the token and the header, unless ``headers`` are given. ``leaves``: without waiting for an answer."""
        content, said = encoded(body, SAID if headers is None else headers)
        said = {"Host": HERE.partition("://")[2], **said}
        path, _, query = path.partition("?")
        if params:
            query = urlencode(params, doseq=True)
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in said.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8765),
        }
        sent: list[Any] = []
        given = iter([{"type": "http.request", "body": content, "more_body": False}])

        async def receive() -> Any:
            return next(given, None) or ({"type": "http.disconnect"} if leaves else await asyncio.Event().wait())

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        found = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
        return Reply(sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))

    def get(self, path: str, params: Mapping[str, Any] | None = None) -> Any:
        reply = self.ask("GET", path, params=params)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def id(self, name: str) -> str:
        return next(row["id"] for row in self.get("/api/runs")["runs"] if row["name"] == name)


@contextmanager
def board_process(folder: Path, *options: str, cwd: Path | None = None) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its address."""
    tokens = folder.parent / "token"
    tokens.write_text(TOKEN + "\n")
    command = [sys.executable, "-m", "shardfold", "board", str(folder), "--port=0", f"--token-file={tokens}", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd)
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().partition("/#")[0]
    finally:
        process.kill()
        process.communicate()


class Client:
    """Of a board that runs, as its page is one."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: Any = None, headers: Mapping[str, str] = SAID) -> Reply:
        content, said = encoded(body, headers)
        asked = urllib.request.Request(self.url + path, None if body is None else content, dict(said))
        try:
            with urllib.request.urlopen(asked, timeout=120) as reply:
                return Reply(reply.status, reply.headers.items(), reply.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.headers.items(), error.read())

    def told(self, path: str, body: Any = None) -> Any:
        reply = self.ask(path, body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def row(self, run: str) -> dict[str, Any]:
        return next((row for row in self.told("/api/runs")["runs"] if row["id"] == run), {"state": "gone"})

    def wait_for(self, run: str, right: Callable[[dict[str, Any]], bool], limit: float = 120.0) -> dict[str, Any]:
        until = time.monotonic() + limit
        while not right(row := self.row(run)):
            assert time.monotonic() < until, row
            time.sleep(0.05)
        return row


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
