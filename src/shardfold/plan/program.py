"""WHEN things happen: a layout lowered to lists of operations that print as text and parse back.

A program has four sections, or five. ``forward`` and ``backward`` run once per micro-batch, ``last`` replaces
``backward`` in the last micro-batch of a step, ``step`` is the optimizer step. What is in ``beside`` a second thread
does while the first does ``step``; there are no collectives in it. Within a pass, ``F u``, ``B u`` and ``END`` are
markers: the model's own work happens there, and everything up to a marker is done before it.

    verb            what the engine does
    CAST            write this rank's master shard into its place of the gathered buffer, in the wire's dtype
    ALL_GATHER      fill the gathered buffer of a unit from its shards
    F, B            the forward, backward of the unit (markers)
    END             the pass of the whole model is over (marker)
    HOLD            copy this rank's part of the gathered buffer into the held shard
    FREE            give the gathered buffer back
    REDUCE_SCATTER  sum gradients over the axes, keep this rank's shard
    ALL_REDUCE      sum gradients over the axes, keep the sum
    NORM            the norm of all gradients
    FETCH           a state of this rank's shard begins to come to the device from the tier that it rests in
    UPDATE          the optimizer's step on this rank's shard, which waits for what was fetched; writes the
                    compute-dtype copy
    STORE           that state begins to go back to its tier
    JOIN            the first thread waits until all operations of the unit in ``beside`` are done

No collective is chosen by hand: :func:`redistribute` derives it from how a tensor lies and how its reader needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.layout import Axes, Layout, Mesh
from shardfold.plan.placement import UnitSpec

__all__ = [
    "COLLECTIVES",
    "MARKERS",
    "MOVES",
    "PARTIAL",
    "REDUCTIONS",
    "SECTIONS",
    "Op",
    "Program",
    "lower",
    "parse",
    "redistribute",
]

REDUCTIONS = ("REDUCE_SCATTER", "ALL_REDUCE")
COLLECTIVES = ("ALL_GATHER", *REDUCTIONS)
MARKERS = ("F", "B", "END")
MOVES = ("FETCH", "STORE")
OPERANDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("F", "B", "CAST", "FREE", "UPDATE", "JOIN"), ("unit",)),
    **dict.fromkeys(COLLECTIVES, ("unit", "axes", "dtype")),
    **dict.fromkeys(("END", "NORM"), ()),
    "HOLD": ("unit", "axes"),
    **dict.fromkeys(MOVES, ("unit", "state", "tier")),
}
UPDATED = ("master", "moments")
"""States that an update reads and writes."""
MARK = "   <-- here"
SECTIONS = ("forward", "backward", "last", "step", "beside")

PARTIAL = None
"""How a tensor lies whose sum over all ranks is still to be taken."""


class Op(NamedTuple):
    """One operation on one unit. Collectives have ``axes`` and ``dtype``, ``HOLD`` has ``axes``, ``FETCH`` and
    ``STORE`` have a ``state`` of the table and the ``tier`` that it rests in.

    ``dtype`` is what travels: of a unit whose segments travel in several, all of them, as in ``bf16+fp32``.
    """

    verb: str
    unit: str = ""
    axes: Axes = ()
    dtype: str = ""
    state: str = ""
    tier: str = ""

    def __str__(self) -> str:
        words = [self.verb, self.unit, f"[{'+'.join(self.axes)}]" if self.axes else "", self.dtype]
        words += [self.state, self.tier]
        return " ".join(word for word in words if word)

    @property
    def journey(self) -> str:
        """Which of the table's journeys a collective belongs to: ``gather`` or ``reduce``."""
        return "gather" if self.verb == "ALL_GATHER" else "reduce"


