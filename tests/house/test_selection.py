"""What runs by default follows from marks and positions; parts of the soak are all of it, once."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from tests.support.selection import Case, by_default, part_of


def _cases(name: str) -> list[Case]:
    layouts = ("ddp", "zero3", "zero1")
    cases = [Case(f"{name}[{layout}]", layout, product=True) for layout in layouts]
    cases += [Case(f"{name}_sampled[{n}]", one_in=3, soak=n == 0) for n in range(8)]
    return [*cases, Case(f"{name}_plain"), Case(f"{name}_long", soak=True)]


def test_renaming_changes_nothing() -> None:
    """Of a product `zero3`, of sampled cases the first of each few, and what has no mark."""
    chosen = by_default(_cases("one"), ())
    assert chosen == by_default(_cases("another"), ())
    names = [case.id for case, runs in zip(_cases("one"), chosen, strict=True) if runs]
    assert names == ["one[zero3]", "one_sampled[1]", "one_sampled[4]", "one_sampled[7]", "one_plain"]


def test_what_a_fault_names_runs() -> None:
    """Unless it is of the soak by its own mark; what others do does not depend on it."""
    cases, needed = _cases("one"), ("one[zero1]", "one_sampled[2]", "one_long")
    chosen, plain = by_default(cases, needed), by_default(cases, ())
    changed = [case.id for case, new, old in zip(cases, chosen, plain, strict=True) if new != old]
    assert changed == ["one[zero1]", "one_sampled[2]"]


def test_parts_are_the_whole_once() -> None:
    """In any number of parts."""
    whole = list(range(17))
    for parts in (1, 3, 20):
        cut = [whole[part_of(f"{part + 1}/{parts}")] for part in range(parts)]
        assert sorted(number for part in cut for number in part) == whole


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not K/N"):
        part_of(text)
