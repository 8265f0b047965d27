"""What is legal next to what was given: sizes that divide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import gcd, log, prod

__all__ = ["nearest_sizes", "nearest_that_divides"]

FEW = 8  # sizes that are tried of each axis where several have to change


def nearest_that_divides(size: int, *numbers: int) -> int:
    """The size next to ``size``, by ratio, that divides all of ``numbers``; the smaller of two."""
    return min(_divisors(gcd(*numbers)), key=lambda each: (_apart(each, size), each))


def nearest_sizes(sizes: Mapping[str, int], ranks: int, *, whole: bool) -> dict[str, int]:
    """Sizes next to these whose product divides the ranks, or, as a ``whole``, is their number: as few as can be are
    changed, by as little as can be. Empty: none was found."""
    names, known = list(sizes), _divisors(ranks)
    for count in range(1, len(names) + 1):
        found: list[tuple[float, tuple[int, ...]]] = []
        for changed in combinations(range(len(names)), count):
            for values in _values(sizes, names, changed, known):
                size = prod(values)
                if size == ranks or (not whole and ranks % size == 0):
                    found.append((sum(_apart(x, sizes[name]) for x, name in zip(values, names, strict=True)), values))
        if found:
            return dict(zip(names, min(found)[1], strict=True))
    return {}


def _values(
    sizes: Mapping[str, int], names: Sequence[str], changed: Sequence[int], known: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """All sizes, of which those at ``changed`` are among the ``known``."""
    choices = [[sizes[name]] for name in names]
    for i in changed:
        near = sorted(known, key=lambda each, old=sizes[names[i]]: _apart(each, old))
        choices[i] = near if len(changed) < 3 else [*near[:FEW], 1]
    yield from product(*choices)


def _apart(one: int, other: int) -> float:
    return round(abs(log(one / other)), 9)


def _divisors(number: int) -> list[int]:
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
