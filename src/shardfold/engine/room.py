"""Room on drives for all that will rest there, taken before anything is made: what does not fit is refused now, on all
ranks, and not in the middle of training."""

from __future__ import annotations

from collections.abc import Sequence

from shardfold.errors import ConfigError, by_rank
from shardfold.optim.fused import fused_moments
from shardfold.plan.cost import on_disk
from shardfold.plan.placement import UnitSpec
from shardfold.sharding.model import ShardedModel
from shardfold.tiers.disk import DiskTier

__all__ = ["take_room"]

WHAT = "room for the states on disk"


def take_room(model: ShardedModel, units: Sequence[UnitSpec]) -> None:
    """Takes the room of every state whose tier is the disk from the file system of its folder. Each rank takes its own,
    so where ranks share a drive the sum of theirs has to fit.

    Raises:
        ConfigError: on every rank: there is none, or a folder cannot be written to.
    """
    names = fused_moments(model.optimizer) if model.optimizer is not None else None
    wanted = on_disk(model.layout, units, model.comm.mesh.sizes, len(names or ()))
    if not wanted:
        return
    problem = ""
    for folder, sizes in wanted.items():
        try:
            tier = model.tiers.named("disk", folder)
        except OSError as error:
            problem = f"no file can be made in {error.filename}: {error.strerror}; name a folder that can be written to"
            break
        assert isinstance(tier, DiskTier)
        try:
            tier.reserve(*sizes)
        except OSError as error:
            problem = str(error.strerror)
            break
    if any(model.comm.any_rank([bool(problem)], WHAT)):
        agreement = model.comm.agreement
        said = agreement.exchange(WHAT, problem)
        ranks = by_rank(dict(zip(agreement.peers.ranks, said, strict=True))).rstrip(".")
        total = sum(map(sum, wanted.values()))
        raise ConfigError(f"The {total:,} bytes of states that rest on disk on each rank have no room there: {ranks}.")
