"""Counts the bytes this rank hands to collectives and moves between tiers, as they are handed over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager

from shardfold.comm.mesh import DataMesh
from shardfold.plan.cost import Moved, Sent, ring_bytes
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import Axes
from shardfold.plan.program import Op
from shardfold.plan.report import MovedRow, TrafficReport, TrafficRow

__all__ = ["LAYERS", "Meter", "TierTraffic"]

LAYERS = "layers"
"""The purpose of collectives that layers run by themselves."""

Counts = defaultdict[Sent, list[int]]  # [calls, bytes]


def _counts() -> Counts:
    return defaultdict(lambda: [0, 0])


class TierTraffic:
    """Operations between the device and slower tiers.

    Attributes:
        counts: calls and bytes, by kind.
        left_out: operations of units that the step does not update: nothing moves.
    """

    def __init__(self) -> None:
        self.counts: dict[Moved, list[int]] = {}
        self.left_out: set[Op] = set()

    def move(self, op: Op, num_bytes: int) -> None:
        """One operation."""
        counted = self.counts.setdefault(Moved(op.tier, op.verb), [0, 0])
        counted[0] += 1
        counted[1] += num_bytes

    def leave_out(self, op: Op) -> None:
        """One that there is no need of."""
        self.left_out.add(op)

    def take(self, other: TierTraffic) -> None:
        """What the other has counted, which has nothing then."""
        for kind, each in other.counts.items():
            counted = self.counts.setdefault(kind, [0, 0])
            counted[:] = [a + b for a, b in zip(counted, each, strict=True)]
        self.left_out |= other.left_out
        other.clear()

    def clear(self) -> None:
        """Nothing was counted."""
        self.counts, self.left_out = {}, set()


class Asked:
    """What is no step's: collectives that were asked for, and forwards that no backward follows.

    Attributes:
        calls, sent: of collectives.
        moves: between tiers, of those forwards.
        ran: sections of the program that these were, by the part of the model that they went through.
    """

    def __init__(self) -> None:
        self.calls = self.sent = 0
        self.moves = TierTraffic()
        self.ran: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)

    def count(self, calls: int, sent: int) -> None:
        """So many collectives more, of so many bytes."""
        self.calls, self.sent = self.calls + calls, self.sent + sent


class Meter:
    """Bytes and calls of one step.

    A forward counts towards the step once its backward begins; one that has none (evaluation) counts as asked for.

    Attributes:
        trains: each forward has its backward, which comes behind forwards of other micro-batches: it counts at once.
        last_sections: how often each section of the program ran for the last step.
        last_parts: the same of what ran of it for a part of the model, by part.
        behind: what updates behind the last step move, on another thread; it is of the step that they arrive in.
    """

    def __init__(self, mesh: DataMesh) -> None:
        self._mesh = mesh
        self._forward, self._step, self._last = _counts(), _counts(), _counts()
        self._known: dict[tuple[Op, int], tuple[Sent, int]] = {}  # what operations on so many elements count as
        self._moves, self._forward_moves, self._last_moves, self.behind = (
            TierTraffic(),
            TierTraffic(),
            TierTraffic(),
            TierTraffic(),
        )
        self._sections: Counter[str] = Counter()
        self._control = self._last_control = 0
        self._asked, self._last_asked = Asked(), Asked()
        self._stepped = False
        self.last_sections: Counter[str] = Counter()
        self._parts: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)
        self.last_parts: Mapping[Hashable, Counter[str]] = {}
        self._in_forward = self.trains = False
        self._begun: tuple[str, Hashable] = "forward", None

    @contextmanager
    def of_batch(self, *, trains: bool) -> Iterator[None]:
        """Inside a batch goes through stages; see :attr:`trains`."""
        self.trains = trains
        try:
            yield
        finally:
            self.trains = False

    def begin_forward(self, section: str = "forward", part: Hashable = None) -> None:
        """A forward by that section of the program begins, or by what of it is for a part of the model."""
        self._count_forward_as_asked()
        self._in_forward, self._begun = not self.trains, (section, part)
        if self.trains:
            self._run(section, part)

    def _run(self, section: str, part: Hashable) -> None:
        (self._sections if part is None else self._parts[part])[section] += 1

    def begin_backward(self, section: str, part: Hashable = None) -> None:
        """A backward by that section of the program begins; the forward before it was its own."""
        if self._in_forward:
            self._run(*self._begun)
        self._in_forward = False
        self._run(section, part)
        for kind, (calls, sent) in self._forward.items():
            self._add(self._step, kind, calls, sent)
        self._forward.clear()
        self._moves.take(self._forward_moves)

    def begin_step(self) -> None:
        """A forward that no backward followed was asked for; what comes now is the step's."""
        self._count_forward_as_asked()

    def _count_forward_as_asked(self) -> None:
        each = self._forward.values()
        self._asked.count(sum(calls for calls, _ in each), sum(sent for _, sent in each))
        self._forward.clear()
        self._asked.moves.take(self._forward_moves)
        if self._in_forward:
            section, part = self._begun
            self._asked.ran[part][section] += 1
        self._in_forward = False

    def end_evaluation(self) -> None:
        """A forward is over, and no backward follows it."""
        self._count_forward_as_asked()

    def arrive(self) -> None:
        """Updates behind their step are done, and what they gave comes to where it is read: both sections are run."""
        for section in ("behind", "arrive"):
            self._sections[section] += 1
        self._moves.take(self.behind)

    def ran(self, section: str) -> None:
        """A section of the program that is none of a pass runs for the step."""
        self._sections[section] += 1

    def end_step(self, *, skipped: bool = False) -> None:
        self._sections["step"] += not skipped
        self._last, self._step = self._step, _counts()
        self._last_moves, self._moves = self._moves, TierTraffic()
        self.last_sections, self._sections = self._sections, Counter()
        self.last_parts, self._parts = self._parts, defaultdict(Counter)
        self._last_control, self._control = self._control, 0
        self._last_asked, self._asked = self._asked, Asked()
        self._stepped = True

    def forget_last(self) -> None:
        """The program is another one now: what the last step sent cannot be compared with it."""
        self._last, self._last_moves, self.last_sections, self.last_parts = _counts(), TierTraffic(), Counter(), {}

    @property
    def last_left_out(self) -> set[Op]:
        """Operations between tiers that the last step had no need of."""
        return self._last_moves.left_out

    def count(self, op: Op, length: int) -> None:
        """One collective by ``op`` on a whole tensor of so many elements."""
        key = op, length
        if key not in self._known:
            num_bytes = FORMATS[op.format].nbytes(length)
            sent = int(ring_bytes(op.verb, num_bytes, self._mesh.parts(op.axes)))
            self._known[key] = Sent(op.purpose, op.verb, op.axes), sent
        kind, sent = self._known[key]
        self._add(self._forward if self._in_forward else self._step, kind, 1, sent)

    def ask(self, verb: str, axes: Axes, num_bytes: int) -> None:
        """One collective of so many bytes that was asked for."""
        self._asked.count(1, int(ring_bytes(verb, num_bytes, self._mesh.parts(axes))))

    def send(self, kind: Sent, num_bytes: int) -> None:
        """One collective that is no operation of the program, in which this rank sends that many bytes to others."""
        self._add(self._forward if self._in_forward else self._step, kind, 1, num_bytes)

    def move(self, op: Op, num_bytes: int) -> None:
        """One operation between the device and a slower tier."""
        (self._forward_moves if self._in_forward else self._moves).move(op, num_bytes)

    def leave_out(self, op: Op) -> None:
        """The same, of a unit that the step does not update: nothing moves."""
        self._moves.leave_out(op)

    def control(self, num_bytes: int) -> None:
        """A small reduction of that many bytes; a ring sends them about twice."""
        self._control += int(ring_bytes("ALL_REDUCE", num_bytes, self._mesh.world))

    @property
    def asked(self) -> tuple[int, int]:
        """Calls and bytes that were asked for since the last step."""
        return self._asked.calls, self._asked.sent

    @property
    def reported(self) -> Asked:
        """What :meth:`report` tells of: since the step before the last began, or, with none, since the beginning."""
        return self._last_asked if self._stepped else self._asked

    def report(
        self,
        predicted: Mapping[Sent, tuple[int, float]],
        moves: Mapping[Moved, tuple[int, float]],
        evaluated: Mapping[Moved, tuple[int, float]],
    ) -> TrafficReport:
        """The last completed step beside what the program predicts for the passes it had; ``evaluated``: for those
        that were no step's."""
        rows = []
        for kind in sorted({*self._last, *predicted}):
            calls, sent = self._last.get(kind, [0, 0])
            program = predicted[kind][1] if kind in predicted else 0.0
            if kind.purpose == LAYERS:  # by the model, not by the program
                program = float(sent)
            rows.append(TrafficRow(*kind, calls, program, sent))
        asked = self.reported
        moved, apart = _rows(self._last_moves, moves), _rows(asked.moves, evaluated)
        return TrafficReport(tuple(rows), self._last_control, asked.sent, asked.calls, moved, apart)

    @staticmethod
    def _add(into: Counts, kind: Sent, calls: int, sent: int) -> None:
        into[kind][0] += calls
        into[kind][1] += sent


def _rows(counted: TierTraffic, predicted: Mapping[Moved, tuple[int, float]]) -> tuple[MovedRow, ...]:
    rows: list[MovedRow] = []
    for kind in sorted({*counted.counts, *predicted}):
        calls, num_bytes = counted.counts.get(kind, [0, 0])
        rows.append(MovedRow(*kind, calls, predicted[kind][1] if kind in predicted else 0.0, num_bytes))
    return tuple(rows)
