"""Which wires a table may have, and which of them is the fastest over links that were measured.

    seconds of a transfer = for each of its collectives: latency + bytes / rate of the link
                           + calls of the format that encode and decode, and their elements, times what these take

The collectives are those of the program that each wire gives. What is measured, all ranks do at once, as they do it in
a step: ranks that share processors encode more slowly together than one does alone. What computes meanwhile is not
looked at, so it is the time of a step in which nothing hides what is sent.

Where processors carry what is sent, as between processes of one machine, they are what a step lacks: the waiting in
such a collective is filled with other work, and to encode is work. So nothing is rounded unless the fastest wire that
loses nothing is slow because of a link: processors work for less than :data:`WORKING` of its time.

Of the wires that lose nothing, the table's dtypes in one hop come first, then two hops. One that loses something has to
be allowed, by its name or by a bound on what it loses; and each has to be faster than what comes before it by
:data:`MARGIN`, which is about what a measurement is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any, NamedTuple

from shardfold.errors import ConfigError
from shardfold.plan.bind import Bound
from shardfold.plan.checks import described, is_number, known_arguments
from shardfold.plan.cost import Codec, coding_seconds, is_encoded, is_rounded, op_bytes
from shardfold.plan.format import typed
from shardfold.plan.formats import FORMATS, format_named
from shardfold.plan.layout import ROLES, Axes, Layout, Wire
from shardfold.plan.placement import SegmentSpec, UnitSpec
from shardfold.plan.program import COLLECTIVES, Op
from shardfold.plan.search import search

__all__ = [
    "PURPOSES",
    "AutoWire",
    "LinkFigure",
    "Measured",
    "WireOption",
    "bucket_for",
    "fastest",
    "lost",
    "needs",
    "told",
    "wire_seconds",
    "wires",
]

PURPOSES: Mapping[str, str] = {"gather": "compute", "reduce": "reduce"}
"""Of a table, each with the word for elements that are not rounded."""
LOSSY = ("bf16", "int8", "int4")
"""What a bound chooses from."""
SUMMED = "fp32"
"""The dtype of sums of which kinds do not say it."""
MARGIN, WORKING = 0.25, 0.75
WAITED = 0.1
"""Which part of a collective's time may be its latency, where blocks are put together for it."""
LEAST_BUCKET, MOST_BUCKET = 2**20, 25 * 2**20
"""Bytes; DDP's buckets have the most."""
SAMPLE = 65536


@known_arguments
@dataclass(frozen=True, kw_only=True)
class AutoWire:
    """As what parameters and gradients travel is chosen for the links that there are, which are measured once for the
    ranks of a job.

    Attributes:
        lossy: what may be lost. Empty: nothing, so that only the number of hops is chosen. Names of formats: these may
            be taken, as ``("int8", "int4+error")``. A number: ``bf16``, ``int8`` and ``int4`` may, if of normally
            distributed numbers they lose at most this part, root mean square against root mean square: 0.01 allows
            ``bf16`` (0.0017) and ``int8`` (0.007), and not ``int4`` (0.13). A format that the table itself names may
            be taken in any case.

    Raises:
        ConfigError: it is neither, or a number that is not above 0 and below 1.
        LayoutError: a name is none of a format.

    Examples:
        >>> auto = sf.Engine(nn.Linear(8, 8), optimizer=adam, wire=sf.AutoWire(lossy=0.01))
        >>> auto.close()
    """

    lossy: float | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given: Any = self.lossy
        if isinstance(given, str):
            raise ConfigError(f"AutoWire.lossy is {given!r}: give a tuple of formats, as ({given!r},), or a number.")
        if isinstance(given, (tuple, list)):
            object.__setattr__(self, "lossy", tuple(_format(name) for name in given))
        elif not is_number(given, 0, 1) or not 0 < given < 1:
            raise ConfigError(
                f"AutoWire.lossy is {described(given)}: it is names of formats, as ('int8', 'int4'), or which part may "
                "be lost, above 0 and below 1, as 0.01."
            )

    @property
    def allowed(self) -> tuple[str, ...]:
        """Names of formats, as programs have them."""
        if isinstance(self.lossy, tuple):
            return self.lossy
        names = [format_named(name, "a wire") for name in LOSSY]
        return tuple(name for name in names if lost(name) <= self.lossy)

    def __str__(self) -> str:
        if self.lossy == ():
            return "auto"
        names = self.lossy if isinstance(self.lossy, tuple) else (f"{self.lossy:g}",)
        return "auto:" + ",".join(map(typed, names))

    @staticmethod
    def named(given: Any) -> AutoWire | None:
        """The value itself, or that of ``"auto"``, ``"auto:0.01"`` or ``"auto:int8,int4+error"``; None stays.

        Raises:
            ConfigError: it is none of these.
        """
        if given is None or isinstance(given, AutoWire):
            return given
        word, colon, rest = given.partition(":") if isinstance(given, str) else ("", "", "")
        if word != "auto" or (colon and not rest):
            raise ConfigError(
                f"wire={described(given)}: it is 'auto', 'auto:0.01' (the relative error that is allowed), "
                "'auto:int8,int4' (which formats may be taken), an AutoWire, or None for what the layout says."
            )
        if not rest:
            return AutoWire()
        try:
            part = float(rest)
        except ValueError:
            return AutoWire(lossy=tuple(name.strip() for name in rest.split(",")))
        return AutoWire(lossy=part)


