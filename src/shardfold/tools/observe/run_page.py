"""The page of a run: what its folder says, as one HTML file that needs nothing else."""

from __future__ import annotations

import html
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError
from shardfold.tools.observe.charts import ChartLine, line_chart
from shardfold.tools.observe.event_files import EventFile, event_files
from shardfold.tools.observe.metrics import StepMetrics
from shardfold.tools.observe.page_parts import page, scroll, table, tiles
from shardfold.tools.observe.printable import printable
from shardfold.tools.observe.readable import format_bytes, format_count, format_duration
from shardfold.tools.observe.run_status import RunStatus

__all__ = ["PAGE", "page_of_run", "series", "smooth", "step_rows", "write_page"]

PAGE = "report.html"
NOT_OPTIONS = ("derived", "procs", "layers", "d_model", "heads", "context")
MOST_CHARTS = 60  # of TensorBoard's files, whose keys may be any number
SMOOTH = 40  # of so many parts of a run, a curve shows the mean


def write_page(folder: Path) -> Path:
    """Write the page of the run in that folder into it, and return its path.

    Raises:
        ConfigError: the folder is not that of a run.
    """
    text = page_of_run(folder)
    path = folder / PAGE
    path.write_text(text, encoding="utf-8")
    return path


def page_of_run(folder: Path) -> str:
    """The page as text: the numbers of ``metrics.jsonl`` and ``summary.json``, the program, the sample, the settings. A
    run that is under way has a page too, of what there is.

    Raises:
        ConfigError: the folder is not that of a run, or a file in it is none that a run writes.
    """
    if not (folder / "config.json").is_file() and event_files(folder):
        return _page_of_events(folder)
    config, summary = _object(folder / "config.json"), _object(folder / "summary.json", missing={})
    steps = step_rows(folder / "metrics.jsonl")
    ranks = config.get("procs", 1)
    what = f"{config['recipe']} of {Path(config.get('model', '')).name}" if "recipe" in config else None
    what = what or f"GPT {config.get('size', '')}"
    title = f"{what}, {config.get('layout', '')} on {ranks} rank{'s' if ranks != 1 else ''}"
    sections = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="muted">{html.escape(str(folder.name))}{_standing(folder, bool(summary))}</p>',
        _tiles(config, summary, steps),
        *_charts(summary, steps),
        *_tables(summary),
        *_texts(folder, config),
    ]
    return page(title, sections)


def _page_of_events(folder: Path) -> str:
    """Of TensorBoard's event files: a chart of each key."""
    steps, name = event_rows(folder), printable(folder.resolve().name, lines=False)
    last = steps[-1] if steps else {"step": 0, "seconds": 0.0}
    keys = list(dict.fromkeys(key for row in steps for key in row if key not in ("step", "seconds")))
    shown = tiles([("last step", str(last["step"])), ("time", format_duration(last["seconds"]))])
    charts = _small_charts(steps, [(key, key) for key in keys[:MOST_CHARTS]])
    more = f'<p class="muted">{len(keys) - MOST_CHARTS} more keys are not shown.</p>' * (len(keys) > MOST_CHARTS)
    return page(name, [f"<h1>{html.escape(name)}</h1>", shown, '<div class="charts">', *charts, "</div>", more])


def _standing(folder: Path, is_whole: bool) -> str:
    """What the run is at, unless all is written that it leaves."""
    if is_whole:
        return ""
    status = RunStatus.of(folder)
    if status.state == "unknown":
        return ": under way, or ended early"
    return html.escape(printable(f": {status.state}{f', {status.words}' * bool(status.words)}", lines=False))


def _object(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if not path.is_file():
        if missing is not None:
            return missing
        raise ConfigError(
            f"{str(path.parent)!r} is not a run folder: it has no {path.name}; give what --out named, or one in runs/."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not JSON ({error}): it is not as the run wrote it.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} holds no object: it is not as the run wrote it.")
    return found


def step_rows(path: Path) -> list[dict[str, Any]]:
    """The steps, without a last line that was not written to its end."""
    found: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            found.append(row)
    return found


def event_rows(folder: Path) -> list[dict[str, Any]]:
    """The same of TensorBoard's event files: one row per step, in which a later file's values hold."""
    found: dict[int, dict[str, Any]] = {}
    began: float | None = None
    for path in event_files(folder):
        for each in EventFile(path).scalars():
            began = each.time if began is None else began
            row = found.setdefault(each.step, {"step": each.step})
            row |= {each.key: each.value if math.isfinite(each.value) else None, "seconds": each.time - began}
    return [found[step] for step in sorted(found)]


def series(steps: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["step"], row[name]) for row in steps if isinstance(row.get(name), int | float)]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    half = len(points) // SMOOTH
    means: list[tuple[float, float]] = []
    for place, (x, _) in enumerate(points):
        reach = min(half, place)
        window = points[place - reach : place + reach + 1]
        means.append((x, sum(y for _, y in window) / len(window)))
    return means


