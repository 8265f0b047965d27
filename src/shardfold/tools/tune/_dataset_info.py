"""What LLaMA-Factory's ``dataset_info.json`` says of files of rows, as sources of ``shardfold tune``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardfold.errors import ConfigError, did_you_mean

__all__ = ["sources_of"]

FILE = "dataset_info.json"
KNOWN = ("file_name", "formatting", "ranking", "columns", "tags", "split", "subset", "folder", "num_samples")
ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
    "chosen": "chosen",
    "rejected": "rejected",
    "tools": "tools",
}
"""Columns there, and as rows have them here."""
SPEAKERS = {
    "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"),
    "system_tag": ("system",),
    "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",),
}


def sources_of(names: Sequence[str], folder: Path, recipe: str) -> list[dict[str, Any]]:
    """Sources, as a config file has them.

    Args:
        names: of entries of the file in the folder.
        folder: ``dataset_dir``.
        recipe: that reads them.

    Raises:
        ConfigError: there is no such file or entry, or one says what is not read here.
    """
    path = folder / FILE
    try:
        every = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r}, which says where data are, cannot be read: {error}.") from None
    found: list[dict[str, Any]] = []
    for name in names:
        if name not in every:
            raise ConfigError(f"{str(path)!r} has no entry {name!r}.{did_you_mean(name, every)}")
        found.append(_source(name, every[name], folder, recipe, f"{str(path)!r}, {name!r}"))
    return found


def _source(name: str, said: Mapping[str, Any], folder: Path, recipe: str, where: str) -> dict[str, Any]:
    if elsewhere := next((key for key in ELSEWHERE if key in said), None):
        raise ConfigError(f"{where}: {elsewhere} is on a hub, and nothing is downloaded: give file_name a file here.")
    for key in said:
        if key not in KNOWN:
            raise ConfigError(f"{where}: there is no key {key!r}.{did_you_mean(key, KNOWN)}")
    if "file_name" not in said:
        raise ConfigError(f"{where}: there is no file_name.")
    for key in ("subset", "folder", "num_samples"):
        if said.get(key) is not None:
            raise ConfigError(
                f"{where}: {key} is {said[key]!r}: all of a file is read, so write its part to another file."
            )
    columns = said.get("columns") or {}
    for key in ("images", "videos", "audios"):
        if columns.get(key):
            raise ConfigError(f"{where}: it has {key}, and rows are text here.")
    formatting = said.get("formatting", "alpaca")
    if formatting not in ("alpaca", "sharegpt"):
        raise ConfigError(f"{where}: formatting is {formatting!r}, but alpaca or sharegpt.")
    kind, renamed = _shape(formatting, said, columns, recipe, where)
    source: dict[str, Any] = {"path": str(folder / said["file_name"]), "format": kind}
    if moved := {ours: theirs for ours, theirs in renamed.items() if ours != theirs}:
        source["columns"] = moved
    return source


def _shape(
    formatting: str, said: Mapping[str, Any], columns: Mapping[str, str], recipe: str, where: str
) -> tuple[str, dict[str, str]]:
    """The format here, and the file's names of columns by ours."""
    if recipe == "pt":
        return "text", {"text": columns.get("prompt", "text")}
    if formatting == "alpaca":
        if columns.get("kto_tag"):
            raise ConfigError(f"{where}: labels are read beside messages: write them so, with formatting: sharegpt.")
        renamed = {ALPACA[key]: theirs for key, theirs in columns.items() if key in ALPACA}
        return "pair" if said.get("ranking") else "alpaca", renamed
    tags = said.get("tags") or {}
    own = tags.get("role_tag") == "role"  # then roles are as templates know them
    for tag, known in {"role_tag": ("from", "role"), "content_tag": ("value", "content"), **SPEAKERS}.items():
        allowed = known[-1:] if own and tag.endswith(("user_tag", "assistant_tag")) else known
        if (given := tags.get(tag, known[0])) not in allowed:
            raise ConfigError(f"{where}: {tag} is {given!r}, which is not known: it is {' or '.join(allowed)}.")
    messages = columns.get("messages", "conversations")
    same = {key: columns[key] for key in ("system", "tools", "chosen", "rejected") if key in columns}
    if columns.get("kto_tag"):
        return "label", {"messages": messages, "label": columns["kto_tag"], **same}
    if said.get("ranking"):
        return "pair", {"conversations": messages, **same}
    return "sharegpt", {"conversations": messages, **same}
