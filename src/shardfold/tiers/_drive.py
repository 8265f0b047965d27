"""One file in one folder, read and written by parallel threads, past the system's page cache.

The file has no name, so it is gone with the process, whatever ends it: where the file system cannot make one
(``O_TMPFILE``), its name is taken away as soon as it is there. Reads and writes have threads of their own, so that
neither waits for the other.

The space that is given out in it is taken from the file system at once (``fallocate``), so that what does not fit is
refused before anything is stored. Where that does not exist, free space is looked up, which another may take meanwhile.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from logging import getLogger
from pathlib import Path
from threading import Lock
from time import time

from torch.profiler import record_function

from shardfold.tiers.staging import BLOCK
from shardfold.torch_internals import profiler_is_on

__all__ = ["Drive", "blocks"]

LOG = getLogger("shardfold")
DIRECT = getattr(os, "O_DIRECT", 0)
PREFIX = "shardfold-disk-"
TRIES = 100
"""How often in a row a read or write may come to less than one block."""


def blocks(nbytes: int) -> int:
    """Bytes of the whole blocks that so many bytes take."""
    return -(-nbytes // BLOCK) * BLOCK


class Drive:
    """A file for one process.

    Args:
        folder: where it is.
        threads: that read, and as many that write.
        direct: past the page cache, where the file system can.

    Attributes:
        direct: whether that is so.

    Raises:
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str, *, threads: int, direct: bool = True) -> None:
        self.folder = folder
        self._moved = {"read": 0, "written": 0}
        try:
            self._file = os.fdopen(_unnamed(folder), "r+b", buffering=0)
        except OSError as error:
            raise OSError(error.errno, error.strerror, folder) from error
        try:
            self.direct = direct and self._turn_direct()
        except OSError as error:
            self._file.close()
            raise OSError(error.errno, error.strerror, folder) from error
        if direct:
            self._warn()
        self.readers = ThreadPoolExecutor(threads, thread_name_prefix="shardfold-disk-read")
        self.writers = ThreadPoolExecutor(threads, thread_name_prefix="shardfold-disk-write")
        self._lock = Lock()
        self._end = 0
        self._free: list[tuple[int, int]] = []  # in order, none next to another: first byte, and the one behind
        self._left: deque[tuple[int, int]] = deque()  # the same, still to be sorted in

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._end

    @property
    def bytes_read(self) -> int:
        """Of whole blocks that came from the file."""
        return self._moved["read"]

    @property
    def bytes_written(self) -> int:
        """Of whole blocks that went to the file."""
        return self._moved["written"]

    # -- whether it is direct

    def _turn_direct(self) -> bool:
        """Turned on behind the opening, as some file systems make the file and then refuse to open it."""
        if not DIRECT:  # another system, which may not have the next module either
            return False
        import fcntl

        flags = fcntl.fcntl(self.fileno(), fcntl.F_GETFL)
        block = memoryview(mmap.mmap(-1, BLOCK))  # which begins at a page
        try:
            fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags | DIRECT)
            os.pwrite(self.fileno(), block, 0)  # some only refuse what is read and written
            os.preadv(self.fileno(), [block], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
                raise
            fcntl.fcntl(self.fileno(), fcntl.F_SETFL, flags)
            return False
        finally:
            os.ftruncate(self.fileno(), 0)
        return True

    def _warn(self) -> None:
        """Says what a user would only see as memory that fills."""
        if _in_memory(self.fileno()):
            LOG.warning(
                "The folder %s is in memory (tmpfs), so what is stored there fills the memory of the host: name a "
                "folder on a drive.",
                self.folder,
            )
        elif not self.direct:
            LOG.warning(
                "The file system of %s takes no direct I/O, so what is stored there passes through the page cache: it "
                "is slower and fills the memory of the host, which the system takes back when it is needed. Name a "
                "folder on another drive (ext4 and XFS take it).",
                self.folder,
            )

    # -- space

    def take(self, nbytes: int) -> int:
        """Where whole blocks of so many bytes are free.

        Raises:
            OSError: the file system has no room for them.
        """
        nbytes = blocks(nbytes)
        with self._lock:
            self._sort_in()
            for i, (first, stop) in enumerate(self._free):
                if stop - first >= nbytes:
                    self._free[i : i + 1] = [(first + nbytes, stop)] if stop - first > nbytes else []
                    return first
            first = self._free[-1][0] if self._free and self._free[-1][1] == self._end else self._end
            self._extend(first + nbytes)
            if first < self._end and self._free and self._free[-1][0] == first:
                self._free.pop()
            self._end = first + nbytes
            return first

    def leave(self, place: int, nbytes: int) -> None:
        """They are free again. Called by destructors, which may run anywhere: it takes no lock."""
        self._left.append((place, place + blocks(nbytes)))

    def reserve(self, nbytes: int) -> None:
        """Takes room from the file system so that so many bytes are free.

        Raises:
            OSError: it has none.
        """
        with self._lock:
            self._sort_in()
            lacking = blocks(nbytes) - sum(stop - first for first, stop in self._free)
            if lacking > 0:
                self._extend(self._end + lacking)
                self._left.append((self._end, self._end + lacking))
                self._end += lacking
                self._sort_in()

    def _sort_in(self) -> None:
        while self._left:
            first, stop = self._left.popleft()
            i = bisect.bisect(self._free, (first, stop))
            if i < len(self._free) and self._free[i][0] == stop:
                stop = self._free.pop(i)[1]
            if i and self._free[i - 1][1] == first:
                i -= 1
                first = self._free.pop(i)[0]
            self._free.insert(i, (first, stop))

    def _extend(self, size: int) -> None:
        """The file becomes so large, and the room is its own."""
        lacking = size - self._end
        try:
            if lacking > self.free_space():  # first: the system would take all there is from others before it refuses
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if not _fallocate(self.fileno(), self._end, lacking):
                os.ftruncate(self.fileno(), size)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self.fileno(), self._end)  # gives back what was taken before it failed
            raise OSError(
                error.errno,
                f"a file in {self.folder} needs {lacking:,} bytes more than the {self._end:,} it has, and there are "
                f"{self.free_space():,} free: {os.strerror(error.errno or 0)}; make room there, or name another folder",
            ) from error

    def free_space(self) -> int:
        """Bytes that the file system has for this user."""
        found = os.fstatvfs(self.fileno())
        return found.f_bavail * found.f_frsize

    # -- bytes

    def write(self, memory: memoryview, place: int) -> None:
        """Writes whole blocks; whoever asks waits.

        Raises:
            OSError: not all could be written.
        """
        self._all(len(memory), "written", lambda done: os.pwrite(self.fileno(), memory[done:], place + done))

    def read(self, memory: memoryview, place: int) -> None:
        """Reads whole blocks; whoever asks waits.

        Raises:
            OSError: not all could be read.
        """

        def some(done: int) -> int:
            got = os.preadv(self.fileno(), [memory[done:]], place + done)
            if got < BLOCK and os.fstat(self.fileno()).st_size < place + len(memory):
                raise OSError(errno.ENODATA, "the file has lost its end")
            return got

        self._all(len(memory), "read", some)

    def _all(self, nbytes: int, which: str, some: Callable[[int], int]) -> None:
        """Asks again for what is left, as the system may do less than it is asked for. What is less than a block is
        asked for again, as direct I/O begins at whole ones. A profiler sees it as ``disk:read`` or ``disk:written``."""
        with record_function(f"disk:{which}") if profiler_is_on() else nullcontext():
            self._whole(nbytes, which, some)

    def _whole(self, nbytes: int, which: str, some: Callable[[int], int]) -> None:
        done = tries = 0
        while done < nbytes:
            got = some(done)
            with self._lock:
                self._moved[which] += got
            if done + got == nbytes:
                return
            whole = got // BLOCK * BLOCK if self.direct else got
            done, tries = done + whole, 0 if whole else tries + 1
            if tries == TRIES:
                raise OSError(errno.EIO, f"{tries} times in a row the drive took or gave less than {BLOCK} bytes")

    def problem(self, nbytes: int, place: int, done: str, error: OSError) -> OSError:
        """Of values that could not be ``done`` there: how much, where and why."""
        said = f"{nbytes:,} bytes of values could not be {done} a file in {self.folder} (at byte {place:,})"
        return OSError(error.errno, f"{said}: {error.strerror or os.strerror(error.errno or 0)}")

    def close(self) -> None:
        """Ends the threads and gives the space back."""
        self.readers.shutdown(cancel_futures=True)
        self.writers.shutdown(cancel_futures=True)
        self._file.close()


