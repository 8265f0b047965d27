"""States that rest on the device and that a user lets rest in host memory for a while, between steps."""

from __future__ import annotations

from collections.abc import Collection

import torch

from shardfold.optim.sharded import ShardedOptimizer
from shardfold.plan.layout import Tier
from shardfold.sharding.model import ShardedModel

__all__ = ["Away"]

STATES = ("params", "grads", "master", "moments")


class Away:
    """What is in host memory for a while, and how it comes back. Whoever needs it on the device calls
    :meth:`come_back`: a forward for parameters, a backward and a step for everything.

    Args:
        model: with its states bound.
        updater: of its shards; None: nothing is trained.

    Attributes:
        states: that are away.
    """

    def __init__(self, model: ShardedModel, updater: ShardedOptimizer | None) -> None:
        self._model, self._updater = model, updater
        self.states: set[str] = set()

    def leave(self, states: Collection[str]) -> None:
        """These of :data:`STATES` move to host memory; between steps only. What is not split stays where it is: the
        model's own parameters, and gradients that gather where they rest. So does what rests in a slower tier
        anyway."""
        for state in states:
            self._move(state, there=True)
            self.states.add(state)

    def come_back(self, *states: str) -> None:
        """These, or all, rest where their cells say."""
        for state in self.states & set(states or STATES):
            self._move(state, there=False)
            self.states.discard(state)

    def _move(self, state: str, *, there: bool) -> None:
        model, updater = self._model, self._updater
        with torch.no_grad():
            if state == "moments":
                if updater is not None:
                    updater.rest_in(Tier.HOST if there else Tier.DEVICE)
                return
            for unit in model.units:
                for segment in unit.segments:
                    cell = segment.table.cells().get(state)
                    whole = state == "grads" and unit.gradients.resting is not None
                    if cell is None or cell.tier is not Tier.DEVICE or whole:
                        continue
                    segment.rest_in(state, model.tiers, Tier.HOST if there else cell.tier)
                    if updater is not None and segment.spec.trainable:
                        updater.point_pieces(segment)
