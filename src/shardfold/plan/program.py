"""WHEN things happen: a layout lowered to lists of operations that print as text and parse back.

A program has four sections, and others where something asks for them. ``forward`` and ``backward`` run once per
micro-batch, ``last`` replaces ``backward`` in the last micro-batch of a step, ``step`` is the optimizer step. Where
gathered units are kept over micro-batches, ``first`` replaces ``forward`` in the first of a step. What is
in ``beside`` a second thread does while the first does ``step``. Where updates are delayed, it does them, and what
brings their states, in ``behind`` behind the step, while the next one computes, and ``arrive`` brings what that gave,
before the next updates begin. There are no collectives in ``beside`` and ``behind``. In ``shared``, before the step,
are sums over the stages of a pipeline. Where groups of ranks meet every so many steps only (see ``outer``), behind such
a step ``outer_send`` sends what they have learned, ``outer_step`` makes of it what the global weights become, and
``outer_take`` takes that in; each for the units behind one marker ``FRAGMENT`` at a time. What else can run is in
sections of its own (:data:`OTHERS`). ``F u``, ``B u``, ``END`` and ``STEP`` are markers: the model's and the
optimizer's own work happens there, and everything up to a marker is done before it.

    verb            what the engine does
    CAST            write this rank's master shard into its place of the gathered buffer, in the wire's dtype
    ALL_GATHER      fill the gathered buffer of a unit from its shards
    DECODE          fill it with what this rank's codes stand for, where they rest whole
    F, B            the forward, backward of the unit (markers)
    END             the pass of the whole model is over (marker)
    HOLD            copy this rank's part of the gathered buffer into the held shard
    FREE            give the gathered buffer back
    KEEP            the gathered buffer stays full until RELEASE: the passes before it gather nothing
    RELEASE         give such a buffer back
    GRADS           make the buffer ``local``, which the unit's gradients are added to as they come
    REDUCE_SCATTER  begin to sum gradients over the axes, keep this rank's shard
    REDUCE_WITHIN   the first of two hops: begin to sum gradients within the node, keep this rank's slice of each node's
                    part
    REDUCE_BETWEEN  the second: begin to sum those between nodes, keep this rank's shard
    ALL_REDUCE      begin to sum gradients over the axes, keep the sum
    SPREAD          begin to bring together sums of which each rank along the axes has a part, in the order of ranks
    WAIT            go on when ``grads`` hold the sums, ``params`` what was updated, or ``log`` what another rank sent
    DROP            give the buffer ``local`` back
    SHARE           sum the gradients of what several stages of a pipeline have over these
    CLAMP           cut every element of the gradients to a range
    NORM            the norm of all gradients
    LOG             this rank's part of the summed gradients begins to go to the rank that holds a copy of its states
    VOTE            all ranks have what their updates need, or nobody updates: before it a step can be undone, behind
                    it each rank can end it alone
    STEP            the optimizer's step begins (marker)
    READ            this rank's shard of a state begins to come from its file to host memory, from where it fills what
                    is gathered
    FETCH           a state of this rank's shard begins to come from the tier that it rests in to where it is updated
    ADD             gradients that were summed earlier in the step begin to come from their file: those that are summed
                    next are added
    UPDATE          the optimizer's step on this rank's shard, which waits for what was fetched; writes the
                    compute-dtype copy
    MIRROR          the optimizer's step on the copy that this rank holds of another's states, with the log of that one
    STORE           a state begins to go to the tier that it rests in, or, on its way to an update there, that it is
                    updated in; summed gradients are added to what came since the last step
    FILL            this rank's shard of a state that rests in a slower tier comes to the device, in the dtype of what
                    is filled
    STASH           a copy of the unit's parameters, which it is about to update, is kept for the backwards of
                    micro-batches that have read them
    JOIN            the first thread waits until all operations of the unit in ``beside`` are done
    SPECULATE       a thread begins to update this rank's shard before the norm is known, behind a snapshot of it;
                    ``UPDATE`` keeps that, or restores the snapshot and updates again
    FRAGMENT        behind it are the units of the fragment with that number (marker)
    DIFF            the outer gradient of this rank's shard: the last global weights minus master
    PUSH            begin to sum outer gradients over the groups, keep this rank's part
    OUTER           the outer optimizer's step on that part: how the global weights change there
    PULL            begin to bring the changes of all parts of the shard
    BLEND           this rank's momentum, with its gradients in it; PUSH and PULL then carry its signs, of several
                    units at once (:data:`BUNDLE`)
    SERVE           the mean of what all ranks have of this rank's part
    GIVE            the averaged momentum takes the place of the gradients
    MIX             the global weights take the change, and master, with its compute-dtype copy, takes these

All that handlers and sums of bytes need to know of an operation is in its operands (:class:`Op`), so neither asks
where in the program it stands. :data:`VERBS` says which operands a verb has. ``a..c`` in place of a unit are those from
``a`` to ``c``, in definition order.

No collective is chosen by hand: :func:`redistribute` derives it from how a tensor lies and how its reader needs it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import STATES, Axes, Layout, Sizes, Tier
from shardfold.plan.order import backwards
from shardfold.plan.placement import SegmentSpec, UnitSpec, enclosing

__all__ = [
    "BESIDE",
    "COLLECTIVES",
    "MARKERS",
    "MOVES",
    "OTHERS",
    "PARTIAL",
    "REDUCTIONS",
    "SCATTERS",
    "SECTIONS",
    "SUMS",
    "TENSORS",
    "VERBS",
    "Op",
    "Program",
    "Verb",
    "lower",
    "parse",
    "redistribute",
    "render_section",
]

Unit = TypeVar("Unit")
SCATTERS = ("REDUCE_SCATTER", "REDUCE_WITHIN", "REDUCE_BETWEEN")
REDUCTIONS = (*SCATTERS, "ALL_REDUCE", "SPREAD")
SUMS = (*REDUCTIONS, "WAIT", "STORE", "DROP", "SPECULATE")
"""Of a backward: what a unit's gradients go through once all are there."""
COLLECTIVES = ("ALL_GATHER", *REDUCTIONS, "PUSH", "PULL", "LOG")
MARKERS = ("F", "B", "END", "STEP", "FRAGMENT")
KINDS = {"PUSH": "REDUCE_SCATTER", "PULL": "ALL_GATHER", "SPREAD": "ALL_GATHER"}
"""Collectives that are another one, of other tensors."""
MOVES = ("READ", "FETCH", "ADD", "FILL", "STORE")
BESIDE = (*COLLECTIVES, *MOVES, "DECODE")
"""What a pass has to do beside the model's own work; where there is none of these, it is left to itself."""

