"""What a table holds and what a program sends, as sums: the same operations that will run, never a second formula.

Bytes at rest come from the table's cells, bytes on the link from the program's operations. :func:`closed_form` has
the papers' expressions for the presets, which tests and ``shardfold explain`` hold beside the sums
(ZeRO, arXiv 1910.02054, sections 5 and 7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from shardfold.plan.axes import Mesh
from shardfold.plan.formats import FORMATS, TORCH_DTYPES
from shardfold.plan.layout import ITEMSIZE, Axes, Layout, Sizes
from shardfold.plan.placement import SegmentSpec, UnitSpec
from shardfold.plan.program import COLLECTIVES, Op, Program

__all__ = [
    "STATES",
    "Sent",
    "closed_form",
    "op_bytes",
    "peak_bytes",
    "ring_bytes",
    "section_traffic",
    "state_bytes",
    "traffic",
]

STATES = ("params", "held", "grads", "master", "moments", "format")
"""What rests, and ``format``: what the formats of reductions keep."""


class Sent(NamedTuple):
    """A kind of collective: what it is for, its verb, the axes it crosses."""

    journey: str
    op: str
    axes: Axes


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
        size = ITEMSIZE[segment.dtype if state in ("params", "held") else segment.dtype_for(state, layout)]
        count = num_moments if state == "moments" else 1
        bytes_[state] = elements * size * count / cell.parts(mesh)
    if frozen and layout.params is None:  # nothing to cast from: the compute copy itself rests, split as master
        bytes_["params"] = elements * ITEMSIZE[segment.dtype] / layout.rest.parts(mesh)
    keeps = FORMATS[segment.format_for("reduce", layout)].state
    if keeps is not None and not frozen:
        bytes_["format"] = elements * keeps.itemsize
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
    """Bytes at rest on one rank by state; ``padded=True`` counts what is really allocated. ``kept`` says what the
    optimizer keeps of a trainable segment on that rank, where it is no number of moments per element."""
    total: dict[str, float] = dict.fromkeys(STATES, 0.0)
    for unit in units:
        for segment in unit.segments:
            elements = segment.length if padded else segment.numel
            for state, n in segment_bytes(layout, segment, mesh, num_moments, elements).items():
                total[state] += kept(segment) if kept is not None and state == "moments" else n
    return {state: n for state, n in total.items() if n}


def ring_bytes(verb: str, full: float, ranks: int) -> float:
    """Bytes one rank sends for a collective whose whole tensor has ``full`` bytes (ZeRO, section 7)."""
    if ranks == 1:
        return 0.0
    return full * (ranks - 1) / ranks * (2 if verb == "ALL_REDUCE" else 1)


def op_bytes(op: Op, layout: Layout, unit: UnitSpec, mesh: Sizes) -> float:
    """Bytes one rank sends for ``op`` on ``unit``."""
    segments = op.moves(unit)
    ranks = prod(mesh[axis] for axis in op.axes)
    parts = _parts(op.target if op.journey == "gather" else op.source, unit.table_or(layout), mesh)
    return sum(
        ring_bytes(op.verb, FORMATS[each.format].nbytes(segment.length) / parts, ranks)
        for segment, each in zip(segments, op.each(len(segments)), strict=True)
    )


def _parts(tensor: str, layout: Layout, mesh: Sizes) -> int:
    """Into how many shards the whole of a unit's tensor is cut; sums of gradients as ``master``, wherever they rest."""
    if tensor in ("flat", "local"):
        return 1
    return getattr(layout, "master" if tensor == "grads" else tensor).parts(mesh)


def traffic(
    program: Program, layout: Layout, units: Sequence[UnitSpec], mesh: Sizes, *, micro_batches: int = 1
) -> dict[Sent, tuple[int, float]]:
    """Collectives of one optimizer step and the bytes one rank sends in them: ``{kind: (calls, bytes)}``."""
    times = {"forward": micro_batches, "backward": micro_batches - 1, "last": 1, "step": 1}
    return section_traffic(program, layout, units, mesh, times)


def section_traffic(
    program: Program, layout: Layout, units: Sequence[UnitSpec], mesh: Sizes, times: Mapping[str, int]
) -> dict[Sent, tuple[int, float]]:
    """As :func:`traffic`, for sections (and ``quiet``) run that many times each; calls count each segment."""
    by_name = {unit.name: unit for unit in units}
    total: dict[Sent, tuple[int, float]] = {}
    for section, runs in times.items():
        for op in program.section(section):
            if op.verb in COLLECTIVES and runs:
                key, unit = Sent(op.journey, op.verb, op.axes), by_name[op.unit]
                calls, sent = total.get(key, (0, 0.0))
                more = op_bytes(op, layout, unit, mesh)
                total[key] = calls + runs * len(op.moves(unit)), sent + runs * more
    return total


