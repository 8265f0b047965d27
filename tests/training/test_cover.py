"""Every two of layout, dtype, tier, axis and order train together as plain PyTorch does."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from shardfold.testing import Ranks
from tests.training.cover import COLUMNS, ROWS, Row, train


def _pairs(row: Row) -> set[tuple[tuple[str, str], ...]]:
    return set(combinations([(name, getattr(row, name)) for name in COLUMNS], 2))


def test_every_pair_of_values_stands_in_a_row() -> None:
    """A layout, an axis or an order that is new is missing here until a row has it beside each of the others."""
    columns = [[(name, value) for value in values] for name, values in COLUMNS.items()]
    asked = {pair for one, other in combinations(columns, 2) for pair in product(one, other)}
    assert asked == set().union(*map(_pairs, ROWS))


@pytest.mark.parametrize("ranks_of_a_row", [2, 4])
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in (1, 2, 3))])
def test_each_row_trains_as_plain_pytorch(ranks: Ranks, ranks_of_a_row: int, part: int) -> None:
    """In a few calls, as a row takes less than its processes."""
    rows = [row for row in ROWS if row.ranks == ranks_of_a_row][part::4]
    assert not ranks.run(train, rows, world_size=ranks_of_a_row)[0]
