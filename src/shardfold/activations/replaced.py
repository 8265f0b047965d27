"""A module whose forward is replaced, because an activation mode other than ``keep`` holds in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from shardfold.activations.profile import Spot
from shardfold.plan.layout import Activations
from shardfold.sharding.pickling import replace_forward, restore_forward
from shardfold.sharding.unit import Unit

__all__ = ["ReplacedForward", "ReplacedProducts"]


class ReplacedProducts(Protocol):
    """What puts products of its own in place of linear layers', below what activations put around modules."""

    def attach(self) -> None: ...
    def remove(self) -> None: ...
    def described(self) -> list[str]: ...


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
        put: the forward that runs in place of its own.
    """

    path: str
    module: nn.Module
    unit: Unit
    given: Activations
    inner: list[nn.Module] = field(default_factory=list[nn.Module])
    left: bool = False
    spot: Spot | None = None
    compared: bool = False
    put: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self.inner = list(self.module.modules())

    @property
    def current(self) -> Activations:
        return self.given if self.spot is None else self.given.chosen(self.spot.mode)

    def replace(self, forward: Callable[..., Any]) -> None:
        """It runs ``forward`` from now on."""
        self.put = forward
        replace_forward(self.module, forward)

    def restore(self) -> None:
        """It runs its own again."""
        if self.put is not None:
            restore_forward(self.module, self.put)
        self.put = None

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