@dataclass(frozen=True)
class Program:
    """The operations of one optimizer step, by section; see the module's docstring."""

    forward: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    last: tuple[Op, ...] = ()
    step: tuple[Op, ...] = ()
    beside: tuple[Op, ...] = ()

    def section(self, name: str) -> tuple[Op, ...]:
        return getattr(self, name)

    @property
    def quiet(self) -> tuple[Op, ...]:
        """A backward that reduces nothing (``no_sync``)."""
        return tuple(op for op in self.backward if op.verb not in REDUCTIONS)

    def __str__(self) -> str:
        return self.render()

    def render(self, mark: tuple[str, int] | None = None) -> str:
        """The text form; ``mark = (section, index)`` points at the operation that failed."""
        lines: list[str] = []
        for name in SECTIONS if self.beside else SECTIONS[:-1]:
            lines.append(f"{name}:")
            for i, op in enumerate(self.section(name)):
                lines.append(f"  {op}{MARK if mark == (name, i) else ''}")
        return "\n".join(lines)


def redistribute(unit: str, have: Axes | None, need: Axes, *, data: Axes, gather: str, reduce: str) -> Iterator[Op]:
    """The collectives that turn how a unit lies into how its reader needs it.

    Args:
        unit: its name.
        have: the axes it is split over, or :data:`PARTIAL`.
        need: the axes it shall be split over.
        data: all axes that a partial sum is waiting on.
        gather: dtype on the wire of a gather.
        reduce: dtype on the wire of a reduction.

    Raises:
        LayoutError: the two cannot be joined by a gather or a reduction.
    """
    if have is None:  # PARTIAL
        if need:
            yield Op("REDUCE_SCATTER", unit, need, reduce)
        if rest := tuple(axis for axis in data if axis not in need):
            yield Op("ALL_REDUCE", unit, rest, reduce)
    elif have != need:
        if have[: len(need)] != need:
            raise LayoutError(f"{unit} lies split over {have} but is needed split over {need}, which no gather gives.")
        yield Op("ALL_GATHER", unit, have[len(need) :], gather)


def lower(
    layout: Layout,
    units: Sequence[UnitSpec],
    mesh: Mesh,
    *,
    clip: bool = False,
    forward: Sequence[str] | None = None,
    backward: Sequence[str] | None = None,
) -> Program:
    """The program of one optimizer step of a bound layout (see :meth:`Layout.bind`).

    Args:
        layout: a table whose dtype words are resolved and whose axes of size 1 are dropped.
        units: in definition order; root units are held through the pass.
        mesh: axis sizes.
        clip: whether the step takes the norm of the gradients.
        forward: names of the units that are not roots in the order in which they run, a unit that runs several times
            as often (but never twice in a row: it stays gathered until another begins); None: definition order.
        backward: the same for backward; None: ``forward`` reversed.
    """
    lowering = _Lowering(layout, units, mesh, forward, backward)
    return Program(
        forward=tuple(lowering.one_pass(True, False)),
        backward=tuple(lowering.one_pass(False, False)),
        last=tuple(lowering.one_pass(False, True)),
        step=tuple(lowering.step(clip)),
    )


