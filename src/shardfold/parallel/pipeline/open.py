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
from shardfold.parallel.pipeline.pieces import PipelinePiece, cut_by_cost, find_pieces
from shardfold.parallel.pipeline.stage_order import OrderChoice
from shardfold.parallel.pipeline.stages import Stages
from shardfold.plan.axes import Mesh
from shardfold.plan.layout import Activations
from shardfold.plan.rewrites import Overlap
from shardfold.sharding.unit import Unit

__all__ = ["check_ahead", "check_together", "open_stages"]


def check_together(
    sizes: Mesh, activations: Sequence[Activations], overlap: Overlap, *, sequence_parallel: bool, ahead: str = ""
) -> None:
    """Refuses what does not go with an axis of pipeline; ``ahead``: the name of an order in which micro-batches are
    under way while weights are updated.

    Raises:
        ConfigError: with one sentence.
    """
    if not sizes.stages:
        return
    refused = {
        "Parallel(sequence_parallel=True), which divides what a stage sends": sequence_parallel,
        "Overlap(speculate=...), which updates before gradients are summed over stages": overlap.snapshot_bytes,
        "Overlap(delayed_update=True), as updates of all stages belong to one step": overlap.delayed_update,
    }
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"parallel= has an axis of pipeline, which does not go with {what}: leave one of them out."
            )
    for modes in activations:
        if ahead and (modes.mode != "keep" or modes.budget is not None):
            raise ConfigError(
                f"Parallel(pipeline={ahead!r}) updates weights while micro-batches are under way, which would be "
                f"recomputed with others: activations={str(modes)!r} does not go with it: leave it out."
            )
        if modes.mode in ("host", "disk") or modes.budget is not None or modes.over or modes.inputs != "device":
            raise ConfigError(
                f"parallel= has an axis of pipeline, which does not go with activations={str(modes)!r}: 'keep', "
                "'recompute' and 'select' do."
            )


def check_ahead(name: str, units: Sequence[Unit], overlap: Overlap, *, scales: bool, sequence: bool) -> None:
    """
    Raises:
        ConfigError: something does not go with micro-batches that are under way while weights are updated.
    """
    split = any(unit.split for unit in units)
    shared = next((slot.name for u in units for s in u.segments if s.spec.places for slot in s.spec.slots), "")
    whole = "those of earlier steps are kept whole; choose ddp, zero1 or zero2"
    refused = {
        f"a layout that splits parameters, as zero3: {whole}": split,
        "a loss scale, which may have moved by the time that a gradient arrives; choose bf16 or fp32": scales,
        "an axis of sequence": sequence,
        "Overlap(update_thread=True)": overlap.update_thread,
        f"{shared!r}, which several stages have: it would have another age on each; untie it": bool(shared),
    }
    for what, given in refused.items():
        if given:
            raise ConfigError(
                f"Parallel(pipeline={name!r}) updates weights while micro-batches are under way, which does not go "
                f"with {what}."
            )


def open_stages(
    model: nn.Module,
    optimizer: Any,
    mesh: DataMesh,
    given: Sequence[str] | PieceCosts | None,
    choice: OrderChoice,
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
            raise ConfigError("Parallel(stages=...) says where stages begin, but parallel= has no axis of pipeline.")
        return None
    axis = axes[0]
    if len(axes) > 1:
        raise ConfigError(f"parallel= has two axes of pipeline, {' and '.join(axes)}: give one.")
    ranks, here = mesh.sizes[axis], mesh.coords[axis]
    places = choice.places(ranks)
    measured = isinstance(given, PieceCosts)
    job.same({"Parallel(stages=...)": "what pieces cost" if measured else repr(given)})
    if measured:
        given = _names(find_pieces(model), given, len(places), ranks, job)
    own = [stage for stage, place in enumerate(places) if place == here]
    stages = Stages(model, len(places), own, given, mesh.device, places)
    mesh.join_places(stages.shared.values())
    if isinstance(optimizer, Optimizer):
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in stages.mine]
    return stages


def _names(pieces: Sequence[PipelinePiece], costs: PieceCosts, stages: int, ranks: int, job: Agreement) -> list[str]:
    """The first piece of each stage but the first, such that the slowest is as fast as can be, by the mean of what all
    ranks have measured."""
    mine = costs.of(pieces)
    said = [json.loads(text) for text in job.exchange(f"stages/{job.sequence}", json.dumps(mine))]
    stage_of = cut_by_cost([sum(each) / len(said) for each in zip(*said, strict=True)], stages, ranks)
    return [pieces[stage_of.index(stage)].path for stage in range(1, stages)]
