"""How long bytes live: what each operation of a program holds, and what it gives back.

The one table of bytes over operations. ``explain`` and ``layout="auto"`` ask it along a program alone, a plan along a
program and a trace of the model (``planner/memory.py``).

    gathered       a unit's parameters, from the first of CAST READ FILL ALL_GATHER to FREE
    gradients      the buffer of a unit, from GRADS, or its first gradient, to DROP
    transport      what a reduction needs besides, to its WAIT; payloads of formats
    arranged       gradients in the order of the ranks that sum parts of them, to that WAIT
    spare          buffers that wait for the next taker, where the allocator of the device does not do that itself
    on their way   a state on its way to its update, from FETCH to STORE
    update         what an update needs besides
    outer          gradients of outer steps, from DIFF to MIX, and their sums, from PUSH to OUTER
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from shardfold.plan.bind import Bound
from shardfold.plan.cost import encoded_bytes, fetched_bytes, is_encoded, summed_bytes
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import DATA_AXES, ITEMSIZE, Tier
from shardfold.plan.placement import UnitSpec
from shardfold.plan.program import REDUCTIONS, Op

__all__ = ["ALONE", "CPU", "GPU", "WORKSPACE", "Behaviour", "Lifetimes", "in_use", "peak_bytes", "room_bytes"]

BLOCK = 256 * 1024  # of the transports near and sockets
WORKSPACE = 16 * 1024 * 1024
"""Of cuBLAS beyond what it keeps: on an H200 with PyTorch 2.11, peaks inside of products were 17 to 30 MiB higher than
all tensors."""
CPU_BLOCK = 64 * 1024
DEVICE_BLOCK = 64 * 1024 * 1024


@dataclass(frozen=True)
class Behaviour:
    """How a device and its transport use memory.

    Attributes:
        streams: the device has streams: its allocator keeps what is given back, and collectives run beside.
        transport: ``near`` (ranks read each other's memory), ``sockets`` (connections of the ranks' own), ``gloo`` or
            ``nccl``; ``none``: it is left out.
        workspace: bytes that libraries take while they compute products.
    """

    streams: bool
    transport: str
    workspace: float = 0.0

    def temporary(self, num_bytes: float, ranks: int) -> float:
        """Bytes that a reduction of ``num_bytes`` holds besides, until its WAIT."""
        held = {"none": 0.0, "near": 0.0, "sockets": 0.0, "gloo": num_bytes, "nccl": num_bytes / ranks}
        return held[self.transport]

    def room(self, ranks: int) -> float:
        """Bytes that the transport keeps for its sums."""
        return ranks * BLOCK if self.transport in ("near", "sockets") else 0.0

    @property
    def reduces_in_flight(self) -> int:
        """How many units' gradients go on their way beside backward, where nobody says: over sockets they do without
        the cores that compute, as far as the system's buffers reach."""
        return int(self.streams or self.transport == "sockets")

    @property
    def block(self) -> int:
        """Elements that one call of an update handles."""
        return DEVICE_BLOCK if self.streams else CPU_BLOCK


CPU = Behaviour(streams=False, transport="near")
GPU = Behaviour(streams=True, transport="nccl", workspace=WORKSPACE)
ALONE = Behaviour(streams=True, transport="none")
"""The engine's own bytes alone: what allocators keep and transports take is left out."""


Coding = Callable[..., float]
"""Gives the most bytes of temporaries of a format that encodes or decodes, as ``planner.coding.coding_bytes`` does."""


def _uncounted(*_: object, **__: object) -> float:
    return 0.0


