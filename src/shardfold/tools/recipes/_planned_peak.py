"""The peak of a step as planned beside the one of a step that ran, for the end of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from shardfold import accelerator
from shardfold.engine.engine import Engine
from shardfold.plan.checks import human
from shardfold.plan.layout import Tier
from shardfold.planner.memory import MemoryPlan
from shardfold.tools.bench.planned import WatchedBytes, inside_hooks
from shardfold.tools.recipes.largest import rank_of, subjects_of
from shardfold.tools.recipes.train_config import TrainConfig

__all__ = ["Peak"]

STEP = 20
"""Which step is watched: orders are found by then. Shorter runs say nothing of a peak."""


class Peak:
    """Of one rank's steps.

    Args:
        config: of the run.
        engine: that trains.
        data: what is read of it is no part of a step's memory.

    Attributes:
        measured: bytes of live storages in the step that was watched, or of the device's allocator; 0: none was.
    """

    def __init__(self, config: TrainConfig, engine: Engine, data: Tensor) -> None:
        self._config, self._engine, self._data = config, engine, data
        self.measured = 0
        whole = all(ranks == 1 for ranks in config.axes().values()) and not config.model_shape().experts
        self.follows = whole and config.steps > STEP and engine.rank == 0
        """Whether a plan follows such a run: axes of data only, and no experts, whose tokens depend on values."""

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Around a step with that number: its peak, if it is the one."""
        if not self.follows or step != STEP:
            yield
            return
        if accelerator.has_streams(self._engine.device):
            yield
            self.measured = accelerator.peak(self._engine.device) or 0
            return
        live = WatchedBytes(self._engine, (), [self._data])
        with live, inside_hooks():
            yield
        self.measured = live.most

    def planned(self) -> MemoryPlan:
        """What the plan says."""
        config = self._config
        (subject,) = subjects_of(config, streams=accelerator.has_streams(self._engine.device))
        rank = rank_of(config, self._engine)
        return rank.plan(subject, config.table(), config.activations, config.micro_batch)[1]

    def told(self) -> list[str]:
        """A line for the report; none where no plan follows the run."""
        if not self.measured:
            return []
        plan = self.planned()
        host = 0.0 if accelerator.has_streams(self._engine.device) else plan.tiers.get(Tier.HOST, 0.0)
        planned = plan.peak + host
        if self._config.optimizer != "adamw":  # a plan counts AdamW's moments
            rows = self._engine.memory().rows
            planned += sum(row.held for row in rows if row.state == "moments")
            planned -= sum(n for (state, _), n in plan.resting.items() if state == "moments")
        return [
            f"Peak of a step on rank 0: {human(planned)} planned, {human(self.measured)} measured "
            f"({planned / self.measured - 1:+.1%}), at {plan.top.where}."
        ]
