"""What kind of pass runs, as a value."""

from __future__ import annotations

import pytest

from shardfold.engine.announced import Announced
from shardfold.engine.pass_context import PassContext
from shardfold.parallel.pipeline.deferred import DeferredWeightGrads
from shardfold.plan.walk import Part

DEFERRED = DeferredWeightGrads()
STAGE = Part(frozenset({"a"}), frozenset({"root"}))


@pytest.mark.parametrize(
    ("context", "behind", "sums", "section"),
    [
        (PassContext(), 0, False, "backward"),
        (PassContext(), 1, True, "last"),
        (PassContext(last=True), 0, True, "last"),
        (PassContext(last=False), 1, False, "backward"),
        (PassContext(synchronize=False), 1, False, "quiet"),
        (PassContext(part=STAGE), 1, False, "backward"),
        (PassContext(part=STAGE._replace(last=True)), 0, True, "last"),
        (PassContext(deferred=DEFERRED), 1, False, "quiet"),
        (PassContext(deferred=DEFERRED, weights=True), 0, False, "weights"),
        (PassContext(deferred=DEFERRED, weights=True), 1, True, "last_weights"),
    ],
)
def test_a_backward_runs_the_section_of_its_kind(context: PassContext, behind: int, sums: bool, section: str) -> None:
    """Behind so many of two micro-batches; inside of a forward none sums gradients for a step."""
    assert context.sums(behind, 2, nested=False) is sums
    assert context.section(sums=sums, nested=False) == section
    assert not context.sums(behind, 2, nested=True)


def test_what_is_announced_for_a_while_leaves_the_rest() -> None:
    """``engine.last_micro_batch`` that is set inside of ``no_sync()`` stays set behind it."""
    announced = Announced()
    with announced.announcing(synchronize=False):
        with announced.announcing(part=STAGE, synchronize=False):
            announced.announce(last=True)
            assert announced.context == PassContext(STAGE, last=True, synchronize=False)
        assert announced.context == PassContext(last=True, synchronize=False)
    assert announced.context == PassContext(last=True)


def test_ranks_call_a_backward_alike_where_they_do_the_same() -> None:
    assert PassContext().title(0, 2, nested=False) == "a backward pass (1 of 2)"
    assert PassContext(last=True).title(0, 2, nested=False) == "a backward pass (1, the last)"
    assert PassContext(synchronize=False).title(1, 2, nested=True) == "a backward pass (inside a forward, no_sync)"
