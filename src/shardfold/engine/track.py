"""Operations that are bound to what they do, and the one place that does them.

A section is a list of them; a track is a section that runs forward only: each marker is a place that an event moves to,
and moving forward runs what lies between, so a rank that skips a unit still takes part in its collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from torch.profiler import record_function

from shardfold.plan.program import COLLECTIVES, MARKERS, Op, render_section
from shardfold.plan.walk import Walk
from shardfold.torch_internals import profiler_is_on

__all__ = ["Section", "Track"]

Call = Callable[[], object]
AROUND = 4
"""So many operations are shown before and behind the one that failed."""


class Section:
    """Operations of a program.

    Args:
        name: for messages.
        ops: in the order in which they are printed.
        bind: what each does; None of a marker.

    Attributes:
        at: the number of the operation that was begun last; -1: of none.
        asked: the number of the one about which ranks ask each other before they begin it; None: they do not.
        observer: of all sections of a process: called in front of each operation with the section and the operation's
            number. It is looked for when a pass begins, so where there is none it costs nothing.
    """

    observer: ClassVar[Callable[[Section, int], object] | None] = None

    def __init__(self, name: str, ops: Sequence[Op], bind: Callable[[Op], Call | None]) -> None:
        self.name = name
        self.ops = tuple(ops)
        self.calls = [bind(op) for op in ops]
        self.at = -1
        self.asked: int | None = None
        self._seen = False

    def restart(self) -> None:
        """Nothing has been done yet. A profiler that is on sees the operations by their names."""
        self.at, self._seen = -1, profiler_is_on() or Section.observer is not None
        self.asked = None

    def ask(self, number: int) -> None:
        """Ranks ask each other about that operation."""
        self.asked = number

    def do(self, numbers: Iterable[int]) -> None:
        """Does these operations."""
        calls, self.asked = self.calls, None
        for number in numbers:
            self.at = number
            if (call := calls[number]) is None:
                continue
            if self._seen:
                self._show(number)
                with record_function(str(self.ops[number])):
                    call()
            else:
                call()

    def _show(self, number: int) -> None:
        if (observer := Section.observer) is not None:
            observer(self, number)

    def where(self, doing: object = None) -> str:
        """The operations around the one that is marked: of a message what ranks ask about, or else what was begun last;
        of an operation, at the marker of a unit that is still
        being gathered that gather; behind all others ``doing``, what is waited for. Empty if that is of another
        section."""
        if doing is None and self.asked is not None:
            return render_section(self.name, self.ops, self.asked, AROUND)
        if self.at < 0 or (isinstance(doing, Op) and doing not in self.ops):
            return ""
        mark, at = self.at, self.ops[self.at]
        if at.verb not in COLLECTIVES and not at.unit and doing in self.ops[:mark]:
            mark -= self.ops[:mark][::-1].index(doing) + 1  # pyright: ignore[reportArgumentType]
        if at.verb in MARKERS and at.unit:
            gathers = (i for i in range(mark - 1, -1, -1) if self.ops[i][:2] == ("ALL_GATHER", at.unit))
            mark = next(gathers, mark)
        return render_section(self.name, self.ops, mark, AROUND)


class Track(Section):
    """A section with a position: everything before it has been done in this pass.

    Attributes:
        walk: says which operations are due.
    """

    def __init__(self, name: str, ops: Sequence[Op], bind: Callable[[Op], Call | None], *, waits: bool = False) -> None:
        super().__init__(name, ops, bind)
        self.walk = Walk(self.ops, waits=waits)

    def restart(self) -> None:
        super().restart()
        self.walk.restart()

    def reach(self, verb: str, unit: str = "") -> None:
        """Runs everything up to the next such marker, if there is one ahead."""
        self.run(self.walk.reach(verb, unit))

    def advance(self) -> None:
        """Runs the next operation."""
        self.run(range(self.walk.position, self.walk.position + 1))

    def finish(self) -> None:
        """Runs everything that is left."""
        self.run(self.walk.rest())

    def run(self, due: range) -> None:
        """Runs operations that are due."""
        try:
            self.do(due)
        except BaseException:  # what raised is what is done first when the pass goes on
            self.walk.move_to(max(self.at, due.start))
            raise
        self.walk.move_to(due.stop)