class Lifetimes:
    """What of the engine's lives on the device of one rank, besides what rests.

    Args:
        bound: whose operations are told, in the order in which they run.
        behaviour: of the device and its transport.
        clip: the norm of the gradients is taken.
        adopts: tensors that autograd makes are kept as gradients.
        coding: bytes that formats hold while they encode and decode; None: they are not counted.
    """

    def __init__(
        self,
        bound: Bound,
        behaviour: Behaviour,
        *,
        clip: bool = False,
        adopts: bool = False,
        coding: Coding | None = None,
    ) -> None:
        self._bound, self._behaviour, self._clip, self._adopts = bound, behaviour, clip, adopts
        self._coding = coding or _uncounted
        self._layout, self._mesh, self._units = bound.layout, bound.mesh, bound.by_name
        self._held: dict[tuple[str, str], float] = {}  # by unit and what it is
        self._terms: dict[str, float] = {}  # by what it is
        self._shown: Mapping[str, float] | None = None  # if nothing has changed since
        self._sum = 0.0
        self._spares: dict[tuple[float, str], int] = {}
        self._taken: dict[tuple[str, str], list[tuple[float, str]]] = {}  # buffers that may be spares
        self._sums: dict[str, list[tuple[float, str]]] = {}  # by unit, what decodes its sums
        self._crossing: set[str] = set()  # units whose sums go between nodes
        self._decodes: dict[tuple[str, str], float] = {}  # temporaries of payloads that are under way

    @property
    def terms(self) -> Mapping[str, float]:
        """Bytes that live now, by what they are for."""
        if self._shown is None:
            shown = {kind: n for kind, n in self._terms.items() if n}
            if spare := sum(ITEMSIZE[dtype] * numel * count for (numel, dtype), count in self._spares.items()):
                shown["spare"] = spare
            self._shown, self._sum = shown, sum(shown.values())
        return self._shown

    @property
    def total(self) -> float:
        """The sum of :attr:`terms`."""
        return self._sum if self._shown is not None else sum(self.terms.values())

    def held(self, unit: str, what: str) -> float:
        """Bytes of a unit that are for that."""
        return self._held.get((unit, what), 0.0)

    def hold(self, unit: str, what: str, num_bytes: float) -> None:
        """So many bytes live now that are of the unit and of that kind."""
        before = self._held.get((unit, what), 0.0)
        self._held[unit, what] = num_bytes
        self._terms[what] = self._terms.get(what, 0.0) + num_bytes - before
        self._shown = None

    def _let_go(self, unit: str, what: str) -> None:
        """They live no more."""
        if (num_bytes := self._held.pop((unit, what), 0.0)) != 0.0:
            self._terms[what] -= num_bytes
            self._shown = None

    # -- operations

    def begin(self, op: Op) -> tuple[float, str]:
        """An operation begins. What it holds besides while it runs, in bytes, and what that is for."""
        unit = self._units.get(op.unit)
        if unit is None:
            return (self._norm(), "norm") if op.verb == "NORM" else (0.0, "")
        more, what = 0.0, ""
        if op.verb in ("CAST", "FILL", "ALL_GATHER", "DECODE") and op.target in ("flat", "node"):
            self._gather(op, unit)
        elif op.verb == "GRADS":
            self.buffer(unit)
        elif op.verb in REDUCTIONS:
            self._reduce(op, unit)
        elif op.verb == "FETCH":
            self._fetch(op, unit)
        elif op.verb == "UPDATE":
            more, what = self._update(unit), "update"
        elif op.verb in ("DIFF", "PUSH") and self._layout.outer is not None:
            self._change(op, unit)
        elif op.verb in ("F", "B"):
            self._give_back(unit.name, "payloads")
        elif op.verb == "WAIT":
            self._take(unit.name, "sums", self._sums.pop(unit.name, []))
        if coded := self._coded(op, unit):
            more, what = more + coded, "encoding"
        return more, what

    def end(self, op: Op) -> None:
        """It is over: what it gives back lives no more."""
        if op.unit not in self._units:
            return
        if op.verb in ("FREE", "RELEASE"):
            self._let_go(op.unit, "gathered")
            self._give_back(op.unit, "payloads")
        elif op.verb == "DROP":
            self._give_back(op.unit, "gradients")
        elif op.verb == "WAIT":
            self._give_back(op.unit, "sums")
            self._give_back(op.unit, "transport")
            self._give_back(op.unit, "arranged")
            if op.unit in self._crossing:
                self._crossing.discard(op.unit)
                self._give_back(op.unit, "sums of a node")
        elif op.verb == "STORE":
            self._let_go(op.unit, f"{op.source} on their way")
        elif op.verb == "OUTER":
            self._give_back(op.unit, "outer sums")
        elif op.verb == "MIX":
            self._give_back(op.unit, "outer gradients")

    def _gather(self, op: Op, unit: UnitSpec) -> None:
        split = [s for s in unit.segments if s.comes_and_goes(self._layout)]
        self.hold(unit.name, "gathered", sum(s.length * ITEMSIZE[s.dtype] for s in split))
        if op.verb == "ALL_GATHER" and op.source != "node":  # of two hops, the first one's payload serves both
            self._take(unit.name, "payloads", [(encoded_bytes(op, self._layout, unit, self._mesh), "int8")])

    def buffer(self, unit: UnitSpec) -> None:
        """What the unit's gradients are added to is there from now on."""
        if (unit.name, "gradients") not in self._taken:
            flats = [(float(s.length), s.dtype_for("reduce", self._layout)) for s in unit.segments if s.trainable]
            self._take(unit.name, "gradients", flats)

    def _reduce(self, op: Op, unit: UnitSpec) -> None:
        ranks = prod(self._mesh[axis] for axis in op.axes)
        over = unit.table_or(self._layout).master.over
        if op.verb == "REDUCE_SCATTER" and over and {*over} < {*op.axes}:
            flats = [(float(s.length), s.dtype_for("reduce", self._layout)) for s in unit.segments if s.trainable]
            self._take(unit.name, "arranged", flats)
        if encoded_bytes(op, self._layout, unit, self._mesh):
            self._sum_encoded(op, unit, ranks)
        elif op.verb == "REDUCE_SCATTER" and self._behaviour.temporary(1.0, ranks):
            parts = self._behaviour.temporary(1.0, ranks) ** -1
            dtypes = [(s.length / parts, s.dtype_for("reduce", self._layout)) for s in unit.segments if s.trainable]
            self._take(unit.name, "transport", dtypes)
        if self._behaviour.streams and (summed := summed_bytes(op, self._layout, unit, self._mesh)):
            self.hold(unit.name, "grads on their way", summed)

    def _sum_encoded(self, op: Op, unit: UnitSpec, ranks: int) -> None:
        """What is sent and what comes, of each segment, and between two hops what the first has summed."""
        segments, slices = op.moves(unit), self._slices(op)
        payloads, sums = list[tuple[float, str]](), list[tuple[float, str]]()
        for segment, one in zip(segments, op.each(len(segments)), strict=True):
            if is_encoded(one, segment, self._layout):
                payloads += [(FORMATS[one.format].nbytes(segment.length) / slices, "int8")] * 2
                sums.append((2 * segment.length / slices / ranks, "fp32"))  # what decodes has a sum, and what is added
        self._sums[unit.name] = sums
        if op.target == "node":
            here = self._mesh[DATA_AXES[1]]
            self._take(unit.name, "sums of a node", [(segment.length / here, "fp32") for segment in segments])
        if op.source == "node":
            self._crossing.add(unit.name)
        self._take(unit.name, "transport", payloads)

    def _coded(self, op: Op, unit: UnitSpec) -> float:
        """Temporaries of formats: what encodes at a collective, what decodes where it is waited for."""
        if op.verb in ("F", "B", "WAIT"):
            return self._decodes.pop((op.unit, "grads" if op.verb == "WAIT" else "flat"), 0.0)
        if op.verb == "DECODE":
            each = ((s.codes, s.dtype, s.length) for s in op.moves(unit))
            return max(self._coding(*one, decodes=True) for one in each)
        if op.verb != "ALL_GATHER" and op.verb not in REDUCTIONS:
            return 0.0
        gathers, segments = op.verb == "ALL_GATHER", op.moves(unit)
        ranks, encodes, decodes = prod(self._mesh[axis] for axis in op.axes), 0.0, 0.0
        for segment, one in zip(segments, op.each(len(segments)), strict=True):
            if is_encoded(one, segment, self._layout):
                length = segment.length // self._slices(op)
                here, there = (length // ranks, length)[:: 1 if gathers else -1]
                dtype = segment.dtype if gathers else segment.dtype_for("reduce", self._layout)
                if op.target == "node" and not gathers:  # what goes to each rank is in as many parts as there are nodes
                    nodes = self._mesh[DATA_AXES[0]]
                    part = here // ranks // nodes
                    encodes = max(encodes, self._coding(one.format, dtype, part, decodes=False, parts=nodes))
                elif not segment.codes:
                    encodes = max(encodes, self._coding(one.format, dtype, here, decodes=False))
                becomes = dtype if gathers else "fp32"
                decodes = max(decodes, self._coding(one.format, becomes, there, decodes=True))
        if decodes:
            self._decodes[op.unit, "flat" if gathers else "grads"] = decodes
        return encodes

    def _slices(self, op: Op) -> int:
        """Of so many slices of what lies between two hops a rank has one."""
        return self._mesh[DATA_AXES[1]] if op.source == "node" else 1

    def _fetch(self, op: Op, unit: UnitSpec) -> None:
        if unit.table_or(self._layout).updates_on is Tier.DEVICE:
            num_bytes = fetched_bytes(op, self._layout, unit, self._mesh, self._bound.num_moments)
            self.hold(unit.name, f"{op.source} on their way", num_bytes)

    def _change(self, op: Op, unit: UnitSpec) -> None:
        """The outer gradients of a unit, which stay until they are taken in, or the sums of this group's part; where
        groups may be away, what each of them sends of it."""
        outer = self._layout.outer
        apart = outer is not None and outer.quorum is not None
        parts = 1 if op.verb == "DIFF" or apart else prod(self._mesh[axis] for axis in op.axes)
        shards = [
            (s.length / s.table_or(self._layout).master.parts(self._mesh) / parts, s.outer_dtype(self._layout))
            for s in unit.segments
            if s.trainable
        ]
        self._take(unit.name, "outer gradients" if op.verb == "DIFF" else "outer sums", shards)
        if op.verb == "PUSH" and not apart:
            kept = self._behaviour.temporary(1.0, parts) * parts
            self._take(unit.name, "transport", [(numel * kept, dtype) for numel, dtype in shards])

    def _update(self, unit: UnitSpec) -> float:
        """A block of the gradients in the dtype of the master; all of a shard's, where one call updates it all; nothing
        where a compiled pass does."""
        if unit.table_or(self._layout).updates_on is not Tier.DEVICE:
            return 0.0
        most = 0.0
        for s in unit.segments:
            if s.trainable:
                table, dtype = s.table_or(self._layout), s.dtype_for("master", self._layout)
                shard = s.length / table.master.parts(self._mesh)
                copies = table.params is not None and "master" not in table.aliases(own=s.own)
                at_once = not copies and s.dtype_for("grads", self._layout) == dtype
                adopted = self._adopts and at_once and not self._clip and not copies
                block = shard if at_once else min(shard, self._behaviour.block)
                one_pass = copies and self._bound.overlap.compiled_update
                most = max(most, 0.0 if adopted or one_pass else block * ITEMSIZE[dtype])
        return most

    def _norm(self) -> float:
        """A row of sums of the largest shard's gradients."""
        numels = [
            s.length / s.table_or(self._layout).master.parts(self._mesh)
            for u in self._bound.units
            for s in u.segments
            if s.trainable
        ]
        return max(numels, default=0.0) / 4096 * 16

    # -- buffers for a short while

    def _take(self, unit: str, what: str, flats: Sequence[tuple[float, str]]) -> None:
        flats = [(numel, dtype) for numel, dtype in flats if numel]
        if not flats:
            return
        self._taken[unit, what] = list(flats)
        for flat in flats:
            if self._spares.get(flat):
                self._spares[flat] -= 1
        self.hold(unit, what, sum(numel * ITEMSIZE[dtype] for numel, dtype in flats))

    def _give_back(self, unit: str, what: str) -> None:
        for flat in self._taken.pop((unit, what), ()):
            if not self._behaviour.streams and self._spares.get(flat, 0) < 2:
                self._spares[flat] = self._spares.get(flat, 0) + 1
        self._let_go(unit, what)

    def forget_spares(self) -> None:
        """Buffers that wait for the next taker go."""
        self._spares.clear()
        self._shown = None


def room_bytes(bound: Bound, behaviour: Behaviour) -> float:
    """Bytes that the transport keeps for its sums, by the most ranks that one is over."""
    program = bound.program
    sums = [op for op in program.last if op.verb in REDUCTIONS and not _all_encoded(op, bound)]
    sums += [op for op in program.outer_send if op.verb == "PUSH" and not _all_encoded(op, bound)]
    ranks = max((prod(bound.mesh[axis] for axis in op.axes) for op in sums), default=0)
    if bound.mesh.get("tensor", 1) > 1:  # layers that ranks share sum what they give
        ranks = max(ranks, bound.mesh["tensor"])
    return behaviour.room(ranks)


def _all_encoded(op: Op, bound: Bound) -> bool:
    """Whether all that a reduction sums travels in a format, so that the transport sums nothing."""
    segments, layout = op.moves(bound.by_name[op.unit]), bound.layout
    if op.verb == "PUSH":
        each = zip(segments, op.each(len(segments)), strict=True)
        return all(FORMATS[one.format].native != s.outer_dtype(layout) for s, one in each)
    return all(is_encoded(one, s, layout) for s, one in zip(segments, op.each(len(segments)), strict=True))


def in_use(bound: Bound, behaviour: Behaviour, *, coding: Coding | None = None) -> Iterator[tuple[str, int, float]]:
    """Bytes that are held beside what rests while each operation of a step of two micro-batches runs, without
    activations: ``(section, number, bytes)``."""
    lifetimes = Lifetimes(bound, behaviour, coding=coding)
    first = "first" if bound.program.first else "forward"
    for section in (first, "backward", "forward", "last", "arrive", "step", "beside", "behind"):
        for number, op in enumerate(bound.program.section(section)):
            more, _ = lifetimes.begin(op)
            yield section, number, lifetimes.total + more
            lifetimes.end(op)
        if section in ("backward", "last"):
            lifetimes.forget_spares()


def peak_bytes(bound: Bound, behaviour: Behaviour, *, rest: float, coding: Coding | None = None) -> float:
    """The most bytes of a step on one rank, without activations and the model's buffers: ``rest`` bytes at rest,
    :func:`in_use` beside them, the transport's room, and the largest parameter's gradient as autograd makes it.

    Gradients that wait whole (late units, ``no_sync``) come on top.
    """
    trained = [segment for unit in bound.units for segment in unit.segments if segment.trainable]
    made = max((slot.numel * ITEMSIZE[segment.dtype] for segment in trained for slot in segment.slots), default=0)
    uses = in_use(bound, behaviour, coding=coding)
    return rest + room_bytes(bound, behaviour) + max((most for *_, most in uses), default=0.0) + made