TENSORS = (*STATES, "flat", "local", "node", "outer", "log", "copies")
"""What an operation reads or writes: a state of the table, or a buffer; the first two have a unit's whole length.

    flat     the gathered parameters
    local    this rank's own gradients, of which no sum was taken yet; where ``grads`` rest whole it is these themselves
    node     between two hops: of each node's part of a unit the slice of the ranks that have this rank's place in
             theirs. Of gradients it is summed within the node, of parameters it is encoded
    outer    of master's shard: the outer gradient, and then how the global weights change; or momentum that is sent by
             signs
    log      of another rank: its part of the summed gradients
    copies   of that rank: its master and moments
"""


class Verb(NamedTuple):
    """What a verb takes.

    Attributes:
        operands: fields of :class:`Op`, in the order in which they are printed.
        source: the tensor that it reads, where that is always the same.
        target: the tensor that it writes, where that is always the same.
        may: an operand behind these that may be left out.
    """

    operands: tuple[str, ...] = ("unit",)
    source: str = ""
    target: str = ""
    may: tuple[str, ...] = ()


VERBS: Mapping[str, Verb] = {
    "CAST": Verb(source="master", target="flat"),
    "ALL_GATHER": Verb(("unit", "source", "target", "axes", "format")),
    "DECODE": Verb(("unit", "source", "target", "format")),
    "F": Verb(),
    "B": Verb(),
    "END": Verb(()),
    "HOLD": Verb(("unit", "axes"), source="flat", target="held"),
    "FREE": Verb(source="flat"),
    "KEEP": Verb(source="flat"),
    "RELEASE": Verb(source="flat"),
    "GRADS": Verb(("unit", "format"), target="local"),
    "REDUCE_SCATTER": Verb(("unit", "axes", "format"), source="local", target="grads"),
    "REDUCE_WITHIN": Verb(("unit", "axes", "format"), source="local", target="node"),
    "REDUCE_BETWEEN": Verb(("unit", "axes", "format"), source="node", target="grads"),
    "ALL_REDUCE": Verb(("unit", "source", "axes", "format"), target="grads"),
    "SPREAD": Verb(("unit", "axes", "format"), source="grads", target="grads"),
    "WAIT": Verb(("unit", "target")),
    "DROP": Verb(source="local"),
    "SHARE": Verb(("unit", "axes"), source="grads", target="grads"),
    "CLAMP": Verb((), source="grads", target="grads"),
    "LOG": Verb(("unit", "axes", "format"), source="grads", target="log"),
    "VOTE": Verb(()),
    "NORM": Verb((), source="grads"),
    "STEP": Verb(()),
    "READ": Verb(("unit", "source", "tier"), target="flat"),
    "FETCH": Verb(("unit", "source", "tier")),
    "FILL": Verb(("unit", "source", "target", "tier")),
    "ADD": Verb(("unit", "tier"), source="grads"),
    "UPDATE": Verb(source="grads", target="master", may=("tier",)),
    "STORE": Verb(("unit", "source", "tier")),
    "STASH": Verb(source="flat"),
    "JOIN": Verb(),
    "MIRROR": Verb(source="log", target="copies", may=("tier",)),
    "SPECULATE": Verb(("unit", "tier"), source="grads", target="master"),
    "FRAGMENT": Verb(),
    "DIFF": Verb(("unit", "format"), source="master", target="outer"),
    "PUSH": Verb(("unit", "axes", "format"), source="outer", target="outer"),
    "OUTER": Verb(source="outer", target="outer"),
    "PULL": Verb(("unit", "axes", "format"), source="outer", target="outer"),
    "MIX": Verb(source="outer", target="master"),
    "BLEND": Verb(source="grads", target="outer"),
    "SERVE": Verb(source="outer", target="outer"),
    "GIVE": Verb(source="outer", target="grads"),
}
"""All verbs. A verb that is not here neither parses nor runs."""