def _unnamed(folder: str) -> int:
    """A file of the owner's without a name."""
    with suppress(AttributeError, OSError):  # what else is wrong with the folder is told by what follows
        return os.open(folder, os.O_TMPFILE | os.O_EXCL | os.O_RDWR, 0o600)
    for stale in Path(folder).glob(PREFIX + "*"):  # of a process that was killed between the next two calls
        with suppress(OSError):
            found = stale.lstat()
            if found.st_uid == os.geteuid() and found.st_mtime < time() - 60:
                stale.unlink()
    descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    os.unlink(name)
    return descriptor


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    takes = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, use_errno=True)
    with suppress(AttributeError):  # elsewhere than on Linux
        return takes(("fallocate64", ctypes.CDLL(None)))
    return None


_system_fallocate = _find_fallocate()


def _fallocate(descriptor: int, first: int, nbytes: int) -> bool:
    """Whether the system took the room; False: it cannot for this file. (``os.posix_fallocate`` writes into each block
    then, which takes as long as storing.)

    Raises:
        OSError: there is no room.
    """
    while _system_fallocate is not None and nbytes:
        if _system_fallocate(descriptor, 0, first, nbytes) == 0:
            return True
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return False


def _in_memory(descriptor: int) -> bool:
    """Whether the file system is one that lives in memory."""
    device = os.fstat(descriptor).st_dev
    place = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
        for line in mounts:
            left, _, right = line.partition(" - ")
            if left.split()[2] == place:
                return right.split()[0] in ("tmpfs", "ramfs")
    return False
