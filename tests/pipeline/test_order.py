"""Orders as data: they end, keep as many micro-batches as is said of them, and leave the bubble that is."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline.order import Action, Choice, choose_order, forwards, lower, make_order
from shardfold.parallel.pipeline.picture import drawn, timeline

SIZES = [(ranks, batches) for ranks, batches in product((2, 3, 4), range(1, 13))]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved:2", "interleaved:3", "looped-bfs:2"])
def test_every_forward_and_backward_is_there_once_and_the_order_ends(name: str) -> None:
    choice = choose_order(name)
    for ranks, batches in SIZES:
        if choice.name == "interleaved" and batches % ranks:
            continue
        order = make_order(choice, ranks, batches)
        stages = ranks * choice.chunks
        every = sorted(action for actions in order for action in actions)
        assert every == sorted(Action(v, s, b) for v in "FB" for s in range(stages) for b in range(batches))
        assert all(action.stage % ranks == place for place, actions in enumerate(order) for action in actions)
        timeline(order, stages)
        timeline(forwards(order), stages)


@pytest.mark.parametrize(("ranks", "batches"), SIZES)
def test_bubbles_and_what_is_kept_are_those_of_the_formulas(ranks: int, batches: int) -> None:
    """(p - 1) / (m + p - 1) of GPipe and 1F1B; 1F1B keeps p micro-batches on the first rank and 1 on the last;
    interleaved with v stages on each rank (p - 1) / (v m + p - 1)."""
    for name in ("gpipe", "1f1b"):
        line = timeline(make_order(Choice(name, 1), ranks, batches), ranks)
        assert line.bubble == pytest.approx((ranks - 1) / (batches + ranks - 1))
        kept = [batches if name == "gpipe" else min(batches, ranks - place) for place in range(ranks)]
        assert line.kept == kept
    if batches % ranks == 0:
        line = timeline(make_order(Choice("interleaved", 2), ranks, batches), 2 * ranks)
        assert line.bubble == pytest.approx((ranks - 1) / (2 * batches + ranks - 1))


def test_what_crosses_borders_is_between_forwards_and_backwards() -> None:
    order = make_order(Choice("1f1b", 1), 2, 2)
    assert [str(action) for action in lower(order[1], 2, 2)] == [
        "RECV_F stage 1 batch 0", "F stage 1 batch 0", "B stage 1 batch 0", "SEND_B stage 1 batch 0",
        "RECV_F stage 1 batch 1", "F stage 1 batch 1", "B stage 1 batch 1", "SEND_B stage 1 batch 1",
    ]  # fmt: skip
    assert drawn(timeline(order, 2), 2) == ["   0 | 0 1 . .-0-0 .-1-1", "   1 | . 0-0-0 1-1-1 . ."]
    assert len(drawn(timeline(make_order(Choice("interleaved", 2), 2, 2), 4), 2)) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("1f2b", "Did you mean '1f1b'"),
        (None, "is no order"),
        ("gpipe:2", "one stage on each rank"),
        ("interleaved:1", "2 or more"),
        ("interleaved:two", "2 or more"),
    ],
)
def test_what_is_no_order_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_order(given)


def test_interleaved_refuses_micro_batches_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="which 3 do not divide into"):
        make_order(Choice("interleaved", 2), 2, 3)