UPDATED = ("master", "moments")
"""States that an update reads and writes."""
RANGE = ".."
"""Between the names of the first and the last unit of several: no name of a module has two dots in a row."""
BUNDLE = 2**24
"""Elements of momentum on a rank whose signs one collective carries, unless a single unit has more: 2 MiB of signs,
which take longer on any link than it takes to begin."""
MARK = "   <-- here"
ROUND = ("outer_send", "outer_step", "outer_take")
"""What is done in a round of outer steps, for each fragment at its time."""
ALWAYS = ("forward", "backward", "last", "step")
"""Sections that every program has, even where nothing is in them."""
SECTIONS = ("first", *ALWAYS, "beside", "behind", "arrive", "shared", "together", *ROUND)
MADE = ("quiet", "weights", "last_weights")
"""Sections that follow from others, and are printed of a program that says that they run."""
OTHERS: Mapping[str, str] = {
    "eval": "a forward without gradients",
    "quiet": "a backward in no_sync(), inside of a forward, or the first of two parts",
    "weights": "the second part of a backward",
    "last_weights": "the same in the last micro-batch",
    "closing": "before a step whose last backward was not known to be the last",
    "late": "before a step, those of units whose gradients came behind their reduction",
}
"""Sections that a step does not always go through, and when they run."""
LIKE: Mapping[str, tuple[str, ...]] = {
    "last": ("backward",),
    "eval": ("forward",),
    "quiet": ("backward",),
    "weights": ("backward",),
    "last_weights": ("weights", "last"),
    "closing": ("last",),
    "late": ("closing", "last"),
}
"""Sections that one may have the operations of, all or those of some verbs, so that these are not printed again."""
LIKENESS = re.compile(r"(\w+): as (\w+)(?: (without|only) ([A-Z_, ]+))?")
Remark = Callable[[str, "Op"], str]
"""What is to be said of an operation of a section; empty: nothing."""

PARTIAL = None
"""How a tensor lies whose sum over all ranks is still to be taken."""


class _Operands(NamedTuple):
    verb: str
    unit: str = ""
    axes: Axes = ()
    format: str = ""
    source: str = ""
    target: str = ""
    tier: str = ""


class Op(_Operands):
    """One operation on one unit, with all that it needs to be done and to be counted.

    Attributes:
        verb: one of :data:`VERBS`.
        unit: its name, or those of the first and the last of several (see :meth:`among`).
        axes: of a collective: that it crosses; of ``HOLD``: that the copy is split over.
        format: of a collective: what is on the link, of a buffer: what is in it, e.g. ``bf16``; where the segments that
            move differ, that of each, as in ``bf16+fp32+bf16`` (see :meth:`each`).
        source: the one of :data:`TENSORS` that is read.
        target: the one that is written.
        tier: that a state is fetched from, stored to, or, where that is not the device, updated in.
    """

    __slots__ = ()

    def __new__(
        cls,
        verb: str,
        unit: str = "",
        axes: Axes = (),
        format: str = "",
        source: str = "",
        target: str = "",
        tier: str = "",
    ) -> Op:
        if (always := VERBS.get(verb)) is not None:
            source, target = source or always.source, target or always.target
        return super().__new__(cls, verb, unit, axes, format, source, target, tier)

    def __str__(self) -> str:
        known = VERBS.get(self.verb)
        words = [self.verb]
        for name in (*known.operands, *known.may) if known is not None else ("unit", "axes"):
            if value := getattr(self, name):
                words += _words(self, name, value)
        return " ".join(words)

    @property
    def is_sum(self) -> bool:
        """Whether, in a backward, a unit's gradients go through it once all are there."""
        return self.verb in SUMS

    @property
    def purpose(self) -> str:
        """What a collective is for: the table's ``gather`` or ``reduce``, ``outer``, or ``copies``."""
        if self.verb == "LOG":
            return "copies"
        if self.verb in REDUCTIONS:
            return "reduce"
        return "outer" if self.verb in KINDS else "gather"

    @property
    def kind(self) -> str:
        """Which collective it is for whoever sends it."""
        return "REDUCE_SCATTER" if self.verb in SCATTERS else KINDS.get(self.verb, self.verb)

    def among(self, units: Mapping[str, Unit]) -> tuple[Unit, ...]:
        """Its units, of all by their names in definition order."""
        first, several, last = self.unit.partition(RANGE)
        if not several:
            return (units[first],)
        names = list(units)
        return tuple(units[name] for name in names[names.index(first) : names.index(last) + 1])

    def moves(self, unit: UnitSpec) -> tuple[SegmentSpec, ...]:
        """The segments of its unit that it works on: what is frozen has nothing but values."""
        if self.verb == "DECODE":
            return tuple(segment for segment in unit.segments if segment.codes)
        ends = (self.source, self.target)
        if "flat" in ends or ("node" in ends and self.purpose == "gather"):
            return unit.segments
        return tuple(segment for segment in unit.segments if segment.trainable)

    def each(self, num_segments: int) -> tuple[Op, ...]:
        """The same for each of so many segments that it moves, with that segment's format."""
        formats = self.format.split("+")
        if len(formats) == 1:
            return (self,) * num_segments
        if len(formats) != num_segments:
            raise ValueError(f"{self} has {len(formats)} formats but moves {num_segments} segments.")
        return tuple(self._replace(format=format) for format in formats)


def _words(op: Op, name: str, value: Any) -> list[str]:
    """An operand as it is printed."""
    if name == "axes":
        return [f"[{'+'.join(value)}]"]
    if name == "tier":
        return [f"@{value}"]
    return ["->", value] if name == "target" and op.source else [value]


