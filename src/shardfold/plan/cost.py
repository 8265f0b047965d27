"""What a table holds and what a program sends, as sums: the same operations that will run, never a second formula.

Bytes at rest come from the table's cells, bytes on the link and bytes of buffers from the program's operations; tests
hold the papers' expressions beside the sums (ZeRO, arXiv 1910.02054, sections 5 and 7).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeVar

from shardfold.plan.checks import Folders
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import DATA_AXES, ITEMSIZE, Axes, Layout, Sizes, Tier
from shardfold.plan.placement import SegmentSpec, UnitSpec
from shardfold.plan.program import COLLECTIVES, MOVES, REDUCTIONS, SCATTERS, Op, Program

__all__ = [
    "STATES",
    "Codec",
    "Moved",
    "Sent",
    "coding_seconds",
    "encoded_bytes",
    "fetched_bytes",
    "is_encoded",
    "is_rounded",
    "moves",
    "op_bytes",
    "parts_of",
    "regions_in",
    "resting_bytes",
    "ring_bytes",
    "room_for",
    "section_traffic",
    "snapshot_bytes",
    "state_bytes",
    "step_of",
    "summed",
    "summed_bytes",
    "tier_bytes",
    "traffic",
    "update_bytes",
]

Kind = TypeVar("Kind", "Sent", "Moved")
OUTER = ("global", "momentum", "worker", "server")
COPIED = ("copies", "log")
STATES = ("params", "held", "grads", "master", "moments", "format", *OUTER, *COPIED)
"""What rests, and ``format``: what the formats of reductions keep, ``global`` and ``momentum``: what outer steps do,
``worker`` and ``server``: what signs have lost, ``copies`` and ``log``: what this rank holds of another's master and
moments, and the gradients that it updates these with."""


class Sent(NamedTuple):
    """A kind of collective: what it is for, its verb, the axes it crosses."""

    purpose: str
    op: str
    axes: Axes


class Moved(NamedTuple):
    """What travels to and from a slower tier: that tier, and which way, one of ``MOVES``."""

    tier: str
    op: str


def segment_bytes(
    layout: Layout, segment: SegmentSpec, mesh: Sizes, num_moments: int, elements: float
) -> dict[str, float]:
    """Bytes that ``elements`` of a segment need on one rank, by state, under a bound layout."""
    frozen = not segment.trainable
    layout = segment.table_or(layout)
    alias = layout.aliases(own=segment.own)
    bytes_: dict[str, float] = {}
    for state, cell in layout.cells().items():
        if state in alias or (frozen and state not in ("params", "held")):
            continue
        if state in ("params", "held"):
            bytes_[state] = segment.value_bytes(elements) / cell.parts(mesh)
            continue
        count = num_moments if state == "moments" else 1
        bytes_[state] = elements * ITEMSIZE[segment.dtype_for(state, layout)] * count / cell.parts(mesh)
    if frozen and layout.params is None:  # nothing to cast from: the compute copy itself rests, split as master
        bytes_["params"] = segment.value_bytes(elements) / layout.rest.parts(mesh)
    keeps = FORMATS[segment.format_for("reduce", layout)].state
    if keeps is not None and not frozen:
        second = 1 / mesh[DATA_AXES[1]] if layout.reduce.hops == 2 else 0
        bytes_["format"] = elements * ITEMSIZE[keeps] * (1 + second)
    if layout.outer is not None and not frozen:
        bytes_["global"] = elements * ITEMSIZE[segment.outer_dtype(layout)] / layout.master.parts(mesh)
        if layout.outer.beta:
            parts = mesh[layout.outer.axis] if layout.outer.quorum is None else 1  # whoever is there steps it on
            bytes_["momentum"] = bytes_["global"] / parts
    if layout.signs is not None and layout.signs.error and not frozen and mesh[layout.signs.axis] > 1:
        bytes_["worker"] = elements * 4 / layout.master.parts(mesh)
        bytes_["server"] = bytes_["worker"] / mesh[layout.signs.axis]
    if frozen and layout.is_copied(trainable=False):
        bytes_["copies"] = segment.value_bytes(elements) / layout.rest.parts(mesh)
    if layout.copied and not frozen:
        master, moments, grads = (ITEMSIZE[segment.dtype_for(s, layout)] for s in ("master", "moments", "grads"))
        bytes_["copies"] = elements * (master + num_moments * moments) / layout.master.parts(mesh)
        bytes_["log"] = elements * grads / layout.master.parts(mesh)
    return bytes_


def state_bytes(
    layout: Layout,
    units: Iterable[UnitSpec],
    mesh: Sizes,
    *,
    num_moments: int = 2,
    padded: bool = False,
    kept: Callable[[SegmentSpec], float] | None = None,
) -> dict[str, float]:
    """Bytes at rest on one rank by state: :func:`resting_bytes`, whatever the tier."""
    total: dict[str, float] = {}
    found = resting_bytes(layout, units, mesh, num_moments=num_moments, padded=padded, kept=kept)
    for (state, _), n in found.items():
        total[state] = total.get(state, 0.0) + n
    return total


def resting_bytes(
    layout: Layout,
    units: Iterable[UnitSpec],
    mesh: Sizes,
    *,
    num_moments: int = 2,
    padded: bool = False,
    kept: Callable[[SegmentSpec], float] | None = None,
) -> dict[tuple[str, Tier], float]:
    """Bytes at rest on one rank by state and tier, in table order; ``padded=True`` counts what is really allocated.
    ``kept`` says what the optimizer keeps of a trainable segment on that rank, where it is no number of moments per
    element."""
    total = {(state, tier): 0.0 for state in STATES for tier in Tier}
    for unit in units:
        for segment in unit.segments:
            elements, table = segment.length if padded else segment.numel, segment.table_or(layout)
            for state, n in segment_bytes(layout, segment, mesh, num_moments, elements).items():
                total[state, tier_of(table, state, trainable=segment.trainable)] += (
                    kept(segment) if kept and state == "moments" else n
                )
    return {key: n for key, n in total.items() if n}


def tier_bytes(resting: Mapping[tuple[str, Tier], float]) -> dict[Tier, float]:
    """Bytes at rest by tier, of what :func:`resting_bytes` gives."""
    total: dict[Tier, float] = {}
    for (_, tier), n in resting.items():
        total[tier] = total.get(tier, 0.0) + n
    return total


def regions_in(
    tier: Tier, layout: Layout, units: Iterable[UnitSpec], mesh: Sizes, num_moments: int
) -> dict[Folders, list[int]]:
    """Bytes of each region that rests in a tier on one rank, by the folder of its cell; moments are behind the others,
    as they are made last."""
    found: dict[Folders, list[tuple[bool, int]]] = {}
    for unit in units:
        for segment in unit.segments:
            table = segment.table_or(layout)
            for state, nbytes in segment_bytes(layout, segment, mesh, num_moments, segment.length).items():
                cell = table.cells().get(state) or table.rest
                if state in COPIED:
                    cell = table.copies_rest(trainable=segment.trainable)
                rests = table.updates_on if state == "log" else cell.tier
                if state not in ("format", *OUTER) and rests is tier:
                    last = state in ("moments", *COPIED)
                    count = num_moments if state == "moments" else 1
                    count += num_moments if state == "copies" and segment.trainable else 0
                    if count:  # SGD without momentum has no moments
                        found.setdefault(cell.folder, []).extend([(last, int(nbytes) // count)] * count)
    return {folder: [size for _, size in sorted(sizes, key=lambda each: each[0])] for folder, sizes in found.items()}


def tier_of(layout: Layout, state: str, *, trainable: bool = True) -> Tier:
    """Where a state rests; what a frozen parameter keeps in place of ``params`` lies as the others' master."""
    if state == "format":
        return Tier.DEVICE
    if state in COPIED:
        return layout.updates_on if state == "log" else layout.copies_rest(trainable=trainable).tier
    if state in OUTER:
        return Tier(layout.outer.tier) if layout.outer is not None else Tier.DEVICE
    return (layout.cells().get(state) or layout.rest).tier


