"""What `shardfold plan` does with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardfold.plan.layout import Layout
from shardfold.planner.choice import options
from shardfold.planner.hardware import cluster
from shardfold.planner.memory import CPU, GPU
from shardfold.tools.planning import show
from shardfold.tools.planning.models import planned_model

__all__ = ["print_plan"]


def print_plan(
    model: str, gpus: str, *, memory: str | None, precision: str, micro_batch: int, accumulate: int,
    length: int | None, tables: Mapping[str, Layout], modes: Sequence[str],
) -> None:  # fmt: skip
    """Plans and prints."""
    where = cluster(gpus, memory=memory)
    planned = planned_model(model, length=length, samples=2)
    found = options(
        planned.subject, tables, modes, precision=precision, mesh=where.mesh, micro_batch=micro_batch,
        micro_batches=accumulate, budget=where.device.usable, behaviour=GPU if where.device.streams else CPU,
    )  # fmt: skip
    print(show.head(planned, where, precision))
    print()
    print(show.table(found))
    fitting = [each for each in found if each.fits]
    best = max(fitting, key=lambda each: each.largest) if fitting else min(found, key=lambda each: each.plan.peak)
    print()
    print(show.detail(best))
    if not fitting:
        print(f"Nothing fits: {best.why}")
