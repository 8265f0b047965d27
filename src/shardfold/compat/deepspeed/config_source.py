"""From what a user gives as config to a dict: a dict, a file (JSON or HJSON), or a file's content in base64."""

from __future__ import annotations

import base64
import binascii
import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError

__all__ = ["load"]


def load(config: Any) -> tuple[dict[str, Any], str]:
    """The dict, and what to call its origin in messages.

    A file is JSON with, as DeepSpeed allows, comments (``#``, ``//``, ``/* */``) and trailing commas, or HJSON
    (https://hjson.github.io), which the package ``hjson`` reads.

    Raises:
        DeepSpeedConfigError: it is neither, there is no such file, or the text is no JSON object.
    """
    if isinstance(config, dict):
        return config, "the config"
    if not isinstance(config, (str, Path)):
        raise DeepSpeedConfigError(
            f"a config is a dict, the path of a JSON file, or its content in base64, not {type(config).__name__}: "
            "give deepspeed.initialize(config=...) or --deepspeed_config one of these."
        )
    path = Path(config)
    try:
        exists = path.is_file()
    except (OSError, ValueError):  # base64 may be longer than a name of a file can be
        exists = False
    if exists:
        try:
            return _parsed(path.read_text(encoding="utf-8"), str(path)), str(path)
        except UnicodeDecodeError:
            raise DeepSpeedConfigError(
                f"the config file {str(path)!r} is not UTF-8 text: a config is JSON or HJSON."
            ) from None
        except RecursionError:
            raise DeepSpeedConfigError(f"the config file {str(path)!r} is nested too deeply to be read.") from None
    try:
        text = base64.b64decode(str(config), altchars=b"-_", validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        text = ""
    if ":" in text:  # as any config has, and the name of a file that decodes has not
        return _parsed(text, "the config given in base64"), "the config given in base64"
    there = f"{str(config)!r} is a folder" if _is_folder(path) else f"there is no config file {str(config)!r}"
    raise DeepSpeedConfigError(f"{there}: give the path of a JSON file.")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def _parsed(text: str, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DeepSpeedConfigError(f"{where} has {_names(twice)} more than once in one section: keep one of each.")
        return dict(pairs)

    try:
        value = json.loads(_plain(text), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        value = _hjson(text, where, unique, error)
    if not isinstance(value, dict):
        raise DeepSpeedConfigError(f"{where} holds a JSON {type(value).__name__}: a config is an object, {{...}}.")
    return value


def _hjson(text: str, where: str, unique: Callable[[Any], Any], error: json.JSONDecodeError) -> Any:
    """The value of HJSON.

    It reads almost anything: a comma or a colon that JSON lacks makes the rest of the line a string. Such a text is
    wrong JSON, unless the file's name says that it is HJSON.
    """
    named = where.endswith(".hjson")
    if importlib.util.find_spec("hjson") is None:
        if named:
            raise DeepSpeedConfigError(f"{where} is HJSON, which the package hjson reads: pip install hjson.")
    else:
        import hjson  # pyright: ignore[reportMissingTypeStubs]

        try:
            value = hjson.loads(text, object_pairs_hook=unique)
        except hjson.HjsonDecodeError as its:
            if named:
                raise DeepSpeedConfigError(
                    f"{where} is not HJSON: {its.msg} at line {its.lineno}, column {its.colno}."
                ) from None
        else:
            if named or (isinstance(value, dict) and value and not _swallowed(value)):
                return value
    raise DeepSpeedConfigError(
        f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
    ) from None


def _swallowed(value: Any) -> bool:
    """Whether a name or a string has what JSON has between strings."""
    if isinstance(value, dict):
        return any(_swallowed(name) or _swallowed(inner) for name, inner in value.items())
    if isinstance(value, list):
        return any(map(_swallowed, value))
    return isinstance(value, str) and re.search(r'["{}\[\],]|:\s', value) is not None


def _names(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _plain(text: str) -> str:
    """The text with comments and trailing commas as spaces, so that places in messages stay."""
    out = list(text)
    i, comma = 0, -1
    while i < len(text):
        if text[i] == '"':
            i += 1
            while i < len(text) and text[i] != '"':
                i += 2 if text[i] == "\\" else 1
            comma = -1
        elif text[i] == "#" or text[i : i + 2] in ("//", "/*"):
            block = text[i : i + 2] == "/*"
            end = text.find("*/" if block else "\n", i)
            end = len(text) if end < 0 else end + (2 if block else 0)
            out[i:end] = [c if c == "\n" else " " for c in text[i:end]]
            i = end
            continue
        elif text[i] == ",":
            comma = i
        elif text[i] in "]}" and comma >= 0:
            out[comma] = " "
            comma = -1
        elif not text[i].isspace():
            comma = -1
        i += 1
    return "".join(out)
