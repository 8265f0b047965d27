"""Which operations of a section are due when something happens in a pass: the walker of what runs and what is planned.

Hooks tell the engine what the model does, a trace tells the planner the same: a module of a unit begins, the gradients
of a unit are complete, the pass is over. A walk answers with the numbers of the operations that are due. The engine
does them, the planner sums their bytes and seconds. There are two policies:

    Walk        the order of units is known: due is what lies before the marker that was reached
    AskedWalk   it is not: ranks say which units they need, and due is what these have at that moment

A rank that has several stages passes through one at a time: :func:`of_part` says what of a section that is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from shardfold.plan.program import MARKERS, REDUCTIONS, SUMS, Op
from shardfold.plan.rewrites import GATHERS

__all__ = ["MOMENTS", "AskedWalk", "Part", "Walk", "of_part"]


MOMENTS: Mapping[str, str] = {
    **dict.fromkeys(GATHERS, "enter"),
    "ADD": "begin",
    "GRADS": "begin",
    **dict.fromkeys(SUMS, "reduce"),
    **dict.fromkeys(("HOLD", "FREE", "KEEP"), "leave"),
}
"""When a pass that asks does an operation on a unit: when a rank needs its values, when this rank begins its backward,
when all its gradients are there, when this rank has used its values."""


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


class AskedWalk:
    """What is due where no order is known, by the names of units. It neither asks nor does anything: who asks gives it
    what all ranks said.

    Args:
        ops: of the section, in definition order.
        refill: of a section that has the gathers of units that ``ops`` have none of; they are numbered behind ``ops``.
        units: all names, in definition order.
        roots: those that are held through the pass.
        backward: it is no forward.
        nested: it is inside of another pass.
        reduced: what the recorded order has reduced, which goes on here: not again.

    Attributes:
        own: what this rank ran, in order.
        record: what all ranks asked for, in order.
        places: units that are asked for.
        roots: those of this pass.
        full: units that the section has no gather of.

    Raises:
        ValueError: it is not known when to do an operation of the section.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        refill: Sequence[Op],
        units: Sequence[str],
        roots: Collection[str],
        *,
        backward: bool,
        nested: bool = False,
        own: Sequence[str] = (),
        reduced: Collection[str] = (),
    ) -> None:
        self.ops, self.own, self.record = tuple(ops), list(own), list[str]()
        self.roots, self._roots, known = [name for name in units if name in roots], {*roots}, {*units}
        self.places = list(dict.fromkeys(op.unit for op in ops if op.unit in known and op.unit not in roots))
        self._backward, self._reduced = backward, {*reduced}
        self._due: dict[str, dict[str, list[int]]] = {
            moment: {name: [] for name in units} for moment in ("enter", "begin", "reduce", "leave")
        }
        for i, op in enumerate(ops):
            if op.verb not in MARKERS and op.unit in known:
                if op.verb not in MOMENTS:
                    raise ValueError(f"a pass that asks does not know when to do {op.verb!r}, which its section has.")
                # What forward keeps for its backward it has not kept yet for one inside of it, of an evaluation never.
                if not (nested and op.verb in GATHERS):
                    self._due[MOMENTS[op.verb]][op.unit].append(i)
        enter = self._due["enter"]
        self.full = {name for name in units if not enter[name]}
        for i, op in enumerate(refill):
            if op.unit in self.full and op.verb in GATHERS:
                enter[op.unit].append(len(self.ops) + i)
        self._gathers = any(enter[name] for name in self.places)
        self._left: dict[str, None] = {}
        self._ready: set[str] = set()
        self._last: str | None = None
        self._around: list[str] = []  # in backward, the unit that runs and those that it is inside of

    def due(self, moment: str, unit: str) -> Sequence[int]:
        """What the unit has at that moment, one of those of :data:`MOMENTS`."""
        return self._due[moment][unit]

    def sums(self, unit: str) -> Sequence[int]:
        """The reductions of the unit, if it has not been reduced: what comes behind that is at the step."""
        return () if unit in self._reduced else self._due["reduce"][unit]

    def begins(self, unit: str) -> Sequence[int]:
        """What makes room for this rank's gradients of the unit, but for those that come behind its reduction."""
        return () if unit in self._reduced else self._due["begin"][unit]

    def enter(self, unit: str, inside: str | None, *, here: bool) -> bool:
        """This rank needs the unit, which is a part of the one that it is ``inside`` of; whether anything follows. Of a
        root nothing does, nor once more where no other came between and the values are ``here`` still."""
        self._left.pop(unit, None)
        if unit in self._roots or (unit == self._last and here):
            return False
        self.own.append(unit)
        if self._backward and unit not in self._around:
            while self._around and self._around[-1] != inside:
                self._left[self._around.pop()] = None
            self._around.append(unit)
        self._last = unit
        return True

    def touch(self, unit: str, inside: str | None, *, here: bool) -> bool:
        """As :meth:`enter`, of a unit whose values are read by another's forward, which goes on."""
        last = self._last
        follows = self.enter(unit, inside, here=here)
        self._last = last
        return follows

    def leave(self, unit: str) -> None:
        """A forward of it is over on this rank."""
        if not self._backward and unit not in self._roots:
            self._left[unit] = None

    @property
    def left(self) -> list[str]:
        """What this rank no longer uses: it is given back before the next round."""
        return list(self._left)

    def forget_left(self) -> None:
        """The same was given back."""
        self._left.clear()

    def complete(self, unit: str) -> bool:
        """All gradients of the unit are there on this rank; whether they are to be reduced."""
        if not self._due["reduce"][unit]:
            return False
        self._ready.add(unit)
        return True

    def ask(self, wanted: str | None) -> tuple[list[bool], int]:
        """What this rank says in a round, in which it needs a unit or none, by place; and the number of the operation
        that it asks the others to do: of that unit, or of one that it has gradients of; else the last, at which it
        waits for them."""
        bits = [name == wanted for name in self.places] + [name in self._ready for name in self.places]
        numbers = self._due["enter"][wanted] if wanted is not None else []
        numbers = numbers or [number for name in self._ready for number in self._due["reduce"][name]]
        self._ready.clear()
        return bits, next((number for number in numbers if number < len(self.ops)), len(self.ops) - 1)

    def hear(self, said: Sequence[int]) -> tuple[list[str], list[str]]:
        """What any rank said in the round: units whose gradients are to be reduced, and units that are to be gathered,
        on all."""
        count = len(self.places)
        asked = [name for name, bit in zip(self.places, said[:count], strict=True) if bit]
        ready = [name for name, bit in zip(self.places, said[count : 2 * count], strict=True) if bit]
        for name in asked if self._gathers else ready:
            if not self.record or self.record[-1] != name:
                self.record.append(name)
        return ready, asked

    def reduce(self, unit: str) -> Sequence[int]:
        """As :meth:`sums`, of a unit that is reduced now."""
        numbers = self.sums(unit)
        self._reduced.add(unit)
        return numbers


# -- parts


class Part(NamedTuple):
    """A pass through one of several stages that a rank has.

    Attributes:
        units: names of the units of that stage.
        common: of those that belong to no stage alone.
        last: whether it is that stage's last backward of the step.
        final: whether it is the rank's.
    """

    units: frozenset[str]
    common: frozenset[str]
    last: bool = False
    final: bool = False


def of_part(section: str, ops: Sequence[Op], backward: Sequence[Op], part: Part | None) -> Sequence[Op]:
    """Operations of the stage's units; sums that only the last backward of a step takes wait, of what several stages
    have, for the rank's last.

    Args:
        section: name of the one that ``ops`` are of.
        ops: operations.
        backward: those of the section of that name.
        part: of the model; None: all of it.
    """
    if part is None:
        return ops
    every = set(backward)
    waits = section in ("last", "last_weights") and not part.final
    return [
        op
        for op in ops
        if not op.unit
        or op.unit in part.units
        or (op.unit in part.common and not (waits and op.is_sum and op not in every))
    ]
