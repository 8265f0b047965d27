"""The tables that a run ends with: what it learned, what it held, what it sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardfold.plan.report import MemoryRow, MovedRow, TrafficRow
from shardfold.tools.observe.printable import printable
from shardfold.tools.observe.readable import format_bytes, format_duration
from shardfold.tools.observe.run_status import RunStatus

__all__ = [
    "memory_table",
    "moved_table",
    "print_whole",
    "printable",
    "quality_table",
    "runs_table",
    "traffic_table",
]

BAR_WIDTH = 24
WIDEST = 10_000  # columns; no table comes near it


def new_table() -> Table:
    return Table(box=None, padding=(0, 3, 0, 0), header_style="dim")


class FullWidthTable:
    """A table at its own width, whatever the console's: a narrow terminal then wraps its lines, and cuts no figure."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(max_width=WIDEST), self._table).maximum
        yield from console.render(self._table, options.update(max_width=max(needed, options.max_width)))


def headed(title: str, table: Table) -> Group:
    """A table under its title; to be printed by :func:`print_whole`."""
    # A table's own title is wrapped to the table's width, which may be narrow.
    return Group("", Text(title, style="bold"), FullWidthTable(table))


def print_whole(console: Console, *groups: Group) -> None:
    """Print tables, no line of which is cut."""
    console.print(*groups, sep="", crop=False)


def quality_table(bits: Mapping[str, float]) -> Group:
    """Show bits per byte of the model, which comes first, beside the baselines; less is better."""
    table = new_table()
    table.add_column("", no_wrap=True)
    table.add_column("bits", justify="right")
    table.add_column("", no_wrap=True)
    most = max((value for value in bits.values() if isfinite(value)), default=1.0)
    for place, (name, value) in enumerate(bits.items()):
        style = "bold cyan" if place == 0 else "dim"
        bar = ProgressBar(
            most, value if isfinite(value) else 0.0, BAR_WIDTH, complete_style=style, finished_style=style
        )
        table.add_row(Text(name, style=style), Text(f"{value:.3f}", style=style), bar)
    return headed("Bits per byte on held-out text (less is better)", table)


def exact(predicted: float, found: float) -> Text:
    """Mark whether what was found is what was predicted."""
    return Text("=", style="green") if round(predicted) == round(found) else Text("differs", style="bold red")


def memory_table(rows: Sequence[MemoryRow]) -> Group:
    """Show bytes per rank by state: predicted (the table's formula, plus named padding) beside held."""
    table = new_table()
    table.add_column("state")
    table.add_column("memory")
    for name in ("formula", "padding", "predicted"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("measured", justify="right")
    for row in rows:
        predicted = row.table + row.padding
        cells = [format_bytes(value) for value in (row.table, row.padding, predicted)]
        table.add_row(row.state, str(row.tier), *cells, exact(predicted, row.held), format_bytes(row.held))
    sums = [sum(row.table for row in rows), sum(row.padding for row in rows)]
    held = sum(row.held for row in rows)
    cells = [format_bytes(value) for value in (*sums, sum(sums))]
    table.add_row("total", "", *cells, exact(sum(sums), held), format_bytes(held), style="bold")
    tiers: dict[str, list[float]] = {}
    for row in rows:
        sums = tiers.setdefault(str(row.tier), [0.0] * 3)
        tiers[str(row.tier)] = [a + b for a, b in zip(sums, (row.table, row.padding, row.held), strict=True)]
    for tier, (formula, padding, held) in tiers.items() if len(tiers) > 1 else ():
        cells = [format_bytes(value) for value in (formula, padding, formula + padding)]
        table.add_row("of it", tier, *cells, exact(formula + padding, held), format_bytes(held))
    return headed("Bytes per rank by state", table)


def moved_table(rows: Sequence[MovedRow]) -> Group:
    """Show bytes moved per step and rank between the device and slower tiers: by the program beside counted."""
    table = new_table()
    for name in ("memory", "operation"):
        table.add_column(name)
    for name in ("calls", "predicted", "", "moved"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [str(row.calls), format_bytes(row.program), exact(row.program, row.moved), format_bytes(row.moved)]
        table.add_row(row.tier, row.op, *cells)
    return headed("Bytes moved per rank and step, between the device and slower memory", table)


def traffic_table(rows: Sequence[TrafficRow], control: float) -> Group:
    """Show bytes sent per step and rank by purpose: predicted by the program beside counted at the collectives."""
    table = new_table()
    for name in ("purpose", "operation", "mesh axes"):
        table.add_column(name)
    for name in ("calls", "predicted", "", "sent"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.purpose,
            row.op,
            " x ".join(row.axes),
            str(row.calls),
            format_bytes(row.program),
            exact(row.program, row.sent),
            format_bytes(row.sent),
        )
    program, sent = sum(row.program for row in rows), sum(row.sent for row in rows)
    calls = str(sum(row.calls for row in rows))
    table.add_row("total", "", "", calls, format_bytes(program), exact(program, sent), format_bytes(sent), style="bold")
    table.add_row("control", "", "", "", "", "", format_bytes(control), style="dim")
    return headed("Bytes sent per rank and step", table)


STYLES = {"failed": "red", "lost": "red", "stalled": "yellow", "stopped": "yellow", "done": "green", "unknown": "dim"}


def runs_table(runs: Sequence[RunStatus]) -> Group:
    """Show what runs are at, and the last loss of each."""
    table = new_table()
    for name, justify in (
        ("run", "left"),
        ("state", "left"),
        ("step", "right"),
        ("loss", "right"),
        ("last word", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    table.add_column("", no_wrap=True)
    for run in runs:
        words, figures = run.why, run.last_figures
        loss = figures.get("loss", next((figures[key] for key in figures if key.endswith("/loss")), None))
        table.add_row(
            Text(printable(str(run.folder), lines=False)),
            Text(run.state, style=STYLES.get(run.state, "cyan")),
            f"{run.step}/{run.steps}" if run.steps else str(run.step or ""),
            f"{loss:.4g}" if isinstance(loss, int | float) and abs(loss) < 1e300 else "",
            "" if run.age is None else f"{format_duration(run.age)} ago",
            Text(printable(words.partition("\n")[0], lines=False), style="dim"),
        )
    return Group(FullWidthTable(table))
