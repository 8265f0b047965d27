"""What a checkpoint has of groups of ranks that train apart between outer steps.

The states of the first group have the names that they always have: a reader that knows of no groups takes these. Those
of another one have its number in front (``group1.weight``), as weights and moments differ between rounds. What groups
share is there once: the last global weights, the outer momentum, and changes that are still to be taken in; of what
ranks have lost that send signs, the mean, which is all that later averages feel.

A run of as many groups goes on to the bit. One of another number gives its groups those that there were, in turn, so
what groups that are no more had learned since the last outer step is lost, as when a group dies.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardfold.checkpoint.files import UnwrittenPiece
from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment

__all__ = [
    "group_here",
    "group_read",
    "is_apart",
    "lost_targets",
    "of_group",
    "shared_states",
    "shared_targets",
    "with_group",
]

GLOBAL, MOMENTUM, CHANGE = "outer_global", "outer_momentum", "outer_change"
WORKER, SERVER = "signs_worker", "signs_server"
SHARED = (GLOBAL, MOMENTUM, CHANGE, WORKER, SERVER)
OF_GROUP = re.compile(r"group[1-9]\d*\..+", re.DOTALL)


def is_apart(state: str) -> bool:
    """Whether a state is another group's, or shared by all."""
    return state in SHARED or OF_GROUP.fullmatch(state) is not None


def with_group(group: int, state: str) -> str:
    """The name of a group's state."""
    return f"group{group}.{state}" if group else state


def group_here(model: ShardedModel) -> int:
    """The number of this rank's group."""
    mesh = model.comm.mesh
    return mesh.coords[mesh.sizes.rare[0]] if mesh.sizes.rare and not mesh.sizes.meets else 0


def group_read(model: ShardedModel, run: Mapping[str, Any]) -> int:
    """Which of the groups that there were this rank's goes on as."""
    return group_here(model) % int((run.get("outer") or {}).get("groups", 1))


def of_group(parts: list[UnwrittenPiece], group: int) -> list[UnwrittenPiece]:
    """The parts of a group's parameters, under its names; what is kept once is the first group's."""
    if not group:
        return parts
    each = [part for part in parts if part.piece.kind in ("element", "block")]
    return [part._replace(piece=replace(part.piece, state=with_group(group, part.piece.state))) for part in each]


def shared_states(model: ShardedModel, segment: Segment) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """What this rank has to tell of what groups share: its group's part, with where that lies in the segment."""
    outer, signs = model.run.outer, model.run.signs
    if signs is not None and "worker" in segment.regions:
        own, start = signs.own(segment), segment.master_range[0]
        bounds = start + own.start, start + own.stop
        yield WORKER, bounds, signs.mean(segment)[own]
        yield SERVER, bounds, segment.regions["server"].values()
    if outer is None or not segment.spec.trainable:
        return
    own, start = outer.weights.own(segment), segment.master_range[0]
    bounds = start + own.start, start + own.stop
    yield GLOBAL, bounds, segment.regions["global"].values()[own]
    if "momentum" in segment.regions:
        yield MOMENTUM, bounds, segment.regions["momentum"].values()
    if (change := outer.weights.in_flight(segment)) is not None:
        yield CHANGE, bounds, change[own]


def shared_targets(
    model: ShardedModel, segment: Segment, there: Collection[str], *, flies: bool
) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Where those of it that are ``there`` are read to, whatever the number of groups; ``flies``: the rounds are those
    that there were."""
    outer = model.run.outer
    assert outer is not None
    bounds, region = segment.master_range, segment.regions["global"]
    if GLOBAL in there:
        yield GLOBAL, bounds, region.values()
    if MOMENTUM in there and "momentum" in segment.regions:
        own = outer.weights.own(segment)
        yield MOMENTUM, (bounds[0] + own.start, bounds[0] + own.stop), segment.regions["momentum"].values()
    if CHANGE in there and flies:
        yield CHANGE, bounds, outer.weights.put_in_flight(segment).zero_()
    elif CHANGE in there:  # what was on its way has come
        change = torch.zeros(segment.shard_numel, dtype=region.dtype, device=region.values().device)
        yield CHANGE, bounds, change
        region.values().add_(change)


def lost_targets(
    model: ShardedModel, segment: Segment, there: Collection[str]
) -> Iterator[tuple[str, tuple[int, int], Tensor]]:
    """Where what ranks lost that send signs is read to: each takes the mean of what all had; where there is none, 0."""
    signs = model.run.signs
    if signs is None or "worker" not in segment.regions:
        return
    own, bounds = signs.own(segment), segment.master_range
    places = {WORKER: ("worker", bounds), SERVER: ("server", (bounds[0] + own.start, bounds[0] + own.stop))}
    for state, (region, at) in places.items():
        values = segment.regions[region].values().zero_()
        if state in there:
            yield state, at, values