def _tiles(config: Mapping[str, Any], summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> str:
    bits, seconds = summary.get("bits_per_byte", {}).get("model"), summary.get("seconds")
    tokens, last = summary.get("tokens"), steps[-1] if steps else {}
    rates = sorted(y for _, y in series(steps, "tokens_per_s"))
    held_out = "bits per byte, held out", f"{bits:.3f}" if bits is not None else "not yet"
    if "recipe" in config:  # of rows, whose loss is no matter of bytes
        loss, end = summary.get("held_out_loss"), last.get("loss")
        held_out = ("loss, held out", f"{loss:.3f}") if loss is not None else ("loss", f"{end:.3f}" if end else "none")
    shown = [
        held_out,
        ("steps", f"{last.get('step', 0)} of {config.get('steps', '?')}"),
        ("time", format_duration(seconds if seconds is not None else last.get("seconds", 0.0))),
        ("tokens", format_count(tokens) if tokens else "not yet"),
        ("tokens/s, median", format_count(rates[len(rates) // 2]) if rates else "not yet"),
        ("states on rank 0", format_bytes(last["memory_bytes"]) if "memory_bytes" in last else "not yet"),
    ]
    if summary.get("num_parameters"):
        shown.insert(1, ("parameters", format_count(summary["num_parameters"])))
    if last.get("straggler"):
        shown.append(("slowed down", str(last["straggler"])))
    if last.get("skipped"):
        shown.append(("steps skipped by the loss scale", str(last["skipped"])))
    return tiles(shown)


def _charts(summary: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> list[str]:
    of_bytes = series(steps, "bits_per_byte")
    unit, loss = ("bits per byte", of_bytes) if of_bytes else ("mean over a step", series(steps, "loss"))
    last = steps[-1]["step"] if steps else 1
    counted = summary.get("bits_per_byte", {})
    held_out = [*series(steps, "held_out_bits_per_byte"), *series(steps, "held_out_loss")]
    if "model" in counted:
        held_out.append((last, counted["model"]))
    lines = [
        ChartLine("", loss, "faint"),
        ChartLine("training", smooth(loss)),
        ChartLine("held out", held_out, "held"),
    ]
    lines += [
        ChartLine(name, [(1, value), (last, value)], "other") for name, value in counted.items() if name != "model"
    ]
    found = [f"<h2>Loss, {unit}</h2>", scroll(line_chart(lines, label=f"{unit}, over steps"))]
    small = (
        ("tokens_per_s", "Tokens per second"),
        ("lr", "Learning rate"),
        ("grad_norm", "Gradient norm"),
        ("loss_scale", "Loss scale"),
    )
    known = {*StepMetrics.__dataclass_fields__, *(name for name, _ in small)}
    figures = [name for row in steps[:1] for name, value in row.items() if name not in known]
    small += tuple((name, name.replace("_", " ").capitalize()) for name in figures)
    return [*found, '<div class="charts">', *_small_charts(steps, small), "</div>"]


def _small_charts(steps: Sequence[Mapping[str, Any]], shown: Iterable[tuple[str, str]]) -> list[str]:
    """Of names in the rows, each with its title."""
    return [
        f"<div><h2>{html.escape(printable(title, lines=False))}</h2>"
        f"{scroll(line_chart([ChartLine('', points, 'faint'), ChartLine('', smooth(points))], label=title))}</div>"
        for name, title in shown
        if (points := series(steps, name))
    ]


def _tables(summary: Mapping[str, Any]) -> list[str]:
    if not summary:
        return []
    memory = [
        [row["state"], row["tier"], format_bytes(row["table"]), format_bytes(row["padding"]), format_bytes(row["held"])]
        for row in summary.get("memory", [])
    ]
    head = ["state", "tier", "by the layout", "padding", "measured"]
    found = ["<h2>Memory between steps, rank 0</h2>", table(head, memory)]
    traffic = summary.get("traffic", [])
    if traffic:
        found += ["<h2>Bytes sent in the last step, rank 0</h2>", _rows_table(traffic)]
    moved = summary.get("moved", [])
    if moved:
        found += ["<h2>Bytes moved between tiers in the last step, rank 0</h2>", _rows_table(moved)]
    return found


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    words = {"op": "operation", "program": "by the program"}
    head = [words.get(name, name.replace("_", " ")) for name in rows[0]]
    return table(head, [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(str, value))
    return f"{value:,.0f}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _texts(folder: Path, config: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    sample = folder / "sample.txt"
    if sample.is_file() and (text := sample.read_bytes().decode("utf-8", errors="replace")):
        found += ["<h2>A sample</h2>", f"<pre>{html.escape(printable(text))}</pre>"]
    program = folder / "program.txt"
    if program.is_file():
        text = html.escape(program.read_text(encoding="utf-8"))
        shown = f"<details><summary>what ran on rank 0</summary><pre>{text}</pre></details>"
        found += ["<h2>Layout and program</h2>", shown]
    options = {name: value for name, value in config.items() if name not in NOT_OPTIONS}
    words = ["shardfold", *(["tune", config["recipe"]] if "recipe" in config else ["train"])]
    words += ["--config", "config.json"]
    settings = table(["setting", "value"], [[name, str(value)] for name, value in options.items()])
    return [
        *found,
        "<h2>The same run again</h2>",
        f"<pre>{html.escape(shlex.join(words))}</pre>",
        f"<details><summary>all settings</summary>{settings}</details>",
    ]
