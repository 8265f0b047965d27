"""Folders in shared memory, which do not outlive the process that made them: what one leaves that was killed, whoever
comes next removes, which may be its launcher, what waits for the launcher's end, or the next run on this host.

A folder is locked as long as its process has it. The kernel takes the lock away with the process, however that ends,
and it is seen from everywhere that the folder is seen from, unlike a number of a process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from shardfold.comm.launcher_notes import MARK

__all__ = ["NAMED", "SharedFolder", "folders_around", "remove_left"]

SHARED = Path("/dev/shm")
NAMED = "shardfold-held-"
"""What their names begin with; then comes the run."""


class SharedFolder:
    """One of this process, until :meth:`drop`; nobody else may look into it.

    Args:
        path: of the new folder, beside one that :meth:`with_room` made; its name begins with ``NAMED``.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        import fcntl  # not on Windows

        self.path = path
        while True:
            path.mkdir(mode=0o700)
            with suppress(FileNotFoundError):  # it was not locked yet, and taken for one that is left
                self._lock = os.open(path, os.O_RDONLY)
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(path):
                    return
                os.close(self._lock)

    @classmethod
    def with_room(cls, num_bytes: int) -> SharedFolder:
        """With room for so many bytes, in memory, or where temporary files are if there is too little."""
        there = next((base for base in folders_around() if shutil.disk_usage(base).free > num_bytes), None)
        run = os.environ.get(MARK, "").rpartition(":")[2] or "alone"
        return cls((there or Path(tempfile.gettempdir())) / f"{NAMED}{run}-{os.getpid()}-{os.urandom(4).hex()}")

    def drop(self) -> None:
        """It is not needed any more; may be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def remove_left() -> None:
    """Removes what processes that are no more have left, of this run or of others."""
    for base in folders_around():
        for folder in base.glob(f"{NAMED}*"):
            with suppress(OSError):
                _remove_unlocked(folder)


def _remove_unlocked(folder: Path) -> None:
    """
    Raises:
        OSError: its process lives, it is another user's, or no folder at all.
    """
    import fcntl

    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def folders_around() -> list[Path]:
    """Where they are: in shared memory, or where temporary files are; none: nothing can be written there."""
    found = [SHARED]
    with suppress(FileNotFoundError):  # there is no place for temporary files
        found.append(Path(tempfile.gettempdir()))
    return [base for base in found if os.access(base, os.W_OK)]
