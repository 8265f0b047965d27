"""The run folder. A run claims it before it does anything else, so that no two runs ever write into one."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from shardfold.errors import ConfigError
from shardfold.launch.run_records import LAUNCHER, STATUS, OwnRecord, read_records

__all__ = ["CLAIM", "LOG", "PRINTS_INTO_FOLDER", "claimed", "claimed_by_launcher", "withdraw"]

CLAIM = "SHARDFOLD_RUN_CLAIM"
"""Variable by which a launcher tells its ranks that the folder is already theirs: its value is in `config.json`."""

PRINTS_INTO_FOLDER = "SHARDFOLD_PRINTS_INTO_FOLDER"
"""Variable by which who starts a run asks that what it prints goes into its folder, as LOG, from the claim on."""
LOG = "output.log"

BEFORE_STEPS = ("config.json", "data.json", "metrics.jsonl", "samples.jsonl", LOG, STATUS)
FIRST = "config.json"  # the first file of a run, and the mark of its claim until it is written


@contextmanager
def claimed(out: Path | None) -> Iterator[Path]:
    """Give this run a folder of its own: `out`, new or empty, or without it the next free `runs/<time>`.

    What was made here is removed at the end, unless the run has begun to write by then; of a run that is refused before
    its first step, that too. A folder of a run that was killed before it began to write is as an empty one. Inside,
    `run.status` says that the run starts.

    Raises:
        ConfigError: the folder is not empty, another run has just claimed it, or it cannot be made.
    """
    token = secrets.token_hex(8)
    made: list[Path] = []
    folder = None
    try:
        folder = new_folder(made) if out is None else given_folder(out, made)
        mark(folder, token)
        record = OwnRecord(folder, LAUNCHER, 0)
        record.write(phase="starting")
    except BaseException as error:  # Ctrl-C too
        if folder is not None and token_in(folder) == token:
            withdraw(folder)
        remove(made)
        if not isinstance(error, OSError):
            raise
        place = "a run folder" if out is None else f"the run folder {str(out)!r}"
        raise ConfigError(f"{place} cannot be made: {error.strerror}; give another --out.") from None
    before = os.environ.get(CLAIM)
    os.environ[CLAIM] = token
    printed = _PrintedLog(folder) if os.environ.pop(PRINTS_INTO_FOLDER, None) else None
    try:
        yield folder
    except ConfigError:
        withdraw(folder)
        raise
    finally:
        if before is None:
            os.environ.pop(CLAIM, None)
        else:
            os.environ[CLAIM] = before
        if token_in(folder) == token:
            for name in (FIRST, LOG, STATUS):
                (folder / name).unlink(missing_ok=True)
        remove(made)
        record.close()
        if printed is not None:
            printed.end(is_kept=folder.is_dir())


class _PrintedLog:
    """What this process and those that it starts print, in a file of the run folder."""

    def __init__(self, folder: Path) -> None:
        sys.stdout.flush()
        self._file = os.open(folder / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._before = [os.dup(1), os.dup(2)]
        os.dup2(self._file, 1)
        os.dup2(self._file, 2)

    def end(self, *, is_kept: bool) -> None:
        """From now on it is printed where it was before; what was printed by a run that is refused, too."""
        sys.stdout.flush()
        for number, before in enumerate(self._before, 1):
            os.dup2(before, number)
            os.close(before)
        if not is_kept:
            os.write(2, os.pread(self._file, 2**20, 0))
        os.close(self._file)


def claimed_by_launcher(out: Path | None) -> bool:
    """Return whether the launcher that started this process has claimed `out` for it."""
    return out is not None and CLAIM in os.environ and token_in(out) == os.environ[CLAIM]


def new_folder(made: list[Path]) -> Path:
    """Make the next free folder that is called after the time."""
    first = Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    make(first.parent, made)
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            made.append(folder)
            return folder
    raise AssertionError("a count has no end")


def given_folder(out: Path, made: list[Path]) -> Path:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"the run folder {str(out)!r} is a file: give another --out.")
    make(out, made)
    give_up_claim(out)
    if any(out.iterdir()):
        raise ConfigError(f"the run folder {str(out)!r} is not empty: give another --out, or remove it first.")
    return out


def make(folder: Path, made: list[Path]) -> None:
    """Make a folder with its parents; those that were not there are noted in `made`, the outermost first."""
    for each in reversed((folder, *folder.parents)):
        with suppress(FileExistsError):
            each.mkdir()
            made.append(each)


def mark(folder: Path, token: str) -> None:
    try:
        with (folder / FIRST).open("x", encoding="utf-8") as file:
            json.dump({"derived": {"claim": token}}, file)  # read as a config file, it says nothing
    except FileExistsError:
        raise ConfigError(f"another run has just begun in {str(folder)!r}: give another --out.") from None


def token_in(folder: Path) -> str | None:
    """Return the token of a claim whose run has not begun to write yet."""
    try:
        found = json.loads((folder / FIRST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found["derived"].get("claim") if isinstance(found, dict) and set(found) == {"derived"} else None


def give_up_claim(folder: Path) -> None:
    """Empty a folder in which a run was killed before it began to write, and of which no process lives."""
    token = token_in(folder)
    records, _ = read_records(folder)
    if token is None or not records or any(each.lives is not False for each in records):
        return
    if {each.name for each in folder.iterdir()} <= {FIRST, LOG, STATUS}:
        aside = folder / f".{FIRST}.{secrets.token_hex(8)}"
        with suppress(FileNotFoundError):  # of two that come at once one is first
            (folder / FIRST).rename(aside)
            if json.loads(aside.read_text(encoding="utf-8"))["derived"]["claim"] != token:
                aside.rename(folder / FIRST)  # the other has claimed it meanwhile
                return
            for each in (folder / LOG, folder / STATUS, aside):
                each.unlink(missing_ok=True)


def withdraw(folder: Path) -> None:
    """Remove what a run writes before its first step, if there is nothing else."""
    found = list(folder.iterdir()) if folder.is_dir() else []
    if all(each.name in BEFORE_STEPS and each.is_file() for each in found) and not step_is_in(folder):
        for each in found:
            each.unlink()


def step_is_in(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def remove(made: list[Path]) -> None:
    for folder in reversed(made):
        with suppress(OSError):  # something is in it
            folder.rmdir()
