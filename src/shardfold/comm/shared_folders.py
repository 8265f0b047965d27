"""Folders in shared memory, by the process that made them: what one leaves that was killed, somebody has to remove."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["remove_folders", "shared_folder"]

SHARED = Path("/dev/shm")
NAME = "shardfold-{}-"


def shared_folder(num_bytes: int) -> Path:
    """A new folder of this process with room for so many bytes, in memory, or where temporary files are if there is too
    little; nobody else may look into it."""
    there = next((base for base in _bases() if shutil.disk_usage(base).free > num_bytes), None)
    return Path(tempfile.mkdtemp(prefix=NAME.format(os.getpid()), dir=there))


def remove_folders(processes: Iterable[int]) -> None:
    """Removes what processes that are no more have left."""
    for process in processes:
        for base in _bases():
            for folder in base.glob(NAME.format(process) + "*"):
                shutil.rmtree(folder, ignore_errors=True)


def _bases() -> list[Path]:
    return [base for base in (SHARED, Path(tempfile.gettempdir())) if os.access(base, os.W_OK)]
