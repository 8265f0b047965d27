"""A module whose forward is replaced, because an activation mode other than ``keep`` holds in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from shardfold.activations.profile import Spot
from shardfold.plan.layout import Activations
from shardfold.sharding.unit import Unit

__all__ = ["ReplacedForward"]


@dataclass(eq=False)
class ReplacedForward:
    """A module whose forward is replaced.

    Attributes:
        path: of the module in the model.
        unit: that it is, or is a part of.
        inner: it and the modules in it.
        left: it last ran inside of a checkpoint of the model's own, to which it is left.
        given: what the rules say for it.
        current: what holds now: the same, or what a budget chose.
        spot: where there is a budget: what is planned for it.
        compared: ranks that its inputs are split over have compared them.
    """

    path: str
    module: nn.Module
    unit: Unit
    given: Activations
    inner: list[nn.Module] = field(default_factory=list[nn.Module])
    left: bool = False
    spot: Spot | None = None
    compared: bool = False

    def __post_init__(self) -> None:
        self.inner = list(self.module.modules())

    @property
    def current(self) -> Activations:
        return self.given if self.spot is None else self.given.chosen(self.spot.mode)

    def plan(self, spot: Spot | None) -> None:
        """What is planned for it."""
        self.spot = spot

    def leave(self, left: bool) -> bool:
        """Whether it runs inside of a checkpoint of the model's own."""
        self.left = left
        return left

    def end_comparison(self) -> None:
        """Ranks have the same inputs."""
        self.compared = True

    @property
    def is_unit(self) -> bool:
        """Whether its unit is this module, and no others."""
        return len(self.unit.modules) == 1 and self.unit.modules[0] is self.module

    @property
    def leaves(self) -> bool:
        """Whether the model recomputes this, or parts of it, itself (``gradient_checkpointing`` of transformers)."""
        return any(vars(module).get("gradient_checkpointing") for module in self.inner)
