"""What a checkpoint's own files may name: regular files beside them, and nothing else.

A checkpoint may come from anywhere. A name in it that leads out of its folder would have other files of the reader's
read, and copied by an export; a pipe or a device would be waited for, for ever.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from shardfold.errors import CheckpointError

__all__ = ["NAME_BYTES", "check_apart", "check_regular", "inside", "is_plain_name", "open_regular", "read_name"]

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
