"""The stages of a new engine, and what its optimizer keeps of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardfold.comm.agreement import Agreement
from shardfold.comm.mesh import DataMesh
from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.costs import PieceCosts
from shardfold.parallel.pipeline.order import Choice
from shardfold.parallel.pipeline.pieces import Piece, cut_by_cost, find_pieces
from shardfold.parallel.pipeline.stages import Stages
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import Activations
from shardfold.plan.passes import Overlap

__all__ = ["check_together", "open_stages"]


def check_together(
    sizes: Mesh, activations: Sequence[Activations], overlap: Overlap, *, sequence_parallel: bool
) -> None:
    """Refuses what does not go with an axis of pipeline.

    Raises:
        ConfigError: with one sentence.
    """
    if not sizes.stages:
        return
    refused = {
        "sequence_parallel=True, which divides what a stage sends": sequence_parallel,
        "Overlap(speculate=...), which updates before gradients are summed over stages": overlap.snapshot_bytes,
        "Overlap(delayed_update=True), as updates of all stages belong to one step": overlap.delayed_update,
    }
    for what, given in refused.items():
        if given:
            raise ConfigError(f"mesh= has an axis of pipeline, which does not go with {what}: leave one of them out.")
    for modes in activations:
        if modes.mode in ("host", "disk") or modes.budget is not None or modes.over or modes.inputs != "device":
            raise ConfigError(
                f"mesh= has an axis of pipeline, which does not go with activations={str(modes)!r}: 'keep', "
                "'recompute' and 'select' do."
            )


def open_stages(
    model: nn.Module,
    optimizer: Any,
    mesh: DataMesh,
    given: Sequence[str] | PieceCosts | None,
    choice: Choice,
    job: Agreement,
) -> Stages | None:
    """The stages along the mesh's axis of pipeline; None: it has none. An optimizer that was made of the whole model
    keeps this rank's parameters. ``choice``: of the order, by which each stage has its place. ``job``: all ranks.

    Raises:
        ConfigError: the mesh has two such axes, or there are names of stages and no such axis.
        ModelError: the model cannot be cut.
    """
    axes = mesh.sizes.stages
    if not axes:
        if given is not None:
            raise ConfigError("stages= says where stages begin, but mesh= has no axis of pipeline.")
        return None
    axis = axes[0]
    if len(axes) > 1:
        raise ConfigError(f"mesh= has two axes of pipeline, {' and '.join(axes)}: give one.")
    ranks, here = mesh.sizes[axis], mesh.coords[axis]
    places = choice.places(ranks)
    measured = isinstance(given, PieceCosts)
    job.same({"stages=": "what pieces cost" if measured else repr(given)})
    if measured:
        given = _names(find_pieces(model), given, len(places), ranks, job)
    own = [stage for stage, place in enumerate(places) if place == here]
    stages = Stages(model, len(places), own, given, mesh.device, places)
    mesh.join_places(stages.shared.values())
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in stages.mine]
    return stages


def _names(pieces: Sequence[Piece], costs: PieceCosts, stages: int, ranks: int, job: Agreement) -> list[str]:
    """The first piece of each stage but the first, such that the slowest is as fast as can be, by the mean of what all
    ranks have measured."""
    mine = costs.of(pieces)
    said = [json.loads(text) for text in job.exchange(f"stages/{job.sequence}", json.dumps(mine))]
    stage_of = cut_by_cost([sum(each) / len(said) for each in zip(*said, strict=True)], stages, ranks)
    return [pieces[stage_of.index(stage)].path for stage in range(1, stages)]
