"""The largest micro-batch of a run that fits into a rank's memory, by plan: nothing runs for it."""

from __future__ import annotations

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
from shardfold.tools.recipes.config import TrainConfig
from shardfold.tools.recipes.gpt import GPT

__all__ = ["rank_of", "subjects_of", "with_most_samples"]


def with_most_samples(config: TrainConfig, engine: Engine, windows: int) -> TrainConfig:
    """The settings with the most sequences of a micro-batch that fit on all ranks; all ranks call it.

    Args:
        config: of the run.
        engine: that trains.
        windows: sequences that there are.

    Raises:
        ConfigError: on all ranks: not even one sequence fits.
    """
    budget = _budget(config, engine.device)
    found = _largest(config, engine, budget)
    held = 0.0 if accelerator.has_streams(engine.device) else found.plan.tiers.get(Tier.HOST, 0.0)
    if held:  # one memory
        found = _largest(config, engine, budget - held)
    (most,) = engine.sharded.comm.control([float(min(found.largest, windows))], dist.ReduceOp.MIN)
    if most < 1:
        raise ConfigError(
            f"--micro-batch max: not even one sequence of {config.model_shape().context:,} bytes fits: a step peaks at "
            f"{human(found.plan.peak + held)}, {found.plan.top.where}, and each rank has {human(budget)}: choose "
            "another --layout, --activations recompute, a smaller --size, or more ranks."
        )
    each = windows // (engine.data_ranks * config.accumulate)
    return config.model_copy(update={"micro_batch": max(1, min(int(most), each))})


def _largest(config: TrainConfig, engine: Engine, budget: float) -> Option:
    subjects = subjects_of(config, streams=accelerator.has_streams(engine.device))
    return largest_of(subjects, rank_of(config, engine, budget), config.table(), config.activations)


def _budget(config: TrainConfig, device: torch.device) -> float:
    """Bytes of a rank: those that are given, or what there is without what a process takes by itself."""
    if config.memory is not None:
        return float(parse_bytes(config.memory) or 0)
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
