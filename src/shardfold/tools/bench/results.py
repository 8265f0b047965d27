"""What was measured, and what follows from it: medians, ratios, losses compared. Pure functions of recorded numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median, quantiles
from typing import Any, NamedTuple

from shardfold.tools.bench.contenders import Contender, default_reference, find
from shardfold.tools.bench.settings import UNITS, Settings, gpt_shape

__all__ = [
    "ContenderRow",
    "Failure",
    "MeasuredRounds",
    "Turn",
    "UnitRow",
    "as_json",
    "loss_difference",
    "rows",
    "unit_rows",
]

EVENTS = 4  # of a unit in a step: its forward begins and ends, its backward begins, its gradients are complete


class Failure(NamedTuple):
    """Why a contender has no (more) figures, and the last lines it wrote to standard error."""

    reason: str
    said: str


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of one contender: what each rank measured, and bytes on the loopback device per rank and step."""

    round: int
    ranks: list[dict[str, Any]]
    sent: float | None

    def steps(self, field: str = "seconds") -> list[float]:
        """Seconds of each step by the slowest rank."""
        return [max(each) for each in zip(*(rank[field] for rank in self.ranks), strict=True)]

    @property
    def seconds(self) -> float:
        return median(self.steps())

    @property
    def update(self) -> float:
        """Seconds of a step behind forward and backward, of the rank that takes longest."""
        parts = [
            [whole - part for whole, part in zip(rank["seconds"], rank["compute"], strict=True)] for rank in self.ranks
        ]
        return median(max(each) for each in zip(*parts, strict=True))

    @property
    def losses(self) -> dict[int, float]:
        """The mean loss of all ranks by the number of the step."""
        means = [sum(each) / len(each) for each in zip(*(rank["losses"] for rank in self.ranks), strict=True)]
        last = self.ranks[0]["last_step"]
        return {last - len(means) + 1 + i: mean for i, mean in enumerate(means)}


@dataclass(kw_only=True)
class MeasuredRounds:
    """All turns so far, of ``rounds`` that were begun. ``restarted`` are those that did not fit into memory beside the
    others, ``not_started`` those for which there was no time; ``first`` are seconds of first steps, in
    which models are compiled."""

    settings: Settings
    contenders: list[Contender]
    turns: dict[str, list[Turn]] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    optimizers: dict[str, str] = field(default_factory=dict)
    masters: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)
    not_started: list[str] = field(default_factory=list)
    first: dict[str, float] = field(default_factory=dict)
    rounds: int = 0

    def __post_init__(self) -> None:
        self.turns = {each.name: [] for each in self.contenders}

    def complete(self) -> dict[str, list[Turn]]:
        """Turns of those that have not failed and had at least one."""
        return {name: turns for name, turns in self.turns.items() if turns and name not in self.failures}

    def reference(self, asked: str | None = None) -> str | None:
        """The one that was asked for, or the fastest of the usual ones; None before there is any."""
        complete = self.complete()
        if asked in complete:
            return asked
        usual = default_reference(list(complete), self.settings)
        return min(usual, key=lambda name: median(turn.seconds for turn in complete[name]), default=None)


class ContenderRow(NamedTuple):
    """One contender: medians over rounds. Seconds; bytes of the rank that has most; ``sent`` per rank and step.

    ``cpu`` are seconds that all threads of a rank computed in a step, whatever else the machine did.
    ``program`` and ``moved`` are bytes between the device and slower tiers in a step, by the program, or by a peer's
    source, and counted; ``read`` and ``written`` are bytes of drives per step, as the system counts.
    """

    name: str
    step: float
    low: float
    high: float
    ratio: float
    update: float
    cpu: float
    held: float
    resident: float | None
    peak: float | None
    set_up_peak: float | None
    sent: float | None
    handed: float | None
    faults: float
    program: float | None
    moved: float | None
    read: float | None
    written: float | None
    master: str


