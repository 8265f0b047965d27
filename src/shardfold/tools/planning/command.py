"""What `shardfold plan` does with its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from shardfold.errors import ConfigError
from shardfold.plan.layout import Layout
from shardfold.plan.sizes import parse_bytes
from shardfold.planner.choice import options
from shardfold.planner.hardware import cluster
from shardfold.planner.memory import CPU, GPU
from shardfold.planner.search import search
from shardfold.tools.planning import show
from shardfold.tools.planning.models import planned_model

__all__ = ["print_plan"]


def print_plan(
    model: str, gpus: str, *, memory: str | None, precision: str, micro_batch: int | None, accumulate: int,
    length: int | None, tables: Mapping[str, Layout], modes: Sequence[str], batch: int | None = None,
    host: str | None = None,
) -> None:  # fmt: skip
    """Plans and prints: what a micro-batch needs under each layout, or else the fastest way to train that fits."""
    where = cluster(gpus, memory=memory)
    room = parse_bytes(host) if host is not None else None
    if host is not None and room is None:
        raise ConfigError(f"--host {host} is no number of bytes: write it as 64GiB or 64GB.")
    planned = planned_model(model, length=length, samples=2)
    print(show.head(planned, where, precision))
    print()
    if micro_batch is None:
        found = search(
            planned.subject, where, precision=precision, layouts=tables, modes=modes, batch=batch, host=room or inf,
        )  # fmt: skip
        print(show.ranking(found, where, precision))
        return
    each = options(
        planned.subject, tables, modes, precision=precision, mesh=where.mesh, micro_batch=micro_batch,
        micro_batches=accumulate, budget=where.device.usable, host=room or inf,
        behaviour=GPU if where.device.streams else CPU,
    )  # fmt: skip
    print(show.table(each))
    fitting = [one for one in each if one.fits]
    best = max(fitting, key=lambda one: one.largest) if fitting else min(each, key=lambda one: one.plan.peak)
    print()
    print(show.detail(best))
    if not fitting:
        print(f"Nothing fits: {best.why}")
