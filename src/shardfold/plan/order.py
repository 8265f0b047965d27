"""One order made of what several ranks ran.

:func:`merge_orders` makes the order that all ranks follow from the orders in which each ran its units, so that each
rank's own is a part of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import combinations, pairwise, permutations

__all__ = ["backwards", "contradiction", "describe", "merge_orders", "with_missing"]


def contradiction(orders: Sequence[Sequence[str]]) -> tuple[int, int, str, str] | None:
    """Two orders of which one runs all of ``u`` before any ``v`` and the other all of ``v`` before any ``u``.

    Returns:
        ``(i, j, u, v)``: order ``i`` has ``u`` first and order ``j`` has ``v`` first; None if there are no such two.
    """
    distinct: dict[tuple[str, ...], int] = {}
    for i, order in enumerate(orders):
        distinct.setdefault(tuple(order), i)
    bounds = [(i, _bounds(order)) for order, i in distinct.items()]
    for (i, one), (j, other) in combinations(bounds, 2):
        common = [name for name in one if name in other]
        for u, v in permutations(common, 2):
            if one[u][1] < one[v][0] and other[v][1] < other[u][0]:
                return i, j, u, v
    return None


def describe(i: int, j: int, u: str, v: str) -> str:
    """What :func:`contradiction` found between the orders of ranks ``i`` and ``j``, as a sentence."""
    return (
        f"rank {i} ran {u!r} before {v!r} in forward, and rank {j} ran {v!r} before {u!r}: under a layout that splits "
        "parameters ranks may leave parts of the model out, but must run them in one order, or pass "
        'overlap=Overlap(order="any") to ask before every unit.'
    )


def _bounds(order: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Where each name comes first and last."""
    bounds: dict[str, tuple[int, int]] = {}
    for i, name in enumerate(order):
        bounds[name] = (bounds.get(name, (i, i))[0], i)
    return bounds


def merge_orders(orders: Sequence[Sequence[str]], known: Sequence[str]) -> list[str] | None:
    """One order of which each of ``orders`` is a part; what they leave open is as in ``known``.

    A unit that runs several times is several entries. None if the orders cannot all be kept.
    """
    place = {name: i for i, name in enumerate(known)}
    after: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    before: Counter[tuple[str, int]] = Counter()
    nodes: set[tuple[str, int]] = set()
    for order in {tuple(order) for order in orders}:
        labelled = list(_occurrences(order))
        nodes.update(labelled)
        for a, b in pairwise(labelled):
            if b not in after[a]:
                after[a].add(b)
                before[b] += 1
    heap: list[tuple[int, int, str]] = []
    for name, k in nodes:
        if not before[name, k]:
            heappush(heap, (place.get(name, len(place)), k, name))
    merged: list[str] = []
    while heap:
        _, k, name = heappop(heap)
        merged.append(name)
        for other, j in after[name, k]:
            before[other, j] -= 1
            if not before[other, j]:
                heappush(heap, (place.get(other, len(place)), j, other))
    return merged if len(merged) == len(nodes) else None


def backwards(order: Sequence[str], inside: Mapping[str, str]) -> list[str]:
    """The order of backward, of that of forward: reversed, but each unit before those that are ``inside`` of it."""
    groups: list[list[str]] = []
    for name in order:
        if groups and inside.get(name) == groups[-1][0]:
            groups[-1].insert(1, name)
        else:
            groups.append([name])
    return [name for group in reversed(groups) for name in group]


def with_missing(order: Sequence[str], known: Sequence[str]) -> list[str]:
    """``order`` with every name of ``known`` that it lacks, each behind its predecessor in ``known``."""
    whole = list(order)
    present = set(whole)
    for i, name in enumerate(known):
        if name not in present:
            before = known[i - 1] if i else None
            whole.insert(whole.index(before) + 1 if before is not None else 0, name)
            present.add(name)
    return whole


def _occurrences(order: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Names numbered by how often they came before; runs of one name count once."""
    count: Counter[str] = Counter()
    for i, name in enumerate(order):
        if i and order[i - 1] == name:
            continue
        yield name, count[name]
        count[name] += 1
