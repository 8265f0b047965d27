"""Boards for tests: called without sockets, or as the command."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

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


class AskedBoard:
    """A board that is called in this process."""

    def __init__(self, *folders: Path, **settings: Any) -> None:
        self.app = BoardApp(BoardConfig.load({"folders": folders, **settings}), TOKEN)

    def ask(self, method: str, path: str, headers: Mapping[str, str] | None = None, **given: Any) -> httpx.Response:
        """With the token and the header, unless ``headers`` are given."""

        async def asked() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url=HERE, timeout=60) as client:
                return await client.request(method, path, headers=SAID if headers is None else headers, **given)

        return asyncio.run(asked())

    def get(self, path: str, params: Any = None) -> Any:
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


class Client(httpx.Client):
    """Of a board that runs, as its page is one."""

    def __init__(self, url: str) -> None:
        super().__init__(base_url=url, headers=SAID, timeout=120)

    def row(self, run: str) -> dict[str, Any]:
        return next((row for row in self.get("/api/runs").json()["runs"] if row["id"] == run), {"state": "gone"})

    def told(self, path: str, given: Mapping[str, Any] | None = None) -> Any:
        reply = self.post(path, json=given or {})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def wait_for(self, run: str, right: Callable[[dict[str, Any]], bool], limit: float = 120.0) -> dict[str, Any]:
        until = time.monotonic() + limit
        while not right(row := self.row(run)):
            assert time.monotonic() < until, row
            time.sleep(0.05)
        return row


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