def moves(
    program: Program,
    layout: Layout,
    units: Iterable[UnitSpec],
    mesh: Sizes,
    times: Mapping[str, int],
    *,
    num_moments: int = 2,
    left_out: Collection[Op] = (),
) -> dict[Moved, tuple[int, float]]:
    """Operations that bring states to the device and back, and the bytes one rank moves in them, of sections run that
    many times each (``beside`` as often as ``step``): ``{kind: (calls, bytes)}``. ``left_out``: of units that the steps
    do not update, as no rank used them."""
    by_name = {unit.name: unit for unit in units}
    total: dict[Moved, tuple[int, float]] = {}
    sums = {"backward": times.get("backward", 0), "last": times.get("last", 0)}
    if first := next((section for section, runs in sums.items() if runs), None):
        sums[first] -= 1  # what is summed first in a step is added to nothing
    for section, every in {**times, "beside": times.get("step", 0)}.items():
        for op in program.section(section) if every else ():
            runs = sums[section] if op.verb == "ADD" else every
            if runs and op.verb in MOVES and op not in left_out:
                calls, moved = total.get(kind := Moved(op.tier, op.verb), (0, 0.0))
                more = fetched_bytes(op, layout, by_name[op.unit], mesh, num_moments)
                total[kind] = calls + runs, moved + runs * more
    return total