@dataclass(frozen=True)
class Program:
    """The operations of one optimizer step, by section; see the module's docstring.

    Attributes:
        also: sections of :data:`MADE` that run, too.
    """

    forward: tuple[Op, ...] = ()
    backward: tuple[Op, ...] = ()
    last: tuple[Op, ...] = ()
    step: tuple[Op, ...] = ()
    beside: tuple[Op, ...] = ()
    behind: tuple[Op, ...] = ()
    arrive: tuple[Op, ...] = ()
    shared: tuple[Op, ...] = ()
    together: tuple[Op, ...] = ()
    outer_send: tuple[Op, ...] = ()
    outer_step: tuple[Op, ...] = ()
    outer_take: tuple[Op, ...] = ()
    first: tuple[Op, ...] = ()
    eval: tuple[Op, ...] = ()
    closing: tuple[Op, ...] = ()
    late: tuple[Op, ...] = ()
    also: tuple[str, ...] = ()

    def section(self, name: str) -> tuple[Op, ...]:
        """The operations of a section; those of one fragment where its number is behind the name, as in
        ``outer_send.0``."""
        name, _, fragment = name.partition(".")
        ops: tuple[Op, ...] = getattr(self, name)
        if not fragment:
            return ops
        starts = [i for i, op in enumerate(ops) if op.verb == "FRAGMENT"]
        bounds = zip(starts, [*starts[1:], len(ops)], strict=True)
        return next((ops[a + 1 : b] for a, b in bounds if ops[a].unit == fragment), ())

    @property
    def alone(self) -> tuple[Op, ...]:
        """A forward that keeps nothing over micro-batches: of an evaluation."""
        return tuple(op._replace(verb="FREE") if op.verb == "KEEP" else op for op in self.first or self.forward)

    @property
    def quiet(self) -> tuple[Op, ...]:
        """A backward that reduces nothing (``no_sync``); the first gradient of a unit makes its buffer, which stays."""
        return tuple(op for op in self.backward if not op.is_sum and op.verb not in ("GRADS", "ADD"))

    @property
    def weights(self) -> tuple[Op, ...]:
        """The second part of a backward, behind ``quiet``: gradients of weights, which need no values of these."""
        return _of_weights(self.backward)

    @property
    def last_weights(self) -> tuple[Op, ...]:
        """The same of the last micro-batch of a step."""
        return _of_weights(self.last)

    def __str__(self) -> str:
        return self.render()

    def render(self, mark: tuple[str, int] | None = None, remark: Remark | None = None) -> str:
        """The text form; ``mark = (section, index)`` points at the operation that failed, ``remark`` says what stands
        behind an operation. A section whose operations are another's is one line that names it."""
        say = remark or _nothing
        texts: list[str] = []
        for name in (*SECTIONS, *OTHERS):
            ops = self.section(name)
            if not (name in ALWAYS or name in self.also or (ops and name not in MADE)):
                continue
            number = mark[1] if mark is not None and mark[0] == name else None
            like = self._like(name) if number is None else ""
            said = [OTHERS[name]] if name in OTHERS else []
            if like:
                base = like.split()[1]
                known = {(op.verb, say(base, op)) for op in self.section(base)}
                own = dict.fromkeys((op.verb, say(name, op)) for op in ops)
                said += [f"{verb}: {words}" for verb, words in own if words and (verb, words) not in known]
            text = f"{name}: {like}" if like else render_section(name, ops, number, say=partial(say, name))
            first, line, rest = text.partition("\n")
            texts.append(f"{first}{_behind('; '.join(said))}{line}{rest}")
        return "\n".join(texts)

    def _like(self, name: str) -> str:
        """Whose operations a section has, in words; empty: none's that is printed before it."""
        ops = self.section(name)
        verbs = {op.verb: None for op in ops}
        for base in LIKE.get(name, ()) if ops else ():
            others = self.section(base)
            if ops == others:
                return f"as {base}"
            left_out = dict.fromkeys(op.verb for op in others if op.verb not in verbs)
            if left_out and tuple(op for op in others if op.verb in verbs) == ops:
                fewer = len(left_out) <= len(verbs)
                return f"as {base} {'without' if fewer else 'only'} {', '.join(left_out if fewer else verbs)}"
        return ""


def _nothing(section: str, op: Op) -> str:
    return ""


def _behind(words: str) -> str:
    """A remark at the end of a line."""
    return f"  # {words}" if words else ""


def _of_weights(ops: Sequence[Op]) -> tuple[Op, ...]:
    return tuple(op for op in ops if op.is_sum or op.verb in ("GRADS", "ADD", *MARKERS))


def render_section(
    name: str,
    ops: Sequence[Op],
    mark: int | None = None,
    around: int | None = None,
    say: Callable[[Op], str] = lambda op: "",
) -> str:
    """The text of one section; ``mark`` points at an operation, ``around`` leaves out what is further away from it,
    ``say`` gives what is remarked of one."""
    first, last = 0, len(ops)
    if mark is not None and around is not None:
        first, last = max(0, mark - around), min(len(ops), mark + around + 1)
    lines = [f"  {ops[i]}{MARK if i == mark else ''}{_behind(say(ops[i]))}" for i in range(first, last)]
    above = [f"  ... {first} above"] if first else []
    below = [f"  ... {len(ops) - last} below"] if last < len(ops) else []
    return "\n".join([f"{name}:", *above, *lines, *below])