class _Lowering:
    """See :func:`lower`."""

    def __init__(
        self,
        layout: Layout,
        units: Sequence[UnitSpec],
        mesh: Mesh,
        forward: Sequence[str] | None,
        backward: Sequence[str] | None,
    ) -> None:
        self._layout, self._units = layout, units
        self._data = tuple(axis for axis in mesh if mesh[axis] > 1)
        self._roots = [unit for unit in units if unit.root]
        inner = {unit.name: unit for unit in units if not unit.root}
        self._onward = [inner[name] for name in (inner if forward is None else forward)]
        self._back = self._onward[::-1] if backward is None else [inner[name] for name in backward]

    def _turn(self, unit: UnitSpec, have: Axes | None, need: Axes, *, frozen: bool = False) -> Iterator[Op]:
        gather, reduce = unit.dtypes_for("gather", self._layout, frozen=frozen), unit.dtypes_for("reduce", self._layout)
        return redistribute(unit.name, have, need, data=self._data, gather=gather, reduce=reduce)

    def _fill(self, unit: UnitSpec, over: Axes, source_is_master: bool) -> Iterator[Op]:
        if over and source_is_master:
            yield Op("CAST", unit.name)
        yield from self._turn(unit, over, (), frozen=True)

    def _enter(self, unit: UnitSpec, *, forward: bool) -> Iterator[Op]:
        cell = self._layout.rest if forward or self._layout.held is None else self._layout.held
        yield from self._fill(unit, cell.over, self._layout.params is None and cell is self._layout.master)
        yield Op("F" if forward else "B", unit.name)

    def _leave(
        self, unit: UnitSpec, *, forward: bool, reduce: Iterator[Op] | tuple[Op, ...] = (), again: bool = False
    ) -> Iterator[Op]:
        after = self._layout.kept if forward else self._layout.rest
        if forward and self._layout.held is not None and self._layout.held.over:
            yield Op("HOLD", unit.name, self._layout.held.over)
        # Gradients can leave as soon as all are there; the values stay until another unit begins, because a node of
        # this unit's backward may still read them (a weight that was detached has no gradient to announce it).
        yield from reduce
        # What backward finds full (because forward kept it) it cannot fill again: it stays until it ran the last time.
        if after.over and not (again and not forward and self._layout.held is not None and not self._layout.held.over):
            yield Op("FREE", unit.name)

    def _reduces(self, unit: UnitSpec, last: bool) -> Iterator[Op]:
        """Gradients that rest split are scattered in every micro-batch; what remains of the sum waits for the last."""
        if not unit.trainable:
            return
        for op in self._turn(unit, PARTIAL, self._layout.grads.over or self._layout.master.over):
            if self._layout.grads.over and op.verb == "ALL_REDUCE":
                op = op._replace(
                    dtype=unit.dtypes_for("grads", self._layout)
                )  # what is summed is the accumulated shard
            if last or (self._layout.grads.over and op.verb == "REDUCE_SCATTER"):
                yield op

    def one_pass(self, forward: bool, last: bool) -> Iterator[Op]:
        for unit in self._roots:
            yield from self._enter(unit, forward=forward)
        order = self._onward if forward else self._back
        final = {unit.name: i for i, unit in enumerate(order)}  # gradients are complete when it ran for the last time
        for i, unit in enumerate(order):
            again = final[unit.name] > i
            yield from self._enter(unit, forward=forward)
            reduce = () if forward or again else self._reduces(unit, last)
            yield from self._leave(unit, forward=forward, reduce=reduce, again=again)
        yield Op("END")
        for unit in self._roots:
            yield from self._leave(unit, forward=forward, reduce=() if forward else self._reduces(unit, last))

    def step(self, clip: bool) -> Iterator[Op]:
        if clip:
            yield Op("NORM")
        for unit in self._units:
            if unit.trainable:
                away = [(name, str(self._layout.cells()[name].tier)) for name in UPDATED]
                away = [(name, tier) for name, tier in away if tier != "device"]
                yield from (Op("FETCH", unit.name, state=name, tier=tier) for name, tier in away)
                yield Op("UPDATE", unit.name)
                yield from (Op("STORE", unit.name, state=name, tier=tier) for name, tier in away)
                if self._layout.params is not None:
                    yield from self._turn(unit, self._layout.master.over, self._layout.params.over)


def parse(text: str) -> Program:
    """The program that prints as ``text``: ``parse(str(program)) == program``, marked or not.

    Raises:
        ConfigError: a line is no operation; the message names the line.
    """
    sections: dict[str, list[Op]] = {}
    current: list[Op] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.removesuffix(MARK).split()
        if not words:
            continue
        if len(words) == 1 and words[0].endswith(":") and words[0][:-1] in SECTIONS:
            current = sections.setdefault(words[0][:-1], [])
        elif current is not None and (op := _parse_op(words)) is not None:
            current.append(op)
        else:
            raise ConfigError(
                f"line {number} of the program, {line.strip()!r}, is neither a section nor an operation in one."
            )
    return Program(**{name: tuple(ops) for name, ops in sections.items()})


def _parse_op(words: Sequence[str]) -> Op | None:
    """The operation in these words, if it has exactly the operands of its verb."""
    verb, *operands = words
    takes = OPERANDS.get(verb)
    if takes is None or len(operands) != len(takes):
        return None
    fields: dict[str, Any] = dict(zip(takes, operands, strict=True))
    if (axes := fields.get("axes")) is not None:
        if not (axes.startswith("[") and axes.endswith("]") and all(names := axes[1:-1].split("+"))):
            return None
        fields["axes"] = tuple(names)
    return Op(verb, **fields)
