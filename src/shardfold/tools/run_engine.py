"""What runs of every recipe ask of their engine: how it clips, what it holds, how it goes on, what ends it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import shardfold as sf
from shardfold.checkpoint.load import LoadReport
from shardfold.optim.schedules import renew_rates
from shardfold.plan.layout import Tier
from shardfold.tools.observe.working_line import working

__all__ = ["clip_of", "held_in_memory", "load_with_own_rates", "not_finite", "parallel_of"]


class EngineSettings(Protocol):
    """Of a run, as far as this page reads them."""

    @property
    def clip_norm(self) -> float: ...
    @property
    def nonfinite(self) -> str: ...
    @property
    def precision(self) -> str: ...
    @property
    def lr(self) -> float: ...


class RankSettings(Protocol):
    """Of a run whose ranks share a model, as far as this page reads them."""

    @property
    def tensor(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def attention(self) -> Any: ...
    @property
    def order(self) -> Any: ...
    def axes(self) -> Mapping[str, int]: ...


def clip_of(config: EngineSettings) -> sf.Clip | None:
    """Of gradients; one that clips nothing looks whether they are finite."""
    stops = config.nonfinite == "raise" and not config.precision.startswith("fp16")  # that skips such steps
    if not (config.clip_norm or stops):
        return None
    return sf.Clip(norm=config.clip_norm or math.inf, error_if_nonfinite=stops)


def parallel_of(config: RankSettings) -> sf.Parallel:
    """How ranks share layers, sequences and stages."""
    return sf.Parallel(
        mesh={axis: ranks for axis, ranks in config.axes().items() if ranks > 1} or None,
        tensor="auto" if config.tensor > 1 else None,
        sequence_parallel=config.sequence_parallel,
        attention=config.attention if config.sequence > 1 else None,
        pipeline=config.order,
    )


def held_in_memory(report: sf.MemoryReport) -> int:
    """Return the bytes that are held in memory, whichever."""
    return sum(num_bytes for tier, num_bytes in report.tiers.items() if tier != Tier.DISK)


def load_with_own_rates(engine: sf.Engine, path: Path, state: Mapping[str, Any]) -> LoadReport:
    """Load a checkpoint; the optimizer's settings and rates stay those of this run."""
    optimizer, schedule = engine.optimizer, engine.lr_schedule
    assert optimizer is not None
    names = ("params", "param_names")
    options = [{k: v for k, v in group.items() if k not in names} for group in optimizer.param_groups]
    rates = list(schedule.base_lrs)
    with working("loading"):
        report = engine.load(path, state=state)
    for group, asked in zip(optimizer.param_groups, options, strict=True):
        group.update(asked)
    schedule.base_lrs = rates
    renew_rates(schedule)
    return report


def not_finite(what: str, step: int, config: EngineSettings) -> str:
    """Return the sentence with which a run ends that is not finite any more."""
    return (
        f"{what} at step {step}, and nothing was updated: lower the learning rate (--lr, now {config.lr:g}), clip "
        f"harder (--clip-norm, now {config.clip_norm:g}), or go on all the same with --nonfinite warn."
    )
