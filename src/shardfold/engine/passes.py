"""One pass over the model, forward or backward: which operations an event brings about on this rank and on all others.

    ReplayedPass     the order of units is known: every rank goes through the same list of operations, prefetched and
                     overlapped; a rank that leaves units out issues their operations in passing
    NegotiatedPass   it is not known yet: before a unit is gathered or reduced, one small message tells what each rank
                     needs, and all take part in all of it; what was needed is the record for the passes after it
                     (DeepSpeed's ZeRO-3 calls this recording its trace)
    LocalPass        there is nothing to issue (one rank, or whole parameters in a forward)

A pass is told of the units that this rank enters, leaves and has all gradients of; it issues collectives in an order
that is the same on all ranks, however different their own ways through the model are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shardfold.comm.agreement import Agreement
from shardfold.engine.handlers import Handlers
from shardfold.engine.track import Section, Track
from shardfold.plan.program import MARKERS, SUMS
from shardfold.plan.program_passes import GATHERS
from shardfold.sharding.unit import Life, Unit

__all__ = ["LocalPass", "NegotiatedPass", "Pass", "ReplayedPass"]

MOMENTS: Mapping[str, str] = {
    **dict.fromkeys(GATHERS, "enter"),
    "ADD": "begin",
    "GRADS": "begin",
    **dict.fromkeys(SUMS, "reduce"),
    **dict.fromkeys(("HOLD", "FREE", "KEEP"), "leave"),
}
"""When a pass that asks does an operation on a unit: when a rank needs its values, when this rank begins its backward,
when all its gradients are there, when this rank has used its values."""


class Pass(Protocol):
    """What a pass is told.

    Attributes:
        own: the order in which this rank ran its units.
        section: the operations; None: there are none to issue.
    """

    own: list[str]

    @property
    def section(self) -> Section | None: ...

    def begin(self) -> None:
        """The pass begins; roots are gathered."""
        ...

    def enter(self, unit: Unit) -> None:
        """This rank needs the unit's values now."""
        ...

    def leave(self, unit: Unit) -> None:
        """A forward of one of the unit's modules is over."""
        ...

    def complete(self, unit: Unit) -> None:
        """All gradients of the unit are there."""
        ...

    def finish(self) -> None:
        """This rank needs nothing more; returns when no rank does."""
        ...


class LocalPass:
    """Nothing is gathered or reduced."""

    def __init__(self) -> None:
        self.own: list[str] = []
        self.section = None

    def begin(self) -> None: ...
    def enter(self, unit: Unit) -> None: ...
    def leave(self, unit: Unit) -> None: ...
    def complete(self, unit: Unit) -> None: ...
    def finish(self) -> None: ...


class ReplayedPass:
    """Follows a track.

    Args:
        verb: ``F`` or ``B``.
        track: of the section that runs.
        roots: units that are held through the pass.
        handlers: to give back what was kept longer than the program thought.
        deviate: called with a unit that is needed behind the track's position.
    """

    def __init__(
        self,
        verb: str,
        track: Track,
        roots: Sequence[Unit],
        handlers: Handlers,
        deviate: Callable[[Unit], None],
    ) -> None:
        self.own: list[str] = []
        self.track = track
        self._verb, self._roots, self._handlers, self._deviate = verb, roots, handlers, deviate
        self._held = {unit.name for unit in roots}

    @property
    def section(self) -> Section:
        return self.track

    def begin(self) -> None:
        self.track.restart()
        for unit in self._roots:
            self.track.reach(self._verb, unit.name)
            if unit.life is Life.GATHERING:
                self._handlers.finish_gather(unit)
            elif unit.life is Life.RESTING:  # forward kept it full, but an earlier backward gave it back
                self._deviate(unit)
                return

    def enter(self, unit: Unit) -> None:
        if unit.name in self._held or (self.track.walk.at_marker(self._verb, unit.name) and unit.life is Life.GATHERED):
            return  # a root, or once more and no other unit came between
        self.own.append(unit.name)
        self.track.reach(self._verb, unit.name)
        if unit.life is Life.RESTING:
            self._deviate(unit)
        elif unit.life is Life.GATHERING:
            self._handlers.finish_gather(unit)

    def leave(self, unit: Unit) -> None:
        # What the program has behind the unit waits until the next one begins: it may run again.
        detours = self._handlers.detours
        if unit.name in detours and not unit.running:
            detours.discard(unit.name)
            self._handlers.free(unit)

    def complete(self, unit: Unit) -> None:
        if not unit.split:
            self.own.append(unit.name)
        self.track.run(self.track.walk.complete(unit.name))

    def finish(self) -> None:
        self.track.finish()
        self._handlers.release_detours()


