"""Folders that are there as a whole or not at all, and the file that says which one is the latest.

A checkpoint is written into a folder beside its place (``.step-100.writing-TOKEN``), synced, and then renamed; where
one of that name exists already the two are exchanged by one system call and the old one is removed. ``latest`` is
replaced after that. A process killed at any moment leaves the old checkpoint, or the new one, and perhaps a folder that
the next save from the same host clears away.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

from shardfold.checkpoint.format import INDEX
from shardfold.errors import CheckpointError

__all__ = ["LATEST", "Draft", "deepspeed_folder", "listed", "resolve"]

LATEST = "latest"
OWNER = "owner.json"
DAY = 24 * 3600.0
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h


class Draft:
    """A folder that is to become ``target``; all ranks write into it, one of them begins and commits it.

    Args:
        target: the checkpoint's folder.
        token: of this save, the same on all ranks.
    """

    def __init__(self, target: Path, token: str) -> None:
        self.target = target
        self.path = target.parent / f".{target.name}.writing-{token}"

    def begin(self) -> None:
        """Makes the folder, and removes those that dead processes left beside it."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        for stale in self.target.parent.glob(".*.writing-*"):
            if _dead(stale):
                shutil.rmtree(stale, ignore_errors=True)
        self.path.mkdir()
        write_synced(self.path / OWNER, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())

    def commit(self, index: bytes) -> None:
        """The folder, complete but for its index, takes its place and is the latest."""
        write_synced(self.path / INDEX, index)
        (self.path / OWNER).unlink()
        sync_folder(self.path)
        if self.target.exists():
            self._replace()
        else:
            os.rename(self.path, self.target)
        sync_folder(self.target.parent)
        mark = self.target.parent / f".{LATEST}.{self.path.name}"
        write_synced(mark, self.target.name.encode() + b"\n")
        os.replace(mark, self.target.parent / LATEST)
        sync_folder(self.target.parent)
        shutil.rmtree(self.path, ignore_errors=True)  # where there was one of that name

    def _replace(self) -> None:
        if not (self.target / INDEX).exists() and any(self.target.iterdir()):
            raise CheckpointError(
                f"{self.target} exists and is no checkpoint: nothing was written; choose another path."
            )
        if not _exchange(self.path, self.target):
            # No such system call here: for a moment neither is there, and ``resolve`` knows the other name.
            aside = self.target.parent / f".{self.target.name}.replaced"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.target, aside)
            os.rename(self.path, self.target)
            shutil.rmtree(aside, ignore_errors=True)

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.path, ignore_errors=True)


def resolve(path: str | Path) -> Path:
    """The folder of a checkpoint: ``path`` itself, or the latest of the checkpoints in it.

    Raises:
        CheckpointError: there is none, or it is not complete; says what is there.
    """
    path = Path(path)
    if (path / INDEX).is_file():
        return path
    aside = path.parent / f".{path.name}.replaced"
    if not path.exists() and (aside / INDEX).is_file():
        return aside
    if (path / LATEST).is_file():
        named = path / (path / LATEST).read_text().strip()
        if named.parent == path and deepspeed_folder(path) is None:
            return resolve(named)
    if not path.exists():
        near = [found.name for found in listed(path.parent)] if path.parent.is_dir() else []
        raise CheckpointError(f"there is no checkpoint {path}." + (f" There: {', '.join(near)}." if near else ""))
    if deepspeed_folder(path) is not None:
        raise CheckpointError(
            f"{path} is a checkpoint of DeepSpeed: `shardfold ckpt import {path} NEW` makes it one that is loaded."
        )
    inside = sorted(p.name for p in path.iterdir()) if path.is_dir() else []
    complete = [found.name for found in listed(path)] if path.is_dir() else []
    if complete:
        raise CheckpointError(f"{path} has no {LATEST!r} file: name one of its checkpoints: {', '.join(complete)}.")
    files = [name for name in inside if name.endswith(".safetensors")]
    what = f"has {', '.join(files)} but no {INDEX}, so not all of it was written" if files else f"has no {INDEX}"
    raise CheckpointError(f"{path} is no complete checkpoint: it {what}; take an earlier one.")


def deepspeed_folder(path: Path) -> Path | None:
    """The folder of one step of a DeepSpeed run: ``path`` itself, or the one that its ``latest`` names; else None."""
    if path.is_dir() and any(path.glob("*mp_rank_*_states.pt")):
        return path
    if (path / LATEST).is_file():
        named = path / (path / LATEST).read_text().strip()
        if named.parent == path and named.is_dir() and any(named.glob("*mp_rank_*_states.pt")):
            return named
    return None


def listed(root: Path) -> list[Path]:
    """The complete checkpoints in a folder, the oldest first."""
    found = [path.parent for path in root.glob(f"*/{INDEX}") if not path.parent.name.startswith(".")]
    return sorted(found, key=lambda path: ((path / INDEX).stat().st_mtime_ns, path.name))


def prune(target: Path, keep: int) -> list[Path]:
    """Removes the oldest checkpoints beside ``target`` (which stays) until ``keep`` are left; what was removed."""
    others = [path for path in listed(target.parent) if path.name != target.name]
    gone = others[: max(0, len(others) + 1 - keep)]
    for path in gone:
        os.rename(path, hidden := path.parent / f".{path.name}.removed")  # never half of one under its name
        shutil.rmtree(hidden, ignore_errors=True)
    return gone


def write_synced(path: Path, data: bytes) -> None:
    """Writes a small file and waits until it is on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders at once; False where the system can not."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    return call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _dead(draft: Path) -> bool:
    """Whether nobody writes into a draft any more."""
    try:
        owner = json.loads((draft / OWNER).read_text())
        if owner["host"] != socket.gethostname():
            return time.time() - draft.stat().st_mtime > DAY
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError):
        try:
            return time.time() - draft.stat().st_mtime > DAY
        except OSError:
            return False
    return False
