"""What kind the passes to come are: an event of PyTorch says that a pass begins, and not which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from shardfold.engine.pass_context import PassContext

__all__ = ["Announced"]


class Announced:
    """Who causes passes says here before what they are, and hooks deliver it with their events.

    Attributes:
        context: of the next pass.
    """

    def __init__(self) -> None:
        self.context = PassContext()

    def announce(self, **changes: Any) -> None:
        """From now on passes are of this kind, by the attributes of :class:`PassContext`."""
        self.context = replace(self.context, **changes)

    @contextmanager
    def announcing(self, **changes: Any) -> Iterator[None]:
        """The same of those that begin inside."""
        before = {name: getattr(self.context, name) for name in changes}
        self.announce(**changes)
        try:
            yield
        finally:
            self.announce(**before)