def peak_bytes(
    layout: Layout,
    units: Sequence[UnitSpec],
    mesh: Sizes,
    *,
    num_moments: int = 2,
    prefetch: int = 1,
    temporary: Callable[[int, int], int] | None = None,
) -> float:
    """Upper bound of a step's bytes on one rank, activations and the model's buffers apart.

    States at rest, plus the root's gathered buffers, plus ``prefetch + 1`` gathered units (all, where ``held`` is not
    split), plus the gradients of the root and of two units on their way (where they rest whole: of one parameter, as
    autograd makes it), plus ``temporary(bytes, ranks)`` of the transport, plus payloads where formats encode.
    Gradients that wait whole (late units, ``no_sync``) come on top.
    """
    total = sum(state_bytes(layout, units, mesh, num_moments=num_moments, padded=True).values())
    ranks = Mesh.of(mesh).divisor
    full = {
        u.name: sum(s.length * ITEMSIZE[s.dtype] + _payload(s, "gather", s.dtype, layout) for s in u.segments)
        for u in units
    }
    grad = {
        u.name: sum(s.length * ITEMSIZE[s.dtype_for("reduce", layout)] for s in u.segments if s.trainable)
        for u in units
    }
    table = {u.name: u.table_or(layout) for u in units}
    gathered = [u for u in units if table[u.name].rest.over]
    stay = [u.name for u in gathered if (held := table[u.name].held) is not None and not held.over]  # till backward
    total += sum(full[u.name] for u in gathered if u.root or u.name in stay)
    passing = [full[u.name] for u in gathered if not u.root and u.name not in stay]
    total += sum(sorted(passing, reverse=True)[: prefetch + 1])
    sent = [u for u in units if table[u.name].grads.over]
    total += sum(grad[u.name] for u in sent if u.root)
    total += sum(sorted((grad[u.name] for u in sent if not u.root), reverse=True)[:2])
    # Where gradients rest whole, autograd makes each before it is added.
    whole = [u for u in units if not table[u.name].grads.over]
    total += max((x.numel * ITEMSIZE[s.dtype] for u in whole for s in u.segments for x in s.slots), default=0)
    encoded = [
        sum(_encoded_sum(s, layout, mesh) for s in u.segments if s.trainable) if ranks > 1 else 0.0 for u in units
    ]
    total += max(encoded, default=0)
    if temporary is not None and ranks > 1 and not any(encoded):
        total += temporary(max(grad.values(), default=0), ranks)
    return total


def _payload(segment: SegmentSpec, journey: str, dtype: str, layout: Layout) -> int:
    """Bytes of what a format makes of all of a segment in that dtype; 0 where it travels as it lies."""
    form = FORMATS[segment.format_for(journey, layout)]
    return 0 if form.native == TORCH_DTYPES[dtype] else form.nbytes(segment.length)


def _encoded_sum(segment: SegmentSpec, layout: Layout, mesh: Sizes) -> float:
    """Bytes that the encoded reduction of a segment needs: what is sent, what comes, a sum and a row of fp32."""
    layout = segment.table_or(layout)
    dtype = segment.dtype_for("reduce" if layout.grads.over else "grads", layout)
    payload = _payload(segment, "reduce", dtype, layout)
    return 2 * payload + (2 * 4 * segment.length / layout.master.parts(mesh) if payload else 0)


def closed_form(
    name: str, mesh: Sizes, *, compute: int = 2, grads: int = 2, moments: int = 8
) -> tuple[float, Callable[[int], float]]:
    """The papers' expressions for a preset with fp32 master: bytes per parameter at rest, and elements sent.

    Args:
        name: a preset.
        mesh: sizes of ``inter`` and ``intra``.
        compute: bytes of a parameter in forward; 4 means that master is the same bytes.
        grads: bytes of an accumulated gradient.
        moments: bytes of the optimizer's state per parameter.

    Returns:
        ``(bytes per parameter, k -> elements sent per parameter and step with k micro-batches)``.
    """
    n, intra = mesh["inter"] * mesh["intra"], mesh["intra"]
    inter = mesh["inter"]
    one = (n - 1) / n
    master = 4 if compute != 4 else 0
    everything = compute + grads + master + moments
    held = compute / intra if inter > 1 and intra > 1 else 0  # a copy over one rank is the gathered buffer itself
    alias_owner = moments + master
    rest: Mapping[str, float] = {
        "ddp": everything,
        "zero1": compute + grads + alias_owner / n,
        "zero2": compute + (grads + alias_owner) / n,
        "zero3": everything / n,
        "fsdp2": (4 + grads + moments) / n if n > 1 else everything,  # one rank keeps the cast copy
        "hsdp": everything / intra,
        "hpz": everything / n + held,
    }
    within, between = (intra - 1) / intra, 2 * (inter - 1) / inter / intra
    sent: Mapping[str, Callable[[int], float]] = {
        "ddp": lambda k: 2 * one,
        "zero1": lambda k: 2 * one,
        "zero2": lambda k: (k + 1) * one,
        "zero3": lambda k: 3 * k * one,
        "fsdp2": lambda k: 3 * k * one,
        "hsdp": lambda k: 3 * k * within + between,
        "hpz": lambda k: k * (2 * one + within),
    }
    return rest[name], sent[name]
