"""What ``shardfold doctor`` prints."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table
from rich.text import Text

from shardfold.errors import ConfigError
from shardfold.tools.doctor._diagnoses import Check, checks
from shardfold.tools.observe.console import lenient_console
from shardfold.tools.observe.readable import format_bytes
from shardfold.tools.observe.working_line import working

__all__ = ["doctor"]

COLORS = {"ok": "green", "none": "dim", "slow": "yellow", "bad": "red"}


def doctor(measure_into: Path | None, *, as_json: bool) -> bool:
    """Whether something is wrong.

    Args:
        measure_into: where the machine's profile goes; None: nothing is measured.

    Raises:
        ConfigError: the profile cannot be written there.
    """
    found = list(checks())
    if as_json:
        print(json.dumps([each._asdict() for each in found], indent=1))
    else:
        _show(found)
    if measure_into is not None:
        _measure(measure_into, quiet=as_json)
    return any(each.state == "bad" for each in found)


def _show(found: list[Check]) -> None:
    console = lenient_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    for each in found:
        mend = f"\n-> {each.mend}" if each.mend else ""
        table.add_row(Text(each.state, COLORS[each.state]), each.what, Text(each.said + mend))
    console.print(table)
    wrong, slow, none = (sum(each.state == state for each in found) for state in ("bad", "slow", "none"))
    costs = f"{slow} things cost" if slow > 1 else f"{'one thing' if slow else 'nothing'} costs"
    without = f"; not installed on request: {none} package{'s' * (none > 1)}" if none else ""
    console.print(f"\n{wrong or 'Nothing'} wrong, {costs} speed{without}.", highlight=False)


def _measure(path: Path, *, quiet: bool) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"{str(path.parent)!r} is not a folder: give --measure a file in one that is there.")
    from shardfold.tools.doctor._rates import measure

    with working("measuring") as line:
        measured = measure(path.parent, line.now)
    path.write_text(measured.device.text() + "\n", encoding="utf-8")
    if quiet:
        return
    device, console = measured.device, lenient_console()
    rates = ", ".join(f"{name} {rate / 1e9:,.1f}" for name, rate in device.flops.items())
    console.print(f"\nProducts, GFLOP/s: {rates}", highlight=False)
    console.print(f"Copies: {format_bytes(device.bandwidth)}/s; disk: {format_bytes(device.disk)}/s", highlight=False)
    table = Table("collective of two ranks", *map(format_bytes, measured.collectives["all_reduce"]), box=None)
    for verb, row in measured.collectives.items():
        table.add_row(verb, *(f"{1e3 * seconds:.2f} ms" for seconds in row.values()))
    console.print(table)
    written = f"Written: {path}; shardfold plan --gpus 2x{path} reads it"
    console.print(written, highlight=False, markup=False, soft_wrap=True)
