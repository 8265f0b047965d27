"""Host memory that goes back to the system the moment it is freed.

glibc's ``malloc`` keeps what is freed below a threshold that grows to 32 MiB, in the hope of a similar request. For
flats that come and go that hope costs up to a quarter of the resident set: kept ranges fit neither the next unit nor
its gradients. Inside :func:`exact` blocks of 2 MiB and more are mapped one by one and unmapped when freed, whoever
frees them; outside, the threshold stands at its largest, as it would after the first few steps anyway. Where states
rest in files, memory is what there is too little of: :func:`spare` lets it stand at 512 KiB everywhere.

Fresh memory costs a page fault for every 4 KiB that is written, more than the writing itself. :func:`huge` asks for
pages of 2 MiB, of which a thousand times fewer are needed (filling 14 MiB: 1.1 ms when the pages are there, 5.8 ms when
they are fresh, 2.5 ms when they are huge). Blocks that have no room for one are not mapped by :func:`exact`.

A unit's flat is freed and the next one's, of the same size, gets its memory a moment later: :class:`ParkedPages` moves
the pages from one to the other (``mremap``), which takes a tenth of the time of clearing fresh ones.

Elsewhere than on Linux with glibc this does nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from shardfold.tiers.collection import AtCollection

__all__ = ["ParkedPages", "exact", "huge", "keep", "let_go", "spare", "trim", "vacate"]

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
SMALL, LARGE, TRIM = 512 * 1024, 32 * 1024 * 1024, 16 * 1024 * 1024
MADV_DONTNEED, MADV_HUGEPAGE = 4, 14  # mman.h
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP = 1, 2, 4
KEPT = 1024 * 1024 * 1024
HUGE = 2 * 1024 * 1024  # bytes of a huge page


def _find_mallopt() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc.mallopt if hasattr(libc, "mallopt") and hasattr(libc, "gnu_get_libc_version") else None


def _find_madvise() -> Any:
    if _mallopt is None:
        return None
    takes = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return takes(("madvise", ctypes.CDLL(None)))


def _find_mremap() -> Any:
    if _mallopt is None:
        return None
    takes = ctypes.CFUNCTYPE(
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    )
    return takes(("mremap", ctypes.CDLL(None)))


_mallopt = _find_mallopt()
_madvise = _find_madvise()
_mremap = _find_mremap()


def huge(address: int, num_bytes: int) -> None:
    """Asks for huge pages where fresh memory has room for whole ones; the system may refuse."""
    start = -(-address // HUGE) * HUGE
    length = (address + num_bytes) // HUGE * HUGE - start
    if _madvise is not None and length > 0:
        _madvise(start, length, MADV_HUGEPAGE)


def keep(owner: object) -> None:
    """Until :func:`let_go`, or until ``owner`` is collected, what is allocated outside of :func:`exact` and freed stays
    with the process, to be used again: for one rank, where nothing is split and each step needs what the last one
    did."""
    _own(_keepers, owner)


def spare(owner: object) -> None:
    """Until :func:`let_go`, or until ``owner`` is collected, blocks of 512 KiB and more are mapped one by one wherever
    they are allocated, and :func:`keep` does nothing: for states in files. Else what comes from the files and goes back
    leaves holes between small blocks that live on, which are too small for the next: the heap of 228 units of 2 MiB
    grew to four times what was used of it."""
    _own(_sparing, owner)


def let_go(owner: object) -> None:
    """Takes back :func:`keep` and :func:`spare`; with the last owner the thresholds are as before, and what is free
    goes to the system."""
    if owner in _keepers or owner in _sparing:
        _keepers.discard(owner)
        _sparing.discard(owner)
        _settle()


def _own(owners: weakref.WeakSet[Any], owner: object) -> None:
    if owner not in owners:
        AtCollection(owner, _settle)
        owners.add(owner)  # behind it, because of two weak references the younger tells first
        _settle()


def _settle() -> None:
    _outside[M_TRIM_THRESHOLD] = KEPT if _keepers and not _sparing else TRIM
    _outside[M_MMAP_THRESHOLD] = SMALL if _sparing else LARGE
    if _mallopt is not None:
        with _EXACT:
            pass
    if not _keepers:
        trim()


def vacate(address: int, num_bytes: int) -> None:
    """Gives back the whole pages of a range that is all zeros; whoever reads or writes there finds zeros again."""
    start, length = _whole(address, num_bytes)
    if _madvise is not None and length > 0:
        _madvise(start, length, MADV_DONTNEED)


class ParkedPages:
    """Pages of flats that were given back, until the next flats of their sizes take them, or :meth:`clear`. What is in
    them is undefined. Where the system moves none (Linux before 5.7), none are kept."""

    def __init__(self) -> None:
        self._places: dict[int, Any] = {}  # by bytes of the flat: addresses that are nobody's
        self._waiting: dict[int, tuple[int, int]] = {}  # and where pages are there, and their bytes
        self._moves = _mremap is not None

    @property
    def num_bytes(self) -> int:
        """Of the pages that wait."""
        return sum(length for _, length in self._waiting.values())

    def park(self, address: int, num_bytes: int) -> None:
        """Takes the whole pages of a private range that nobody reads any more; it can be freed then."""
        if not self._moves or num_bytes < HUGE or num_bytes in self._waiting:
            return
        if num_bytes not in self._places:
            made = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._places[num_bytes] = ctypes.c_char.from_buffer(made)
        start, length = _whole(address, num_bytes)
        first = ctypes.addressof(self._places[num_bytes])
        to = first + (start - first) % HUGE  # huge pages stay whole where their place in one is the same
        if self._move(start, length, to):
            self._waiting[num_bytes] = to, length

    def hand_over(self, address: int, num_bytes: int) -> bool:
        """A fresh range gets the pages that a range of this size has left; whether there are any."""
        at, left = self._waiting.pop(num_bytes, (0, 0))
        start, length = _whole(address, num_bytes)
        return left > 0 and self._move(at, min(length, left), start)

    def clear(self) -> None:
        """No pages wait any more."""
        while self._waiting:
            _, where = self._waiting.popitem()
            _madvise(*where, MADV_DONTNEED)

    def _move(self, start: int, length: int, to: int) -> bool:
        flags = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP
        self._moves = _mremap(start, length, length, flags, to) == to
        return self._moves


def _whole(address: int, num_bytes: int) -> tuple[int, int]:
    """Where the first whole page of a range begins, and the bytes of all that are whole."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start


def trim() -> None:
    """Returns to the system what was allocated outside of :func:`exact` and is free; for rare moments: it walks all."""
    if _mallopt is not None:
        ctypes.CDLL(None).malloc_trim(0)


_keepers: weakref.WeakSet[Any] = weakref.WeakSet()
_sparing: weakref.WeakSet[Any] = weakref.WeakSet()
_outside = {M_MMAP_THRESHOLD: LARGE, M_TRIM_THRESHOLD: TRIM}


class _Exact:
    """A class and not a generator: it is entered twice per unit and pass."""

    def __enter__(self) -> None:
        if _mallopt is not None:
            _mallopt(M_MMAP_THRESHOLD, min(HUGE, _outside[M_MMAP_THRESHOLD]))

    def __exit__(self, *_: object) -> None:
        if _mallopt is not None:
            for what, num_bytes in _outside.items():
                _mallopt(what, num_bytes)


_EXACT = _Exact()


def exact() -> AbstractContextManager[None]:
    """Host memory allocated inside is returned to the system as soon as it is freed."""
    return _EXACT
