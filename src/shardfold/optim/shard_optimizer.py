"""Which kind of optimizer over shards stands for the user's: it is chosen once, when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from shardfold.errors import ConfigError
from shardfold.optim._fused_optimizer import FusedOptimizer
from shardfold.optim._parts_optimizer import PartsOptimizer
from shardfold.optim.class_optimizer import ClassOptimizer
from shardfold.optim.copied_shard import CopiedShard
from shardfold.optim.fused import fused_moments
from shardfold.optim.parts import PartOptimizer
from shardfold.optim.requirements import check_compiled
from shardfold.optim.sharded import ShardedOptimizer
from shardfold.plan.layout import Cell
from shardfold.sharding.segment import TORCH_DTYPES, Segment
from shardfold.sharding.unit import Unit
from shardfold.tiers.tiers import Tiers

__all__ = ["shard_optimizer"]


def shard_optimizer(
    optimizer: Optimizer,
    units: Sequence[Unit],
    moments: Cell,
    tiers: Tiers,
    copies: Callable[[Segment], CopiedShard],
    block: int,
    stochastic: int | None = None,
    threads: int = 1,
    compiled: bool = False,
    delayed: bool = False,
) -> ShardedOptimizer:
    """The optimizer over the shards of units.

    Args:
        optimizer: from :func:`~shardfold.optim.requirements.build`; its groups are re-pointed in place.
        units: with their states bound.
        moments: the bound table's cell of the fused update's moments, for their dtype; where they rest is in the
            tables of the segments.
        tiers: what these rest in.
        copies: makes the copy of another rank's states that this one holds of a segment.
        block: elements per fused call, 0 for the default of the device.
        stochastic: the seed, where a bf16 master is rounded stochastically; None: to the nearest.
        threads: how many update what is in host memory.
        compiled: whether a compiled pass does.
        delayed: whether updates go on behind their step (see :meth:`ShardedOptimizer.hold`).

    Raises:
        ConfigError: it cannot be compiled, or could not be.
    """
    made: ShardedOptimizer
    if (names := fused_moments(optimizer)) is not None:
        how = TORCH_DTYPES[moments.dtype], block, stochastic, threads
        made = FusedOptimizer(optimizer, tiers, names, *how, compiles=compiled, delayed=delayed, copies=copies)
    elif isinstance(optimizer, PartOptimizer):
        made = PartsOptimizer(optimizer, tiers)
    else:
        made = ClassOptimizer(optimizer, tiers)
    for unit in units:
        made.add(unit)
    if compiled and not made.compiled:
        check_compiled(optimizer, stochastic)
        raise ConfigError(
            "Overlap(compiled_update=True) joins an update with the casts of 16-bit gradients and parameters; here "
            "nothing is cast: leave compiled_update out."
        )
    made.point_groups(units)
    return made
