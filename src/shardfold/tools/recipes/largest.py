"""The largest micro-batch of a run that fits into a rank's memory, by plan: nothing runs for it."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import torch
import torch.distributed as dist

from shardfold import accelerator
from shardfold.engine.engine import Engine
from shardfold.engine.fitting import memory_of
from shardfold.errors import ConfigError
from shardfold.plan.checks import human, parse_bytes
from shardfold.plan.layout import Tier
from shardfold.plan.lifetimes import CPU, GPU
from shardfold.planner.choice import Option, largest_of
from shardfold.planner.division import Division
from shardfold.planner.hardware import RESERVE
from shardfold.planner.setting import LINE, PlannedRank, Subject
from shardfold.sharding.materialize import meta_init
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import TrainConfig

__all__ = ["most_that_fit", "rank_of", "subjects_of", "with_most_samples"]


def with_most_samples(config: TrainConfig, engine: Engine, windows: int) -> TrainConfig:
    """The settings with the most sequences of a micro-batch that fit on all ranks; all ranks call it.

    Args:
        config: of the run.
        engine: that trains.
        windows: sequences that there are.

    Raises:
        ConfigError: on all ranks: not even one sequence fits.
    """
    most, peak, budget = most_that_fit(engine, config.memory, lambda budget: _largest(config, engine, budget), windows)
    if most < 1:
        raise ConfigError(
            f"--micro-batch max: not even one sequence of {config.model_shape().context:,} bytes fits: a step peaks at "
            f"{human(peak)}, and each rank has {human(budget)}: choose another --layout, --activations recompute, a "
            "smaller --size, or more ranks."
        )
    each = windows // (engine.data_ranks * config.accumulate)
    return config.model_copy(update={"micro_batch": max(1, min(most, each))})


def most_that_fit(
    engine: Engine, memory: str | None, find: Callable[[float], Option], most: int
) -> tuple[int, float, float]:
    """Samples of a micro-batch that fit on all ranks, which all call it; the peak of a step, and the bytes that there
    are.

    Args:
        engine: that trains.
        memory: of a rank; None: what there is.
        find: the largest micro-batch in so many bytes.
        most: samples that there are.
    """
    budget = _budget(memory, engine.device)
    found = find(budget)
    held = 0.0 if accelerator.has_streams(engine.device) else found.plan.tiers.get(Tier.HOST, 0.0)
    if held:  # one memory
        found = find(budget - held)
    (fits,) = engine.sharded.comm.control([float(min(found.largest, most))], dist.ReduceOp.MIN)
    return int(fits), found.plan.peak + held, budget


def _largest(config: TrainConfig, engine: Engine, budget: float) -> Option:
    subjects = subjects_of(config, streams=accelerator.has_streams(engine.device))
    return largest_of(subjects, rank_of(config, engine, budget), config.table(), config.activations)


def _budget(memory: str | None, device: torch.device) -> float:
    """Bytes of a rank: those that are given, or what there is without what a process takes by itself."""
    if memory is not None:
        return float(parse_bytes(memory) or 0)
    return memory_of(device) - RESERVE


def rank_of(config: TrainConfig, engine: Engine, budget: float = inf) -> PlannedRank:
    """A rank of a run as it is planned, with so many bytes."""
    return PlannedRank(
        mesh=engine.mesh.sizes.axes,
        budget=budget,
        precision=config.precision,
        micro_batches=config.accumulate,
        clip=bool(config.clip_norm),
        behaviour=GPU if accelerator.has_streams(engine.device) else CPU,
    )


def subjects_of(config: TrainConfig, *, streams: bool) -> list[Subject]:
    """The model of a run as it is planned, one for each stage; ``streams``: its devices have them."""
    shape = config.model_shape()
    tokens = torch.empty((LINE[0], shape.context), dtype=torch.int64, device="meta")
    with meta_init():
        model = GPT(shape)
    division = Division(
        tensor=config.tensor,
        sequence_parallel=config.sequence_parallel,
        sequence=config.sequence,
        expert=config.expert,
        pipeline=config.pipeline,
        order=config.order,
        micro_batches=config.accumulate if config.pipeline > 1 else 1,
        streams=streams,
        attention=None if config.attention == "auto" else config.attention,
    )
    return Subject(model, {"tokens": tokens, "targets": tokens}, division=division).ranks
