"""The least that a run needs of each memory, so that what cannot fit is refused before any of it is taken."""

from __future__ import annotations

from collections.abc import Collection

from shardfold.errors import ConfigError
from shardfold.plan.cost import resting_bytes, tier_bytes
from shardfold.plan.layout import Precision, Tier
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.tools.observe.readable import format_bytes
from shardfold.tools.recipes.train_config import GPTConfig, TrainConfig

__all__ = ["check_memory", "saved_bytes", "states_bytes"]


def states_bytes(config: TrainConfig, shape: GPTConfig, ranks: int, tiers: Collection[Tier] = tuple(Tier)) -> float:
    """Return the bytes that parameters, gradients and optimizer states take in `tiers`, between steps on each rank."""
    policy = Precision.named(config.precision)
    apart = config.tensor * config.pipeline
    mesh = {"inter": 1, "intra": max(ranks // apart, 1)}  # experts are split over them too, or shared out
    numel = shape.num_parameters // apart
    segment = SegmentSpec((Slot("all", (numel,), 0),), numel, policy.compute)
    bound = config.table().bind(policy, mesh)
    held = tier_bytes(resting_bytes(bound, [UnitSpec("(root)", (segment,), True)], mesh))
    return sum(held.get(tier, 0.0) for tier in tiers)


def saved_bytes(config: TrainConfig, shape: GPTConfig) -> float:
    """Return bytes that backward needs of a micro-batch at least: the inputs of what each block multiplies."""
    itemsize = 4 if config.precision == "fp32" else 2
    tokens = config.micro_batch * shape.context / config.sequence
    return tokens * (16.0 + itemsize * shape.layers * (7 * shape.d_model + 3 * shape.d_ff) / config.tensor)


def check_memory(
    config: TrainConfig, *, ranks: int, sharing: int, available: int, where: str, tiers: Collection[Tier] = tuple(Tier)
) -> None:
    """Refuse a run that cannot fit.

    Args:
        ranks: in all.
        sharing: of them, those that share the memory.
        available: its bytes; 0 if unknown.
        where: what it is the memory of, for people.
        tiers: those that are in it.

    Raises:
        ConfigError: model and optimizer alone, or what backward needs besides, take more than there is.
    """
    shape = config.model_shape()
    states = sharing * states_bytes(config, shape, max(ranks // config.sequence, 1), tiers)
    needed = states + (sharing * saved_bytes(config, shape) if Tier.DEVICE in tiers else 0.0)
    if not available or needed <= available:
        return
    there = f"{where} has {format_bytes(available)}"
    if states > available:
        raise ConfigError(
            f"{shape.num_parameters:,} parameters under {config.layout} need {format_bytes(states)} here, but {there}: "
            "choose a smaller --size (--d-model, --layers), another --layout, --offload to a slower tier, or more "
            "machines."
        )
    raise ConfigError(
        f"a micro-batch of {config.micro_batch:,} sequences of {shape.context:,} bytes needs at least "
        f"{format_bytes(needed)} here, but {there}: give a smaller --micro-batch (and --accumulate for the rest)."
    )
