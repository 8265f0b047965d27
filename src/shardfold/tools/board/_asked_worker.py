"""The process that a board asks what needs PyTorch, kept for the next question."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shardfold.tools.serve.api_refusal import ApiRefusal

__all__ = ["AskedWorker"]

SECONDS = {"check": 60.0, "plan": 600.0}
"""Until an answer comes; the first plan measures the machine."""
MOST_LINE = 16 * 2**20


class AskedWorker:
    """Started with the first question, and again if it ends; a second question waits for the first."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._free = asyncio.Lock()

    async def ask(self, asked: str, **what: Any) -> dict[str, Any]:
        """
        Raises:
            ApiRefusal: it refuses, in a sentence, or does not answer.
        """
        async with self._free:
            process = await self._running()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(json.dumps({"asked": asked, **what}).encode() + b"\n")
                await process.stdin.drain()
                line = await asyncio.wait_for(process.stdout.readline(), SECONDS[asked])
                answer: Mapping[str, Any] = json.loads(line)
            except (OSError, ValueError, TimeoutError, asyncio.TimeoutError):
                self._end(signal.SIGKILL)
                raise ApiRefusal("the settings could not be looked at: ask again.", code="worker", status=500) from None
            except asyncio.CancelledError:
                self.close()  # its answer would be taken for that of the next question
                raise
        if "refused" in answer:
            raise ApiRefusal(str(answer["refused"]), "settings", "refused")
        return dict(answer)

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "shardfold.tools.board._recipe_worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=MOST_LINE,
                start_new_session=True,  # Ctrl-C is the board's
            )
        return self._process

    def close(self) -> None:
        """It ends, and what it has started to measure the machine; files of that go with it."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
        self._process = None
