"""Sleeping on a word of memory that several processes map, until one of them has changed it.

Linux's ``futex`` compares the word with what the sleeper has seen *before* it sleeps, and so that no waking comes in
between (futex(2)): whoever changes a word first and wakes then is never missed, and who looks again and again, or
sleeps for some time, takes no core from those who have work.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from contextlib import suppress
from threading import Lock
from typing import Any

__all__ = ["fence", "possible", "sleep_while", "wake"]

CALL, WAIT, WAKE, ALL = 202, 0, 1, 2**31 - 1  # of x86-64; between processes

_lock = Lock()


class _Duration(ctypes.Structure):
    """``struct timespec``"""

    _fields_ = [("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64)]


def _find_call() -> Any:
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return None
    takes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    call = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, *takes, use_errno=True)  # without Python's lock
    with suppress(AttributeError):
        return call(("syscall", ctypes.CDLL(None)))
    return None


_futex = _find_call()


def possible() -> bool:
    """Whether this system has it."""
    return _futex is not None


def sleep_while(address: int, value: int, seconds: float | None) -> None:
    """Sleeps while the low 32 bits of the word there are those of ``value``; until somebody wakes it, a signal comes or
    so many seconds are over. It may return earlier, so look again.

    Raises:
        OSError: the system does not do it.
    """
    limit = None if seconds is None else ctypes.byref(_Duration(int(seconds), int(seconds % 1 * 1e9)))
    if _futex(CALL, address, WAIT, value & 0xFFFFFFFF, limit, None, 0) < 0:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(number, os.strerror(number))


def wake(address: int) -> None:
    """Wakes all that sleep on that word; change it first."""
    _futex(CALL, address, WAKE, ALL, None, None, 0)


def fence() -> None:
    """What this thread has written is visible to all before it reads on: a processor may read ahead of its own writes,
    but not over the instruction that takes a lock (Intel's manual, volume 3, section 9.2)."""
    with _lock:
        pass
