"""Orders: what is merged contains every rank's own, what contradicts is found, and a track runs each operation once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.engine.handlers import HANDLERS, Handlers
from shardfold.engine.passes import NegotiatedPass
from shardfold.engine.track import Section, Track
from shardfold.plan.order import contradiction, merge_orders, with_missing
from shardfold.plan.program import MARKERS, VERBS, Op
from shardfold.plan.walk import MOMENTS

NAMES = "abcdef"
orders = st.lists(st.sampled_from(NAMES), max_size=7).map(
    lambda names: [n for i, n in enumerate(names) if not i or names[i - 1] != n]
)


def subsequence(part: Sequence[str], whole: Sequence[str]) -> bool:
    rest = iter(whole)
    return all(name in rest for name in part)


@given(st.lists(orders, max_size=4))
def test_a_merged_order_contains_every_rank_s_own(several: list[list[str]]) -> None:
    merged = merge_orders(several, NAMES)
    if merged is None:
        assert len({tuple(order) for order in several}) > 1  # one order alone can always be kept
    else:
        assert all(subsequence(order, merged) for order in several)
        assert set(merged) == {name for order in several for name in order}
        for name in merged:  # no unit more often than the rank that ran it most
            assert merged.count(name) == max(order.count(name) for order in several)


@given(st.permutations(NAMES), st.lists(st.sets(st.sampled_from(NAMES)), max_size=4))
def test_parts_of_one_order_can_always_be_merged(order: list[str], parts: list[set[str]]) -> None:
    several = [[name for name in order if name in part] for part in parts]
    merged = merge_orders(several, NAMES)
    assert merged is not None and all(subsequence(part, merged) for part in several)
    assert contradiction(several) is None


def test_what_the_orders_leave_open_is_as_known() -> None:
    assert merge_orders([["d"], ["b"], ["c", "a"]], NAMES) == ["b", "c", "a", "d"]


@given(st.lists(orders, max_size=4))
def test_a_contradiction_is_two_orders_that_run_two_units_the_other_way_round(several: list[list[str]]) -> None:
    found = contradiction(several)
    if found is not None:
        i, j, u, v = found
        assert _all_before(several[i], u, v) and _all_before(several[j], v, u)
        return
    for one, other in combinations(several, 2):
        for u, v in combinations(NAMES, 2):
            assert not (_all_before(one, u, v) and _all_before(other, v, u))
            assert not (_all_before(one, v, u) and _all_before(other, u, v))


def _all_before(order: list[str], u: str, v: str) -> bool:
    if u not in order or v not in order:
        return False
    return max(i for i, n in enumerate(order) if n == u) < min(i for i, n in enumerate(order) if n == v)


@given(orders)
def test_missing_names_come_behind_their_predecessor(order: list[str]) -> None:
    whole = with_missing(order, NAMES)
    assert [name for name in whole if name in order] == order
    assert set(whole) == set(NAMES)
    for i, name in enumerate(NAMES):
        if name not in order and i:
            assert whole.index(NAMES[i - 1]) < whole.index(name)


@given(st.lists(st.sampled_from(NAMES), max_size=6), st.lists(st.sampled_from(NAMES), max_size=8))
def test_a_track_runs_every_operation_once_and_in_order(units: list[str], reached: list[str]) -> None:
    ops = [op for name in units for op in (Op("ALL_GATHER", name), Op("F", name), Op("FREE", name))]
    ran: list[int] = []
    numbers = iter(range(len(ops)))

    def bind(op: Op) -> object:
        number = next(numbers)
        return None if op.verb == "F" else lambda: ran.append(number)

    track = Track("forward", ops, bind)  # type: ignore[arg-type]
    for name in reached:
        walk, before = track.walk, track.walk.position
        track.reach("F", name)
        if walk.position > before:
            assert walk.at_marker("F", name)
        else:
            assert Op("F", name) not in ops[before:]
    track.finish()
    assert ran == [i for i, op in enumerate(ops) if op.verb != "F"]


def test_an_operation_that_raises_is_what_is_done_first_when_the_pass_goes_on() -> None:
    ran: list[str] = []
    broken = [True]

    def bind(op: Op) -> object:
        def call() -> None:
            if op.unit == "b" and broken.pop():
                raise RuntimeError
            ran.append(op.unit)

        return call

    track = Track("forward", [Op("FREE", name) for name in "abc"], bind)  # type: ignore[arg-type]
    try:
        track.finish()
    except RuntimeError:
        broken.append(False)
    track.finish()
    assert ran == ["a", "b", "c"]


def test_every_verb_has_a_handler_or_is_a_marker() -> None:
    assert {*HANDLERS, *MARKERS} == set(VERBS)
    assert not {*HANDLERS} & {*MARKERS}


def test_a_verb_without_a_handler_is_refused_when_it_is_bound() -> None:
    """A program never runs an operation as another one."""
    handlers = Handlers.__new__(Handlers)
    handlers.units = {"block": None}  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'SEND', which no handler does"):
        handlers.bind(Op("SEND", "block"))


def test_a_verb_whose_moment_is_not_known_is_refused_before_a_pass_that_asks() -> None:
    """Such a pass never does an operation at a moment that is another one's."""
    step = {"CLAMP", "NORM", "FETCH", "SHARE", "UPDATE", "STORE", "JOIN", "STASH", "RELEASE"}
    outer = {"DIFF", "PUSH", "OUTER", "PULL", "MIX", "BLEND", "SERVE", "GIVE"}
    copies = {"LOG", "VOTE", "MIRROR"}
    assert set(MOMENTS) | step | outer | copies | {*MARKERS} == set(VERBS)

    section = Section("forward", [Op("UPDATE", "block")], lambda op: lambda: None)
    with pytest.raises(ValueError, match="does not know when to do 'UPDATE'"):
        NegotiatedPass("F", section, {"block": None}, set(), None, None, refill=section)  # type: ignore[dict-item,arg-type]
