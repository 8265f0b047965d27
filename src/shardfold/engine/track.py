"""A section of a program that runs forward only.

Each operation is a bound call, each marker a place that an event moves to. Moving forward runs what lies between, so a
rank that skips a unit still takes part in its collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardfold.plan.program import MARKERS, Op

__all__ = ["Track"]

Call = Callable[[], None]


class Track:
    """A section of a program with a position: everything before ``position`` has been done in this pass."""

    def __init__(self, name: str, ops: Sequence[Op], bind: Callable[[Op], Call | None]) -> None:
        self.name = name
        self.ops = tuple(ops)
        self.calls = [bind(op) for op in ops]
        self.position = 0
        self._markers: dict[tuple[str, str], list[int]] = {}
        for i, op in enumerate(self.ops):
            if op.verb in MARKERS:
                self._markers.setdefault((op.verb, op.unit), []).append(i)

    def restart(self) -> None:
        self.position = 0

    def reach(self, verb: str, unit: str = "") -> bool:
        """Runs everything up to the next such marker; False if there is none ahead."""
        for i in self._markers.get((verb, unit), ()):
            if i >= self.position:
                self._run(i + 1)
                return True
        return False

    def at(self, verb: str, unit: str) -> bool:
        """Whether that marker is the last thing reached."""
        return self.position > 0 and self.ops[self.position - 1][:2] == (verb, unit)

    def ahead(self, verbs: tuple[str, ...]) -> str | None:
        """The unit of the next operation that is one of ``verbs``; None if there is none before END."""
        for op in self.ops[self.position :]:
            if op.verb in verbs:
                return op.unit
            if op.verb == "END":
                return None
        return None

    def follow(self, verbs: tuple[str, ...] | None = None) -> None:
        """Runs on to the next marker, or, if ``verbs`` are given, only while the next operation is one of them."""
        stop = self.position
        while stop < len(self.ops) and (
            self.ops[stop].verb not in MARKERS if verbs is None else self.ops[stop].verb in verbs
        ):
            stop += 1
        self._run(stop)

    def finish(self) -> None:
        """Runs everything that is left."""
        self._run(len(self.ops))

    def _run(self, stop: int) -> None:
        while self.position < stop:
            call = self.calls[self.position]
            if call is not None:
                call()  # if it raises, it is what is done first when the pass goes on
            self.position += 1
