"""Settings as a config file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["as_toml"]


def as_toml(settings: Mapping[str, Any], sections: Iterable[str] = ()) -> str:
    """Return settings as TOML that ``--config`` reads; ``sections`` stand at its end, as tables."""
    tables = [name for name in sections if isinstance(settings.get(name), Mapping)]
    lines = [f"{name} = {_value(value)}" for name, value in settings.items() if name not in tables]
    for name in tables:
        lines += ["", f"[{name}]", *(f"{inner} = {_value(value)}" for inner, value in settings[name].items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_value(each)}" for name, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # which JSON allows
