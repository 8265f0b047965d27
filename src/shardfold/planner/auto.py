"""``Engine(layout="auto")``: what is taken of layouts and modes of activations, and why.

Without a micro-batch it is the layout that sends the least of those whose states fit. An engine is made before it sees
a batch, so what forward and backward hold is not known then. What is counted is the rest: states at rest and buffers of
the program, by the sums that a plan and ``explain`` have (``plan.cost``). A part of the memory stays free for
activations.

With a micro-batch, ``sample=``, it is the fastest layout and mode with which a step of it fits. The model itself is
traced with it, and the program of each layout is walked on the engine's own mesh, as ``shardfold plan --micro-batch``
does. Where the device's rates are known, the seconds of a step say what is fastest. Where they are not, this order
does: states stay on the device before they rest in host memory, activations are kept before they are made again, and of
the rest what sends less comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

from shardfold.errors import ConfigError
from shardfold.plan import presets
from shardfold.plan.axes import Mesh
from shardfold.plan.bind import bind
from shardfold.plan.checks import described, human, known_arguments
from shardfold.plan.cost import resting_bytes
from shardfold.plan.layout import Layout, Tier
from shardfold.plan.lifetimes import ALONE, peak_bytes
from shardfold.plan.outer import Outer
from shardfold.plan.placement import UnitSpec
from shardfold.plan.rules import Rules
from shardfold.plan.search import Searched, search
from shardfold.planner.choice import Option, option
from shardfold.planner.live import coding_bytes
from shardfold.planner.moved import MOVED
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.sharding.partition import cut

__all__ = ["AUTO", "FREE", "MODES", "ORDER", "Auto", "Chosen", "choose", "choose_layout", "first_of", "states_peak"]


AUTO = "auto"
ORDER = ("ddp", "zero1", "zero2", "zero3", "offload", "infinity")
"""Layouts by what they send and move in a step, the least first."""
FREE = 0.4
"""Part of the memory that stays free for activations."""
MODES = ("keep", "select", "recompute", *MOVED)
"""Of activations, what costs the least first."""
SHOWN = 4
"""Ways that are named beside the one that is taken."""


class Chosen(NamedTuple):
    """What is taken.

    Attributes:
        layout: its name.
        mode: of activations; empty: nothing is known of them.
        peak: bytes of a rank's memory in a step; of states alone without a micro-batch.
        told: why, and what was assumed, in a few sentences.
    """

    layout: str
    mode: str
    peak: float
    told: str


# -- by states alone


class StateBytes(NamedTuple):
    """What states and buffers take under a layout; ``cost``: the first that fits is taken."""

    layout: str
    needed: float
    budget: float
    cost: float = 0.0

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget


def first_of(names: Iterable[str], needed: Callable[[str], float], budget: float) -> Searched[StateBytes]:
    """Layouts up to the first that needs no more than the budget."""
    return search(names, lambda name: [StateBytes(name, needed(name), budget)], lambda plan: plan.fits)


def choose_layout(
    model: nn.Module,
    precision: Any,
    mesh: Mesh,
    memory: float,
    moments: int = 2,
    bucket: int = 0,
    copies: str | None = None,
) -> Chosen:
    """The first layout whose states and buffers leave a part of the memory free.

    Args:
        model: with or without memory.
        precision: policy or rules.
        mesh: of all ranks.
        memory: bytes of each rank's device.
        moments: that the optimizer keeps of each element.
        bucket: of :func:`~shardfold.sharding.partition.cut`.
        copies: who holds the optimizer's states of a rank once more, as the column of a table has it; None: nobody.

    Raises:
        ConfigError: none does.
    """
    groups = {id(p): 0 for p in model.parameters() if p.requires_grad}

    def needed(name: str) -> float:
        rules = Rules(precision, presets.named(name).replace(copies=copies), mesh)
        units = [c.spec for c in cut(model, None, groups, rules, mesh, bucket=bucket) if c.spec is not None]
        return states_peak(rules.layouts[-1], units, mesh, moments)

    names = ORDER if mesh.divisor > 1 else ("ddp", *ORDER[-2:])
    looked = first_of(names, needed, memory * (1 - FREE))
    tried = "; ".join(f"{each.layout} would take {human(each.needed)}" for each in looked.others)
    if not looked.fitting:
        raise ConfigError(
            f"layout='auto': nothing fits into {human(memory)} for each rank, of which {FREE:.0%} stay free for "
            f"activations: {tried}. Take more ranks, or a smaller model."
        )
    (taken,) = looked.fitting
    before = f" {tried}." if tried else ""
    with_copies = ", with copies of others'," if copies is not None else ""
    told = (
        f"layout='auto' is {taken.layout!r}: its states{with_copies} and buffers take {human(taken.needed)} of the "
        f"{human(memory)} of each rank.{before} Assumed: an optimizer with {moments} moments, and {FREE:.0%} of the "
        "memory for activations, of which nothing is known before a batch; shardfold.plan.best counts them."
    )
    return Chosen(taken.layout, "", taken.needed, told)


def states_peak(layout: Layout, units: Sequence[UnitSpec], mesh: Mesh, moments: int) -> float:
    """The most bytes of the device in a step on one rank, without activations and the model's buffers.

    Args:
        layout: bound.
        units: laid out on the mesh.
        mesh: of all ranks.
        moments: that the optimizer keeps of each element.
    """
    bound = bind(layout, units, mesh, num_moments=moments, clip=True)
    resting = resting_bytes(layout, units, mesh, num_moments=moments, padded=True)
    rest = sum(n for (_, tier), n in resting.items() if tier is Tier.DEVICE)
    return peak_bytes(bound, ALONE, rest=rest, coding=coding_bytes)


# -- by a plan of a micro-batch


def choose(
    subjects: Sequence[Subject], tables: Mapping[str, Layout], modes: Sequence[str], rank: PlannedRank
) -> Chosen:
    """The fastest of these layouts and modes that fits.

    Args:
        subjects: the model with its micro-batch, one, or one for each stage.
        tables: layouts by name, what sends the least first.
        modes: of activations, of :data:`MODES`.
        rank: that is planned for.

    Raises:
        ConfigError: nothing fits; the message says what would.
        ModelError: the model does not train on the micro-batch.
    """
    timed = rank.where is not None and len(subjects) == 1

    def planned(way: tuple[str, str]) -> list[Option]:
        name, mode = way
        return [option(subjects, rank, tables[name], mode, name=name, sized=False)]

    looked = search(_ways(tables, modes), planned, lambda plan: plan.fits and not timed)
    if not looked.fitting:
        least = min(looked.others, key=lambda each: each.needed)
        raise ConfigError(_refusal(subjects, tables[least.layout], least))
    taken = looked.fitting[0]
    told = _told(looked, len(tables) * len(modes) - len(looked.planned))
    return Chosen(taken.layout, taken.mode, taken.needed, told)


def _ways(tables: Mapping[str, Layout], modes: Sequence[str]) -> Iterator[tuple[str, str]]:
    """In the order in which they are taken where no rates are known."""
    for slower in (False, True):
        for mode in sorted(modes, key=MODES.index):
            yield from ((name, mode) for name, table in tables.items() if _offloads(table) == slower)


def _offloads(table: Layout) -> bool:
    return any(cell.tier is not Tier.DEVICE for cell in table.cells().values())


def _told(looked: Searched[Option], left: int) -> str:
    """Why the first that fits is taken; ``left``: ways that were not planned."""
    taken, *slow = looked.fitting
    seconds, where = "", taken.rank.where
    if taken.cost and where is not None:
        seconds = f", and takes {1000 * taken.cost:.4g} ms by the rates of {where.device.name}"
    said = [
        f"layout={taken.layout!r} with activations={taken.mode!r} is taken for Auto(sample=...): a step peaks at "
        f"{human(taken.needed)} of the {human(taken.rank.budget)} of each rank ({taken.plan.top.where}){seconds}."
    ]
    if quicker := [each for each in looked.others if not taken.cost or each.cost < taken.cost]:
        said.append(f"Too large: {_listed(quicker)}.")
    if slow:
        said.append(f"Slower: {_listed(slow)}.")
    if left:
        said.append("Others were not planned: they send, move or compute more.")
    if taken.loss:
        said.append(
            f"The model gives no loss, so {taken.loss} is taken for it: Auto(sample=..., loss=...) gives its own."
        )
    return " ".join(said)


def _listed(ways: Sequence[Option]) -> str:
    more = f"; and {len(ways) - SHOWN} more" if len(ways) > SHOWN else ""
    each = [
        f"{way.layout}, {way.mode}: {human(way.needed)}" + (f" in {1000 * way.cost:.4g} ms" if way.cost else "")
        for way in ways[:SHOWN]
    ]
    return "; ".join(each) + more


def _refusal(subjects: Sequence[Subject], table: Layout, least: Option) -> str:
    """What would fit, in a sentence; ``least``: the way that needs the least."""
    samples, largest, budget, host = subjects[0].samples, 0, least.rank.budget, least.rank.host
    if samples > 1 and least.needed > budget:
        rank = replace(least.rank, where=None)
        largest = min(option(subjects, rank, table, least.mode, LINE[0]).largest, samples - 1)
    would = (
        f"a micro-batch of {largest} samples fits so, in place of {samples}"
        if largest
        else f"give each rank {human(least.needed)}, a smaller Auto(sample=...), or more ranks"
    )
    held = ""
    if host is not None and least.host > host:
        held = f" and {human(least.host)} of the {human(host)} of host memory"
    return (
        f"Auto(sample=...): no layout fits a step of this micro-batch into {human(budget)} for each rank; the least, "
        f"{human(least.needed)}{held} ({least.plan.top.where}), is taken by layout={least.layout!r} with "
        f"activations={least.mode!r}: {would}."
    )


@known_arguments
@dataclass(frozen=True, kw_only=True)
class Auto:
    """``layout=`` of an engine: the fastest with which a step of this model fits, by a plan of it with a micro-batch
    (see ``planner.auto``). Rank 0 plans, and all ranks take the same; the log says what, and why.

    Attributes:
        sample: a micro-batch as the model takes it (a dict of arguments by name, a tuple of them, or the only one),
            whose shapes and dtypes the plan goes by; with an axis of sequence, of whole sequences.
        loss: where the model does not give its loss itself, what does, as ``lambda model, batch: ...``.
        layout: one that is given, a preset's name or a :class:`Layout`: only what happens to activations is chosen.
            ``"auto"``: both are.
        outer: rare steps along an axis, which every layout to choose from has; None: those of a given layout.

    Raises:
        ConfigError: there is no micro-batch, or ``outer`` is no :class:`Outer`.

    Examples:
        >>> squares = sf.Auto(sample=x, loss=lambda model, batch: model(batch).square().mean())
        >>> sf.Engine(nn.Linear(8, 8), optimizer=adam, layout=squares).layout == sf.PRESETS["zero3"]
        False
    """

    sample: Any = field(repr=False)
    loss: Callable[[Any, Any], Any] | None = None
    layout: str | Layout = AUTO
    outer: Outer | None = None

    def __post_init__(self) -> None:
        if self.sample is None:
            raise ConfigError(
                "Auto(sample=None) has no micro-batch to plan with: give one as the model takes it, as in "
                "sf.Auto(sample=batch), or take layout='auto', which goes by states alone."
            )
        if self.outer is not None and not isinstance(self.outer, Outer):
            raise ConfigError(f"Auto.outer is {described(self.outer)}: give sf.Outer(every=...), or None.")