class UnitRow(NamedTuple):
    """One contender of the job ``units``: microseconds above the reference in the same round."""

    name: str
    compute: float
    per_event: float
    low: float
    high: float
    update: float


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def rows(measured: MeasuredRounds, reference: str) -> list[ContenderRow]:
    """A row per contender that has not failed; ratios are taken round by round, and their median is given."""
    complete = measured.complete()
    base = {turn.round: turn.seconds for turn in complete[reference]}
    found = []
    for name, turns in complete.items():
        seconds = [turn.seconds for turn in turns]
        ratios = [turn.seconds / base[turn.round] for turn in turns if turn.round in base]
        found.append(
            ContenderRow(
                name=name,
                step=median(seconds),
                low=middle_half(seconds)[0],
                high=middle_half(seconds)[1],
                ratio=median(ratios) if ratios else float("nan"),
                update=median(turn.update for turn in turns),
                cpu=_of_ranks(turns, "cpu") or 0.0,
                held=_of_ranks(turns, "held") or 0.0,
                resident=_of_ranks(turns, "resident"),
                peak=_of_ranks(turns, "peak"),
                set_up_peak=_of_ranks(turns, "set_up_peak"),
                sent=_median([turn.sent for turn in turns]),
                handed=_of_ranks(turns, "handed"),
                faults=_of_ranks(turns, "faults") or 0.0,
                program=_of_ranks(turns, "program") or _by_source(measured, name),
                moved=_of_ranks(turns, "moved"),
                read=_of_ranks(turns, "read"),
                written=_of_ranks(turns, "written"),
                master=measured.masters.get(name, ""),
            )
        )
    return found


def _by_source(measured: MeasuredRounds, name: str) -> float | None:
    """Bytes that a peer moves between device and host in a step on one rank, as its source has it."""
    settings = measured.settings
    contender = next(each for each in measured.contenders if each.name == name)
    if not contender.moved:
        return None
    return contender.moved * gpt_shape(settings.params, settings.context).num_parameters / settings.ranks


def _of_ranks(turns: Sequence[Turn], field: str) -> float | None:
    """The largest over ranks, the median over rounds."""
    values = [[rank.get(field) for rank in turn.ranks] for turn in turns]
    known = [[value for value in each if value is not None] for each in values]
    return median(max(each) for each in known) if known == values else None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def unit_rows(measured: MeasuredRounds, reference: str) -> list[UnitRow]:
    """What a step takes above the reference, divided by the events of its units."""
    complete = measured.complete()
    parts = {
        name: {t.round: (median(t.steps("compute")), t.seconds - median(t.steps("compute"))) for t in turns}
        for name, turns in complete.items()
    }
    base = parts.pop(reference)
    found = []
    for name, mine in parts.items():
        common = [number for number in mine if number in base]
        compute = [(mine[number][0] - base[number][0]) * 1e6 for number in common]
        update = [(mine[number][1] - base[number][1]) * 1e6 for number in common]
        low, high = (value / EVENTS / UNITS for value in middle_half(compute))
        found.append(UnitRow(name, median(compute), median(compute) / EVENTS / UNITS, low, high, median(update)))
    return found


def loss_difference(measured: MeasuredRounds) -> tuple[int, float, tuple[str, str]] | None:
    """The last step that all have made, the largest relative difference of its losses, and between whom.

    None where there are no two contenders whose losses are to be the same.
    """
    by_name = {
        name: {step: loss for turn in turns for step, loss in turn.losses.items()}
        for name, turns in measured.complete().items()
        if not find(name).differs
    }
    if len(by_name) < 2:
        return None
    step = max(set.intersection(*(set(losses) for losses in by_name.values())))
    ends = sorted((losses[step], name) for name, losses in by_name.items())
    (low, one), (high, other) = ends[0], ends[-1]
    if any(not isfinite(loss) for loss, _ in ends):
        return step, float("inf"), (one, other)
    return step, (high - low) / max(abs(high), abs(low), 1e-30), (one, other)


def as_json(measured: MeasuredRounds, reference: str | None) -> dict[str, Any]:
    """Everything, raw: each rank's seconds of each step of each round, and the rows that follow."""
    difference = loss_difference(measured)
    return {
        "settings": measured.settings.as_json(),
        "reference": reference,
        "rows": [row._asdict() for row in rows(measured, reference)] if reference else [],
        "units": [row._asdict() for row in unit_rows(measured, reference)]
        if reference and measured.settings.job == "units"
        else [],
        "loss": None
        if difference is None
        else {"step": difference[0], "largest_relative_difference": difference[1], "between": difference[2]},
        "failures": {name: failure._asdict() for name, failure in measured.failures.items()},
        "rounds": measured.rounds,
        "not_started": measured.not_started,
        "restarted_each_turn": sorted(measured.restarted),
        "optimizers": measured.optimizers,
        "masters": measured.masters,
        "first_steps": measured.first,
        "turns": {
            name: [{"round": turn.round, "sent": turn.sent, "ranks": turn.ranks} for turn in turns]
            for name, turns in measured.turns.items()
        },
    }
