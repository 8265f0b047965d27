"""The walk of a pass whose order is not known yet, of several ranks at once, without any: names in, numbers out."""

from __future__ import annotations

from shardfold.plan.program import Op
from shardfold.plan.walk import AskedWalk

UNITS = ["root", "a", "b"]


def ops(text: str) -> list[Op]:
    parts = [each.strip().partition(" ") for each in text.split(",")]
    return [Op(verb, unit) for verb, _, unit in parts]


FORWARD = ops(
    "ALL_GATHER root, F root, ALL_GATHER a, F a, FREE a, ALL_GATHER b, F b, FREE b, FREE root, END",
)
BACKWARD = ops(
    "B root, ALL_GATHER b, B b, GRADS b, REDUCE_SCATTER b, FREE b, B a, GRADS a, REDUCE_SCATTER a, FREE a, "
    "GRADS root, REDUCE_SCATTER root, END",
)


def walk(of: list[Op], *, backward: bool = False, nested: bool = False, reduced: tuple[str, ...] = ()) -> AskedWalk:
    return AskedWalk(of, FORWARD, UNITS, {"root"}, backward=backward, nested=nested, reduced=reduced)


def asked(walks: list[AskedWalk], wanted: list[str | None]) -> list[tuple[list[str], list[str]]]:
    """A round of these ranks: what each hears, to reduce and to gather."""
    bits = [each.ask(name)[0] for each, name in zip(walks, wanted, strict=True)]
    said = [any(column) for column in zip(*bits, strict=True)]
    return [each.hear(said) for each in walks]


def verbs(of: AskedWalk, numbers: object) -> list[str]:
    assert isinstance(numbers, (list, tuple))
    return [str((*of.ops, *FORWARD)[number][0]) for number in numbers]


def test_ranks_take_part_in_what_any_of_them_asks_for() -> None:
    """Ranks on other branches gather both units, in the order of definition, and have the same record."""
    ranks = [walk(FORWARD), walk(FORWARD)]
    assert ranks[0].enter("a", None, here=False) and ranks[1].enter("b", None, here=False)
    assert asked(ranks, ["a", "b"]) == [([], ["a", "b"])] * 2
    assert asked(ranks, [None, None]) == [([], [])] * 2
    assert [each.own for each in ranks] == [["a"], ["b"]]
    assert [each.record for each in ranks] == [["a", "b"]] * 2
    assert verbs(ranks[0], ranks[0].due("enter", "a")) == ["ALL_GATHER"]


def test_a_unit_is_given_back_when_another_is_asked_for() -> None:
    """Not before: it may run again."""
    rank = walk(FORWARD)
    assert rank.enter("a", None, here=False)
    rank.leave("a")
    assert not rank.enter("a", None, here=True)  # once more, and no other came between
    assert rank.left == []
    rank.leave("a")
    assert rank.enter("b", None, here=False)
    assert rank.left == ["a"]
    rank.forget_left()
    assert rank.left == [] and not rank.enter("root", None, here=True)


def test_gradients_are_reduced_once_and_with_those_of_others() -> None:
    """What one rank has all of is reduced on all; what comes behind that waits for the step."""
    ranks = [walk(BACKWARD, backward=True), walk(BACKWARD, backward=True)]
    assert ranks[0].complete("b") and verbs(ranks[0], ranks[0].begins("b")) == ["GRADS"]
    assert ranks[0].ask("a")[1] == len(BACKWARD) - 1 and ranks[0].complete("b")  # its gather is of another section
    assert asked(ranks, [None, None]) == [(["b"], [])] * 2
    assert verbs(ranks[1], ranks[1].reduce("b")) == ["REDUCE_SCATTER"]
    assert not ranks[1].sums("b") and not ranks[1].begins("b") and ranks[1].sums("a")
    assert not walk(BACKWARD, backward=True, reduced=("a",)).sums("a")


def test_a_unit_around_others_is_left_behind_the_last_of_them() -> None:
    """In backward a unit is over when another begins that is not inside of it."""
    rank = walk(BACKWARD, backward=True)
    assert rank.enter("a", None, here=False) and rank.enter("b", "a", here=False)
    assert rank.left == []
    rank = walk(BACKWARD, backward=True)
    assert rank.enter("a", None, here=False) and rank.enter("b", None, here=False)
    assert rank.left == ["a"]


def test_what_forward_kept_and_lost_is_gathered_as_in_forward() -> None:
    """Of a section that has no gather of a unit; of a pass inside another, of all of them."""
    rank = walk(BACKWARD, backward=True)
    assert rank.full == {"root", "a"}
    assert [number - len(BACKWARD) for number in rank.due("enter", "a")] == [2]
    assert walk(BACKWARD, backward=True, nested=True).full == {*UNITS}
