"""Where files of the disk tier are: the folders that users name, one for each drive."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

__all__ = ["FOLDERS", "Folders", "are_folders", "folders_of", "on_this_rank"]

Folders = str | tuple[str, ...] | None
FOLDERS = "the path of a folder, or several in a list, one for each drive, or None for the system's for temporary files"
"""What a cell's folder is."""


def folders_of(given: Any) -> Any:
    """Paths as text, several as a tuple; what is no folder comes back as it is."""
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        return tuple(folders_of(each) for each in given)
    return os.fspath(given) if isinstance(given, os.PathLike) else given


def are_folders(given: Any) -> bool:
    """Whether it is what :func:`folders_of` makes of folders."""
    names = given if isinstance(given, tuple) else (given,)
    return given is None or bool(names and all(isinstance(each, str) and each.strip() for each in names))


def on_this_rank(folder: str, local_rank: str) -> str:
    """The folder that is meant here: ``~`` is the user's home, and ``{local_rank}`` this rank's number on its node."""
    return os.path.expanduser(folder.replace("{local_rank}", local_rank))
