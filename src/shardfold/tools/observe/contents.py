"""What a checkpoint holds, as text: the tree of its modules with sizes, its states, and what of the run is in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.markup import escape
from rich.text import Text

from shardfold.checkpoint.inspect import Row
from shardfold.tools.observe.printable import printable
from shardfold.tools.observe.readable import format_bytes, format_count
from shardfold.tools.observe.tables import headed, new_table

__all__ = ["contents_table", "run_table", "states_table"]


def contents_table(rows: Sequence[Row]) -> Group:
    """Show the tree of modules; sizes of siblings that are alike are those of all of them."""
    table = new_table()
    table.padding = (0, 2, 0, 0)
    table.add_column("module", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("elements", justify="right", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("weights", justify="right", no_wrap=True)
    table.add_column("states", justify="right", no_wrap=True)
    for row, lines in zip(rows, _lines(rows), strict=True):
        name = Text.assemble(
            (lines, "dim"), (printable(row.name, lines=False), "" if row.shape is not None else "bold")
        )
        notes = (f"{row.num} alike",) * (row.num > 1) + row.notes
        if notes:
            name.append(printable(f"  {', '.join(notes)}", lines=False), style="dim")
        table.add_row(
            name,
            "x".join(map(str, row.shape)) or "scalar" if row.shape is not None else "",
            format_count(row.numel),
            " ".join(row.dtypes),
            format_bytes(row.weight_bytes),
            format_bytes(row.state_bytes) if row.state_bytes else "-",
        )
    return headed("What it holds", table)


def _lines(rows: Sequence[Row]) -> list[str]:
    """The lines of the tree in front of each name."""
    open_at: set[int] = set()  # depths at which another sibling follows
    drawn: list[str] = []
    for row in reversed(rows):
        open_at = {depth for depth in open_at if depth <= row.depth}
        lead = "".join("│  " if depth in open_at else "   " for depth in range(1, row.depth))
        drawn.append(lead + ("├─ " if row.depth in open_at else "└─ ") if row.depth else "")
        open_at.add(row.depth)
    return drawn[::-1]


def states_table(states: Mapping[str, tuple[int, Sequence[str]]], num_bytes: int) -> Group:
    """Show bytes by state, and how much of the files that is."""
    table = new_table()
    table.add_column("state")
    table.add_column("dtype")
    table.add_column("bytes", justify="right")
    for state, (size, dtypes) in states.items():
        table.add_row(Text(printable(state, lines=False)), " ".join(dtypes), format_bytes(size))
    table.add_row("files", "", format_bytes(num_bytes), style="bold")
    return headed("Bytes by state", table)


def run_table(facts: Mapping[str, str]) -> Group:
    """Show what is kept of the run."""
    table = new_table()
    table.show_header = False
    table.add_column("", style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, words in facts.items():
        table.add_row(name, escape(printable(words)))
    # Words may be long: they are wrapped to the console, and not kept on a line as figures are.
    return Group("", Text("Of the run", style="bold"), table)
