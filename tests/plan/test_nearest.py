"""Sizes that divide, next to others."""

from __future__ import annotations

from itertools import product
from math import log, prod

from hypothesis import given
from hypothesis import strategies as st

from shardfold.plan.axes import nearest_sizes, nearest_that_divides

SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=3)


@given(SIZES, st.integers(1, 12), st.booleans())
def test_as_few_sizes_as_can_be_are_changed_by_as_little(sizes: list[int], ranks: int, whole: bool) -> None:
    """Beside all sizes that multiply up."""
    given_sizes = dict(zip("abc", sizes, strict=False))

    def legal(values: tuple[int, ...]) -> bool:
        return prod(values) == ranks if whole else ranks % prod(values) == 0

    def price(values: tuple[int, ...]) -> tuple[int, float]:
        changed = sum(a != b for a, b in zip(values, sizes, strict=True))
        return changed, sum(abs(log(a / b)) for a, b in zip(values, sizes, strict=True))

    found = nearest_sizes(given_sizes, ranks, whole=whole)
    if legal(tuple(sizes)):
        return
    best = min(price(v) for v in product(range(1, ranks + 1), repeat=len(sizes)) if legal(v))
    mine = tuple(found.values())
    assert list(found) == list(given_sizes) and legal(mine)
    assert price(mine)[0] == best[0] and (len(sizes) > 2 or abs(price(mine)[1] - best[1]) < 1e-6)


def test_a_size_that_divides_all() -> None:
    assert [nearest_that_divides(size, 12) for size in (1, 5, 7, 40)] == [1, 6, 6, 12]
    assert nearest_that_divides(3, 4, 8) == 4 and nearest_that_divides(3, 4, 6) == 2 and nearest_that_divides(3, 4, 0)
