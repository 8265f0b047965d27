"""Where a step goes: one profiled step of each of some contenders, as sums, as text, and as a picture."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardfold.tools.bench.contenders import Contender, find
from shardfold.tools.bench.settings import Settings
from shardfold.tools.bench.teams import ContenderFailed, Team
from shardfold.tools.bench.traces import DEVICE, MOVES, Span, lanes_of
from shardfold.tools.extras import EXTRAS
from tests.support.gpu.section import Asked, Notes, Outcome
from tests.support.gpu.steps import Work, absent, set_up, settings_of

__all__ = ["WORKS", "bars", "run"]

WORKS = {
    "200M": Work(
        contenders=("zero3", "compile-zero3", "compile-fsdp2"),
        given={"params": 200e6, "rows": 8, "context": 1024, "steps": 2},
    ),
    "1.3B-host": Work(
        contenders=("zero2-host", "delayed-zero2-host"),
        given={"job": "offload", "params": 1.3e9, "rows": 4, "context": 2048, "steps": 2},
    ),
}
COLUMNS = 100
MUCH, SOME = "#", "."
NEEDS = 20.0  # seconds that a contender is begun with


def run(asked: Asked, notes: Notes) -> None:
    if lacking := [name for name, extra in EXTRAS.items() if extra == "cli" and find_spec(name) is None]:
        notes.not_run("all contenders", f"{', '.join(lacking)} is not installed (pip install 'shardfold[cli]')")
        return
    set_up(asked, notes)
    for place, (name, work) in enumerate(WORKS.items()):
        settings, traces = settings_of(work, asked, notes), dict[str, dict[str, Any]]()
        for each in map(find, work.contenders):
            if why := absent(each, settings, asked):
                notes.not_run(f"{name}: {each.name}", why)
                continue
            notes.attempt(
                f"{name}: {each.name}", lambda of=each, at=settings, to=traces: _stepped(of, at, to),
                needs=0.0 if asked.small else NEEDS,
            )  # fmt: skip
        if not traces:
            continue
        if find_spec("matplotlib") is None:
            notes.not_run(f"{name}: its picture", "matplotlib is not installed")
        else:
            file = Path(asked.out) / f"timeline-{place + 1}.png"
            notes.attempt(f"{name}: its picture", lambda f=file, of=traces, at=settings: _drawn(f, of, at))


def _stepped(contender: Contender, settings: Settings, traces: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    try:
        with Team(contender, settings) as team:
            trace = team.profile(settings.steps)[0]
    except ContenderFailed as error:
        raise Outcome(error.reason, error.said) from error
    traces[f"{contender.name}: {contender.says}"] = trace
    of = lanes_of(trace, settings.job)
    found = of.sort(trace)
    if of is DEVICE and settings.job == "offload":  # what the host does beside it
        found |= {f"host: {lane}": spans for lane, spans in MOVES.sort(trace).items() if lane in ("UPDATE", "waiting")}
    figures = {"step, ms": round(trace["length"] / 1e3, 2)}
    figures |= {lane: round(sum(e - b for b, e in spans) / 1e3, 2) for lane, spans in found.items()}
    return "\n" + bars(found, trace["length"]), figures


def _drawn(file: Path, traces: dict[str, dict[str, Any]], settings: Settings) -> tuple[str, dict[str, Any]]:
    from shardfold.tools.bench._timeline import picture

    picture(file, traces, title=settings.title(), of=lanes_of(next(iter(traces.values())), settings.job))
    return file.name, {}


def bars(lanes: dict[str, list[Span]], length: float) -> str:
    """A line for each lane: ``#`` where it is busy more than half of a column's time, ``.`` where it is at all."""
    width, lines = max(map(len, lanes), default=0), list[str]()
    for name, spans in lanes.items():
        busy = [0.0] * COLUMNS
        for begin, end in spans:
            for column in range(int(begin / length * COLUMNS), COLUMNS):
                left, right = column * length / COLUMNS, (column + 1) * length / COLUMNS
                if left >= end:
                    break
                busy[column] += max(0.0, min(end, right) - max(begin, left)) / (right - left)
        lines.append(f"{name:<{width}} " + "".join(MUCH if b > 0.5 else SOME if b > 0 else " " for b in busy).rstrip())
    return "\n".join(lines)
