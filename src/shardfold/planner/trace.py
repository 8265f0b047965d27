"""What a model's forward and backward do, seen once without memory: what lives when, and how much is computed.

The model runs on tensors that have shapes but no values (torch's fake tensors), so neither weights nor a device are
needed, and seconds do for 70B parameters. What happens is noted as the engine's hooks hear it: a unit is entered, left,
reached by backward, a gradient is there. Between two such events the trace has the most bytes that lived and those that
lived at its end; which of the engine's own buffers live beside them follows from the program (see ``memory``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from shardfold.plan.layout import Tier
from shardfold.plan.placement import UnitSpec
from shardfold.plan.walk import Part

__all__ = ["Computation", "Event", "Lane", "Moves", "Sends", "StagePass", "Trace", "Works"]

SMALL = 16 * 1024
BATCH = 64 * 1024
"""As ``sharding.gradient_buffer`` has them: gradients of so few bytes wait until there are so many of them."""


class Sends(NamedTuple):
    """What a rank sends for its layers along one axis.

    Attributes:
        axis: its name.
        num_bytes: that this rank sends.
        calls: collectives.
    """

    axis: str
    num_bytes: float
    calls: int


class Moves(NamedTuple):
    """What was moved of what autograd saves.

    Attributes:
        out: bytes that leave the device.
        back: bytes that begin to come back, before anything else of the event.
        lag: bytes that may still be on their way when the computation goes on; below 0: it waits for none.
    """

    out: float = 0.0
    back: float = 0.0
    lag: float = -1.0


STAYS = Moves()


class Computation(NamedTuple):
    """What was computed between two events.

    Attributes:
        products: floating-point operations of matrix products, convolutions and attention, by dtype.
        product_bytes: that these read and write.
        other_bytes: that all other operations read and write.
        calls: operations that the host begins, views among them.
        attention: those of ``products`` that attention does between tokens.
        sent: to the ranks that share layers, by axis.
        product_calls: those of ``calls`` that are products.
        again: those of ``products`` that were done before, and are done again for a backward.
        attention_again: those of ``attention``.
        moves: of activations to another tier and back.
    """

    products: tuple[tuple[str, float], ...] = ()
    product_bytes: float = 0.0
    other_bytes: float = 0.0
    calls: int = 0
    attention: float = 0.0
    sent: tuple[Sends, ...] = ()
    product_calls: int = 0
    again: float = 0.0
    attention_again: float = 0.0
    moves: Moves = STAYS

    @property
    def flops(self) -> float:
        return sum(flops for _, flops in self.products)


class Works(NamedTuple):
    """What was computed before each of some events, as :class:`Computation` has it for one; attention and calls of
    products are by the dtype that most of the event's products have; ``moves`` in three rows, None where nothing is."""

    products: dict[str, np.ndarray]
    attention: dict[str, np.ndarray]
    product_calls: dict[str, np.ndarray]
    product_bytes: np.ndarray
    other_bytes: np.ndarray
    calls: np.ndarray
    sent: dict[str, tuple[np.ndarray, np.ndarray]]
    moves: np.ndarray | None


class Event(NamedTuple):
    """Something that the engine's hooks hear.

    Attributes:
        kind: ``begin``, ``enter``, ``leave``, ``end_forward``, ``begin_backward``, ``enter_backward``, ``gradient``,
            ``complete`` (all gradients of the unit are there), ``sent`` (a stage has run its forward), ``inputs`` (what
            the first part of a backward leaves for its second is all that there is) or ``end``.
        unit: its name, where it is of one.
        peak: the most bytes that forward and backward held since the event before.
        level: those that they hold now.
        size: of a gradient, its bytes; of ``sent``, those that go to the next stage, and of the end of a stage's
            backward, those that go to the stage before.
        slot: of a gradient, its parameter's name.
        work: since the event before.
        tops: of which, with :attr:`level`, one sum is :attr:`peak`, whichever it is for a number of samples.
        away: bytes of activations that are in another tier, and not on the device.
    """

    kind: str
    unit: str = ""
    peak: float = 0
    level: float = 0
    size: float = 0
    slot: str = ""
    work: Computation = Computation()
    tops: tuple[float, ...] = ()
    away: float = 0


class Lane(NamedTuple):
    """How a micro-batch goes through a stage.

    Attributes:
        stage: its number.
        split: whether its backward is in two parts, of inputs and of weights.
    """

    stage: int = 0
    split: bool = False


