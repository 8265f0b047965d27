"""Room on drives for all that will rest there, taken before anything is made: what does not fit is refused then, on all
ranks, and not in the middle of training."""

from __future__ import annotations

from collections.abc import Sequence

from shardfold.comm.launcher_notes import tell_launcher
from shardfold.errors import ConfigError, by_rank
from shardfold.plan.cost import regions_in
from shardfold.plan.layout import Tier
from shardfold.plan.placement import UnitSpec
from shardfold.sharding.model import ShardedModel
from shardfold.tiers.disk import DiskTier

__all__ = ["take_room"]

WHAT = "room for the states on disk"
NO_FILE = "no file can be made in"


def take_room(model: ShardedModel, units: Sequence[UnitSpec], num_moments: int, gone: Sequence[UnitSpec] = ()) -> None:
    """Takes the room of every state of these units whose tier is the disk from the file system of its folder. Each rank
    takes its own, so where ranks share a drive the sum of theirs has to fit. Every rank calls it.

    Args:
        model: whose units they are to be.
        units: of which nothing is allocated yet.
        num_moments: that the update keeps of each element.
        gone: units whose room these take over, one after the other.

    Raises:
        ConfigError: on every rank: there is none, or a folder cannot be written to. Nothing was made.
    """
    mesh = model.comm.mesh.sizes
    wanted = regions_in(Tier.DISK, model.layout, units, mesh, num_moments)
    if not wanted:
        return
    if gone:  # each is there until the one that takes its place is
        before = regions_in(Tier.DISK, model.layout, gone, mesh, num_moments)
        most = [regions_in(Tier.DISK, model.layout, [unit], mesh, num_moments) for unit in units]
        for folder, sizes in wanted.items():
            more = sum(sizes) - sum(before.get(folder, ()))
            wanted[folder] = [max(0, more) + max(sum(each.get(folder, ())) for each in most)]
    problem = ""
    for folder, sizes in wanted.items():
        try:
            tier = model.tiers.named("disk", folder)
        except OSError as error:
            problem = f"{NO_FILE} {error.filename}: {error.strerror}; name a folder that can be written to"
            break
        assert isinstance(tier, DiskTier)
        try:
            tier.reserve(*sizes)
        except OSError as error:
            problem = str(error.strerror)
            break
    if any(model.comm.anyone([bool(problem)], WHAT)):
        agreement = model.comm.group
        said = agreement.exchange(WHAT, problem)
        ranks = by_rank(dict(zip(agreement.peers.ranks, said, strict=True))).rstrip(".")
        total = sum(map(sum, wanted.values()))
        if not problem:
            tell_launcher(ranks, follows=True)
        if any(each.startswith(NO_FILE) for each in said):
            raise ConfigError(f"{ranks[0].upper()}{ranks[1:]}, for the {total:,} bytes of states that rest on disk.")
        raise ConfigError(f"The {total:,} bytes of states that rest on disk on each rank have no room there: {ranks}.")
