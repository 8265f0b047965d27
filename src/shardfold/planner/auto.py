"""``Engine(layout="auto")``: the layout that sends the least of those whose states fit.

An engine is made before it sees a batch, so what forward and backward hold is not known then. What is counted is the
rest: states at rest and buffers of the program, by the sums that a plan and ``explain`` have (``plan.cost``). A part of
the memory stays free for activations. ``shardfold.plan.best`` takes a batch and counts them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardfold.errors import ConfigError
from shardfold.plan import presets
from shardfold.plan.axes import Mesh
from shardfold.plan.bind import bind
from shardfold.plan.cost import resting_bytes
from shardfold.plan.layout import Layout, Tier
from shardfold.plan.lifetimes import ALONE, peak_bytes
from shardfold.plan.placement import UnitSpec
from shardfold.plan.rules import Rules
from shardfold.plan.sizes import human
from shardfold.planner.coding import coding_bytes
from shardfold.sharding.partition import cut

__all__ = ["AUTO", "FREE", "ORDER", "Choice", "choose_layout", "states_peak"]

AUTO = "auto"
ORDER = ("ddp", "zero1", "zero2", "zero3", "offload", "infinity")
"""Layouts by what they send and move in a step, the least first."""
FREE = 0.4
"""Part of the memory that stays free for activations."""


@dataclass(frozen=True)
class Choice:
    """A layout that was chosen.

    Attributes:
        layout: its name.
        told: why, and what was assumed, in a sentence or two.
    """

    layout: str
    told: str


def choose_layout(model: nn.Module, precision: Any, mesh: Mesh, memory: float, moments: int = 2) -> Choice:
    """The first of :data:`ORDER` whose states and buffers leave a part of the memory free.

    Args:
        model: with or without memory.
        precision: policy or rules.
        mesh: of all ranks.
        memory: bytes of each rank's device.
        moments: that the optimizer keeps of each element.

    Raises:
        ConfigError: none does.
    """
    groups = {id(p): 0 for p in model.parameters() if p.requires_grad}
    budget = memory * (1 - FREE)
    tried: list[str] = []
    for name in ORDER if mesh.divisor > 1 else ("ddp", "offload", "infinity"):
        rules = Rules(precision, presets.named(name), mesh)
        units = [c.spec for c in cut(model, None, groups, rules, mesh) if c.spec is not None]
        needed = states_peak(rules.layouts[-1], units, mesh, moments)
        if needed <= budget:
            before = f" {'; '.join(tried)}." if tried else ""
            return Choice(
                name,
                f"layout='auto' is {name!r}: its states and buffers take {human(needed)} of the {human(memory)} of "
                f"each rank.{before} Assumed: an optimizer with {moments} moments, and {FREE:.0%} of the memory for "
                "activations, of which nothing is known before a batch; shardfold.plan.best counts them.",
            )
        tried.append(f"{name} would take {human(needed)}")
    raise ConfigError(
        f"layout='auto': nothing fits into {human(memory)} for each rank, of which {FREE:.0%} stay free for "
        f"activations: {'; '.join(tried)}. Take more ranks, or a smaller model."
    )


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
