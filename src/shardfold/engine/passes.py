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
from shardfold.plan.walk import AskedWalk
from shardfold.sharding.unit import Life, Unit

__all__ = ["LocalPass", "NegotiatedPass", "Pass", "ReplayedPass"]


class Pass(Protocol):
    """What a pass is told.

    Attributes:
        own: the order in which this rank ran its units.
        section: the operations; None: there are none to issue.
    """

    @property
    def own(self) -> list[str]: ...
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
    """Asks before every unit (see :class:`AskedWalk`).

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
        self.touched: list[Unit] = []  # units read outside of their own forward: held to the end of the pass
        self._agreement, self._handlers = agreement, handlers
        self.section, self._refill, self._units = section, refill, units
        # What a replayed pass has reduced is not reduced again here but, if more came, at the step.
        self._walk = AskedWalk(
            section.ops,
            refill.ops,
            list(units),
            roots,
            backward=verb == "B",
            nested=nested,
            own=own or (),
            reduced=units if own is not None else (),
        )
        self._kept = {u.name for u in units.values() if nested and u.life is not Life.RESTING}

    @property
    def own(self) -> list[str]:
        return self._walk.own

    @property
    def record(self) -> list[str]:
        """What all ranks asked for, in order."""
        return self._walk.record

    def begin(self) -> None:
        self.section.restart()
        for name in self._walk.roots:
            if name not in self._walk.full or self._units[name].life is Life.RESTING:
                self._do(self._walk.due("enter", name))
            self._do(self._walk.begins(name))
            if self._units[name].life is Life.GATHERING:
                self._handlers.finish_gather(self._units[name])

    def enter(self, unit: Unit) -> None:
        if self._walk.enter(unit.name, unit.spec.inside, here=unit.life is Life.GATHERED):
            self._gather(unit)

    def touch(self, unit: Unit) -> None:
        """The unit's values are read by another module's forward: they stay until the pass is over."""
        if self._walk.touch(unit.name, unit.spec.inside, here=unit.life is Life.GATHERED):
            self._gather(unit)
        unit.enter()
        self.touched.append(unit)

    def _gather(self, unit: Unit) -> None:
        self._do(self._walk.begins(unit.name))
        if unit.life is Life.RESTING:
            self._round(unit)
        elif unit.life is Life.GATHERING:
            self._handlers.finish_gather(unit)

    def leave(self, unit: Unit) -> None:
        if not unit.running:
            self._walk.leave(unit.name)

    def complete(self, unit: Unit) -> None:
        if self._walk.complete(unit.name) and not unit.split:  # no unit will be asked for behind it
            self.own.append(unit.name)
            self._round(None)

    def finish(self) -> None:
        for unit in self.touched:
            unit.leave()
        while self._round(None, done=True):
            pass
        for name in self._walk.places:
            self._do(self._walk.sums(name))
        for name, unit in self._units.items():
            if unit.split and name not in self._walk.roots and unit.life is not Life.RESTING:
                self._give_back(unit)
        for name in self._walk.roots:
            if name not in self._kept:
                self._do(self._walk.sums(name))
                self._do(self._walk.due("leave", name))
        self._handlers.release_detours()

    def _round(self, wanted: Unit | None, *, done: bool = False) -> bool:
        """One message; then every rank takes part in what any rank asked for. False when nobody needs anything."""
        for name in self._walk.left:
            self._give_back(self._units[name])
        self._walk.forget_left()
        bits, number = self._walk.ask(wanted.name if wanted is not None else None)
        self.section.ask(number)
        said = self._agreement.ask([*bits, not done])
        ready, asked = self._walk.hear(said)
        for name in ready:
            self._do(self._walk.reduce(name))
        for name in asked:
            unit = self._units[name]
            used_here = unit.life is not Life.RESTING
            self._do(self._walk.due("enter", name))
            if unit.life is Life.GATHERING:
                self._handlers.finish_gather(unit)
            if unit is not wanted and not used_here:
                self._give_back(unit)
        return any(said)

    def _give_back(self, unit: Unit) -> None:
        if not unit.running and unit.name not in self._kept:
            self._do(self._walk.due("leave", unit.name))

    def _do(self, numbers: Sequence[int]) -> None:
        count = len(self.section.ops)
        for number in numbers:
            if number < count:
                self.section.do((number,))
            else:
                self._refill.do((number - count,))
