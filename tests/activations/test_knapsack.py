"""The knapsack of `activations="fit:..."`: its answer is the best of all plans, tried one by one."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.activations import _knapsack as budget
from shardfold.activations._knapsack import Item, ModeOption, choose, peak, smallest
from shardfold.plan.checks import parse_bytes

BYTES = st.integers(0, 12)
MODES = ("keep", "recompute", "host")


@st.composite
def items(draw: st.DrawFn) -> list[Item]:
    def options() -> tuple[ModeOption, ...]:
        modes = draw(st.lists(st.sampled_from(MODES), min_size=1, unique=True))
        moved = {"host": draw(BYTES)}
        return tuple(ModeOption(m, draw(BYTES), draw(BYTES), moved.get(m, 0), float(draw(BYTES))) for m in modes)

    return [Item(str(i), draw(st.integers(0, 3)), options()) for i in range(draw(st.integers(0, 5)))]


@given(items(), st.integers(0, 60), BYTES, st.booleans())
def test_the_plan_is_the_fastest_that_fits(found: list[Item], size: int, after: int, repeated: bool) -> None:
    """As fast as the best of all plans; None only if none fits."""
    plans = [list(plan) for plan in product(*(item.options for item in found))]
    fits = [plan for plan in plans if peak(found, plan, after, repeated=repeated) <= size]
    chosen = choose(found, size, after, repeated=repeated)
    assert (chosen is None) == (not fits)
    if chosen is not None:
        assert chosen in fits
        assert sum(o.ms for o in chosen) == min(sum(o.ms for o in plan) for plan in fits)


@given(items(), BYTES, st.booleans())
def test_the_smallest_plan_is_the_smallest(found: list[Item], after: int, repeated: bool) -> None:
    plans = [list(plan) for plan in product(*(item.options for item in found))]
    least = min(peak(found, plan, after, repeated=repeated) for plan in plans)
    assert peak(found, smallest(found, after, repeated=repeated), after, repeated=repeated) == least


@given(items(), st.integers(0, 60), BYTES)
def test_what_is_gone_in_time_is_not_counted_twice(found: list[Item], size: int, after: int) -> None:
    """The bound for units that run several times is one for those that run once."""
    for plan in product(*(item.options for item in found)):
        assert peak(found, plan, after) <= peak(found, plan, after, repeated=True)


def test_a_stack_is_counted_as_one() -> None:
    """Two units made again in backward: the second while the first one's input is kept, the first when all is gone."""
    made = ModeOption("recompute", 1, 10, 0, 5.0)
    kept = ModeOption("keep", 11, 0, 0, 0.0)
    two = [Item("a", 0, (kept, made)), Item("b", 0, (kept, made))]
    assert peak(two, [made, made]) == 12
    assert peak(two, [made, kept]) == 12  # when the first is made again, what the second kept is gone
    assert peak(two, [kept, made]) == 22
    assert choose(two, 12) == [made, kept]


def test_what_is_moved_comes_back_one_unit_ahead() -> None:
    moved = ModeOption("host", 0, 10, 10, 1.0)
    made = ModeOption("recompute", 1, 5, 0, 1.0)
    assert peak([Item("a", 0, (moved,)), Item("b", 0, (moved,))], [moved, moved]) == 20
    assert peak([Item("a", 0, (moved,)), Item("b", 0, (made,)), Item("c", 0, (moved,))], [moved, made, moved]) == 21


def test_many_partial_plans_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thinned, a plan still fits, is found if there is one, and is close to the best."""
    several = [
        Item(
            str(i), 0, (ModeOption("keep", 1000 + 37 * i, 0, 0, 0.0), ModeOption("recompute", 10, 500, 0, 10 + 1.7**i))
        )
        for i in range(14)
    ]
    exact = {size: choose(several, size) for size in range(700, 16000, 700)}
    monkeypatch.setattr(budget, "FRONT", 200)
    for size, plan in exact.items():
        thinned = choose(several, size)
        assert (thinned is None) == (plan is None)
        if thinned is not None and plan is not None:
            assert peak(several, thinned) <= size
            assert sum(o.ms for o in thinned) <= 1.1 * sum(o.ms for o in plan) + 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GiB", 12 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("500MB", 500_000_000),
        ("500mb", 500_000_000),
        (" 4096 ", 4096),
        (".5KiB", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "0.0GiB", "GiB", "12 GiBs", "12Gib", "-1", "1.2.3MB", "1e9", "0.1B", "nan"])
def test_no_sizes(text: str) -> None:
    assert parse_bytes(text) is None
