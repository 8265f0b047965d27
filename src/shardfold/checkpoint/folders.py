"""Folders of checkpoints: which are complete, which one is the latest, which are removed; and the files in them.

A checkpoint may come from anywhere. A name in it that leads out of its folder would have other files of the reader's
read, and copied by an export; a pipe or a device would be waited for, for ever: it names regular files beside its own,
and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from shardfold.errors import CheckpointError, ConfigError
from shardfold.plan.checks import described

__all__ = [
    "INDEX",
    "IN_RUN",
    "LATEST",
    "NAME_BYTES",
    "check_apart",
    "check_place",
    "check_regular",
    "deepspeed_folder",
    "inside",
    "is_plain_name",
    "listed",
    "older",
    "open_regular",
    "origin",
    "read_name",
    "remove",
    "resolve",
    "sync_folder",
    "write_synced",
]


NAME_BYTES = 255
"""Of a name of a file, at most: what file systems have."""

KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


def is_plain_name(name: object) -> bool:
    """Whether it names something in the folder itself: no path, nothing hidden, no ``..``."""
    return (
        isinstance(name, str)
        and 0 < len(name.encode(errors="surrogatepass")) <= NAME_BYTES
        and not name.startswith(".")
        and not any(c in name for c in (os.sep, os.altsep or os.sep, "\0"))
    )


def read_name(path: Path) -> str | None:
    """The name of a neighbour that a small file such as ``latest`` holds; None: it is no such name."""
    check_regular(path)
    with open(path, "rb") as file:
        said = file.read(NAME_BYTES + 3)
    try:
        name = said.decode().strip()
    except UnicodeDecodeError:
        return None
    return name if is_plain_name(name) else None


def check_regular(path: Path) -> None:
    """
    Raises:
        CheckpointError: it is a folder, a pipe, a socket or a device. That it is not there is another's affair.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    _check_mode(mode, path)


def _check_mode(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for test, name in KINDS if test(mode)), "special file")
        raise CheckpointError(f"{path} cannot be read: it is a {kind}, where a file is needed.")


def check_apart(source: Path, target: Path) -> None:
    """What is written must not lie in what is read, nor the other way round; links count for what they lead to.

    Raises:
        CheckpointError: it does.
    """
    read, written = Path(os.path.realpath(source)), Path(os.path.realpath(target))
    if read == written:
        how = "is"
    elif read in written.parents:
        how = "is inside of"
    elif written in read.parents:
        how = "is around"
    else:
        return
    raise CheckpointError(f"{target} {how} {source}, which is read: nothing was written; choose another path to write.")


def inside(folder: Path, name: str) -> Path:
    """The path of a file of a folder, which need not be there.

    Raises:
        CheckpointError: the name is a path, or a link that leads out of the folder; or it is no regular file.
    """
    path = folder / name
    if not is_plain_name(name):
        raise CheckpointError(f"{folder} names {name!r}, which is not the name of a file in it: nothing was read.")
    if path.is_symlink():
        home, target = os.path.realpath(folder), os.path.realpath(path)
        if os.path.dirname(target) != home:
            raise CheckpointError(
                f"{path} is a link that leads out of the checkpoint, to {target}: if that is meant, put a copy in its "
                "place (cp -rL copies a checkpoint without links)."
            )
    check_regular(path)
    return path


def open_regular(folder: Path, name: str) -> int:
    """A file of a folder, opened for reading; see :func:`inside`.

    Raises:
        CheckpointError: it is none, or cannot be opened.
    """
    path = inside(folder, name)
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}.") from None
    try:
        _check_mode(os.fstat(fd).st_mode, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


INDEX = "index.json"  # what makes a folder a checkpoint
LATEST = "latest"
IN_RUN = "checkpoints"  # the folder of checkpoints in the folder of a run of ours
DRAFT = ".{}.writing-{}"  # of its name and the token of the save
OWNER = "owner.json"  # in it: who writes it
ASIDE = ".{}.shardfold-replaced"  # a checkpoint of this name, for the moment that its successor takes its place
LEFT_OVER = re.compile(r"\.(.+)\.(?:(writing|removed)-[0-9a-f]{12}|shardfold-replaced)", re.DOTALL)


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
        raise CheckpointError(f"{str(path)[:200]!r} is not a path of a checkpoint ({_why(error)}).") from None
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
    return f"{path} is not a complete checkpoint: it {_lacking(path)}; take an earlier one."


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


def older(target: Path, keep: int, ours: Callable[[Path], bool]) -> list[str]:
    """Names of the oldest of a run's checkpoints beside ``target`` (which stays), without which ``keep`` are left.

    The newest in which as little as in any is inf or NaN is none of them, so that a run whose values have gone bad
    still has what to go back to.
    """
    others = [path for path in listed(target.parent) if path.name != target.name]
    if len(others) < keep:
        return []
    others = [path for path in others if ours(path)]
    gone = others[: max(0, len(others) + 1 - keep)]
    if gone:
        bad = {path: len(origin(path).nonfinite) for path in (*others, target)}
        least = min(bad.values())
        best = [path for path, count in bad.items() if count == least][-1]
        gone = [path for path in gone if path != best]
    return [path.name for path in gone]


class Origin(NamedTuple):
    """What the index of a checkpoint says of where it came from: the names of its run and of its save, empty if it has
    none, and names of what is inf or NaN in it."""

    run: str
    save: str
    nonfinite: tuple[str, ...]


def origin(checkpoint: Path) -> Origin:
    """Of a checkpoint; nothing of one that cannot be read."""
    try:
        return _origin(checkpoint, (checkpoint / INDEX).stat().st_mtime_ns)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Origin("", "", ())


@lru_cache(maxsize=64)
def _origin(checkpoint: Path, modified: int) -> Origin:
    said = json.loads((checkpoint / INDEX).read_bytes())
    run, save = (str(said["written"].get(name, "")) for name in ("run", "save"))
    return Origin(run, save, tuple(said.get("nonfinite", ())))


def remove(parent: Path, names: Iterable[str]) -> None:
    """Removes checkpoints of a folder by their names, those that are there.

    Raises:
        OSError: one of them cannot be removed.
    """
    for name in names:  # never half of one under its name
        if (parent / name / INDEX).is_file():
            os.rename(parent / name, hidden := parent / f".{name}.removed-{os.urandom(6).hex()}")
            shutil.rmtree(hidden, ignore_errors=True)


def write_synced(path: Path, data: bytes, *, new: bool = False) -> None:
    """Writes a small file, one that was not there if it is to be ``new``, and waits until it is on the disk."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC), 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError as error:
        name_file(error, path)
        raise
    finally:
        os.close(fd)


def name_file(error: OSError, path: Path) -> None:
    """The error, which is of no file by name, is of this one."""
    error.filename = error.filename or str(path)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_place(call: str, path: Any, what: str) -> None:
    """
    Raises:
        ConfigError: ``path`` is no path; ``call``, and ``what`` it should be of, are for the sentence.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ConfigError(f"{call}: the path is {described(path)}: give the path of {what}, a str or a Path.")
    if not os.fspath(path).strip():
        raise ConfigError(f"{call}: the path is empty: give the path of {what}; '.' is the current folder.")