def redistribute(
    unit: str,
    have: Axes | None,
    need: Axes,
    *,
    data: Axes,
    source: str,
    target: str,
    format: Mapping[str, str],
    hops: Mapping[str, int] | None = None,
    ordered: bool = False,
) -> Iterator[Op]:
    """The collectives that turn how a unit lies into how its reader needs it.

    Args:
        unit: its name.
        have: the axes that ``source`` is split over, or :data:`PARTIAL`.
        need: the axes that ``target`` shall be split over.
        data: all axes that a partial sum is waiting on.
        source: the tensor that there is.
        target: the tensor that is needed.
        format: by transfer what is on the link: of ``gather`` and ``reduce``, and of ``sum``, the reduction of what a
            reduction has scattered.
        hops: of ``gather`` and ``reduce``; 2: over the axes between nodes and those within one after the other.
        ordered: sums are of all ranks at once, each of which has a part of them until they are complete.

    Raises:
        LayoutError: the two cannot be joined by a gather or a reduction.
    """
    two = {purpose for purpose, number in (hops or {}).items() if number == 2}
    if have is None and ordered:
        if data:
            yield Op("REDUCE_SCATTER", unit, need if {*need} == {*data} else data, format["reduce"], source, target)
        if rest := tuple(axis for axis in data if axis not in need):
            yield Op("SPREAD", unit, rest, format["sum"])
    elif have is None:  # PARTIAL
        if len(need) == 2 and "reduce" in two:
            yield Op("REDUCE_WITHIN", unit, need[1:], format["reduce"])
            yield Op("REDUCE_BETWEEN", unit, need[:1], format["reduce"])
        elif need:
            yield Op("REDUCE_SCATTER", unit, need, format["reduce"], source, target)
        if rest := tuple(axis for axis in data if axis not in need):
            if need:
                yield Op("ALL_REDUCE", unit, rest, format["sum"], target, target)
            else:
                yield Op("ALL_REDUCE", unit, rest, format["reduce"], source, target)
    elif have != need:
        if have[: len(need)] != need:
            raise LayoutError(f"{unit} is split over {have} but is needed split over {need}, which no gather gives.")
        if len(have) == 2 and not need and "gather" in two:
            yield Op("ALL_GATHER", unit, have[:1], format["gather"], source, "node")
            yield Op("ALL_GATHER", unit, have[1:], format["gather"], "node", target)
            return
        yield Op("ALL_GATHER", unit, have[len(need) :], format["gather"], source, target)


def lower(
    layout: Layout,
    units: Sequence[UnitSpec],
    mesh: Sizes,
    *,
    clip: bool = False,
    clamp: bool = False,
    forward: Sequence[str] | None = None,
    backward: Sequence[str] | None = None,
    speculated: Collection[str] = (),
    delayed: bool = False,
    meets: str = "dense",
    apart: bool = False,
    stashes: bool = False,
) -> Program:
    """The program of one optimizer step of a bound layout (see :meth:`Layout.bind`).

    Args:
        layout: a table whose dtype words are resolved and whose axes of size 1 are dropped.
        units: in definition order; root units are held through the pass.
        mesh: axis sizes; a plain mapping has the roles of its names (see :meth:`Mesh.of`).
        clip: whether the step takes the norm of the gradients.
        clamp: whether the step cuts their elements.
        forward: names of the units that are not roots in the order in which they run, a unit that runs several times
            as often (but never twice in a row: it stays gathered until another begins); None: definition order.
        backward: the same for backward; None: ``forward`` reversed.
        speculated: names of units that are updated before the norm is known.
        delayed: updates go on behind their step.
        meets: how ranks do that send signs: ``dense``: gradients are summed over their axis, too; ``signs``; ``local``:
            nothing crosses it.
        apart: they may go their own ways, and be brought together outside of a step.
        stashes: what is about to be updated is kept, for micro-batches that are under way.
    """
    lowering = _Lowering(layout, units, mesh, forward, backward, speculated, meets=meets, stashes=stashes)
    rounds: dict[str, Any] = {name: tuple(lowering.outer(name)) for name in ROUND if layout.outer is not None}
    return Program(
        first=tuple(lowering.one_pass(True, False, first=True)) if lowering.keeps else (),
        forward=tuple(lowering.one_pass(True, False)),
        backward=tuple(lowering.one_pass(False, False)),
        last=tuple(lowering.one_pass(False, True)),
        step=tuple(lowering.step(clip=clip, clamp=clamp, delayed=delayed)),
        behind=tuple(lowering.behind()) if delayed else (),
        arrive=tuple(lowering.updates(behind=True)) if delayed else (),
        shared=tuple(lowering.shared()),
        together=tuple(lowering.together()) if apart else (),
        **rounds,
    )