def fetched_bytes(op: Op, layout: Layout, unit: UnitSpec, mesh: Sizes, num_moments: int = 2) -> float:
    """Bytes of one rank's part of the state that ``op``, one of ``MOVES``, moves."""
    table = unit.table_or(layout)
    if op.verb == "READ" or (not op.target and op.source in ("params", "master")):
        return sum(_shard_bytes(op, layout, segment, mesh) for segment in op.moves(unit))
    if op.target in ("flat", "params"):  # as what it becomes there
        cell = table.master if op.target == "params" else table.cells()[op.source]
        return sum(segment.value_bytes(segment.length) for segment in op.moves(unit)) / cell.parts(mesh)
    if op.source == "grads":
        parts = table.master.parts(mesh)
        return sum(s.length * ITEMSIZE[s.dtype_for("grads", layout)] for s in op.moves(unit)) / parts
    return sum(
        segment_bytes(layout, segment, mesh, num_moments, segment.length)[op.source] for segment in op.moves(unit)
    )


def _shard_bytes(op: Op, layout: Layout, segment: SegmentSpec, mesh: Sizes) -> float:
    """Bytes of one rank's part of ``params`` or ``master`` of a segment that comes or goes as it rests. Where both are
    the same bytes, an update reads and writes them as ``master``; what is frozen has only the compute dtype."""
    table = segment.table_or(layout)
    if not segment.trainable:
        return segment.value_bytes(segment.length) / table.rest.parts(mesh)
    held = segment_bytes(layout, segment, mesh, 0, segment.length)
    if op.verb == "STORE" and op.source == "params" and "master" in table.aliases(own=segment.own):
        return 0.0
    return held.get(op.source, held.get("params", 0.0))


def snapshot_bytes(layout: Layout, unit: UnitSpec, mesh: Sizes, num_moments: int = 2) -> int:
    """Bytes that one rank needs to update a unit before it is known whether that stands: copies of what the update
    writes, and what it makes of ``params``, which waits there."""
    total = 0.0
    for segment in unit.segments:
        if segment.trainable:
            table = segment.table_or(layout)
            size = ITEMSIZE[segment.dtype_for("master", layout)]
            size += num_moments * ITEMSIZE[segment.dtype_for("moments", layout)]
            if table.params is not None and "master" not in table.aliases(own=segment.own):
                size += ITEMSIZE[segment.dtype]
            total += segment.length * size / table.master.parts(mesh)
    return int(total)


def room_for(sizes: Mapping[str, int], room: int) -> dict[str, int]:
    """Those of ``sizes``, by name, that have room together, the first ones first."""
    found: dict[str, int] = {}
    for name, num_bytes in sizes.items():
        if 0 < num_bytes <= room:
            found[name] = num_bytes
            room -= num_bytes
    return found


