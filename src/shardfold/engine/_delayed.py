"""Updates that go on behind their step, while the next one computes (ZeRO-Offload, arXiv 2101.06840, section 5)."""

from __future__ import annotations

from collections.abc import Sequence

from shardfold.engine.cursor import Cursor
from shardfold.sharding.unit import Unit

__all__ = ["Delayed"]


class Delayed:
    """The update of a unit on the second cursor, and what brings its states from their files and back. Whoever reads
    what it writes, or writes the gradients that it reads, waits for it (``Segment.under_way``).

    Args:
        cursor: goes through the updates.
        unit: that is updated.
    """

    owns_grads = True

    def __init__(self, cursor: Cursor, unit: Unit) -> None:
        self._cursor, self._unit = cursor, unit
        for segment in unit.trainable:
            segment.begin_update(self)

    def settle(self) -> None:
        if self._cursor.is_here:
            return
        self._cursor.join(self._unit.name)
        for segment in self._unit.trainable:
            segment.end_update()

    @staticmethod
    def over(cursor: Cursor, units: Sequence[Unit]) -> list[Delayed]:
        """One for each of these."""
        return [Delayed(cursor, unit) for unit in units if unit.trainable]
