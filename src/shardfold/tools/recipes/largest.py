"""The largest micro-batch of a run that fits into a rank's memory, by plan: nothing runs for it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardfold import accelerator
from shardfold.engine.engine import Engine
from shardfold.engine.fitting import memory_of
from shardfold.errors import ConfigError
from shardfold.plan.layout import Tier
from shardfold.plan.lifetimes import CPU, GPU, Behaviour
from shardfold.plan.sizes import human, parse_bytes
from shardfold.planner.choice import Option, largest_of
from shardfold.planner.division import Division
from shardfold.planner.hardware import RESERVE
from shardfold.planner.setting import LINE, Subject
from shardfold.sharding.materialize import meta_init
from shardfold.tools.recipes.config import TrainConfig
from shardfold.tools.recipes.gpt import GPT

__all__ = ["behaviour_on", "subjects_of", "with_most_samples"]


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
    return largest_of(
        subjects_of(config, streams=accelerator.has_streams(engine.device)),
        layout=config.table(),
        mode=config.activations,
        precision=config.precision,
        mesh=engine.mesh.sizes.axes,
        micro_batches=config.accumulate,
        budget=budget,
        behaviour=behaviour_on(engine.device),
        clip=bool(config.clip_norm),
    )


def _budget(config: TrainConfig, device: torch.device) -> float:
    """Bytes of a rank: those that are given, or what there is without what a process takes by itself."""
    if config.memory is not None:
        return float(parse_bytes(config.memory) or 0)
    return memory_of(device) - RESERVE


def behaviour_on(device: torch.device) -> Behaviour:
    """How a device uses memory."""
    return GPU if accelerator.has_streams(device) else CPU


def subjects_of(config: TrainConfig, *, streams: bool) -> list[Subject]:
    """The model of a run as it is planned, one for each stage; ``streams``: its devices have them."""
    shape = config.model_shape()
    tokens = torch.empty((LINE[0], shape.context), dtype=torch.int64, device="meta")
    with meta_init():
        model = GPT(shape)
    return [
        Subject(
            model,
            {"tokens": tokens, "targets": tokens},
            division=Division(
                tensor=config.tensor,
                sequence_parallel=config.sequence_parallel,
                sequence=config.sequence,
                expert=config.expert,
                pipeline=config.pipeline,
                order=config.order,
                micro_batches=config.accumulate if config.pipeline > 1 else 1,
                stage=stage,
                streams=streams,
                attention=None if config.attention == "auto" else config.attention,
            ),
        )
        for stage in range(config.pipeline)
    ]
