"""Which cores of its machine a rank computes on, how many of them are its own share, and for how long it needs them."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import process_time

from shardfold.tiers.limit import boot_id

__all__ = ["allowed", "machine", "occupied", "share", "share_of_cores"]


def share_of_cores(exchange: Callable[[str, str], list[str]]) -> float:
    """How many cores this rank may keep busy with work of its own; less than 1, where ranks have to share one. All
    ranks call it.

    A core that several ranks may run on counts for each of them as a part: ranks that a launcher bound to cores of
    their own have all of these, and ranks that may run anywhere have equal shares, whatever ``OMP_NUM_THREADS`` says.

    Args:
        exchange: ``exchange(key, text)`` gives every rank's text.
    """
    here, cores = machine(), allowed()
    said = [json.loads(text) for text in exchange("cores", json.dumps([here, cores]))]
    return share(cores, [theirs for other, theirs in said if other == here])


def share(cores: Sequence[int], listed: Sequence[Sequence[int]]) -> float:
    """How many of these cores one rank has to itself, of ranks of which each lists the cores that it may run on."""
    users = [set(theirs) for theirs in listed]
    return sum(1 / sum(core in theirs for theirs in users) for core in cores) + 1e-6


def allowed() -> list[int]:
    """Numbers of the cores that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def machine() -> str:
    """What ranks of one machine have in common; containers on it count its cores alike."""
    try:
        return boot_id()
    except OSError:
        return socket.gethostname()


def occupied() -> float:
    """Seconds for which threads of this process have worked so far, or had work and waited for a core that others had;
    those of two threads at once count twice. Where the system does not tell of waiting, without it."""
    total = 0.0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # a thread that ends meanwhile
            total += 1e-9 * sum(float(figure) for figure in thread.read_text(encoding="ascii").split()[:2])
    return total or process_time()
