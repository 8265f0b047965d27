"""What the folder of a run says of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from shardfold.launch.run_records import read_records
from shardfold.tools.board.known_runs import recipe_of_settings
from shardfold.tools.board.recipe_forms import RecipeForm
from shardfold.tools.observe.printable import printable
from shardfold.tools.observe.run_files import opened, read_object, read_text, text_of
from shardfold.tools.observe.run_status import RunStatus
from shardfold.tools.recipes.folder import LOG

__all__ = ["RunDetails"]

PIECE = 64 * 1024
MOST_FILES = 1000
MOST_SAMPLES = 1000
MOST_TEXT = 20_000
"""Characters of a sample."""


class RunDetails:
    """Of one run. Its folder may be anybody's: nothing in it is believed to be as a run writes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = read_object(folder / "config.json")

    def told(self) -> dict[str, Any]:
        summary = read_object(self._folder / "summary.json")
        records, changed = read_records(self._folder)
        status = RunStatus.of(self._folder)
        return {
            "folder": text_of(str(self._folder)),
            "config": self._config,
            **self._again(),
            "status": [
                {
                    "rank": each.rank,
                    "host": each.host[:200],
                    "pid": each.pid,
                    "state": status.state_of(each, changed),
                    "lives": each.lives,
                    "step": each.step,
                    "age": each.age(changed),
                    "words": each.words,
                }
                for each in records
            ],
            "checkpoints": self._checkpoints(),
            "memory": _by_tier(summary.get("memory")),
            "traffic": _rows(summary.get("traffic")),
            "moved": _rows(summary.get("moved")),
            "summary": {name: value for name, value in summary.items() if name not in ("memory", "traffic", "moved")},
            "files": self._files(),
            "samples": (self._folder / "samples.jsonl").is_file() or (self._folder / "sample.txt").is_file(),
            "logs": [0] if (self._folder / LOG).is_file() else [],
        }

    def _again(self) -> dict[str, Any]:
        """The run as a form, a command and a file."""
        recipe = recipe_of_settings(self._config)
        if recipe not in RecipeForm.names():
            return {"settings": {}, "command": "", "toml": ""}
        form = RecipeForm(recipe)
        settings = form.form_values(self._config)
        nested = form.nested(settings)
        return {"settings": settings, "command": form.shown_command(nested), "toml": form.toml(nested)}

    def flat_settings(self) -> dict[str, Any]:
        """Settings by their dotted names."""
        return _flat({name: value for name, value in self._config.items() if name not in ("derived", "out")})

    def _files(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with suppress(OSError), os.scandir(self._folder) as entries:
            for each in entries:
                with suppress(OSError):
                    if each.is_file(follow_symlinks=False) and len(found) < MOST_FILES:
                        found.append({"name": text_of(each.name), "bytes": each.stat(follow_symlinks=False).st_size})
        return sorted(found, key=lambda each: each["name"])

    def _checkpoints(self) -> list[dict[str, Any]]:
        folder = self._folder / "checkpoints"
        latest = read_text(folder / "latest")
        found: list[dict[str, Any]] = []
        if folder.is_symlink():
            return found
        with suppress(OSError), os.scandir(folder) as entries:
            for each in entries:
                if each.is_dir(follow_symlinks=False) and len(found) < MOST_FILES:
                    size = _bytes_in(Path(each.path))
                    found.append({"name": text_of(each.name), "bytes": size, "is_latest": each.name == latest})
        return sorted(found, key=lambda each: each["name"])

    def log(self, rank: int, after: int | None) -> dict[str, Any]:
        """A piece of what it printed, from a byte on; None: the last piece."""
        with opened(self._folder / LOG) as file:
            if rank or file is None:
                return {"after": 0, "text": "", "rank": rank}
            size = os.fstat(file).st_size
            begin = max(0, size - PIECE) if after is None or after > size else after
            piece = os.pread(file, PIECE, begin)
        cut = piece.rfind(b"\n") + 1 if len(piece) == PIECE else len(piece)
        piece = piece[: cut or len(piece)]
        # A line that is drawn again and again shows as it is at its end.
        lines = [line.rsplit(b"\r", 1)[-1] for line in piece.replace(b"\r\n", b"\n").split(b"\n")]
        return {"after": begin + len(piece), "text": printable(b"\n".join(lines)), "rank": rank}

    def samples(self, after: int) -> dict[str, Any]:
        """Texts that the run generated, from a byte of their file on."""
        found: list[dict[str, Any]] = []
        place = after
        with opened(self._folder / "samples.jsonl") as file:
            if file is None:
                return {"after": 0, "samples": self._one_sample() if not after else []}
            piece = os.pread(file, 16 * PIECE, after)
        for line in piece.split(b"\n")[:-1][:MOST_SAMPLES]:
            place += len(line) + 1
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict):
                    found.append(_sample(row))
        if place == after and len(piece) == 16 * PIECE:  # a line that is longer
            place += len(piece)
        return {"after": place, "samples": found}

    def _one_sample(self) -> list[dict[str, Any]]:
        with opened(self._folder / "sample.txt") as file:
            text = os.read(file, MOST_TEXT) if file is not None else b""
        return [{"step": None, "prompt": "", "text": printable(text), "reward": None}] if text else []


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    text = next((row[name] for name in ("answer", "text", "completion") if isinstance(row.get(name), str)), "")
    prompt = row.get("prompt")
    prompt = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False) if prompt else ""
    number = {name: row.get(name) for name in ("step", "reward")}
    return {
        **{name: value if isinstance(value, int | float) else None for name, value in number.items()},
        "prompt": printable(prompt[:MOST_TEXT]),
        "text": printable(text[:MOST_TEXT]),
    }


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value and before.count(".") < 3:
            found |= _flat(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found


def _by_tier(rows: Any) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in _rows(rows):
        tier, state, held = row.get("tier"), row.get("state"), row.get("held")
        if isinstance(tier, str) and isinstance(state, str) and isinstance(held, int | float):
            found.setdefault(tier, {})[state] = found.get(tier, {}).get(state, 0) + held
    return found


def _rows(rows: Any) -> list[dict[str, Any]]:
    return [row for row in rows if isinstance(row, dict)][:MOST_FILES] if isinstance(rows, list) else []


def _bytes_in(folder: Path) -> int:
    """Of the first thousand files."""
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    total = 0
    for path in islice(paths, MOST_FILES):
        with suppress(OSError):
            total += os.lstat(path).st_size
    return total
