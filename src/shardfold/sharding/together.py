"""What reads or writes the files of this rank's disk between steps: all ranks do it, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardfold.comm.comm import Comm
from shardfold.errors import UsageError
from shardfold.plan.layout import Layout, Tier

__all__ = ["on_disk", "together"]

T = TypeVar("T")


def together(comm: Comm, what: str, do: Callable[[], T], *, files: bool) -> T:
    """Does what sends nothing.

    Args:
        comm: of the ranks that do it.
        what: the caller, for messages.
        do: this rank's part.
        files: whether states that it reads or writes rest in files, which all ranks know alike; else nothing is told.

    Raises:
        UsageError: the system could not read or write this rank's.
        ConfigError: the same on another rank, which it names.
    """
    if not files:
        return do()
    problem: UsageError | None = None
    found: list[T] = []
    try:
        found.append(do())
    except OSError as error:
        problem = UsageError(f"{what}: {error}: load a checkpoint before going on.")
        problem.__cause__ = error
    if comm.any_rank([problem is not None], what)[0]:
        comm.agreement.refuse(what, problem)
    return found[0]


def on_disk(layout: Layout) -> bool:
    """Whether any state rests in files."""
    return any(cell.tier is Tier.DISK for cell in layout.cells().values())
