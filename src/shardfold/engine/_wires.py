"""As what parameters and gradients travel, and how many bytes together, chosen when an engine is made: see
``plan/auto_wire``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from logging import getLogger
from typing import Any, NamedTuple

import torch.distributed as dist

from shardfold.comm.comm import Comm
from shardfold.comm.links import measured
from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.auto_wire import (
    PURPOSES,
    AutoWire,
    WireOption,
    bucket_for,
    fastest,
    needs,
    told,
    wire_seconds,
    wires,
)
from shardfold.plan.bind import Bound, bind
from shardfold.plan.cost import step_of
from shardfold.plan.layout import Layout
from shardfold.plan.placement import UnitSpec
from shardfold.plan.rewrites import Overlap
from shardfold.plan.rules import Rules

__all__ = ["chosen", "chosen_bucket"]

LOG = getLogger("shardfold")


class _Way(NamedTuple):
    """What a transfer would be by one wire."""

    purpose: str
    option: WireOption
    bound: Bound


def chosen(
    auto: AutoWire,
    table: Layout,
    precision: Any,
    comm: Comm,
    overlap: Overlap,
    accumulate: int,
    cut: Callable[[Rules], list[UnitSpec]],
) -> tuple[Layout, list[str]]:
    """The table with the wires that are the fastest here, the same on all ranks, and what was measured, in lines.

    ``cut`` gives the units of the model by rules. All ranks of the job call it.

    Raises:
        ConfigError: the table says how gradients travel.
    """
    if table.reduce.ordered:
        raise ConfigError(
            f"wire={str(auto)!r} chooses how gradients travel, and by Runtime(exact=True) they do as {table.reduce}: "
            "leave one of the two out."
        )
    ways = [way for purpose in PURPOSES for way in _ways(auto, table, purpose, precision, comm, overlap, cut)]
    comm.job.same({"wire=": str(auto), "the ways to send": str([(way.purpose, str(way.option.wire)) for way in ways])})
    links, formats = set[Any](), set[str]()
    for way in ways:
        crossed, coded = needs(way.purpose, way.bound, step_of(accumulate, way.bound.program))
        links, formats = links | crossed, formats | coded
    found = measured(comm, links, formats)
    costs = [wire_seconds(way.purpose, way.bound, step_of(accumulate, way.bound.program), found) for way in ways]
    # Ranks of other stages have other units: what all of them need together says which is the fastest.
    total = comm.control([figure for cost in costs for figure in cost], dist.ReduceOp.SUM)
    options: dict[str, list[WireOption]] = {}
    for i, way in enumerate(ways):
        seconds, sent, working = (figure / comm.mesh.world for figure in total[3 * i : 3 * i + 3])
        option = way.option._replace(seconds=seconds, sent=sent, working=working)
        options.setdefault(way.purpose, []).append(option)
    lines = told(auto, found, options)
    if comm.mesh.rank == 0:
        LOG.info("%s", "\n".join(lines))
    return table.replace(**{purpose: fastest(each).wire for purpose, each in options.items()}), lines


def _ways(
    auto: AutoWire,
    table: Layout,
    purpose: str,
    precision: Any,
    comm: Comm,
    overlap: Overlap,
    cut: Callable[[Rules], list[UnitSpec]],
) -> list[_Way]:
    """By each wire that a transfer of the table may take on this mesh."""
    sizes, found, seen = comm.mesh.sizes, list[_Way](), set[str]()
    for option in wires(table, purpose, auto):
        others = {name: word for name, word in PURPOSES.items() if name != purpose}
        try:
            rules = Rules(precision, table.replace(**{purpose: option.wire, **others}), sizes)
        except LayoutError:  # what rests whole, for one, is not rounded on its way
            continue
        layout = rules.layouts[-1]
        if (wire := str(getattr(layout, purpose))) not in seen:  # where there is one axis, two hops are one
            seen.add(wire)
            found.append(_Way(purpose, option, bind(layout, cut(rules), sizes, overlap=overlap)))
    return found


def chosen_bucket(
    table: Layout, comm: Comm, overlap: Overlap, accumulate: int, units: list[UnitSpec]
) -> tuple[Overlap, list[str]]:
    """The overlap with the bytes that small blocks are put together to over the links of this table, the same on all
    ranks, and a line that says it. All ranks of the job call it.

    Args:
        table: bound.
        units: of the model.
    """
    comm.job.same({"Overlap.bucket": str(overlap.bucket)})
    bound = bind(table, units, comm.mesh.sizes, overlap=overlap)
    crossed = {link for what in PURPOSES for link in needs(what, bound, step_of(accumulate, bound.program))[0]}
    found = measured(comm, crossed, set()).links
    mine = bucket_for(found, {axes: comm.mesh.parts(axes) for _, axes in found})
    # Ranks of other stages may send over other links.
    size = int(comm.control([float(mine)], dist.ReduceOp.MAX)[0]) // 2**20
    slowest = max(found.values(), key=lambda link: link.latency * link.rate, default=None)
    link = f", {slowest.latency * 1e3:.2f} ms and {slowest.rate / 1e6:,.0f} MB/s" if slowest is not None else ""
    line = f"small blocks are put together to {size} MiB of gradients, for the links that were measured{link}"
    if comm.mesh.rank == 0:
        LOG.info("%s", line)
    return replace(overlap, bucket=f"{size}MiB"), [line]
