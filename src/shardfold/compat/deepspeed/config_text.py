"""A config in words: the notes at start, every effective value with its origin, and the table of the docs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shardfold.compat.deepspeed.config_check import Note
from shardfold.compat.deepspeed.config_keys import HONOURED, KEYS, NOTED, Key
from shardfold.compat.deepspeed.config_read import Settings, read
from shardfold.plan.explain import explain_preset

__all__ = ["effective", "explain_config", "markdown", "said"]


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


def explain_config(config: Path, *, mesh: Mapping[str, int], params: int) -> str:
    """What a config becomes: its layout's table and program with their cost, every effective value, the notes.

    Raises:
        DeepSpeedConfigError: it cannot be honoured.
    """
    ranks = mesh["inter"] * mesh["intra"]
    settings = read(config, world_size=ranks)
    if settings.mesh is not None:
        of_data = ranks // settings.sizes.tensor
        intra = settings.mesh.get("intra", of_data)
        mesh = {"inter": of_data // intra, "intra": intra}
    parts = [
        f"{config} on {ranks} ranks: layout {settings.layout}{_tiers(settings)}",
        explain_preset(settings.table, mesh=mesh, precision=settings.precision, params=params),
        effective(settings),
        said(settings.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _tiers(settings: Settings) -> str:
    """What of the layout rests in a slower tier."""
    by_tier: dict[str, list[str]] = {}
    for state, tier in settings.offload.items():
        by_tier.setdefault(tier, []).append(state)
    return "".join(f", {' and '.join(states)} in the {tier} tier" for tier, states in by_tier.items())


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
