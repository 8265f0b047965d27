"""What an engine says about itself: bytes held beside the table, bytes sent beside the program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardfold.plan.checks import human
from shardfold.plan.layout import Axes

__all__ = [
    "KINDS",
    "Finding",
    "MemoryReport",
    "MemoryRow",
    "MovedRow",
    "SavedReport",
    "SavedRow",
    "StepReport",
    "Straggler",
    "TierSeconds",
    "TrafficReport",
    "TrafficRow",
]


KINDS = ("parameter", "buffer", "output", "loss", "gradient of the output", "gradient", "state")
"""What can be found, causes before what they spoil."""


class MemoryRow(NamedTuple):
    """One state in one tier on this rank, in bytes: ``held`` are live storages, each counted once."""

    state: str
    tier: str
    table: float
    padding: float
    held: int


class SavedRow(NamedTuple):
    """What autograd saved in forwards of one unit, in bytes of storages: on the ``device``, where each counts once and
    for the unit that saved it first, and ``outside``, in host memory or on disk."""

    unit: str
    mode: str
    device: int
    outside: int


class MemoryReport(NamedTuple):
    """States at rest, and at this moment ``transient``, gathered flats and gradients on their way, and ``activations``,
    what autograd holds, of units for which it holds anything.

    What rests outside, and what is back from there, is always known. What stays on the device is known inside of
    ``with engine.count_saved():``, of forwards since it was entered, because knowing takes a hook on each tensor that
    autograd saves.

    Examples:
        >>> report = engine.memory()
        >>> report.held == sum(row.held for row in report.rows)
        True
    """

    rows: tuple[MemoryRow, ...]
    transient: int
    activations: tuple[SavedRow, ...] = ()

    @property
    def held(self) -> int:
        """Bytes of all states at rest."""
        return sum(row.held for row in self.rows)

    @property
    def tiers(self) -> dict[str, int]:
        """Bytes of states at rest, by tier."""
        total: dict[str, int] = {}
        for row in self.rows:
            total[row.tier] = total.get(row.tier, 0) + row.held
        return total

    @property
    def table(self) -> float:
        """What the table says, without padding."""
        return sum(row.table for row in self.rows)

    @property
    def padding(self) -> float:
        return sum(row.padding for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'state':<10}{'memory':<8}{'table':>12}{'padding':>12}{'measured':>12}"]
        for row in self.rows:
            lines.append(
                f"{row.state:<10}{row.tier:<8}{human(row.table):>12}{human(row.padding):>12}{human(row.held):>12}"
            )
        lines.append(f"{'all':<18}{human(self.table):>12}{human(self.padding):>12}{human(self.held):>12}")
        lines.append(f"temporary, in use now: {human(self.transient)}")
        return "\n".join([*lines, *(_saved_lines(self.activations) if self.activations else ())])


class SavedReport:
    """What autograd saved for backward on this rank, without parameters and buffers.

    Attributes:
        rows: the root first, then the other units.
        peak: the most bytes of what rests outside that were on the device at once, in forward or backward.
    """

    def __init__(self) -> None:
        self.rows: tuple[SavedRow, ...] = ()
        self.peak = 0

    @property
    def device(self) -> int:
        return sum(row.device for row in self.rows)

    @property
    def outside(self) -> int:
        return sum(row.outside for row in self.rows)

    def __str__(self) -> str:
        return "\n".join([*_saved_lines(self.rows), f"at once on the device of what is outside: {human(self.peak)}"])


def _saved_lines(rows: Sequence[SavedRow]) -> list[str]:
    lines = [f"{'unit':<28}  {'activations':<14}{'device':>12}{'outside':>12}"]
    for row in rows:
        lines.append(f"{row.unit:<28}  {row.mode:<14}{human(row.device):>12}{human(row.outside):>12}")
    device, outside = sum(row.device for row in rows), sum(row.outside for row in rows)
    return [*lines, f"{'all':<44}{human(device):>12}{human(outside):>12}"]


class TrafficRow(NamedTuple):
    """One kind of collective in the last step: calls and bytes this rank sent, beside what the program says."""

    purpose: str
    op: str
    axes: Axes
    calls: int
    program: float
    sent: int


class MovedRow(NamedTuple):
    """What travelled between the device and a slower tier, one way (``FETCH`` or ``STORE``): calls and bytes of this
    rank, beside what the program says."""

    tier: str
    op: str
    calls: int
    program: float
    moved: int


class TrafficReport(NamedTuple):
    """Collectives of the last completed step, and what ``moved`` between the device and slower tiers. ``control`` bytes
    (norms, used parameters) and ``asked`` bytes (``gathered()``, ``state_dict()``, evaluation since the step began; by
    ``asked_calls`` collectives) are apart, and so is what forwards without a backward (evaluation, generation) moved in
    that time, ``evaluated``. Before the first step is over both are since the engine was made.

    Examples:
        >>> engine.backward(engine(x).square().mean())
        >>> report = engine.step()
        >>> sum(row.sent for row in engine.traffic().rows)  # one rank sends nothing
        0
    """

    rows: tuple[TrafficRow, ...]
    control: int
    asked: int
    asked_calls: int = 0
    moved: tuple[MovedRow, ...] = ()
    evaluated: tuple[MovedRow, ...] = ()

    @property
    def sent(self) -> int:
        return sum(row.sent for row in self.rows)

    @property
    def program(self) -> float:
        return sum(row.program for row in self.rows)

    def __str__(self) -> str:
        lines = [f"{'purpose':<9}{'operation':<16}{'axes':<14}{'calls':>6}{'program':>13}{'sent':>13}"]
        for row in self.rows:
            axes = "+".join(row.axes)
            lines.append(
                f"{row.purpose:<9}{row.op:<16}{axes:<14}{row.calls:>6}{human(row.program):>13}{human(row.sent):>13}"
            )
        for row in self.moved:
            lines.append(f"{row.tier:<9}{row.op:<30}{row.calls:>6}{human(row.program):>13}{human(row.moved):>13}")
        for row in self.evaluated:
            what = f"{row.op} without a step"
            lines.append(f"{row.tier:<9}{what:<30}{row.calls:>6}{human(row.program):>13}{human(row.moved):>13}")
        by = f" by {self.asked_calls} collectives" if self.asked_calls else ""
        lines.append(f"control messages {human(self.control)}, gathered on request {human(self.asked)}{by}")
        return "\n".join(lines)


class Finding(NamedTuple):
    """Something that is inf or NaN.

    Attributes:
        kind: one of :data:`KINDS`.
        name: of the module (outputs), parameter, buffer, or optimizer state (``exp_avg of head.weight``).
        rank: that has it; of a gradient the rank whose shard it is in, which need not be the one it came from.
        step: the update that was to be, counted from 1.
        micro_batch: counted from 0 within the step, where it is known.
        num_elements: how many of it, where they were counted.

    Examples:
        >>> sf.numerics.check(engine).findings  # nothing is inf or NaN
        ()
    """

    kind: str
    name: str
    rank: int
    step: int
    micro_batch: int | None = None
    num_elements: int | None = None

    def __str__(self) -> str:
        what = f"the {self.kind} of {self.name}" if self.kind in KINDS[2:5:2] else f"{self.kind} {self.name}".strip()
        batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        count = "" if self.num_elements is None else f" ({self.num_elements} elements)"
        return f"{what} on rank {self.rank}, step {self.step}{batch}{count}"


class TierSeconds(NamedTuple):
    """What slower tiers took of a step, in seconds of this rank's host; 0 where there is no such tier.

    Attributes:
        host: waits for values on their way to or from host memory. On the CPU they are on no way.
        disk: waits for a file: for what is read, and for room to write.
        update: updates on the host, without what they waited for.
    """

    host: float = 0.0
    disk: float = 0.0
    update: float = 0.0


class Straggler(NamedTuple):
    """What makes steps longer.

    Attributes:
        rank: that is slower than the others; None: none is, they all wait longer for what they send.
        host: its name, or that of the one host whose link is slower than those of others; empty where it is not known.
        kind: ``computation``, ``data``, or ``link``.
        factor: by which a step is longer for it.
    """

    rank: int | None
    host: str
    kind: str
    factor: float

    def __str__(self) -> str:
        if self.rank is None:
            whose = (
                f"the link of host {self.host} is slower than others" if self.host else "a link is slower than it was"
            )
            return f"steps take {self.factor:.2f} times as long by what ranks send: {whose}"
        where = f" on host {self.host}" if self.host else ""
        by = {"computation": "its computation", "data": "its data, or what else it does between passes"}[self.kind]
        return f"steps take {self.factor:.2f} times as long as without rank {self.rank}{where}, by {by}"


class StepReport(NamedTuple):
    """What ``engine.step()`` did.

    Attributes:
        step: optimizer steps so far.
        updated: whether this call updated the weights: it was the accumulation boundary, and nothing overflowed.
        skipped: whether an update was due but left out, on every rank (only with a loss scale, or where bytes had
            changed that nobody wrote and came from another rank: see ``Runtime.checksums``).
        lr: learning rate of the first group in this update.
        loss_scale: that of this step's losses; 1.0 without one.
        norm: 0-d tensor, the norm of all gradients before clipping; None if the engine does not clip.
        findings: what was inf or NaN on any rank, the likely cause first, where the step was skipped, or where a loss
            of it was not finite and those of the step before were; the same on every rank.
        tiers: seconds that slower tiers took since the update before.
        straggler: what makes steps longer, as ranks have found together; None: nothing, or it is not known.

    Examples:
        >>> engine.backward(engine(x).square().mean())
        >>> report = engine.step()
        >>> report.updated, report.skipped
        (True, False)
    """

    step: int
    updated: bool
    skipped: bool = False
    lr: float | None = None
    loss_scale: float = 1.0
    norm: object = None
    findings: tuple[Finding, ...] = ()
    tiers: TierSeconds = TierSeconds()
    straggler: Straggler | None = None

    @property
    def grad_norm(self) -> float | None:
        """The norm as a number; on CUDA asking for it waits for the device."""
        return None if self.norm is None else float(self.norm)  # pyright: ignore[reportArgumentType]