def ring_bytes(verb: str, full: float, ranks: int) -> float:
    """Bytes one rank sends for a collective whose whole tensor has ``full`` bytes (ZeRO, section 7); of a
    log it is this rank's part."""
    if ranks == 1:
        return 0.0
    if verb == "LOG":
        return full
    return full * (ranks - 1) / ranks * (2 if verb == "ALL_REDUCE" else 1)


def op_bytes(op: Op, layout: Layout, unit: UnitSpec, mesh: Sizes) -> float:
    """Bytes one rank sends for ``op`` on ``unit``, one of its own."""
    segments = op.moves(unit)
    ranks = prod(mesh[axis] for axis in op.axes)
    parts = parts_of(op, unit.table_or(layout), mesh)
    return sum(
        ring_bytes(op.verb, FORMATS[each.format].nbytes(segment.length) / parts, ranks)
        for segment, each in zip(segments, op.each(len(segments)), strict=True)
    )


def parts_of(op: Op, layout: Layout, mesh: Sizes) -> int:
    """Into how many shards the whole of the tensor is cut that a collective on a unit works on; sums of gradients, and
    what outer steps make, as ``master``, wherever they rest."""
    tensor = op.target if op.purpose == "gather" else op.source
    if tensor in ("flat", "local"):
        return 1
    if tensor == "node":
        return mesh[DATA_AXES[1]]
    return getattr(layout, "master" if tensor in ("grads", "outer") else tensor).parts(mesh)


def traffic(
    program: Program, layout: Layout, units: Sequence[UnitSpec], mesh: Sizes, *, micro_batches: int = 1
) -> dict[Sent, tuple[int, float]]:
    """Collectives of one optimizer step and the bytes one rank sends in them: ``{kind: (calls, bytes)}``."""
    return section_traffic(program, layout, units, mesh, step_of(micro_batches, program))


def step_of(micro_batches: int, program: Program) -> dict[str, int]:
    """How often each section of a program runs in a step."""
    first = int(bool(program.first))
    return {
        "first": first,
        "forward": micro_batches - first,
        "backward": micro_batches - 1,
        "last": 1,
        "step": 1,
        "behind": 1,
        "arrive": 1,
    }


def section_traffic(
    program: Program, layout: Layout, units: Sequence[UnitSpec], mesh: Sizes, times: Mapping[str, int]
) -> dict[Sent, tuple[int, float]]:
    """As :func:`traffic`, for sections (and ``quiet``) run that many times each; calls count each segment,
    but those of what the table bundles, of which one carries all."""
    by_name = {unit.name: unit for unit in units}
    total: dict[Sent, tuple[int, float]] = {}
    for section, runs in times.items():
        for op in program.section(section):
            if op.verb in COLLECTIVES and runs:
                key, several = Sent(op.purpose, op.verb, op.axes), op.among(by_name)
                calls, sent = total.get(key, (0, 0.0))
                more = sum(op_bytes(op, layout, unit, mesh) for unit in several)
                each = 1 if layout.bundles and op.purpose == "outer" else len(op.moves(several[0]))
                total[key] = calls + runs * each, sent + runs * more
    return total


def summed(each: Iterable[Mapping[Kind, tuple[int, float]]]) -> dict[Kind, tuple[int, float]]:
    """Calls and bytes of all of them, by kind."""
    total: dict[Kind, tuple[int, float]] = {}
    for counts in each:
        for kind, (calls, nbytes) in counts.items():
            before = total.get(kind, (0, 0.0))
            total[kind] = before[0] + calls, before[1] + nbytes
    return total


def encoded_bytes(op: Op, layout: Layout, unit: UnitSpec, mesh: Sizes) -> float:
    """Bytes that a collective needs for payloads and, to sum, for a sum and a row of fp32; 0 where tensors travel as
    they lie."""
    segments, total = op.moves(unit), 0.0
    ranks = prod(mesh[axis] for axis in op.axes)
    slices = mesh[DATA_AXES[1]] if op.source == "node" and op.verb in REDUCTIONS else 1
    for segment, each in zip(segments, op.each(len(segments)), strict=True):
        form = FORMATS[each.format]
        if "node" in (op.source, op.target) and op.verb in REDUCTIONS:
            total += 4 * segment.length / mesh[DATA_AXES[1]]
        if is_encoded(each, segment, layout):
            payload, length = form.nbytes(segment.length) / slices, segment.length / slices
            total += payload if op.verb == "ALL_GATHER" else 2 * payload + 2 * 4 * length / ranks
    return total


