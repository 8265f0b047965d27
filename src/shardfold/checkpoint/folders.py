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
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardfold.checkpoint.format import INDEX
from shardfold.checkpoint.paths import read_name
from shardfold.errors import CheckpointError

__all__ = ["IN_RUN", "LATEST", "Draft", "deepspeed_folder", "listed", "prune", "resolve", "sync_folder", "write_synced"]

LATEST = "latest"
IN_RUN = "checkpoints"  # the folder of checkpoints in the folder of a run of ours
OWNER = "owner.json"
DAY = 24 * 3600.0
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # fcntl.h, linux/fs.h
ASIDE = ".{}.shardfold-replaced"  # a checkpoint of this name, for the moment that its successor takes its place
LEFT_OVER = re.compile(r"\.(.+)\.(?:(writing|removed)-[0-9a-f]{12}|shardfold-replaced)", re.DOTALL)


class Draft:
    """A folder that is to become ``target``; all ranks write into it, one of them begins and commits it.

    Args:
        target: the checkpoint's folder.
        token: of this save, 12 hexadecimal digits, the same on all ranks.
        latest: whether it becomes the latest checkpoint.
    """

    def __init__(self, target: Path, token: str, *, latest: bool = True) -> None:
        self.target, self.token, self._latest = target, token, latest
        self.path = target.parent / f".{target.name}.writing-{token}"
        self._ours = False  # whether what lies at ``path`` is this draft

    def begin(self) -> None:
        """Makes the folder, and removes those that dead processes left beside it.

        Raises:
            CheckpointError: the target is not a checkpoint's place.
            OSError: of the file system.
        """
        parent = self.target.parent
        if self.target.name == LATEST or self.target.name.startswith(".") or not self.target.name:
            raise CheckpointError(
                f"{self.target}: a checkpoint is not named {self.target.name!r}: {LATEST!r} is the file that says "
                "which one is the latest, and names that begin with a dot are hidden; choose another."
            )
        there = next(above for above in self.target.parents if above.exists())
        if not there.is_dir():
            raise CheckpointError(f"{there} is a file, where a folder is needed; choose another path.")
        parent.mkdir(parents=True, exist_ok=True)
        if (parent / LATEST).is_dir():
            raise CheckpointError(
                f"{parent / LATEST} is a folder, where the file that says which checkpoint is the latest belongs: "
                "choose another folder for checkpoints, or move it."
            )
        self._check_target()
        _clear(parent)
        self.path.mkdir()
        self._ours = True
        owner = {"host": _host(), "pid": os.getpid(), "started": _started(os.getpid())}
        write_synced(self.path / OWNER, json.dumps(owner).encode())

    def commit(self, index: bytes) -> None:
        """The folder, complete but for its index, takes its place, and is the latest if it is to be.

        Raises:
            CheckpointError, OSError: all is as it was, and the draft still there.
        """
        write_synced(self.path / INDEX, index)
        if self._latest:
            write_synced(self.path / LATEST, self.target.name.encode())
        sync_folder(self.path)
        undo = self._take_place()
        try:
            sync_folder(self.target.parent)
            if self._latest:
                os.replace(self.target / LATEST, self.target.parent / LATEST)
        except BaseException:
            undo()
            raise
        self._ours = False
        with suppress(OSError):  # it is done; after a loss of power ``latest`` may be the one before
            sync_folder(self.target.parent)
            (self.target / OWNER).unlink()
        for old in (self.path, self.target.parent / ASIDE.format(self.target.name)):  # of the same name
            shutil.rmtree(old, ignore_errors=True)

    @property
    def committed(self) -> bool:
        """Whether this save, and no other, is what lies at the target; as another rank can see it."""
        try:
            with open(self.target / INDEX, "rb") as file:
                return json.load(file)["written"].get("save") == self.token
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False

    def discard(self) -> None:
        """Removes what was written, unless it has become the checkpoint."""
        if self._ours:
            shutil.rmtree(self.path, ignore_errors=True)
            self._ours = False

    def sweep(self) -> None:
        """On another rank, which has heard that the save failed: removes what it wrote after it was discarded."""
        if not (self.path / INDEX).exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def _take_place(self) -> Callable[[], None]:
        """Renames the folder to its target; what brings both back to where they were."""
        path, target = self.path, self.target
        if not target.exists():
            os.rename(path, target)
            return lambda: os.rename(target, path)
        self._check_target()
        if _exchange(path, target):
            return lambda: None if _exchange(path, target) else self._lose()
        # No such system call here: for a moment neither is there, and ``resolve`` knows the other name.
        aside = target.parent / ASIDE.format(target.name)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
        try:
            os.rename(path, target)
        except BaseException:
            os.rename(aside, target)
            raise

        def undo() -> None:
            os.rename(target, path)
            os.rename(aside, target)

        return undo

    def _lose(self) -> None:
        """What lies at ``path`` is the checkpoint that was replaced: nobody may remove it."""
        self._ours = False

    def _check_target(self) -> None:
        target = self.target
        if not target.exists():
            return
        if not target.is_dir() or (not (target / INDEX).exists() and any(target.iterdir())):
            raise CheckpointError(
                f"{target} exists and is no checkpoint: nothing was written; choose another path, or remove it."
            )