class NegotiatedPass:
    """Asks before every unit.

    Args:
        verb: ``F`` or ``B``.
        section: its operations in definition order (reversed for backward).
        units: by name; those that are not roots are asked for.
        roots: names of the units that are held through the pass.
        agreement: carries the rounds of asking.
        handlers: to gather, finish and free.
        refill: a section that has the gathers of units that forward kept and that an earlier backward of the same
            forward has freed (``retain_graph``), and of all units of a pass inside another.
        own: what this rank ran already, when this pass goes on where a replayed one has ended too early.
        nested: this pass runs inside another, which holds units of its own.

    Raises:
        ValueError: it is not known when to do an operation of the section.
    """

    def __init__(
        self,
        verb: str,
        section: Section,
        units: Mapping[str, Unit],
        roots: set[str],
        agreement: Agreement,
        handlers: Handlers,
        *,
        refill: Section,
        own: Sequence[str] | None = None,
        nested: bool = False,
    ) -> None:
        self.own: list[str] = list(own or ())
        self.record: list[str] = []  # what all ranks asked for, in order
        self.touched: list[Unit] = []  # units read outside of their own forward: held to the end of the pass
        self._verb, self._agreement, self._handlers = verb, agreement, handlers
        self.section = section
        self._units, self._roots = units, roots
        self._places = list(dict.fromkeys(op.unit for op in section.ops if op.unit in units and op.unit not in roots))
        self._numbers: dict[str, dict[str, list[tuple[Section, int]]]] = {  # of the operations of each unit
            moment: {name: [] for name in units} for moment in ("enter", "begin", "reduce", "leave")
        }
        for i, op in enumerate(section.ops):
            if op.verb not in MARKERS and op.unit in units:
                if op.verb not in MOMENTS:
                    raise ValueError(f"a pass that asks does not know when to do {op.verb!r}, which its section has.")
                # What forward keeps for its backward it has not kept yet for one inside of it, of an evaluation never.
                if not (nested and op.verb in GATHERS):
                    self._numbers[MOMENTS[op.verb]][op.unit].append((section, i))
        enter = self._numbers["enter"]
        self._full = {name for name in units if not enter[name]}
        for i, op in enumerate(refill.ops):
            if op.unit in self._full and op.verb in GATHERS:
                enter[op.unit].append((refill, i))
        self._gathers = any(enter[name] for name in self._places)
        self._left: dict[str, Unit] = {}  # no longer used here; given back when another is gathered
        self._ready: set[str] = set()
        # What a replayed pass has reduced is not reduced again here but, if more came, at the step.
        self._reduced: set[str] = set(units) if own is not None else set()
        self._last: Unit | None = None
        self._around: list[Unit] = []  # in backward, the unit that runs and those that it is inside of
        self._kept = {u.name for u in units.values() if nested and u.life is not Life.RESTING}

    def begin(self) -> None:
        self.section.restart()
        for name in self._places_of_roots():
            if name not in self._full or self._units[name].life is Life.RESTING:
                self._do("enter", name)
            self._begin_backward(name)
            if self._units[name].life is Life.GATHERING:
                self._handlers.finish_gather(self._units[name])

    def enter(self, unit: Unit) -> None:
        self._left.pop(unit.name, None)
        if unit.name in self._roots or (unit is self._last and unit.life is Life.GATHERED):
            return
        self.own.append(unit.name)
        self._begin_backward(unit.name)
        if self._verb == "B" and unit not in self._around:
            while self._around and self._around[-1].name != unit.spec.inside:
                over = self._around.pop()
                self._left[over.name] = over
            self._around.append(unit)
        self._last = unit
        if unit.life is Life.RESTING:
            self._round(unit)
        elif unit.life is Life.GATHERING:
            self._handlers.finish_gather(unit)

    def touch(self, unit: Unit) -> None:
        """The unit's values are read by another module's forward: they stay until the pass is over."""
        last = self._last
        self.enter(unit)
        self._last = last
        unit.enter()
        self.touched.append(unit)

    def leave(self, unit: Unit) -> None:
        if not unit.running and self._verb == "F" and unit.name not in self._roots:
            self._left[unit.name] = unit

    def complete(self, unit: Unit) -> None:
        if not self._numbers["reduce"][unit.name]:
            return
        self._ready.add(unit.name)
        if not unit.split:  # no unit will be asked for behind it
            self.own.append(unit.name)
            self._round(None)

    def finish(self) -> None:
        for unit in self.touched:
            unit.leave()
        while self._round(None, done=True):
            pass
        for name in self._places:
            if name not in self._reduced:
                self._do("reduce", name)
        for name, unit in self._units.items():
            if unit.split and name not in self._roots and unit.life is not Life.RESTING:
                self._give_back(unit)
        for name in self._places_of_roots():
            if name not in self._kept:
                if name not in self._reduced:
                    self._do("reduce", name)
                self._do("leave", name)
        self._handlers.release_detours()

    def _round(self, wanted: Unit | None, *, done: bool = False) -> bool:
        """One message; then every rank takes part in what any rank asked for. False when nobody needs anything."""
        for unit in list(self._left.values()):
            self._give_back(unit)
        self._left.clear()
        places = self._places
        bits = [wanted is not None and name == wanted.name for name in places]
        bits += [name in self._ready for name in places]
        self.section.ask(self._asked_about(wanted))
        self._ready.clear()
        said = self._agreement.ask([*bits, not done])
        asked = [name for name, bit in zip(places, said, strict=False) if bit]
        ready = [name for name, bit in zip(places, said[len(places) :], strict=False) if bit]
        for name in ready:
            if name not in self._reduced:  # what comes behind the reduction is reduced once more at the step
                self._reduced.add(name)
                self._do("reduce", name)
        for name in asked:
            unit = self._units[name]
            used_here = unit.life is not Life.RESTING
            self._do("enter", name)
            if unit.life is Life.GATHERING:
                self._handlers.finish_gather(unit)
            if unit is not wanted and not used_here:
                self._give_back(unit)
        for name in asked if self._gathers else ready:
            if not self.record or self.record[-1] != name:
                self.record.append(name)
        return any(said)

    def _asked_about(self, wanted: Unit | None) -> int:
        """The number of the operation that this rank asks the others to do: of the unit that it needs, or has gradients
        of; else the last, at which it waits for them."""
        numbers = self._numbers["enter"][wanted.name] if wanted is not None else []
        numbers = numbers or [each for name in self._ready for each in self._numbers["reduce"][name]]
        return next((number for section, number in numbers if section is self.section), len(self.section.ops) - 1)

    def _give_back(self, unit: Unit) -> None:
        if not unit.running and unit.name not in self._kept:
            self._do("leave", unit.name)

    def _begin_backward(self, name: str) -> None:
        """This rank's gradients of the unit come now, but for those that come behind its reduction."""
        if name not in self._reduced:
            self._do("begin", name)

    def _places_of_roots(self) -> list[str]:
        return [name for name in self._units if name in self._roots]

    def _do(self, moment: str, name: str) -> None:
        for section, number in self._numbers[moment][name]:
            section.do((number,))
