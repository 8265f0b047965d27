"""The runs in the folders of a board: each by a name that no request can turn into another path."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardfold.launch.run_records import STATUS
from shardfold.tools.observe.run_files import opened, read_object, text_of
from shardfold.tools.observe.run_status import RunStatus, runs_in
from shardfold.tools.serve.api_refusal import ApiRefusal

__all__ = ["KnownRuns", "recipe_of_settings"]

LOOK = 1.0  # seconds for which the folders that were found are believed
MOST_NAME = 300
HEAD = 16 * 1024  # bytes in which the first row is


class KnownRuns:
    """Finds runs, and says what each is at.

    A run's id is a digest of its path: it is the same for every board, browser and restart, and what is no run in
    one of the folders has none.

    Args:
        roots: folders; links in them are not followed.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = [Path(os.path.realpath(each)) for each in roots]
        self._lock = threading.Lock()
        self._found: dict[str, Path] = {}
        self._looked = -float("inf")
        self._version, self._mark = 0, secrets.token_hex(4)
        self._rows: dict[str, tuple[int, dict[str, Any]]] = {}
        self._gone: dict[str, int] = {}
        self._seen: dict[Path, tuple[Any, dict[str, Any], float]] = {}

    @staticmethod
    def id_of(folder: Path) -> str:
        return hashlib.blake2s(os.fsencode(folder), digest_size=8).hexdigest()

    def folder(self, run: str) -> Path:
        """
        Raises:
            ApiRefusal: there is no such run.
        """
        for is_new in (False, True):
            found = self._folders(is_new=is_new).get(run)
            if found is not None and found.is_dir():
                return found
        raise ApiRefusal("there is no such run: it was moved or removed, or refused.", code="no_run", status=404)

    def _folders(self, *, is_new: bool = False) -> dict[str, Path]:
        if is_new or time.monotonic() - self._looked > LOOK:
            self._found = {self.id_of(folder): folder for folder in runs_in(self.roots)}
            self._looked = time.monotonic()
        return self._found

    def changes(self, cursor: str) -> dict[str, Any]:
        """The rows that changed since a cursor, or all."""
        with self._lock:
            rows = {run: self._row(run, folder) for run, folder in self._folders().items()}
            self._version += 1
            for run, row in rows.items():
                if run not in self._rows or _lasting(self._rows[run][1]) != _lasting(row):
                    self._rows[run] = self._version, row
                self._gone.pop(run, None)
            for run in self._rows.keys() - rows.keys():
                del self._rows[run]
                self._gone[run] = self._version
            self._seen = {folder: self._seen[folder] for folder in self._found.values() if folder in self._seen}
            mark, _, version = cursor.partition(".")
            since = int(version) if mark == self._mark and version.isdecimal() and len(version) < 20 else -1
            return {
                "cursor": f"{self._mark}.{self._version}",
                "roots": [str(each) for each in self.roots],
                "runs": [rows[run] for run, (at, _) in self._rows.items() if at > since],
                "whole": since < 0,
                "gone": [run for run, at in self._gone.items() if at > since] if since >= 0 else [],
            }

    def row(self, run: str) -> dict[str, Any]:
        """What a run is at now.

        Raises:
            ApiRefusal: there is no such run.
        """
        folder = self.folder(run)
        with self._lock:
            return self._row(run, folder)

    def _row(self, run: str, folder: Path) -> dict[str, Any]:
        marks = tuple(_mark(folder / name) for name in (STATUS, "metrics.jsonl", "config.json", "summary.json"))
        before = self._seen.get(folder)
        if before is not None and before[0] == marks and before[1]["is_over"]:
            passed = time.monotonic() - before[2]
            return {**before[1], "age": None if before[1]["age"] is None else before[1]["age"] + passed}
        row = self._told(run, folder, RunStatus.of(folder))
        self._seen[folder] = marks, row, time.monotonic()
        return row

    def _told(self, run: str, folder: Path, status: RunStatus) -> dict[str, Any]:
        config, figures = read_object(folder / "config.json"), status.last_figures
        loss = next((key for key in figures if key.rpartition("/")[2] == "loss"), "loss")  # TensorBoard's train/loss
        figures = {**figures, "loss": figures.get("loss", figures.get(loss))}
        number = {name: figures.get(name) for name in ("loss", "tokens_per_s", "seconds", "step")}
        number = {name: value if _is_finite(value) else None for name, value in number.items()}
        step = status.step or int(number["step"] or 0)
        steps = status.steps or (config["steps"] if isinstance(config.get("steps"), int) else 0)
        left = None
        if not status.is_over and number["seconds"] and 0 < step < steps:
            left = _pace(folder, step, number["seconds"]) * (steps - step)
        return {
            "id": run,
            "name": self._name(folder),
            "recipe": recipe_of_settings(config),
            "state": status.state,
            "is_over": status.is_over,
            "why": status.why[:2000],
            "step": step,
            "steps": steps,
            "loss": number["loss"],
            "rate": number["tokens_per_s"],
            "seconds": number["seconds"],
            "seconds_left": left,
            "ranks": len(status.ranks) or _whole(config.get("procs")),
            "layout": str(config.get("layout", ""))[:MOST_NAME],
            "started": _begun(folder),
            "age": status.age,
        }

    def _name(self, folder: Path) -> str:
        for root in self.roots:
            with suppress(ValueError):
                inside = folder.relative_to(root)
                name = root.name if inside == Path() else str(inside if len(self.roots) == 1 else root.name / inside)
                return text_of(name)[:MOST_NAME]
        return text_of(folder.name)[:MOST_NAME]


def recipe_of_settings(config: Mapping[str, Any]) -> str:
    """The recipe that a run's ``config.json`` is of; "": a script of somebody's own."""
    if isinstance(named := config.get("recipe"), str):
        return named[:MOST_NAME]
    return "face" if "backbone" in config else "lm" if {"size", "context", "eval_windows"} <= config.keys() else ""


def _pace(folder: Path, step: int, seconds: float) -> float:
    """Seconds of a step. A run that was resumed begins at another step than the first."""
    with opened(folder / "metrics.jsonl") as file, suppress(OSError, ValueError, RecursionError):
        first: Any = json.loads(os.pread(file, HEAD, 0).partition(b"\n")[0]) if file is not None else {}
        begun, before = map(first.get, ("step", "seconds")) if isinstance(first, dict) else (None, None)
        if isinstance(begun, int) and 0 < begun < step and isinstance(before, int | float) and 0 <= before < seconds:
            return (seconds - before) / (step - begun)
    return seconds / step


def _lasting(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without what changes as time goes by."""
    return {name: value for name, value in row.items() if name != "age"}


def _mark(path: Path) -> Any:
    with suppress(OSError):
        found = path.lstat()
        return found.st_ino, found.st_size, found.st_mtime_ns
    return None


def _begun(folder: Path) -> float | None:
    """When its settings were written, in seconds since 1970."""
    with suppress(OSError):
        return (folder / "config.json").lstat().st_mtime
    return None


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 2**31 else 0
