"""The benchmark on a terminal: interim medians while it runs, tables at its end, in Markdown too."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardfold.launch import num_cores
from shardfold.tools.bench.results import MeasuredRounds, loss_difference, rows, unit_rows
from shardfold.tools.bench.turns import Callbacks
from shardfold.tools.observe.readable import format_bytes

__all__ = ["Show", "environment", "markdown", "print_report", "table"]

MILLI = 1e3


def environment(measured: MeasuredRounds) -> dict[str, Any]:
    """Where and when."""
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": measured.versions,
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": num_cores(),
        "load": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "threads_per_rank": measured.settings.threads,
    }


def _bytes(number: float | None) -> str:
    return "" if number is None else format_bytes(number)


def cells(measured: MeasuredRounds, asked: str | None) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table, as text."""
    reference = measured.reference(asked)
    if reference is None:
        return [], []
    if measured.settings.job == "units":
        head = ["", f"forward and backward, above {reference}", "per event of a unit", "middle half", "step, above"]
        return head, [
            [
                row.name,
                f"{row.compute:.0f} us",
                f"{row.per_event:.1f} us",
                f"{row.low:.1f} - {row.high:.1f} us",
                f"{row.update:.0f} us",
            ]
            for row in unit_rows(measured, reference)
        ]
    if measured.settings.job == "offload":
        return _offload_cells(measured, reference)
    head = [
        "",
        "step, ms",
        "middle half",
        f"/ {reference}",
        "held",
        "peak",
        "peak of set-up",
        "by sockets",
        "handed over",
        "faults",
    ]
    return head, [
        [
            row.name,
            f"{row.step * MILLI:.1f}",
            f"{row.low * MILLI:.1f} - {row.high * MILLI:.1f}",
            f"{row.ratio:.2f}",
            _bytes(row.held),
            _bytes(row.peak),
            _bytes(row.set_up_peak),
            _bytes(row.sent),
            _bytes(row.handed),
            f"{row.faults:.0f}",
        ]
        for row in rows(measured, reference)
    ]


def _offload_cells(measured: MeasuredRounds, reference: str) -> tuple[list[str], list[list[str]]]:
    """What moving states to slower tiers costs and gives."""
    head = [
        "",
        "step, ms",
        "middle half",
        f"/ {reference}",
        "update, ms",
        "CPU, ms",
        "peak",
        "held",
        "moved",
        "counted",
    ]
    head += ["disk read", "written", "master"]
    return head, [
        [
            row.name,
            f"{row.step * MILLI:.1f}",
            f"{row.low * MILLI:.1f} - {row.high * MILLI:.1f}",
            f"{row.ratio:.2f}",
            f"{row.update * MILLI:.1f}",
            f"{row.cpu * MILLI:.1f}",
            _bytes(row.peak),
            _bytes(row.held),
            _bytes(row.program),
            _bytes(row.moved),
            _bytes(row.read),
            _bytes(row.written),
            row.master,
        ]
        for row in rows(measured, reference)
    ]


def table(measured: MeasuredRounds, asked: str | None) -> Table:
    head, lines = cells(measured, asked)
    drawn = Table(title=measured.settings.title(), title_justify="left", box=None, pad_edge=False)
    for place, name in enumerate(head):
        drawn.add_column(name, justify="right" if place else "left", overflow="fold", no_wrap=not place)
    for line in lines:
        drawn.add_row(*line)
    return drawn


def markdown(measured: MeasuredRounds, asked: str | None) -> str:
    head, lines = cells(measured, asked)
    ours = {each.name for each in measured.contenders if each.ours}
    text = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, *rest in lines:
        text.append(f"| {' | '.join([f'`{name}`' if name in ours else name, *rest])} |")
    return "\n".join(text)


class Show:
    """A table that is redrawn after each turn, on a terminal; nothing anywhere else."""

    def __init__(self, asked: str | None) -> None:
        self._asked = asked
        self._doing, self._measured = "", None
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self.watch = Callbacks(doing=self._begin, turned=self._turned)

    def __enter__(self) -> Show:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def _begin(self, doing: str) -> None:
        self._doing = doing
        self._draw()

    def _turned(self, measured: MeasuredRounds) -> None:
        self._measured = measured
        self._draw()

    def _draw(self) -> None:
        if self._live:
            so_far = [table(self._measured, self._asked)] if self._measured else []
            self._live.update(Group(*so_far, Text(self._doing, style="cyan")), refresh=True)


def print_report(
    measured: MeasuredRounds, asked: str | None, left_out: Mapping[str, str], *, as_markdown: bool, tolerance: float
) -> bool:
    """Prints the table and what has to be said about it; False if the result is not to be trusted."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 180
    if as_markdown:
        print(f"{measured.settings.title()}\n\n{markdown(measured, asked)}\n")
    else:
        console.print(table(measured, asked))
    notes, trusted = _notes(measured, asked, left_out, tolerance)
    for note in notes:
        console.print(Text(note), soft_wrap=True)
    return trusted


def _notes(
    measured: MeasuredRounds, asked: str | None, left_out: Mapping[str, str], tolerance: float
) -> tuple[Sequence[str], bool]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        by_reason.setdefault(reason, []).append(name)
    notes = [f"Left out: {', '.join(names)} ({reason})." for reason, names in by_reason.items()]
    if measured.restarted:
        notes.append(f"Started again for each turn, as memory is short: {', '.join(sorted(measured.restarted))}.")
    if measured.not_started:
        notes.append(f"Not started, as three quarters of the time were over: {', '.join(measured.not_started)}.")
    if 0 < measured.rounds < measured.settings.rounds:
        notes.append(f"{measured.rounds} of {measured.settings.rounds} rounds were begun before the time was over.")
    for name, failure in measured.failures.items():
        notes.append(f"{name} failed: {failure.reason}. The end of what it wrote:")
        notes += [f"    {line}" for line in failure.said.splitlines()]
    if asked and asked in measured.failures:
        notes.append(f"{asked} was to be the reference; it is {measured.reference()} now.")
    if not measured.complete():
        return [*notes, "No contender ran to its end."], False
    difference = loss_difference(measured)
    if difference is None:
        return notes, True
    step, relative, between = difference
    notes.append(f"Losses of step {step} differ by {relative:.1e} at most ({between[0]}, {between[1]}).")
    if measured.settings.precision == "fp32" and relative > tolerance:
        notes.append(f"THE LOSSES DISAGREE by more than {tolerance:g}: one of these trains something else.")
        return notes, False
    return notes, True
