"""A config in words: the notes at start, every effective value with its origin, and the keys in the docs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_keys import HONOURED, KEYS, NOTED, REFUSED, Key
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
    """The keys in ``docs/from-deepspeed.md``: a section for each first part of the paths.

    Keys that act are rows of a table, with type and default. Of the others the names are listed, by reason.
    """
    parts: dict[str, list[Key]] = {}
    for key in KEYS.values():
        parts.setdefault(key.path.split(".")[0] if "." in key.path else "", []).append(key)
    lines: list[str] = []
    for section, keys in parts.items():
        lines += [f"### {f'`{section}`' if section else 'Top level'}", ""]
        acting = [_row(key, section) for key in keys if key.kind == HONOURED]
        lines += ["| key | value (default) | effect |", "|---|---|---|", *acting, ""] if acting else []
        for title, kind in (("No effect", NOTED), ("Refused", REFUSED)):
            lines += _reasons(title, [key for key in keys if key.kind == kind], section)
    return "\n".join(lines)


def _reasons(title: str, keys: list[Key], section: str) -> list[str]:
    """A list with one line for each reason; no lines without keys."""
    by_reason: dict[str, list[str]] = {}
    for key in keys:
        by_reason.setdefault(key.why, []).append(_names(key, section))
    rows = [f"- {', '.join(names)}: {why}" for why, names in by_reason.items()]
    return [f"{title}:", "", *rows, ""] if rows else []


def _names(key: Key, section: str) -> str:
    return ", ".join(f"`{name}`" for name in (key.path.removeprefix(f"{section}."), *key.aliases))


def _row(key: Key, section: str) -> str:
    kind = f"one of {', '.join(key.choices)}" if key.choices else key.type
    default = "" if key.default in (None, "") else f" (`{_value(key.default)}`)"
    return f"| {_names(key, section)} | {kind}{default} | {key.why} |"
