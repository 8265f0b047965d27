"""The walk over a config: every key is known, of its type and legal, or one sentence says which is not.

JSON that another program wrote (YAML, a command line) has values as DeepSpeed's pydantic models take them, too: ``1``
and ``"true"`` for a boolean, ``"8"`` for a number, a string for a list of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.config_keys import KEYS, NOTED, REFUSED, Key
from shardfold.errors import nearest

__all__ = ["TYPES", "Checked", "Note", "check", "coerced"]


YES, NO = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in (*YES, *NO):
        return value.lower() in YES
    raise ValueError


def _number(value: Any) -> float:
    if isinstance(value, str):
        value = float(value)
        value = int(value) if math.isfinite(value) and value == int(value) else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
        raise ValueError
    return value


def _integer(value: Any) -> int:
    number = _number(value)
    if not math.isfinite(number) or number != int(number):
        raise ValueError
    return int(number)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _path(value: Any) -> Any:
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise ValueError
    return value


def _strings(value: Any) -> list[str]:
    if not isinstance(value, (str, list, tuple)):
        raise ValueError
    return [value] if isinstance(value, str) else [_string(one) for one in value]


def _integers(value: Any) -> list[int]:
    if not isinstance(value, (list, tuple)):
        raise ValueError
    return [_integer(one) for one in value]


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError
    return value


def _pair(value: Any) -> list[float]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError
    return [_number(one) for one in value]


def _rate(value: Any) -> float | list[float]:
    return [_number(one) for one in value] if isinstance(value, (list, tuple)) else _number(value)


TYPES: Mapping[str, Callable[[Any], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "string": _string,
    "path": _path,
    "list of strings": _strings,
    "list of integers": _integers,
    "object": _object,
    "any": lambda value: value,
    "pair of numbers": _pair,
    "rate": _rate,
}
"""The types of values: what JSON calls them, and what makes a value of it. ``5e8`` is an integer."""


def coerced(type: str, value: Any) -> Any:
    """The value as one of its type.

    Raises:
        ValueError: it is none, and nothing that stands for one.
    """
    return TYPES[type](value)


AUTO = "auto"


@dataclass(frozen=True)
class Note:
    """Something to say once at start: a key without effect here, or a default that matters. ``key`` is its path."""

    key: str
    value: Any
    why: str


@dataclass
class Checked:
    """What the walk found.

    Attributes:
        given: by path, as a value of its type.
        notes: keys that have no effect here.
        autos: paths whose value is ``"auto"``.
        refused: a sentence's part for each key that cannot be honoured.
    """

    given: dict[str, Any] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


BY_NAME = {f"{key.path.rpartition('.')[0]}.{alias}".lstrip("."): key for key in KEYS.values() for alias in key.aliases}
BY_NAME.update(KEYS)
SECTIONS = {".".join(path.split(".")[:n]) for path in KEYS for n in range(1, path.count(".") + 1)}
OTHER_SECTION_NAMES = {"bfloat16": "bf16", "tensor_parallel.tensor_parallel": "tensor_parallel.tp"}


def check(config: Mapping[str, Any], where: str) -> Checked:
    """Walks over every key.

    Raises:
        DeepSpeedConfigError: a key is unknown, twice there under two names, of the wrong type, out of its range, or
            would change the training and cannot be honoured.
    """
    found = Checked()
    _walk(config, "", found, where)
    if found.refused:
        raise DeepSpeedConfigError(f"{where} asks for what is not here: {'; '.join(found.refused)}; leave that out.")
    return found


def _walk(section: Mapping[str, Any], prefix: str, found: Checked, where: str) -> None:
    switched_off = _is_off(section.get("enabled", True))
    for name, value in section.items():
        if not isinstance(name, str):
            raise DeepSpeedConfigError(
                f"{where} has the key {name!r}, which is not a string: keys of JSON are strings."
            )
        path = OTHER_SECTION_NAMES.get(prefix + name, prefix + name)
        if "." in name:
            found.notes.append(Note(path, value, "a key with dots is read by no version of DeepSpeed: nest it"))
        elif path in SECTIONS:
            _section(path, value, found, where)
        elif path in BY_NAME:
            _value(BY_NAME[path], path, value, found, quiet=switched_off and name != "enabled")
        else:
            raise DeepSpeedConfigError(f"{where} has the unknown key {path!r}.{_nearest(name, prefix)}")


def _section(path: str, value: Any, found: Checked, where: str) -> None:
    if path == "zero_optimization" and isinstance(value, bool):
        value = {"stage": int(value)}  # an old form
    if value is None:
        return
    if value == AUTO:
        found.autos.append(path)
    elif isinstance(value, Mapping):
        _walk(value, f"{path}.", found, where)
    else:
        raise DeepSpeedConfigError(f"{path} is {value!r}: it is a section, {{...}}.")


def _value(key: Key, name: str, value: Any, found: Checked, *, quiet: bool) -> None:
    if key.path in found.given:
        raise DeepSpeedConfigError(f"{key.path} is given under two names, the other is {name}: keep one.")
    if AUTO not in key.off:
        found.autos += _autos(value, key.path)
        if isinstance(value, Mapping):
            value = {k: v for k, v in value.items() if v != AUTO}
    if value is None or (value == AUTO and AUTO not in key.off):
        if value is None and None not in key.off and key.default is not None:
            raise DeepSpeedConfigError(f"{name} is null: expected {_a(key.type)}, or leave it out.")
        return
    if key.type == "object" and value is False and False in key.off:  # an old way to say: none
        return
    value = _checked(key, name, value)
    found.given[key.path] = value
    if quiet or value in key.off or _disabled(key, value):
        return
    if key.kind == REFUSED:
        found.refused.append(f"{name} = {_short(value)} ({key.why})")
    if key.kind == NOTED:
        found.notes.append(Note(key.path, value, key.why))


def _checked(key: Key, name: str, given: Any) -> Any:
    """The value, of its type and within its range."""
    try:
        value = coerced(key.type, given)
    except ValueError:
        raise DeepSpeedConfigError(
            f"{name} is {given!r}, of type {type(given).__name__}: expected {_a(key.type)}."
        ) from None
    if key.choices and value.lower() not in key.choices:
        near = nearest(value, key.choices)
        hint = f" Did you mean {near!r}?" if near else ""
        raise DeepSpeedConfigError(f"{name} is {value!r}: it is one of {', '.join(map(repr, key.choices))}.{hint}")
    if key.type in ("integer", "number") and not key.low <= value <= key.high:
        upper = f" and <= {key.high:g}" if math.isfinite(key.high) else ""
        raise DeepSpeedConfigError(f"{name} is {value!r}: it must be >= {key.low:g}{upper}.")
    return value.lower() if key.choices else value


def _autos(value: Any, path: str) -> Iterator[str]:
    if value == AUTO:
        yield path
    elif isinstance(value, Mapping):
        yield from (f"{path}.{name}" for name, inner in value.items() if inner == AUTO)


def _a(type: str) -> str:
    return f"{'an' if type[0] in 'aio' else 'a'} {type}"


def _disabled(key: Key, value: Any) -> bool:
    """A section that is switched off by itself."""
    if not isinstance(value, Mapping):
        return False
    if key.switch == "enabled":
        return "enabled" not in value or _is_off(value["enabled"])
    if key.switch:
        return value.get(key.switch) is not True and value.get(key.switch) in (None, False, 0, 1)
    return _is_off(value.get("enabled"))


def _is_off(value: Any) -> bool:
    """Whether it is a boolean, in any of its forms, and false."""
    try:
        return not coerced("boolean", value)
    except ValueError:
        return False


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest(name: str, prefix: str) -> str:
    """The nearest key of the section; else the section that has such a key."""
    depth = prefix.count(".")
    names = {p.split(".")[depth] for p in (*BY_NAME, *SECTIONS) if p.startswith(prefix) and p.count(".") >= depth}
    near = nearest(name, names)
    if near:
        return f" Did you mean {prefix + near!r}?"
    if name.startswith("_"):
        return " No key begins with an underscore: in a file, write a comment as `// ...`."
    elsewhere = [path for path in BY_NAME if path.rpartition(".")[2] == name]
    if elsewhere:
        return f" Did you mean {elsewhere[0]!r}?"
    return f" Known: {', '.join(sorted(names))}." if prefix else " docs/from-deepspeed.md lists all keys."
