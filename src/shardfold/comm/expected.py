"""What ranks expect to do next, from what followed the last times.

``[Note: a step that is like the one before]`` Nothing is issued before all ranks are known to do the same. To find that
out when a pass begins takes a message and its answer, in which the host does nothing else. But a training loop does the
same again and again, so a rank knows what it will be asked for next as soon as a pass is over: it tells the others
then, and does not wait. If all say the same, the pass begins without a meeting. A rank that comes to something else, or
has something to tell, meets: the others come to that meeting when they are next at one, and a rank that has begun the
pass meanwhile and waits in it for data answers from there (:meth:`Agreement._answer`).
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch

__all__ = ["Expectation", "Place", "Sequel", "Started"]

BEFORE, MOST = 3, 1024
"""So many meetings tell what follows, as with fewer a second step would be taken for one that is like those before; and
so many sequels are remembered."""


class Place(NamedTuple):
    """Where in a step a rank is.

    Attributes:
        forwards: in training that it began since the last step.
        micro_batch: backwards since then whose gradients it has.
        caught: it has dropped a pass that an exception interrupted, or whatever was there by ``engine.reset()``.
    """

    forwards: int
    micro_batch: int
    caught: bool


class Expectation(NamedTuple):
    """What a rank is to do next, as it says before it does it.

    Attributes:
        what: as of a meeting.
        alike: a text that all ranks have to have alike for it.
        bits: that this rank tells besides.
    """

    what: str
    alike: str = ""
    bits: tuple[bool, ...] = ()


class Coming(NamedTuple):
    """An expectation on its way.

    Attributes:
        mine: this rank's.
        values: the message, in which the others' come.
        work: to be waited for.
    """

    mine: Expectation
    values: torch.Tensor
    work: Any


class Started(NamedTuple):
    """What this rank does because all ranks expected it.

    Attributes:
        mine: as above.
        sequence: operations of the engine before it.
        place: where in a step that is; None: of what is no backward.
    """

    mine: Expectation
    sequence: int
    place: Place | None


class Sequel:
    """Remembers which meetings came behind which: the same on all ranks, as all have been at all of them."""

    def __init__(self) -> None:
        self._last: deque[str] = deque(maxlen=BEFORE)
        self._next: dict[tuple[str, ...], str | None] = {}

    def note(self, what: str, *, expected: bool) -> None:
        """All ranks have met for it; ``expected``: what is like that may be begun as soon as all have expected it."""
        if len(self._next) == MOST:  # of a program in which nothing comes again
            self._next.clear()
        if len(self._last) == BEFORE:
            self._next[tuple(self._last)] = what if expected else None
        self._last.append(what)

    @property
    def last(self) -> str:
        """What ranks have met for last, this one at least."""
        return self._last[-1] if self._last else "nothing"

    @property
    def next(self) -> str | None:
        """What followed the last time; None: nothing, or what no rank begins without a meeting."""
        return self._next.get(tuple(self._last))
