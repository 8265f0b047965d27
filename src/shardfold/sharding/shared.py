"""Parameters that several stages of a pipeline have, as a tied embedding and head.

Each of the stages has the whole parameter, or its shards of it, in a segment of its own, so that shards of all of them
match element by element: gradients are summed over these stages before the step, and the norm counts them once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardfold.sharding.model import ShardedModel
from shardfold.sharding.segment import Segment
from shardfold.sharding.whole_segments import whole_segments
from shardfold.sharding.whole_state import most_precise

__all__ = ["share_values", "shared_segments"]

WHAT = "the first values of what several stages have"


def shared_segments(model: ShardedModel) -> dict[int, Segment]:
    """The segments of what several stages have, by the ``id`` of their one parameter."""
    return {id(s.parameters[0]): s for unit in model.units for s in unit.segments if s.spec.places}


def share_values(model: ShardedModel, parameters: Sequence[nn.Parameter | None], axis: str) -> None:
    """The values of the first of each parameter's places become everyone's.

    Args:
        parameters: in an order that all stages have alike; None: another stage's.
        axis: of the stages.
    """
    found, here = shared_segments(model), model.comm.mesh.coords[axis]
    with torch.no_grad():
        for parameter in parameters:
            segment = None if parameter is None else found.get(id(parameter))
            if segment is None:
                continue
            kept, _, over = most_precise(model, segment)
            _, values = next(whole_segments(model.comm, [(segment, kept, over)], WHAT))
            flat = values.clone()
            model.comm.broadcast_among(flat, segment.spec.places, WHAT)
            if here != segment.spec.places[0]:
                segment.take(0, segment.views_of(flat)[0])
