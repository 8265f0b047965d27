"""A search plans in order until enough is known, and the cheapest that fits comes first."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from shardfold.plan.search import search


class Plan(NamedTuple):
    number: int
    fits: bool
    cost: int


PLANS = st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=3), max_size=6)


@given(PLANS, st.integers(0, 20))
def test_the_cheapest_of_those_that_fit_is_first_and_of_equal_ones_the_first(
    drawn: list[list[tuple[bool, int]]], last: int
) -> None:
    """Nothing is planned behind that which is enough; candidates without plans are passed over."""
    numbers = iter(range(100))
    space = [[Plan(next(numbers), *each) for each in plans] for plans in drawn]
    asked: list[list[Plan]] = []

    def objective(candidate: list[Plan]) -> list[Plan]:
        asked.append(candidate)
        return candidate

    found = search(space, objective, lambda plan: plan.number == last)
    every = [plan for plans in space for plan in plans]
    assert list(found.planned) == every[: last + 1]
    assert found.fitting == sorted((p for p in found.planned if p.fits), key=lambda p: (p.cost, p.number))
    assert found.others == [plan for plan in found.planned if not plan.fits]
    assert asked == space[: len(asked)] and not any(plan.number > last for plans in asked[-1:] for plan in plans[:1])