def resolve(path: str | Path) -> Path:
    """The folder of a checkpoint: ``path`` itself, or the latest of the checkpoints in it or in its ``checkpoints``.

    Raises:
        CheckpointError: there is none, or it is not complete; says what is there.
    """
    path = Path(path)
    try:
        if (found := _checkpoint(path)) is not None:
            return found
    except (OSError, ValueError) as error:  # no name that a file system has
        raise CheckpointError(f"{str(path)[:200]!r} is no path of a checkpoint ({_why(error)}).") from None
    if not (path / LATEST).exists() and (path / IN_RUN / LATEST).is_file():
        return resolve(path / IN_RUN)
    complete = [found.name for found in listed(path)] if path.is_dir() else []
    if path.exists() and deepspeed_folder(path) is not None:
        raise CheckpointError(_not_there(path))
    if (path / LATEST).is_file():
        name = read_name(path / LATEST)
        if name is not None:
            if (found := _checkpoint(path / name)) is not None:
                return found
            raise CheckpointError(f"{path / LATEST} names {name!r}, but {_not_there(path / name)}")
        raise CheckpointError(
            f"{path / LATEST} is damaged: it does not name a folder beside it. Complete checkpoints there: "
            f"{', '.join(complete) or 'none'}."
        )
    if path.exists() and complete:
        raise CheckpointError(f"{path} has no {LATEST!r} file: name one of its checkpoints: {', '.join(complete)}.")
    raise CheckpointError(_not_there(path))


def _checkpoint(path: Path) -> Path | None:
    """The folder itself if it is a checkpoint, or where it lies while its successor takes its place; else None."""
    if (path / INDEX).is_file():
        return path
    aside = path.parent / ASIDE.format(path.name)
    return aside if not path.exists() and (aside / INDEX).is_file() else None


def _not_there(path: Path) -> str:
    """What is at the place of a checkpoint instead."""
    if not path.exists():
        near = [found.name for found in listed(path.parent)] if path.parent.is_dir() else []
        return f"there is no checkpoint {path}." + (f" There: {', '.join(near)}." if near else "")
    if path.is_dir() and deepspeed_folder(path) is not None:
        return f"{path} is a checkpoint of DeepSpeed: `shardfold ckpt import {path} NEW` makes it one that is loaded."
    return f"{path} is no complete checkpoint: it {_lacking(path)}; take an earlier one."


def _why(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__


def _lacking(path: Path) -> str:
    """What a folder that is no checkpoint has and has not."""
    if not path.is_dir():
        return "is a file"
    files = sorted(found.name for found in path.glob("*.safetensors"))
    if not files:
        return f"has no {INDEX} and no files of ranks"
    said = f"has {', '.join(files[:8])}{', ...' * (len(files) > 8)} but no {INDEX}"
    if (many := re.fullmatch(r"rank-\d+-of-(\d+)\.safetensors", files[0])) is not None:
        ranks = range(int(many[1]))
        absent = [r for r in ranks if f"rank-{r:05d}-of-{len(ranks):05d}.safetensors" not in files]
        if absent:
            names = ", ".join(map(str, absent[:8])) + ", ..." * (len(absent) > 8)
            said += f" and no file of rank {names}"
    return said + ", so not all of it was written"


def deepspeed_folder(path: Path) -> Path | None:
    """The folder of one step of a DeepSpeed run: ``path`` itself, or the one that its ``latest`` names; else None."""
    if path.is_dir() and any(path.glob("*mp_rank_*_states.pt")):
        return path
    if (path / LATEST).is_file() and (name := read_name(path / LATEST)) is not None:
        named = path / name
        if named.is_dir() and any(named.glob("*mp_rank_*_states.pt")):
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
    for path in gone:  # never half of one under its name
        os.rename(path, hidden := path.parent / f".{path.name}.removed-{os.urandom(6).hex()}")
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
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
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


def _clear(parent: Path) -> None:
    """Removes what processes that are no more left in a folder of checkpoints."""
    for found in parent.iterdir():
        match = LEFT_OVER.fullmatch(found.name)
        if match is None or not found.is_dir():
            continue
        name, kind = match.groups()
        if kind is None and not (parent / name).exists() and (found / INDEX).is_file():
            with suppress(OSError):
                os.rename(found, parent / name)  # its successor never came
        elif kind != "writing" or _dead(found):
            shutil.rmtree(found, ignore_errors=True)


def _dead(draft: Path) -> bool:
    """Whether nobody writes into a draft any more."""
    try:
        owner = json.loads((draft / OWNER).read_text())
        if owner["host"] == _host():
            os.kill(owner["pid"], 0)
            return owner["started"] != _started(owner["pid"])
    except ProcessLookupError:
        return True
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        return time.time() - draft.stat().st_mtime > DAY
    except OSError:
        return False


def _host() -> str:
    """Where process ids mean what they mean here: a container is a host of its own."""
    said = [socket.gethostname()]
    with suppress(OSError):
        said.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        said.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(said)


def _started(pid: int) -> str:
    """When a process began, in a unit of the system's; ids are given again. Empty where that is not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
