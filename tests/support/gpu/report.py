"""The report of a day on a GPU: what each section found, as Markdown and as JSON. Nothing here runs anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["FAILED", "PASSED", "SKIPPED", "Case", "Day", "NotRun", "Section", "as_json", "judged", "markdown"]

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"
SHOWN = 3  # names in a sentence
INDENT = "    "


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing that was tried.

    Attributes:
        name: of it.
        verdict: ``passed``, ``failed`` or ``skipped``.
        says: a sentence.
        figures: what was measured, by name.
        detail: a traceback or the end of an output, where it failed.
    """

    name: str
    verdict: str
    says: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class NotRun:
    """What was left out, and why."""

    what: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section.

    Attributes:
        name, title: of it.
        verdict: of it: ``failed`` if a case failed, ``skipped`` if none ran.
        says: a sentence.
        seconds, share: that it took, and that it had.
        cases: in the order in which they ran.
        not_run: what was left out.
        facts: what it read off the machine.
    """

    name: str
    title: str
    verdict: str
    says: str
    seconds: float
    share: float
    cases: tuple[Case, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Day:
    """All sections, and what was asked for.

    Attributes:
        title: what ran where, in a line.
        command: that repeats it.
        date: of its beginning.
        seconds, limit: that it took, and that it had.
        sections: in their order.
    """

    title: str
    command: str
    date: str
    seconds: float
    limit: float
    sections: tuple[Section, ...]

    @property
    def verdict(self) -> str:
        verdicts = {each.verdict for each in self.sections}
        return FAILED if FAILED in verdicts else PASSED if PASSED in verdicts else SKIPPED


def judged(
    name: str, title: str, notes: Iterable[Mapping[str, Any]], *, ended: str | None, said: str, seconds: float,
    share: float,
) -> Section:  # fmt: skip
    """The section that left these notes.

    Args:
        name, title: of the section.
        notes: what its process wrote, see :class:`tests.support.gpu.section.Notes`.
        ended: how its process ended otherwise than by itself, as in "was killed by SIGSEGV"; None: by itself.
        said: the end of its standard error.
        seconds, share: that it took, and that it had.
    """
    cases: list[Case] = []
    not_run: list[NotRun] = []
    facts: dict[str, Any] = {}
    begun: str | None = None
    for note in notes:
        if "begins" in note:
            begun = note["begins"]
        elif "case" in note:
            case = Case(**note["case"])
            # What is told again is newer.
            cases = [case if case.name == each.name else each for each in cases]
            cases += [case] if case not in cases else []
            begun = None
        elif "not_run" in note:
            not_run.append(NotRun(**note["not_run"]))
        elif "fact" in note:
            facts[note["fact"]] = note["value"]
    if ended is not None:
        where = f"in {begun!r}" if begun else "before its first case" if not cases else "behind its last case"
        cases.append(Case(name=begun or "the process", verdict=FAILED, says=f"{ended} {where}", detail=said))
    verdict, says = _summed_up(cases, not_run, facts)
    return Section(
        name=name, title=title, verdict=verdict, says=says, seconds=seconds, share=share, cases=tuple(cases),
        not_run=tuple(not_run), facts=facts,
    )  # fmt: skip


def _summed_up(cases: Sequence[Case], not_run: Sequence[NotRun], facts: Mapping[str, Any]) -> tuple[str, str]:
    by = {v: [case.name for case in cases if case.verdict == v] for v in (PASSED, FAILED, SKIPPED)}
    left = f" {_count(len(not_run), 'thing')} not run, see below." if not_run else ""
    if by[FAILED]:
        ran = len(by[FAILED]) + len(by[PASSED])
        return FAILED, f"{len(by[FAILED])} of {_count(ran, 'case')} failed: {_some(by[FAILED])}.{left}"
    if by[PASSED]:
        skipped = f", {len(by[SKIPPED])} skipped" if by[SKIPPED] else ""
        return PASSED, f"{_count(len(by[PASSED]), 'case')} passed{skipped}.{left}"
    if facts and not by[SKIPPED]:
        return PASSED, f"{_count(len(facts), 'fact')} read.{left}"
    reasons = [*dict.fromkeys([case.says for case in cases if case.says] + [each.why for each in not_run])]
    return SKIPPED, f"Nothing ran: {_some(reasons)}." if reasons else "Nothing ran."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name.rstrip(".") for name in names[:SHOWN]) + more


def as_json(day: Day) -> str:
    """All of it."""
    return json.dumps({"verdict": day.verdict, **asdict(day)}, indent=1, default=str) + "\n"


def markdown(day: Day) -> str:
    """The report: the verdict, a table of the sections, the machine, each section, what was not run."""
    lines = [
        f"# {day.title}", "",
        f"**{day.verdict.capitalize()}** in {day.seconds:.0f} s of {day.limit:.0f}, {day.date}. To repeat it: "
        f"`{day.command}`", "",
    ]  # fmt: skip
    lines += _table(
        ["section", "verdict", "seconds", "of", ""],
        [[e.title, e.verdict, f"{e.seconds:.0f}", f"{e.share:.0f}", e.says] for e in day.sections],
    )
    for section in day.sections:
        lines += ["", f"## {section.title}", "", f"**{section.verdict.capitalize()}.** {section.says}"]
        if section.facts:
            lines += ["", *_table(["", ""], [[name, _text(value)] for name, value in section.facts.items()])]
        if section.cases:
            lines += ["", *_cases(section.cases)]
        for case in section.cases:
            if case.detail:
                shown = (INDENT + line for line in case.detail.rstrip().splitlines())
                lines += ["", f"{case.name}:", "", *shown]
    lines += ["", "## Not run", ""]
    rows = [[e.title, each.what, each.why] for e in day.sections for each in e.not_run]
    lines += _table(["section", "what", "why"], rows) if rows else ["Everything ran."]
    return "\n".join(lines) + "\n"


def _cases(cases: Sequence[Case]) -> list[str]:
    """Those that failed first; a column per figure that any of them has."""
    names = list(dict.fromkeys(name for case in cases for name in case.figures))
    ordered = sorted(cases, key=lambda case: (FAILED, PASSED, SKIPPED).index(case.verdict))
    rows = [
        [case.name, case.verdict, *(_text(case.figures.get(name)) for name in names), case.says] for case in ordered
    ]
    return _table(["case", "verdict", *names, ""], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(head), "|" + "---|" * len(head), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(each) for each in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return str(value)