def _format(name: Any) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"AutoWire.lossy has {described(name)}: its entries are names of formats, as 'int8'.")
    wire = Wire(format=name)
    if wire.hops > 1:
        raise ConfigError(
            f"AutoWire.lossy has {name!r}: how many hops it takes is measured; give {wire.format!r} without x2."
        )
    return format_named(wire.format, "a wire")


@cache
def lost(name: str) -> float:
    """Which part of normally distributed numbers a format loses, root mean square against root mean square."""
    import torch

    form = FORMATS[name]
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(1, max(1, SAMPLE // form.block) * form.block, generator=draw)
    payload = torch.empty(1, form.nbytes(values.shape[1]), dtype=torch.uint8)
    form.encode(values, payload)
    decoded = torch.empty_like(values)
    form.decode(payload, decoded)
    return float((decoded - values).norm() / values.norm())


class LinkFigure(NamedTuple):
    """What a collective over some axes takes: ``latency`` seconds, and as many more as it sends bytes by ``rate``.

    Attributes:
        working: for which part of all those the processors of a rank work, or what works waits for one.
    """

    rate: float
    latency: float
    working: float = 0.0


@dataclass
class Measured:
    """What was measured.

    Attributes:
        links: by kind of collective, as :func:`needs` has it, and axes. What sums has a kind for each dtype, as
            ``REDUCE_SCATTER:bf16``; that of fp32 is ``REDUCE_SCATTER``.
        codecs: by name of format.
    """

    links: dict[tuple[str, Axes], LinkFigure] = field(default_factory=dict[tuple[str, Axes], LinkFigure])
    codecs: dict[str, Codec] = field(default_factory=dict[str, Codec])


class WireOption(NamedTuple):
    """A wire that a transfer may take.

    Attributes:
        wire: as the table has it.
        loses: which part of what travels, see :func:`lost`; 0: nothing.
        seconds: of a step.
        sent: bytes of a step by one rank.
        working: of the seconds those in which processors work.
    """

    wire: Wire
    loses: float
    seconds: float = inf
    sent: float = 0.0
    working: float = 0.0

    @property
    def fits(self) -> bool:
        return True

    @property
    def cost(self) -> float:
        return self.seconds


def wires(table: Layout, purpose: str, auto: AutoWire) -> list[WireOption]:
    """Those that a transfer of a table may take, the plain one first: its dtype, what the table names itself, and what
    is allowed, each in one hop and in two."""
    plain, own = PURPOSES[purpose], getattr(table, purpose).format
    keeps = () if purpose == "reduce" else [name for name in auto.allowed if not FORMATS[name].gathers]
    names: list[str] = [plain, *([own] if own not in ROLES else []), *auto.allowed]
    return [
        WireOption(Wire(format=name, hops=hops), 0.0 if name == plain else lost(name))
        for name in dict.fromkeys(names)
        if name not in keeps
        for hops in (1, 2)
    ]


def fastest(options: Sequence[WireOption]) -> WireOption:
    """The one to take. The first is the plain one; see the module's docstring."""
    best = options[0]
    for group in ([o for o in options if not o.loses], [o for o in options if o.loses]):
        if group and group[0].loses and best.working >= WORKING * best.seconds:
            break
        first = next(iter(search(group, lambda option: [option]).fitting), best)
        if first.seconds < best.seconds * (1 - MARGIN):
            best = first
    return best


def _sendings(
    purpose: str, bound: Bound, times: Mapping[str, int]
) -> Iterator[tuple[Op, int, UnitSpec, list[tuple[SegmentSpec, Op, bool]]]]:
    """Collectives of a transfer, how often each runs, its unit, and of each segment as what it travels, encoded or
    not."""
    for section, runs in times.items():
        for op in bound.program.section(section) if runs else ():
            if op.verb in COLLECTIVES and op.purpose == purpose:
                segments = op.moves(unit := bound.by_name[op.unit])
                pairs = zip(segments, op.each(len(segments)), strict=True)
                yield op, runs, unit, [(segment, one, is_encoded(one, segment, bound.layout)) for segment, one in pairs]


def _kind(op: Op, *, encoded: bool) -> str:
    """The collective that carries it: what is encoded to be summed is exchanged, and summed by who gets it."""
    if op.purpose != "reduce":
        return op.kind
    return "EXCHANGE" if encoded else op.kind if op.format == SUMMED else f"{op.kind}:{op.format}"


def needs(purpose: str, bound: Bound, times: Mapping[str, int]) -> tuple[set[tuple[str, Axes]], set[str]]:
    """Kinds of collectives and axes whose links a transfer of a program crosses, and the formats that it encodes."""
    links, formats = set[tuple[str, Axes]](), set[str]()
    for op, _, _, each in _sendings(purpose, bound, times):
        links |= {(_kind(one, encoded=encoded), op.axes) for _, one, encoded in each}
        formats |= {one.format for segment, one, encoded in each if encoded or is_rounded(one, segment)}
    return links, formats


def bucket_for(links: Mapping[tuple[str, Axes], LinkFigure], ranks: Mapping[Axes, int]) -> int:
    """Bytes of gradients that small blocks are put together to, whole MiB from 1 to 25: so many that of what a
    collective of them takes over any of these links a tenth is its latency. More of them make it hardly faster, and
    fewer wait for the link for longer than they are sent over it.

    Args:
        links: what was measured, by kind and axes.
        ranks: how many lie along axes: of a flat each sends all but its own part.
    """
    most = 0.0
    for (_, axes), link in links.items():
        if ranks[axes] > 1:
            sent = link.latency * (1 - WAITED) / WAITED * link.rate
            most = max(most, sent * ranks[axes] / (ranks[axes] - 1))
    whole = -(-int(most) // LEAST_BUCKET) * LEAST_BUCKET
    return min(max(whole, LEAST_BUCKET), MOST_BUCKET)


def wire_seconds(
    purpose: str, bound: Bound, times: Mapping[str, int], measured: Measured
) -> tuple[float, float, float]:
    """Seconds of a transfer of a program, whose sections run so many times, the bytes that one rank sends in it, and
    the seconds in which processors work."""
    layout, mesh = bound.layout, bound.mesh
    seconds = sent = working = 0.0
    for op, runs, unit, each in _sendings(purpose, bound, times):
        sent += runs * (num_bytes := op_bytes(op, layout, unit, mesh))
        # Segments of a unit share its latencies; where they travel as several kinds, the slowest stands for all.
        kinds = {_kind(one, encoded=encoded) for _, one, encoded in each}
        link = min((measured.links[kind, op.axes] for kind in sorted(kinds)), key=lambda link: link.rate)
        seconds += (sending := runs * (num_bytes / link.rate + len(each) * link.latency))
        working += sending * link.working
        coding = runs * coding_seconds(op, layout, unit, mesh, measured.codecs)
        seconds, working = seconds + coding, working + coding
    return seconds, sent, working


def told(auto: AutoWire, measured: Measured, options: Mapping[str, Sequence[WireOption]]) -> list[str]:
    """What was measured and chosen, in lines."""
    lines = [f"wires, chosen for the links that were measured ({auto}):"]
    lines += [f"  {'link':<31}{'MB/s sent by a rank':>22}{'latency, ms':>14}{'processors work':>17}"]
    for (kind, axes), link in sorted(measured.links.items()):
        figures = f"{link.rate / 1e6:>22,.1f}{link.latency * 1e3:>14.2f}{link.working:>17.0%}"
        lines.append(f"  {kind + ' ' + '+'.join(axes):<31}{figures}")
    lines += [f"  {'format':<31}{'encoded, M elements/s':>22}{'decoded':>14}{'and added':>14}{'a call, ms':>14}"]
    for name, codec in sorted(measured.codecs.items()):
        rates = (1e-6 / seconds if seconds else 0.0 for seconds in codec[:3])
        lines.append("  {:<31}{:>22,.0f}{:>14,.0f}{:>14,.0f}{:>14.2f}".format(name, *rates, codec.call * 1e3))
    for purpose, each in options.items():
        chosen = fastest(each)
        exact = fastest([option for option in each if not option.loses])
        lines.append(f"  {purpose}: seconds of a step, if nothing else goes on, and bytes that a rank sends")
        for option in sorted(each, key=lambda option: option.seconds):
            loses = f"loses {option.loses:.2g}" if option.loses else "loses nothing"
            mark = "   <-- taken" if option is chosen else ""
            lines.append(f"    {option.wire!s:<29}{option.seconds:>12.4f}{option.sent:>18,.0f}  {loses}{mark}")
        if exact.working >= WORKING * exact.seconds and any(option.loses for option in each):
            lines.append("    nothing is rounded, as processors and not a link are what sending waits for")
    return lines