class _Lowering:
    """See :func:`lower`."""

    def __init__(
        self,
        layout: Layout,
        units: Sequence[UnitSpec],
        mesh: Sizes,
        forward: Sequence[str] | None,
        backward: Sequence[str] | None,
        speculated: Collection[str],
        *,
        meets: str = "dense",
        stashes: bool = False,
    ) -> None:
        self._meets, self._stashes = meets, stashes
        self._layout, self._units, self._speculated = layout, units, speculated
        self._mesh = Mesh.of(mesh)
        self._roots = [unit for unit in units if unit.root]
        inner = {unit.name: unit for unit in units if not unit.root}
        self._onward = [inner[name] for name in (inner if forward is None else forward)]
        back = backwards([unit.name for unit in self._onward], enclosing(units)) if backward is None else backward
        self._back = [inner[name] for name in back]

    @property
    def keeps(self) -> bool:
        """Whether any unit stays gathered over micro-batches."""
        return any(self._kept(unit) for unit in self._units)

    def _kept(self, unit: UnitSpec) -> bool:
        return unit.table_or(self._layout).gathers_once

    def _turn(self, unit: UnitSpec, source: str, target: str) -> Iterator[Op]:
        """From how one tensor of the unit lies to how another shall."""
        table = unit.table_or(self._layout)
        hops = {"gather": table.gather.hops if target == "flat" else 1, "reduce": table.reduce.hops}
        format = {
            "gather": unit.format("held" if source == "held" else "gather", self._layout, frozen=target == "flat"),
            "reduce": unit.format("reduce", self._layout),
            "sum": unit.format("grads", self._layout),
        }
        have, need = PARTIAL if source == "local" else self._over(unit, source), self._over(unit, target)
        dense = self._layout.signs is not None and self._meets == "dense"
        data = (*(self._mesh.rare if dense else ()), *self._mesh.summed(unit.distinct))
        more: Any = {"source": source, "target": target, "hops": hops, "ordered": table.reduce.ordered}
        return redistribute(unit.name, have, need, data=data, format=format, **more)

    def _over(self, unit: UnitSpec, tensor: str) -> Axes:
        """The axes that a tensor is split over; sums of gradients are used as ``master`` is, wherever they rest."""
        table = unit.table_or(self._layout)
        return () if tensor == "flat" else getattr(table, "master" if tensor == "grads" else tensor).over

    def _enter(self, unit: UnitSpec, *, forward: bool, again: bool = False, first: bool = False) -> Iterator[Op]:
        table = unit.table_or(self._layout)
        if first or not self._kept(unit):
            yield from self._fill(unit, forward=forward)
        if not forward and not again and unit.trainable and table.buffered:
            if table.grads.tier is Tier.DISK:
                yield Op("ADD", unit.name, tier=str(table.grads.tier))
            yield Op("GRADS", unit.name, format=unit.format("buffer", self._layout))
        yield Op("F" if forward else "B", unit.name)

    def _fill(self, unit: UnitSpec, *, forward: bool) -> Iterator[Op]:
        """What brings a unit's values."""
        table = unit.table_or(self._layout)
        rest = "params" if table.params is not None else "master"
        source = rest if forward or table.held is None else "held"
        tier = table.cells()[source].tier
        if tier is Tier.DISK:
            yield Op("READ", unit.name, source=source, tier=str(tier))
        if tier is not Tier.DEVICE:
            yield Op("FILL", unit.name, source=source, target="flat", tier=str(Tier.HOST))
        elif source == "master" and self._over(unit, source):
            yield Op("CAST", unit.name)
        yield from self._turn(unit, source, "flat")
        if unit.coded and not self._over(unit, source):
            formats = "+".join(dict.fromkeys(segment.codes for segment in unit.segments if segment.codes))
            yield Op("DECODE", unit.name, source=source, target="flat", format=formats)

    def _leave(
        self,
        unit: UnitSpec,
        *,
        forward: bool,
        reduce: Iterator[Op] | tuple[Op, ...] = (),
        again: bool = False,
        first: bool = False,
    ) -> Iterator[Op]:
        table = unit.table_or(self._layout)
        goes = table.comes_and_goes or unit.coded
        if forward and table.held is not None:
            goes = bool(table.held.over)
        if forward and table.held is not None and table.held.over:
            yield Op("HOLD", unit.name, table.held.over)
        # Gradients can leave as soon as all are there; the values stay until another unit begins, because a node of
        # this unit's backward may still read them (a weight that was detached has no gradient to announce it).
        yield from reduce
        if self._kept(unit):
            if first:
                yield Op("KEEP", unit.name)
            return
        # What backward finds full (because forward kept it) it cannot fill again: it stays until it ran the last time.
        if goes and not (again and not forward and table.held is not None and not table.held.over):
            yield Op("FREE", unit.name)

    def _reduces(self, unit: UnitSpec, last: bool) -> Iterator[Op]:
        """Gradients that rest split, or are summed in the order of ranks, are scattered in every micro-batch; what
        remains of the sum waits for the last. Those that rest in a slower tier go there summed over all ranks. On one
        rank those of a micro-batch that are to be added by themselves are, behind it."""
        if not unit.trainable:
            return
        table = unit.table_or(self._layout)
        grads, away = table.grads, table.grads.tier is not Tier.DEVICE
        sums = list(self._turn(unit, "local", "grads"))
        for op in sums:
            if last or away or (table.buffered and op.verb in SCATTERS):
                yield op
                yield Op("WAIT", unit.name, target="grads")
                if table.buffered and op.source == "local" and not away:
                    yield Op("DROP", unit.name)
        if table.buffered and not sums and not away:
            yield from (Op("WAIT", unit.name, target="grads"), Op("DROP", unit.name))
        if away:
            yield Op("STORE", unit.name, source="grads", tier=str(grads.tier))
            yield Op("DROP", unit.name)
        if last and unit.name in self._speculated:
            yield Op("SPECULATE", unit.name, tier=str(unit.table_or(self._layout).updates_on))

    def one_pass(self, forward: bool, last: bool, *, first: bool = False) -> Iterator[Op]:
        for unit in self._roots:
            yield from self._enter(unit, forward=forward, first=first)
        order = self._onward if forward else self._back
        final = {unit.name: i for i, unit in enumerate(order)}  # gradients are complete when it ran for the last time
        entered: set[str] = set()
        around: list[tuple[str, Iterator[Op]]] = []  # units that the one that runs is inside of, and what ends them
        for i, unit in enumerate(order):
            again = final[unit.name] > i
            yield from self._enter(unit, forward=forward, again=unit.name in entered, first=first)
            entered.add(unit.name)
            reduce = () if forward or again else self._reduces(unit, last)
            around.append((unit.name, self._leave(unit, forward=forward, reduce=reduce, again=again, first=first)))
            inside = order[i + 1].inside if i + 1 < len(order) else ""
            while around and around[-1][0] != inside:
                yield from around.pop()[1]
        yield Op("END")
        for unit in self._roots:
            reduce = () if forward else self._reduces(unit, last)
            yield from self._leave(unit, forward=forward, reduce=reduce, first=first)

    def step(self, *, clip: bool, clamp: bool, delayed: bool) -> Iterator[Op]:
        if clamp:
            yield Op("CLAMP")
        logged = list(self._copied())
        yield from (Op("LOG", unit.name, (to,), unit.format("grads", self._layout)) for unit, to in logged)
        if clip:
            yield Op("NORM")
        if self._meets == "signs":
            yield from self.signs()
        for unit, _ in logged:
            yield Op("WAIT", unit.name, target="log")
            if (on := unit.table_or(self._layout).updates_on) is not Tier.DEVICE:
                yield Op("STORE", unit.name, source="log", tier=str(on))
        if logged:
            yield Op("VOTE")
        yield Op("STEP")
        yield from (Op("RELEASE", unit.name) for unit in self._units if self._kept(unit))
        if not delayed:
            yield from self.updates()

    def _copied(self) -> Iterator[tuple[UnitSpec, str]]:
        """Units of whose states another rank holds a copy, and along which axis it is."""
        for unit in self._units:
            table = unit.table_or(self._layout)
            if unit.trainable and table.copies is not None and table.copied:
                yield unit, table.copies.to

    def signs(self) -> Iterator[Op]:
        """Momentum is averaged by signs."""
        signs, axes = self._layout.signs, self._mesh.rare
        assert signs is not None
        bundles = list(self._bundles())
        for verb, format in (("PUSH", signs.format), ("PULL", signs.back)):
            for several in bundles:
                yield from (Op("BLEND" if verb == "PUSH" else "SERVE", unit.name) for unit in several)
                if axes:
                    yield Op(verb, _range(several), axes, format)
            yield from (Op("WAIT", _range(several), target="outer") for several in bundles if axes)
        yield from (Op("GIVE", unit.name) for several in bundles for unit in several)

    def _bundles(self) -> Iterator[list[UnitSpec]]:
        """Neighbouring units whose momentum is sent at once."""
        several: list[UnitSpec] = []
        room = float(BUNDLE)
        for unit in self._units:
            if unit.trainable:
                parts = unit.table_or(self._layout).master.parts(self._mesh)
                size = sum(segment.length for segment in unit.segments if segment.trainable) / parts
                if several and size > room:
                    yield several
                    several, room = [], float(BUNDLE)
                several.append(unit)
                room -= size
        if several:
            yield several

    def together(self) -> Iterator[Op]:
        """Ranks that went their own ways between signs meet, outside of a step."""
        yield from self.signs()
        waits: list[Op] = []
        for unit in self._units:
            whole = unit.trainable and unit.table_or(self._layout).params is not None
            for op in self._turn(unit, "master", "params") if whole else ():
                yield op
                waits.append(Op("WAIT", unit.name, target="params"))
        yield from waits

    def shared(self) -> Iterator[Op]:
        """Sums of gradients of what several stages have."""
        found = [u.name for u in self._units if any(s.places and s.trainable for s in u.segments)]
        if found:  # of several units at once, as ranks of other stages may have them in another order
            yield Op("SHARE", RANGE.join(dict.fromkeys((found[0], found[-1]))), self._mesh.stages)

    def outer(self, section: str) -> Iterator[Op]:
        """What a section of a round of outer steps does, fragment by fragment."""
        outer = self._layout.outer
        assert outer is not None
        trained = [unit for unit in self._units if unit.trainable]
        sizes = [sum(s.numel for s in unit.segments if s.trainable) for unit in trained]
        places = [outer.fragment_of(sizes, number) for number in range(len(trained))]
        for fragment in range(outer.fragments):
            yield Op("FRAGMENT", str(fragment))
            waits: list[Op] = []
            for unit in (unit for unit, place in zip(trained, places, strict=True) if place == fragment):
                yield from self._outer(unit, section, waits)
            yield from waits

    def _outer(self, unit: UnitSpec, section: str, waits: list[Op]) -> Iterator[Op]:
        axes, format = self._mesh.rare, unit.outer_format(self._layout)
        if section == "outer_send":
            yield Op("DIFF", unit.name, format=unit.outer_dtype(self._layout))
        elif axes:
            yield Op("WAIT", unit.name, target="outer")
        if section == "outer_step":
            yield Op("OUTER", unit.name)
        if section == "outer_take":
            yield Op("MIX", unit.name)
            for op in self._turn(unit, "master", "params") if unit.table_or(self._layout).params is not None else ():
                yield op
                waits.append(Op("WAIT", unit.name, target="params"))
        elif axes:
            yield Op("PUSH" if section == "outer_send" else "PULL", unit.name, axes, format)

    def behind(self) -> Iterator[Op]:
        """Updates, in the order in which the next backward needs the memory of the gradients."""
        for unit in (*dict.fromkeys(self._back), *self._roots):
            if unit.trainable:
                yield from self._update(unit)

    def updates(self, *, behind: bool = False) -> Iterator[Op]:
        """The updates of all units, and what brings what they give to where it is read; only that of those that are
        done ``behind`` their step."""
        waits: list[Op] = []
        for unit in self._units:
            if unit.trainable:
                if not behind:
                    yield from self._update(unit)
                yield from self._give(unit)
                whole = unit.table_or(self._layout).params is not None
                for op in self._turn(unit, "master", "params") if whole else ():
                    yield op
                    waits.append(Op("WAIT", unit.name, target="params"))
        for unit, _ in self._copied():  # while what was updated is on its way
            yield from self._mirror(unit)
        yield from waits

    def _mirror(self, unit: UnitSpec) -> Iterator[Op]:
        """The update of the copy that this rank holds, and what brings it to where originals are updated, and back."""
        table = unit.table_or(self._layout)
        on, rests = table.updates_on, table.copies_rest(trainable=True).tier
        if rests is not on:
            yield Op("FETCH", unit.name, source="copies", tier=str(rests))
        yield Op("MIRROR", unit.name, tier=str(on) if on is not Tier.DEVICE else "")
        if rests is not on:
            yield Op("STORE", unit.name, source="copies", tier=str(rests))

    def _update(self, unit: UnitSpec) -> Iterator[Op]:
        """The update of a unit, and what brings its states to where it computes, and back."""
        table = unit.table_or(self._layout)
        on = table.updates_on
        host = on is not Tier.DEVICE
        away = [(name, cell.tier) for name, cell in table.cells().items() if name in UPDATED and cell.tier is not on]
        read = away + [("grads", table.grads.tier)] * (table.grads.tier is Tier.DISK)
        yield from (
            Op("FETCH", unit.name, source=name, tier=str(tier)) for name, tier in read if tier is not Tier.DEVICE
        )
        if host and table.grads.tier is Tier.DEVICE:
            yield Op("STORE", unit.name, source="grads", tier=str(on))
        if self._stashes:
            yield Op("STASH", unit.name)
        yield Op("UPDATE", unit.name, tier=str(on) if host else "")
        yield from (Op("STORE", unit.name, source=name, tier=str(tier)) for name, tier in away)

    def _give(self, unit: UnitSpec) -> Iterator[Op]:
        """What brings the new ``params`` of this rank from where they were updated to where they rest."""
        table = unit.table_or(self._layout)
        on = table.updates_on
        if on is not Tier.DEVICE and table.params is not None:
            if table.params.tier is Tier.DEVICE:
                yield Op("FILL", unit.name, source="master", target="params", tier=str(on))
            elif table.params.tier is Tier.DISK and any(self._copies(segment) for segment in unit.segments):
                yield Op("STORE", unit.name, source="params", tier=str(table.params.tier))

    def _copies(self, segment: SegmentSpec) -> bool:
        """Whether a segment has ``params`` beside ``master``, in bytes of their own, that an update writes."""
        aliases = segment.table_or(self._layout).aliases(own=segment.own)
        return segment.trainable and "master" not in aliases


