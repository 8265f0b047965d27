"""``Engine(layout=Auto(sample=...))``: the fastest layout and mode with which a step of this micro-batch fits.

The model itself is traced with the micro-batch, and the program of each layout is walked on the engine's own mesh, as
``shardfold plan --micro-batch`` does. Where the device's rates are known, the seconds of a step say what is fastest.
Where they are not, this order does: states stay on the device before they rest in host memory, activations are kept
before they are made again, and of the rest what sends less comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, inf
from typing import NamedTuple

from shardfold.errors import ConfigError
from shardfold.plan.axes import Axis
from shardfold.plan.layout import Layout, Precision, Tier
from shardfold.plan.lifetimes import Behaviour
from shardfold.plan.program_passes import Overlap
from shardfold.plan.sizes import human
from shardfold.planner.hardware import Cluster
from shardfold.planner.memory import plan_memory
from shardfold.planner.moved import MOVED
from shardfold.planner.seconds import plan_seconds, ways_of
from shardfold.planner.setting import LINE, Subject

__all__ = ["MODES", "Chosen", "PlannedRank", "choose"]

MODES = ("keep", "select", "recompute", *MOVED)
"""Of activations, what costs the least first."""
SHOWN = 4
"""Ways that are named beside the one that is taken."""


class Chosen(NamedTuple):
    """What is taken.

    Attributes:
        layout: its name.
        mode: of activations.
        peak: bytes of a rank's memory in a step.
        told: why, in a few sentences.
    """

    layout: str
    mode: str
    peak: float
    told: str


@dataclass(frozen=True, kw_only=True)
class PlannedRank:
    """A rank that is planned for, and what it is to run.

    Attributes:
        axes: of the mesh of all ranks.
        precision: of the whole model.
        micro_batches: of a step.
        overlap: as the engine has it.
        moments: that the optimizer keeps of each element.
        clip: the norm of the gradients is taken.
        behaviour: of the device.
        memory: bytes for the rank's process on the device.
        host: bytes of host memory for it; None: there is one memory, ``memory``.
        where: devices whose rates are known; None: they are not.
    """

    axes: Sequence[Axis]
    precision: str | Precision
    micro_batches: int = 1
    overlap: Overlap | None = None
    moments: int = 2
    clip: bool = False
    behaviour: Behaviour
    memory: float
    host: float | None = None
    where: Cluster | None = None


class _Tried(NamedTuple):
    """A way to train."""

    layout: str
    mode: str
    needed: float  # of the device's memory
    host: float
    seconds: float  # 0: not known
    at: str
    largest: int  # micro-batch; 0: none fits, or it is not known
    loss: str = ""  # as of a trace

    def fits(self, place: PlannedRank) -> bool:
        return self.needed <= place.memory and (place.host is None or self.host <= place.host)

    def __str__(self) -> str:
        seconds = f" in {1000 * self.seconds:.4g} ms" if self.seconds else ""
        return f"{self.layout}, {self.mode}: {human(self.needed)}{seconds}"


def choose(
    subjects: Sequence[Subject], tables: Mapping[str, Layout], modes: Sequence[str], place: PlannedRank
) -> Chosen:
    """The fastest of these layouts and modes that fits.

    Args:
        subjects: the model with its micro-batch, one, or one for each stage.
        tables: layouts by name, what sends the least first.
        modes: of activations, of :data:`MODES`.
        place: where.

    Raises:
        ConfigError: nothing fits; the message says what would.
        ModelError: the model does not train on the micro-batch.
    """
    timed = place.where is not None and len(subjects) == 1
    tried: list[_Tried] = []
    for layout, mode in _ways(tables, modes):
        tried.append(_planned(subjects, tables[layout], layout, mode, place, timed=timed))
        if not timed and tried[-1].fits(place):
            break
    fitting = [each for each in tried if each.fits(place)]
    if not fitting:
        raise ConfigError(_refusal(subjects, tables, tried, place))
    taken = min(fitting, key=lambda each: each.seconds)  # of equal ones the first
    left = len(tables) * len(modes) - len(tried)
    return Chosen(taken.layout, taken.mode, taken.needed, _told(taken, tried, place, left))


def _ways(tables: Mapping[str, Layout], modes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """In the order in which they are taken where no rates are known."""
    for slower in (False, True):
        for mode in sorted(modes, key=MODES.index):
            yield from ((name, mode) for name, table in tables.items() if _offloads(table) == slower)


def _offloads(table: Layout) -> bool:
    return any(cell.tier is not Tier.DEVICE for cell in table.cells().values())


def _planned(
    subjects: Sequence[Subject],
    table: Layout,
    layout: str,
    mode: str,
    place: PlannedRank,
    *,
    timed: bool,
    samples: int | None = None,
) -> _Tried:
    """One way; of stages that whose rank needs the most."""
    found = _Tried(layout, mode, -1.0, 0.0, 0.0, "", 0)
    for subject in subjects:
        trace = subject.trace(place.precision, mode, samples)
        setting = subject.setting(
            trace,
            layout=table,
            precision=place.precision,
            mesh=place.axes,
            overlap=place.overlap,
            micro_batches=place.micro_batches,
            moments=place.moments,
            clip=place.clip,
            behaviour=place.behaviour,
        )
        plan = plan_memory(setting, trace)
        held = plan.tiers.get(Tier.HOST, 0.0)
        needed = plan.peak + (held if place.host is None else 0.0)
        seconds, largest = 0.0, 0
        if timed and place.where is not None:
            where, mesh = place.where, setting.bound.mesh
            ways = ways_of(where, mesh, subject.division.axes)
            seconds = plan_seconds(setting, plan, where.device, ways).step
        if samples is not None:
            few, more = subject.line(place.precision, mode)
            most = plan.of(few).line(few, more, LINE).largest(place.memory - (needed - plan.peak))
            largest = 0 if most == inf else floor(most)
        if needed > found.needed:
            found = _Tried(layout, mode, needed, held, found.seconds, plan.top.where, largest, found.loss)
        found = found._replace(
            loss=found.loss or trace.loss,
            host=max(found.host, held),
            seconds=max(found.seconds, seconds),
            largest=min(found.largest, largest),
        )
    return found


def _told(taken: _Tried, tried: Sequence[_Tried], place: PlannedRank, left: int) -> str:
    seconds = f", and takes {1000 * taken.seconds:.4g} ms by the rates of {_name(place)}" if taken.seconds else ""
    first = (
        f"layout={taken.layout!r} with activations={taken.mode!r} is taken for Auto(sample=...): a step peaks at "
        f"{human(taken.needed)} of the {human(place.memory)} of each rank ({taken.at}){seconds}."
    )
    large = [each for each in tried if not each.fits(place)]
    slow = [each for each in tried if each.fits(place) and each is not taken]
    said = [first]
    if quicker := [each for each in large if not taken.seconds or each.seconds < taken.seconds]:
        said.append(f"Too large: {_listed(quicker)}.")
    if slow:
        said.append(f"Slower: {_listed(sorted(slow, key=lambda each: each.seconds))}.")
    if left:
        said.append("Others were not planned: they send, move or compute more.")
    if taken.loss:
        said.append(
            f"The model gives no loss, so {taken.loss} is taken for it: Auto(sample=..., loss=...) gives its own."
        )
    return " ".join(said)


def _listed(ways: Sequence[_Tried]) -> str:
    more = f"; and {len(ways) - SHOWN} more" if len(ways) > SHOWN else ""
    return "; ".join(map(str, ways[:SHOWN])) + more


def _name(place: PlannedRank) -> str:
    return place.where.device.name if place.where is not None else ""


def _refusal(
    subjects: Sequence[Subject], tables: Mapping[str, Layout], tried: Sequence[_Tried], place: PlannedRank
) -> str:
    """What would fit, in a sentence."""
    least = min(tried, key=lambda each: each.needed)
    samples = subjects[0].samples
    largest = 0
    if samples > 1 and least.needed > place.memory:
        largest = _planned(
            subjects, tables[least.layout], least.layout, least.mode, place, timed=False, samples=LINE[0]
        ).largest
        largest = min(largest, samples - 1)
    would = (
        f"a micro-batch of {largest} samples fits so, in place of {samples}"
        if largest
        else f"give each rank {human(least.needed)}, a smaller sample=, or more ranks"
    )
    if place.host is not None and least.host > place.host:
        held = f" and {human(least.host)} of the {human(place.host)} of host memory"
    else:
        held = ""
    return (
        f"Auto(sample=...): no layout fits a step of this micro-batch into {human(place.memory)} for each rank; the "
        f"least, {human(least.needed)}{held} ({least.at}), is taken by layout={least.layout!r} with "
        f"activations={least.mode!r}: {would}."
    )
