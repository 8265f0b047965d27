"""The runs in the folders of a board: each by a name that no request can turn into another path."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardfold.launch.run_records import STATUS
from shardfold.tools.board._run_figures import RunFigures, is_finite
from shardfold.tools.observe.run_files import read_object, text_of
from shardfold.tools.observe.run_status import RunStatus, runs_in
from shardfold.tools.serve.api_refusal import ApiRefusal

__all__ = ["KnownRuns", "recipe_of_settings"]

LOOK = 1.0  # seconds for which the folders that were found are believed
MOST_NAME = 300


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
        self._figures: dict[Path, RunFigures] = {}

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
            here = self._found.values()
            self._seen = {folder: self._seen[folder] for folder in here if folder in self._seen}
            self._figures = {folder: self._figures[folder] for folder in here if folder in self._figures}
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
        config, figures = read_object(folder / "config.json"), RunFigures.of(status, self._figures.get(folder))
        self._figures[folder] = figures
        number = {name: figures.last.get(name) for name in ("loss", "tokens_per_s", "seconds", "step")}
        number = {name: value if is_finite(value) else None for name, value in number.items()}
        step = status.step or int(number["step"] or 0)
        steps = status.steps or (config["steps"] if isinstance(config.get("steps"), int) else 0)
        goes = not status.is_over and status.state != "stalled" and 0 < step < steps
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
            "loss_mean": figures.mean,
            "held_out": (_held_out_at_the_end(folder, step) if status.is_over else None) or figures.held_out,
            "rate": number["tokens_per_s"],
            "seconds": number["seconds"],
            "seconds_left": figures.pace * (steps - step) if goes and figures.pace is not None else None,
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


def _held_out_at_the_end(folder: Path, step: int) -> dict[str, Any] | None:
    """What a run wrote into its summary."""
    summary = read_object(folder / "summary.json")
    bits = summary.get("bits_per_byte")
    told = {
        "bits_per_byte": bits.get("model") if isinstance(bits, dict) else None,
        "loss": summary.get("held_out_loss"),
    }
    return next(({"figure": figure, "value": v, "step": step} for figure, v in told.items() if is_finite(v)), None)


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


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 2**31 else 0
