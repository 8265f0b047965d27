"""Which operations of a section are due when something happens in a pass: the walker of what runs and what is planned.

Hooks tell the engine what the model does, a trace tells the planner the same: a module of a unit begins, the gradients
of a unit are complete, the pass is over. A walk answers with the numbers of the operations that are due. The engine
does them, the planner sums their bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardfold.plan.program import MARKERS, REDUCTIONS, SUMS, Op

__all__ = ["Walk"]


class Walk:
    """A position in the operations of a section. Everything before it has been done. It moves forward only, so a rank
    that skips a unit still takes part in its collectives.

    Every question leaves the position where it is: who has done the operations moves it behind them.

    Args:
        ops: of the section, in the order in which they run.
        waits: no unit is reduced before its gradients are complete (see :attr:`Bound.waits`).

    Attributes:
        position: the number of the next operation.
    """

    def __init__(self, ops: Sequence[Op], *, waits: bool = False) -> None:
        self.ops, self.position = tuple(ops), 0
        self._waits, self._complete = waits, set[str]()
        self._markers: dict[tuple[str, str], list[int]] = {}
        for i, op in enumerate(self.ops):
            if op.verb in MARKERS:
                self._markers.setdefault((op.verb, op.unit), []).append(i)

    def restart(self) -> None:
        """A pass begins."""
        self.position = 0
        self._complete.clear()

    def move_to(self, position: int) -> None:
        """Everything before that operation has been done."""
        self.position = position

    def at_marker(self, verb: str, unit: str) -> bool:
        """Whether that marker is the last thing reached."""
        return self.position > 0 and self.ops[self.position - 1][:2] == (verb, unit)

    def reach(self, verb: str, unit: str = "") -> range:
        """Everything up to the next such marker: ``F`` or ``B`` of a unit that begins, or ``STEP``. Nothing if there is
        none ahead."""
        ahead = (i + 1 for i in self._markers.get((verb, unit), ()) if i >= self.position)
        return range(self.position, next(ahead, self.position))

    def complete(self, unit: str) -> range:
        """All gradients of the unit are there: its sums, if their turn has come."""
        stop = self.position
        if self._waits:
            self._complete.add(unit)
            while (number := self._ahead(stop, REDUCTIONS, ("END",))) >= 0 and self.ops[number].unit in self._complete:
                stop = self._sums(number)
        elif self.at_marker("B", unit):
            stop = self._sums(stop)
        elif due := self.reach("B", unit):
            stop = self._sums(due.stop)
        elif (number := self._ahead(stop, SUMS, MARKERS)) >= 0 and self.ops[number].unit == unit:
            stop = self._sums(number)  # of a unit around others, whose gradients are there last
        return range(self.position, stop)

    def next(self, verbs: Sequence[str]) -> range:
        """The operations that come next, as long as they are of these verbs."""
        return range(self.position, self._behind(self.position, verbs))

    def rest(self) -> range:
        """Everything that is left: this rank needs nothing more."""
        return range(self.position, len(self.ops))

    def _sums(self, number: int) -> int:
        return self._behind(number, SUMS)

    def _behind(self, number: int, verbs: Sequence[str]) -> int:
        """The number of the first operation from ``number`` on that is of another verb."""
        while number < len(self.ops) and self.ops[number].verb in verbs:
            number += 1
        return number

    def _ahead(self, start: int, verbs: Sequence[str], before: Sequence[str]) -> int:
        """The number of the next operation that is of ``verbs``; -1 if one of ``before`` comes first."""
        for i in range(start, len(self.ops)):
            if self.ops[i].verb in verbs:
                return i
            if self.ops[i].verb in before:
                return -1
        return -1
