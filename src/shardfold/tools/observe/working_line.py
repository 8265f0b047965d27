"""One line that says how far long work is besides steps: its amount, rate and time left.

On a terminal it is redrawn in place and gone in the end. Elsewhere, as in a file, a plain line comes every half minute.
What is over within a second says nothing, and of several ranks only the first speaks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.printable import printable
from shardfold.tools.observe.readable import format_bytes, format_count, format_duration

__all__ = ["Tick", "WorkingLine", "working"]

FIRST, EVERY = 1.0, 0.2  # seconds until a terminal shows it, and between two drawings
PLAIN_EVERY = 30.0
ONLY = threading.Lock()
"""Of what is shown in this process: work within other work, or within steps, says nothing."""


class Tick(Protocol):
    """Called with how much is done so far, and how much there is."""

    def __call__(self, done: float, total: float, /) -> None: ...


class WorkingLine:
    """How far some work is; made by :func:`working`.

    Args:
        doing: what is done, such as ``"merging"``.
        unit: of its amounts: ``"bytes"``, or what is counted, such as ``"rows"``.
    """

    def __init__(self, doing: str, unit: str, console: Console) -> None:
        self._doing, self._unit = doing, unit
        self._console = console
        self._what = ""
        self._done, self._total = 0.0, 0.0
        self._counted: tuple[float, float] | None = None  # when, and how much was done then
        self._began = time.monotonic()
        first, self._every = (FIRST, EVERY) if console.is_terminal else (PLAIN_EVERY, PLAIN_EVERY)
        self._due = self._began + first
        self._live: Progress | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True, name="working line")

    def amount(self, done: float, total: float) -> None:
        """Say how much is done, and how much there is."""
        self._done, self._total = done, total
        if self._counted is None:
            self._counted = time.monotonic(), done
        self._show_if_due()

    def now(self, what: str) -> None:
        """Say what is done next."""
        self._what = what
        self._show_if_due()

    def text(self) -> str:
        """What stands behind the words: amount, rate and time left, or the time so far."""
        now = time.monotonic()
        if self._counted is None or not self._total:
            return f"{format_duration(now - self._began)} so far"
        form = format_bytes if self._unit == "bytes" else format_count
        unit = "" if self._unit == "bytes" else f" {self._unit}"
        since, before = self._counted
        rate = (self._done - before) / (now - since) if now > since else 0.0
        said = f"{form(self._done)} of {form(self._total)}{unit}"
        if rate <= 0:
            return said
        left = format_duration(max(0.0, self._total - self._done) / rate)
        return f"{said}  {form(rate)}{unit}/s  {left} left"

    def _title(self) -> str:
        return printable(f"{self._doing}: {self._what}" if self._what else self._doing, lines=False)

    def _go_on(self) -> None:
        """Draws in between, as work may say nothing for long."""
        while not self._over.wait(max(0.01, self._due - time.monotonic())):
            self._show_if_due()

    def _show_if_due(self) -> None:
        if time.monotonic() < self._due:
            return
        with self._lock:
            if time.monotonic() < self._due or self._over.is_set():
                return
            self._due = time.monotonic() + self._every
            if self._console.is_terminal:
                self._draw()
            else:
                self._console.print(Text(f"{self._title()}  {self.text()}"), soft_wrap=True)

    def _draw(self) -> None:
        if self._live is None:
            columns = [TextColumn(f"{{task.{part}}}", markup=False) for part in ("description", "fields[said]")]
            self._live = Progress(
                columns[0],
                BarColumn(24),
                columns[1],
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.add_task("", total=None, said="")
            self._live.start()
            self._console.show_cursor(True)  # whoever is killed leaves a terminal that has one
        task, total = self._live.tasks[0].id, self._total or None
        self._live.update(
            task, completed=self._done, total=total, description=self._title(), said=self.text(), refresh=True
        )

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Take the line away."""
        self._over.set()
        self._thread.join()
        with self._lock:
            if self._live is not None:
                self._live.stop()


class _Silent(WorkingLine):
    """Of work that nobody hears of."""

    def _show_if_due(self) -> None: ...


@contextmanager
def working(
    doing: str, *, unit: str = "bytes", console: Console | None = None, enabled: bool = True
) -> Iterator[WorkingLine]:
    """A line for as long as the block takes. Nothing else is to be printed to its console inside.

    Args:
        doing: what is done, such as ``"merging"``.
        unit: of amounts: ``"bytes"``, or what is counted, such as ``"rows"``.
        console: where it stands; None: standard error.
        enabled: False: it says nothing, as on ranks other than the first and within other work.
    """
    console = lenient_console(sys.stderr) if console is None else console
    if not (enabled and os.environ.get("RANK", "0") == "0" and ONLY.acquire(blocking=False)):
        yield _Silent(doing, unit, console)
        return
    line = WorkingLine(doing, unit, console)
    line.begin()
    try:
        yield line
    finally:
        line.end()
        ONLY.release()