def _range(units: Sequence[UnitSpec]) -> str:
    return RANGE.join(dict.fromkeys((units[0].name, units[-1].name)))


def parse(text: str) -> Program:
    """The program that prints as ``text``: ``parse(str(program)) == program``, marked, with remarks, or not.

    Raises:
        ConfigError: a line is no operation; the message names the line. Or a section that follows from others is given
            otherwise.
    """
    sections: dict[str, list[Op]] = {}
    current: list[Op] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].rstrip().removesuffix(MARK)
        words = line.split()
        if not words:
            continue
        if len(words) == 1 and words[0].endswith(":") and words[0][:-1] in (*SECTIONS, *OTHERS):
            current = sections.setdefault(words[0][:-1], [])
        elif (name := _parse_likeness(line, sections)) is not None:
            current = sections[name]
        elif current is not None and (op := _parse_op(words)) is not None:
            current.append(op)
        else:
            raise ConfigError(
                f"line {number} of the program, {line.strip()!r}, is neither a section nor an operation in one."
            )
    made = {name: tuple(sections.pop(name)) for name in MADE if name in sections}
    fields: dict[str, Any] = {name: tuple(ops) for name, ops in sections.items()}
    program = Program(**fields, also=tuple(made))
    for name, ops in made.items():
        if ops != program.section(name):
            raise ConfigError(f"the section {name!r} of the program is not what follows from the others.")
    return program


