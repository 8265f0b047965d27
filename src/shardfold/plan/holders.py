"""What would be lost: how many ranks, and how many hosts, hold an element of each state.

Who differs on axes only on which values are alike, and over which a state is not split, holds the same of it. An
element of ``params`` can be had from ``master`` too, of which it is a cast; one of ``master`` from ``params`` where
both are in one dtype. With one holder it is lost with that rank or host, and comes back from a checkpoint only; what a
step's gradients would have been comes again with the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import NamedTuple

from shardfold.plan.axes import Axes, Mesh
from shardfold.plan.checks import human
from shardfold.plan.layout import DATA_AXES, Layout, Tier
from shardfold.plan.placement import SegmentSpec, UnitSpec, shard_index

__all__ = ["Holders", "death_told", "holders", "holders_told", "lost_of", "lost_told", "spare_told", "usual_hosts"]

WAITS = 0.32e9
"""Bytes of host memory of a process that waits, as measured: what its imports take."""


class Holders(NamedTuple):
    """Of an element of a state, the fewest.

    Attributes:
        ranks: that hold it.
        hosts: that these are on.
    """

    ranks: int
    hosts: int

    def fewer(self, other: Holders) -> Holders:
        return Holders(min(self.ranks, other.ranks), min(self.hosts, other.hosts))


def usual_hosts(mesh: Mesh) -> int:
    """Ranks of a host where nothing else is known: those that differ on other axes than ``inter``."""
    return mesh.size // mesh.get("inter", 1)


def holders(layout: Layout, mesh: Mesh, per_host: int, units: Iterable[UnitSpec] | None = None) -> dict[str, Holders]:
    """By state, in table order.

    Args:
        layout: a bound table.
        mesh: of all ranks, of which so many neighbours are on a host each.
        per_host: how many.
        units: of a model; None: of one whose parameters are all trained, in the dtypes of the table.
    """
    segments = [SegmentSpec((), 0, "")] if units is None else [s for unit in units for s in unit.segments]
    found: dict[str, Holders] = {}
    known: dict[tuple[Axes, tuple[Axes, ...], tuple[int, ...], str], Holders] = {}
    for segment in segments:
        table = segment.table_or(layout)
        alike = (*mesh.replicas(segment.distinct), *(axis for axis in mesh.alike if axis not in segment.distinct))
        for state, (copies, also) in _copies(table, segment).items():
            to = table.copies.to if table.copies is not None and also else ""
            key = alike, copies, also, to
            if key not in known:
                known[key] = _fewest(mesh, alike, copies, per_host, also, to)
            found[state] = found.get(state, known[key]).fewer(known[key])
    return found


def _copies(table: Layout, segment: SegmentSpec) -> dict[str, tuple[tuple[Axes, ...], tuple[int, ...]]]:
    """By state the axes over which each copy of its values is split, and which of these the next rank has too."""
    rest, master = table.rest.over, table.master.over
    if not segment.trainable:
        return {"params": ((rest,), (0,) if table.is_copied(trainable=False) else ())}
    equal = table.params is not None and (segment.own or table.params.dtype == table.master.dtype)
    copies = {
        "params": (rest, master),
        "grads": (table.grads.over,),
        "master": (master, rest) if equal else (master,),
        "moments": (table.moments.over,),
    }
    if table.outer is not None:
        copies["momentum"] = ((*master, table.outer.axis) if table.outer.quorum is None else master,)
    mirrored = {"params": (1,), "master": (0,), "moments": (0,)} if table.copied else {}
    return {state: (each, mirrored.get(state, ())) for state, each in copies.items()}


def _fewest(
    mesh: Mesh, alike: Axes, copies: Sequence[Axes], per_host: int, also: Sequence[int] = (), to: str = ""
) -> Holders:
    """Over all elements: a flat has as many parts as make shards of each copy come out even. ``also``: numbers of those
    of which the next rank along ``to`` has this rank's part too."""
    parts = [mesh.parts(over) for over in copies]
    pieces = lcm(*parts)
    where: dict[tuple[tuple[int, ...], int, int], set[int]] = {}
    groups: set[tuple[int, ...]] = set()
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        group = tuple(coords[axis] for axis in mesh if axis not in alike)
        groups.add(group)
        for copy, over in enumerate(copies):
            where.setdefault((group, copy, shard_index(over, mesh, coords)), set()).add(rank)
            if copy in also:
                before = {**coords, to: (coords[to] - 1) % mesh[to]}
                where.setdefault((group, copy, shard_index(over, mesh, before)), set()).add(rank)
    fewest: Holders | None = None
    for group in groups:
        for piece in range(pieces):
            ranks = set[int]().union(
                *(where.get((group, copy, piece * count // pieces), set()) for copy, count in enumerate(parts))
            )
            one = Holders(len(ranks), len({rank // per_host for rank in ranks}))
            fewest = one if fewest is None else fewest.fewer(one)
    assert fewest is not None
    return fewest


def holders_told(found: Mapping[str, Holders], mesh: Mesh, per_host: int | None) -> list[str]:
    """In lines; ``per_host`` None: it is not the same on all."""
    hosts = f", on hosts of {per_host} rank{'s' * (per_host > 1)}" if per_host else ""
    lines = [f"holders of an element, of {mesh.size} rank{'s' * (mesh.size > 1)}{hosts}, at least:"]
    for state, (ranks, count) in found.items():
        on = f"{count:>6} host{'s' * (count > 1)}" if per_host else ""
        lines.append(f"  {state:<9}{ranks:>6} rank{'s' * (ranks > 1):<1}{on}")
    return [*lines, f"  {lost_told(found, by_host=per_host is not None)}"]


def lost_told(found: Mapping[str, Holders], *, by_host: bool = True) -> str:
    """What goes with a rank and with a host."""
    host = f"; with any one host: {lost_of({state: each.hosts for state, each in found.items()})}" if by_host else ""
    return f"lost with any one rank: {lost_of({state: each.ranks for state, each in found.items()})}{host}"


def lost_of(counts: Mapping[str, int]) -> str:
    """The states of which one alone has an element, of how many have; gradients come again with their step."""
    lost = ", ".join(state for state, count in counts.items() if count == 1 and state != "grads")
    return lost or "nothing (the step is taken again)"


def spare_told() -> str:
    """What a spare takes before it has a place."""
    return f"while it waits it holds {human(WAITS)} of host memory"


def death_told(
    layout: Layout, mesh: Mesh, found: Mapping[str, Holders], held: Mapping[tuple[str, Tier], float]
) -> list[str]:
    """In lines, what a rank's death costs a run that goes on, without a spare and with one; none where it ends the run.

    Args:
        layout: a bound table.
        mesh: of all ranks.
        found: as :func:`holders` has it.
        held: bytes at rest on a rank, by state and tier.
    """
    ranks = mesh.parts(axis for axis in DATA_AXES if axis in mesh)
    once = any(each.ranks == 1 for state, each in found.items() if state != "grads")  # which come again
    if once or ranks == 1 or ranks < mesh.size or layout.outer is not None or layout.signs is not None:
        return []
    first = "master" if any(state == "master" for state, _ in held) else "params"  # of which the other is a cast
    states = sum(num_bytes for (state, _), num_bytes in held.items() if state in (first, "moments", "copies"))
    return [
        "if a rank dies and the others go on (sf.ElasticRun):",
        f"  without a spare each has {ranks / (ranks - 1):.3g} times as much to do, and to hold of what they split",
        f"  with a spare, that reads {human(states)} of states; {spare_told()}",
    ]