class StagePass(NamedTuple):
    """A pass of a pipeline's stage.

    Attributes:
        section: of the program.
        begin: its first event.
        end: the one behind its last.
        lane: of its stage.
        part: of the program that it is for; None: all of it.
    """

    section: str
    begin: int
    end: int
    lane: Lane = Lane()
    part: Part | None = None


@dataclass(frozen=True)
class Trace:
    """One forward and backward of a model on one micro-batch.

    Attributes:
        events: in order.
        batch: bytes of the inputs.
        buffers: bytes of the model's buffers.
        mode: of the units' activations.
        tokens: of the micro-batch; 0: not known.
        touched: units whose weights are read outside of their forward, and which an engine therefore holds.
        passes: of a pipeline's stages; empty: one forward and one backward.
        zeros: why the model ran on zeros with memory, whose values sizes and branches may go by; empty: it ran without.
        loss: what was taken for the loss of a model that gives none; empty: it, or ``compute``, gave one.
    """

    events: tuple[Event, ...]
    batch: float = 0
    buffers: float = 0
    mode: str = "keep"
    tokens: float = 0
    touched: frozenset[str] = field(default_factory=frozenset[str])
    passes: tuple[StagePass, ...] = ()
    zeros: str = ""
    loss: str = ""

    @property
    def forward_order(self) -> list[str]:
        """Units as forward enters them; one that is entered twice in a row is there once."""
        return _once(event.unit for event in self._first("forward") if event.kind == "enter")

    def backward_order(self, *, split: bool) -> list[str]:
        """Units as backward reaches them, or, where their values do not come and go, as their gradients are there."""
        kind, parts = ("enter_backward", ("quiet",)) if split else ("complete", ("weights", "last_weights"))
        return _once(event.unit for event in self._first("backward", "last", *parts) if event.kind == kind)

    def _first(self, *sections: str) -> Sequence[Event]:
        """Events of the first pass of these sections through each stage."""
        if not self.passes:
            return self.events
        firsts: dict[int, Sequence[Event]] = {}
        for each in self.passes:
            if each.section in sections and each.lane.stage not in firsts:
                firsts[each.lane.stage] = self.events[each.begin : each.end]
        return [event for events in firsts.values() for event in events]

    def joined(self, units: Iterable[UnitSpec]) -> Trace:
        """The same, as it is heard where some units are made of several (:attr:`UnitSpec.blocks`): one of these is
        complete when its last block is; until then a gradient of no bytes stands in its place."""
        of = {block: unit.name for unit in units for block in unit.blocks}
        if not of:
            return self
        last: set[str] = set()
        events: list[Event] = []
        for event in reversed(self.events):
            name = of.get(event.unit, event.unit)
            more = event.kind == "complete" and name in last
            if event.kind == "complete":
                last.add(name)
            events.append(event._replace(unit=name, kind="gradient" if more else event.kind))
        touched = frozenset(of.get(name, name) for name in self.touched)
        return replace(self, events=tuple(reversed(events)), touched=touched)

    @cached_property
    def levels(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each event the most bytes before it, and those at it."""
        found = np.array([(e.peak, e.level) for e in self.events], dtype=float).reshape(-1, 2)
        return found[:, 0], found[:, 1]

    def tops_with(self, other: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What may be the most bytes before each event, as the numbers of these lines by event, and their values here
        and in the ``other``, a trace of twice the samples; those are left out that are not the largest from half the
        samples on."""
        if id(other) not in self._pairs:
            counts, pairs = list[int](), list[tuple[float, float]]()
            for a, b in zip(self.events, other.events, strict=True):
                each = {(a.peak, b.peak)}
                if len(a.tops) == len(b.tops):
                    each |= {(a.level + x, b.level + y) for x, y in zip(a.tops, b.tops, strict=True)}
                most, kept = float("-inf"), 0
                for low, high in sorted(each, key=lambda pair: (pair[0] - pair[1], -pair[0])):
                    if 3 * low - high > most:  # the steepest are first
                        most, kept = 3 * low - high, kept + 1
                        pairs.append((low, high))
                counts.append(kept)
            values = np.array(pairs, dtype=float).reshape(-1, 2)
            self._pairs[id(other)] = other, (np.array(counts, dtype=int), values[:, 0], values[:, 1])
        return self._pairs[id(other)][1]

    @cached_property
    def _pairs(self) -> dict[int, tuple[Trace, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
        return {}

    @cached_property
    def structure(self) -> Any:
        """What a walk of the program goes by; traces of the same structure are walked alike."""
        sizes = ((e.kind, e.unit, e.size if e.kind == "gradient" else 0, e.slot) for e in self.events)
        return tuple(sizes), self.touched

    @cached_property
    def works(self) -> Works:
        """What was computed before each event."""
        dtypes = sorted({dtype for event in self.events for dtype, _ in event.work.products})
        found = [dict(event.work.products) for event in self.events]
        most = [max(each, key=lambda dtype: each[dtype]) if each else "" for each in found]

        def of_most(values: Sequence[float]) -> dict[str, np.ndarray]:
            pairs = [*zip(most, values, strict=True)]
            return {dtype: np.array([n if dtype == name else 0.0 for name, n in pairs]) for dtype in dtypes}

        return Works(
            {dtype: np.array([each.get(dtype, 0.0) for each in found]) for dtype in dtypes},
            of_most([event.work.attention for event in self.events]),
            of_most([event.work.product_calls for event in self.events]),
            np.array([event.work.product_bytes for event in self.events]),
            np.array([event.work.other_bytes for event in self.events]),
            np.array([float(event.work.calls) for event in self.events]),
            {axis: self._sent(axis) for axis in sorted({s.axis for e in self.events for s in e.work.sent})},
            self._moves(),
        )

    def _moves(self) -> np.ndarray | None:
        found = [event.work.moves for event in self.events]
        return np.array(found, dtype=float).T if any(each != STAYS for each in found) else None

    def _sent(self, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Bytes and collectives along an axis before each event."""
        each = [next((s for s in e.work.sent if s.axis == axis), Sends(axis, 0.0, 0)) for e in self.events]
        return np.array([s.num_bytes for s in each]), np.array([float(s.calls) for s in each])

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of the model's products; what is recomputed counts once."""
        return sum(event.work.flops - event.work.again for event in self.events)

    @cached_property
    def attention(self) -> float:
        """Those of ``flops`` that attention does between tokens."""
        return sum(event.work.attention - event.work.attention_again for event in self.events)

    @cached_property
    def away(self) -> dict[Tier, float]:
        """The most bytes of activations that are in another tier at once."""
        most = max((event.away for event in self.events), default=0.0)
        return {Tier(self.mode): most} if most else {}

    @property
    def peak(self) -> float:
        """The most bytes of activations and temporaries at once."""
        return max((event.peak for event in self.events), default=0.0)

    @property
    def saved(self) -> float:
        """Bytes that live between forward and backward."""
        return next((event.level for event in self.events if event.kind == "begin_backward"), 0.0)

    def between(self, other: Trace, at: float) -> Trace:
        """The trace that lies on the line through this one, at 0, and the ``other``, at 1, with the same events."""

        def on(a: float, b: float) -> float:
            return a + (b - a) * at

        def mixed(a: Computation, b: Computation) -> Computation:
            more = dict(b.products)
            products = tuple((dtype, on(flops, more.get(dtype, flops))) for dtype, flops in a.products)
            others = {sends.axis: sends.num_bytes for sends in b.sent}
            sent = tuple(s._replace(num_bytes=on(s.num_bytes, others.get(s.axis, s.num_bytes))) for s in a.sent)
            return Computation(
                products,
                on(a.product_bytes, b.product_bytes),
                on(a.other_bytes, b.other_bytes),
                a.calls,
                on(a.attention, b.attention),
                sent,
                a.product_calls,
                on(a.again, b.again),
                on(a.attention_again, b.attention_again),
                a.moves if a.moves is STAYS else Moves(*(on(x, y) for x, y in zip(a.moves, b.moves, strict=True))),
            )

        def event(a: Event, b: Event) -> Event:
            level, peak, tops = on(a.level, b.level), on(a.peak, b.peak), ()
            if len(a.tops) == len(b.tops):
                tops = tuple(on(x, y) for x, y in zip(a.tops, b.tops, strict=True))
                peak = max([peak, *(level + top for top in tops)])
            return a._replace(
                peak=peak,
                level=level,
                size=on(a.size, b.size),
                work=mixed(a.work, b.work),
                tops=tops,
                away=on(a.away, b.away),
            )

        events = tuple(event(a, b) for a, b in zip(self.events, other.events, strict=True))
        return replace(self, events=events, batch=on(self.batch, other.batch), tokens=on(self.tokens, other.tokens))


def _once(names: Iterable[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        if not found or found[-1] != name:
            found.append(name)
    return found