def _parse_likeness(line: str, sections: dict[str, list[Op]]) -> str | None:
    """The section that a line says to be like one of ``sections``, which then has it; None: it says no such thing."""
    found = LIKENESS.fullmatch(line.strip())
    if found is None or found[1] not in LIKE or found[2] not in sections:
        return None
    name, base, kind, words = found.groups()
    verbs = set((words or "").split(", "))
    sections[name] = [op for op in sections[base] if not kind or (op.verb in verbs) == (kind == "only")]
    return name


def _parse_op(words: Sequence[str]) -> Op | None:
    """The operation in these words, if it has exactly the operands of its verb."""
    verb, *operands = words
    takes = VERBS.get(verb)
    if takes is None:
        return None
    if {"source", "target"} <= {*takes.operands}:
        at = takes.operands.index("target")
        if operands[at : at + 1] != ["->"]:
            return None
        del operands[at]
    names = takes.operands if len(operands) == len(takes.operands) else (*takes.operands, *takes.may)
    if len(operands) != len(names):
        return None
    fields = {name: _value(name, word) for name, word in zip(names, operands, strict=True)}
    return None if None in fields.values() else Op(verb, **fields)


def _value(name: str, word: str) -> Any:
    """An operand out of its word; None: it is none."""
    if name == "axes":
        inside = word[1:-1].split("+") if word.startswith("[") and word.endswith("]") else [""]
        return tuple(inside) if all(inside) else None
    if name == "tier":
        return word[1:] if word.startswith("@") and word[1:] in list(Tier) else None
    return word if name not in ("source", "target") or word in TENSORS else None