def is_encoded(op: Op, segment: SegmentSpec, layout: Layout) -> bool:
    """Whether ``op``, a gather or a reduction of a segment, encodes it; else tensors travel as they lie."""
    if op.verb == "ALL_GATHER":
        dtype = segment.dtype
    else:
        waits = op.source == "local" and segment.table_or(layout).buffered
        dtype = segment.dtype_for("reduce" if waits else "grads", layout)
    return FORMATS[op.format].native != dtype or "node" in (op.source, op.target)


def summed_bytes(op: Op, layout: Layout, unit: UnitSpec, mesh: Sizes) -> float:
    """Bytes of the device that this rank's shard of the sums of ``op``, a reduction, takes on its way to the slower
    tier that gradients rest in; 0 where it is scattered to where they rest, or lies where they came."""
    table = unit.table_or(layout)
    if op.verb not in SCATTERS or op.target == "node" or table.grads.tier is Tier.DEVICE:
        return 0.0
    parts = table.master.parts(mesh)
    return sum(s.length * ITEMSIZE[s.dtype_for("grads", layout)] for s in op.moves(unit)) / parts


class Codec(NamedTuple):
    """What a format takes.

    Attributes:
        encode: seconds for each element that is encoded.
        decode: that is decoded.
        add: that is decoded and added to a sum, as a reduction does.
        call: seconds of one call of each, however few the elements.
    """

    encode: float
    decode: float
    add: float
    call: float


def is_rounded(op: Op, segment: SegmentSpec) -> bool:
    """Whether gradients become narrower as they are laid where they wait for ``op``, which sends them as they lie."""
    native = FORMATS[op.format].native
    return op.source == "local" and native is not None and ITEMSIZE[native] < ITEMSIZE[segment.dtype]


def coding_seconds(op: Op, layout: Layout, unit: UnitSpec, mesh: Sizes, codecs: Mapping[str, Codec]) -> float:
    """Seconds in which a rank encodes and decodes for one collective on a unit; formats that are not in ``codecs``
    take none."""
    segments, seconds = op.moves(unit), 0.0
    parts = parts_of(op, unit.table_or(layout), mesh)
    for segment, one in zip(segments, op.each(len(segments)), strict=True):
        if (codec := codecs.get(one.format)) is None:
            continue
        if is_encoded(one, segment, layout):
            seconds += _coding(one, segment.length / parts, mesh, codec)
        elif is_rounded(one, segment):
            seconds += segment.length * codec.encode
    return seconds


def _coding(op: Op, whole: float, mesh: Sizes, codec: Codec) -> float:
    """What encodes and decodes for one collective on ``whole`` elements."""
    ranks = prod(mesh[axis] for axis in op.axes)
    if op.purpose == "reduce":
        return whole * (codec.encode + codec.add) + ranks * codec.call
    own = 0.0 if op.source == "node" else 1 / ranks
    return whole * (own * codec.encode + (0.0 if op.target == "node" else codec.decode)) + codec.call


def update_bytes(
    master: int, grads: int, copy: int, num_moments: int, *, one_pass: bool = True, scaled: bool = False
) -> int:
    """Bytes that an update by AdamW, Adam or SGD reads and writes of each element.

    Args:
        master, grads, copy: bytes of an element of each; ``copy``: in the compute dtype, 0: there is none.
        num_moments: as large as the master.
        one_pass: whether all is done while an element is at hand: in host memory in blocks that a cache holds, on a
            device where it was compiled; else casts, the factor, update and copy are passes of their own.
        scaled: whether gradients are multiplied by a factor, as to clip them.
    """
    states = 2 * master * (1 + num_moments)
    if one_pass:
        return grads + states + copy
    cast = grads + master if grads != master else 0
    factor = 2 * master if scaled else 0
    return cast + factor + master + states + (master + copy if copy else 0)
