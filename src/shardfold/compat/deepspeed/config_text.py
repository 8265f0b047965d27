"""A config in words: the notes at start, every effective value with its origin, and the table of the docs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_keys import HONOURED, KEYS, NOTED, Key
from shardfold.compat.deepspeed.config_read import Settings

__all__ = ["effective", "markdown", "said"]


def said(notes: Iterable[Note]) -> str:
    """The notes as one block: those with one reason together, one to a line. Empty if there are none."""
    by_reason: dict[str, list[str]] = {}
    for note in notes:
        by_reason.setdefault(note.why, []).append(f"{note.key} = {_value(note.value)}")
    if not by_reason:
        return ""
    lines = ["of this config, to know:"]
    for why, keys in by_reason.items():
        lines += [*(f"  {key}" for key in keys), f"      {why}"]
    return "\n".join(lines)


def effective(settings: Settings) -> str:
    """Every key that is honoured or was given, its value and where that came from."""
    origins = settings.origins
    known = [path for path, key in KEYS.items() if key.kind == HONOURED or origins[path] == "given"]
    width = max(map(len, known))
    rows = [
        f"{path:<{width}}  {_value(settings.values[path]):<28}  {origins[path]}"
        + (", no effect" if KEYS[path].kind == NOTED else "")
        for path in known
    ]
    return "\n".join([f"{'key':<{width}}  {'value':<28}  origin", *rows])


def _value(value: Any) -> str:
    text = "true" if value is True else "false" if value is False else "-" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def markdown() -> str:
    """The table of keys in ``docs/from-deepspeed.md``, a section of it for each first part of the paths."""
    parts: dict[str, list[Key]] = {}
    for key in KEYS.values():
        parts.setdefault(key.path.split(".")[0] if "." in key.path else "", []).append(key)
    lines: list[str] = []
    for section, keys in parts.items():
        lines += [f"### {f'`{section}`' if section else 'Top level'}", ""]
        lines += ["| key | here | type | default | what it does, or why not |", "|---|---|---|---|---|"]
        lines += [_row(key, section) for key in keys] + [""]
    return "\n".join(lines)


def _row(key: Key, section: str) -> str:
    names = [key.path.removeprefix(f"{section}."), *key.aliases]
    kind = f"one of {', '.join(key.choices)}" if key.choices else key.type
    default = "" if key.default in (None, "") else f"`{_value(key.default)}`"
    return f"| {', '.join(f'`{name}`' for name in names)} | {key.kind} | {kind} | {default} | {key.why} |"
