"""Boxes of a tensor that is several matrices, one behind the other: what they share with others, element by element."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shardfold.errors import LayoutError
from shardfold.plan.placement import Box, shared

SHAPE = (4, 12, 2)
DIM, COUNT, LENGTH = 1, 3, 4


def stacked(start: int, size: int) -> Box:
    """The same columns of each of three matrices."""
    return Box((0, 0, start, 0), (4, COUNT, size, 2), (DIM, COUNT, LENGTH))


def elements(box: Box) -> list[int]:
    """The numbers in the whole of the box's elements, in its order."""
    whole = torch.arange(4 * 12 * 2).view(box.view(SHAPE))
    return whole[box.slices].flatten().tolist()


BOXES = [
    stacked(0, 2),
    stacked(2, 2),
    stacked(1, 3),
    stacked(0, 4),
    Box.of(SHAPE),
    Box((1, 4, 0), (2, 4, 2)),
    Box((0, 5, 1), (4, 2, 1)),
]


@pytest.mark.parametrize(("one", "other"), list(product(BOXES, BOXES)))
def test_what_boxes_share(one: Box, other: Box) -> None:
    """Every element of both, once, at its place in each, in rising order; also where a range of each counts."""
    mine, theirs = elements(one), elements(other)
    for within, of in (((0, len(mine)), (0, len(theirs))), ((3, len(mine) - 2), (1, len(theirs) - 3))):
        runs = list(shared(one, within, other, of))
        found = [(run.one + i, run.other + i) for run in runs for i in range(run.numel)]
        expected = [
            (a, theirs.index(number))
            for a, number in enumerate(mine)
            if number in theirs and within[0] <= a < within[1] and of[0] <= theirs.index(number) < of[1]
        ]
        assert found == expected
    assert one.meets(other) == bool(set(mine) & set(theirs))


def test_parts_that_are_not_alike() -> None:
    """Rows that begin in one matrix and end in another are no box of what is stacked: refused with a sentence."""
    with pytest.raises(LayoutError, match="rows 2 to 6 are no part of matrices of 4 rows"):
        list(shared(Box((0, 2, 0), (4, 4, 2)), (0, 32), stacked(0, 2), (0, 48)))
