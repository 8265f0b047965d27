"""What a rank keeps of micro-batches under way, action by action."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardfold.parallel.pipeline.stage_order import ORDERS, choose_order, make_order
from shardfold.planner.division import Division
from shardfold.planner.memory import Point, plan_memory
from shardfold.planner.setting import Subject
from shardfold.planner.staged import Span, actions_of, bases_of, in_order, lanes_of, places_of, spans_of
from shardfold.planner.trace import Event, Lane, Trace
from shardfold.tools.recipes.gpt import GPT, GPTConfig

SHAPE = GPTConfig(d_model=32, layers=4, heads=2, context=32)
FOLLOWED = [order for order in ORDERS if order not in ("pipedream", "2bw")]
KEEPS = {"F": 7.0, "I": 3.0, "B": 0.0, "W": 0.0}
GIVES = {"F": 100.0, "I": 1000.0, "B": 1000.0, "W": 0.0}


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.randint(256, (rows, SHAPE.context)) for name in ("tokens", "targets")}


def _spans(lane: Lane, gives: float) -> dict[str, Span]:
    verbs = "FIW" if lane.split else "FB"
    return {verb: Span(0, 0, KEEPS[verb] * (lane.stage + 1), gives * GIVES[verb]) for verb in verbs}


@given(st.sampled_from(FOLLOWED), st.integers(2, 4), st.integers(1, 9))
def test_what_is_kept_is_what_the_actions_leave(order: str, ranks: int, count: int) -> None:
    """Of each micro-batch of a stage what its last action leaves, as an order's own rules count them; at the end none.
    Without what crosses borders."""
    rows, places = make_order(choose_order(order), ranks, count), places_of(order, ranks)
    for here, row in enumerate(rows):
        bases = bases_of(rows, places, here, {lane: _spans(lane, 0.0) for lane in lanes_of(row)})
        for number, (action, base) in enumerate(zip(row, bases, strict=True)):
            state = {(stage, batch): verb for verb, stage, batch in row[:number]}
            _ = state.pop(action[1:], None)
            assert base == sum(KEEPS[verb] * (stage + 1) for (stage, _), verb in state.items())


@given(st.sampled_from(FOLLOWED), st.integers(2, 4), st.integers(1, 9))
def test_what_crosses_borders_is_somewhere(order: str, ranks: int, count: int) -> None:
    """Each gradient for a stage on the same rank waits until it is used; of those for others one is on its way; what
    comes out of turn is less than all that comes."""
    rows, places = make_order(choose_order(order), ranks, count), places_of(order, ranks)
    for here, row in enumerate(rows):
        spans = {lane: _spans(lane, 1.0) for lane in lanes_of(row)}
        none = bases_of(rows, places, here, {lane: _spans(lane, 0.0) for lane in spans})
        more = [a - b for a, b in zip(bases_of(rows, places, here, spans), none, strict=True)]
        handed: set[tuple[int, int]] = set()
        sent = False
        for (verb, stage, batch), extra in zip(row, more, strict=True):
            if verb in "BI":
                handed.discard((stage, batch))
            least = 1000.0 * (len(handed) + sent)
            assert least <= extra <= least + 2 * 1000.0 * count * len(places)
            if verb in "BI" and stage:
                if places[stage - 1] == here:
                    handed.add((stage - 1, batch))
                else:
                    sent = True


def test_what_comes_out_of_turn_waits() -> None:
    """Rank 0 sends the activations of two micro-batches for stage 1, and rank 1 takes the second one first."""
    order = "0F0 0F1 0B1 0B0\n1F1 1B1 1F0 1B0"
    rows = actions_of(order, 2, 2)
    spans = {Lane(1): _spans(Lane(1), 1.0)}
    assert bases_of(rows, places_of(order, 2), 1, spans) == [1000.0, 1000.0, 1000.0, 1000.0]


def _trace(lane: Lane) -> Trace:
    """Of a micro-batch of which forward and backward hold nothing while they run."""
    spans, parts = _spans(lane, 1.0), [Event("sent", level=KEEPS["F"] * (lane.stage + 1), size=GIVES["F"])]
    parts.append(Event("end", size=GIVES["B"]))
    if lane.split:
        parts += [Event("inputs", level=spans["I"].keeps), Event("end")]
    return Trace(tuple(parts))


@given(st.sampled_from(FOLLOWED), st.integers(2, 4), st.integers(1, 30))
@settings(max_examples=60)
def test_the_passes_that_are_walked_have_the_most_that_is_kept(order: str, ranks: int, count: int) -> None:
    """Of each lane's forwards, backwards and parts of these, of all that an order has, however long it is."""
    rows, places = make_order(choose_order(order), ranks, count), places_of(order, ranks)
    for here, row in enumerate(rows):
        spans = {lane: _spans(lane, 1.0) for lane in lanes_of(row)}
        split = {action[1:] for action in row if action.verb == "W"}
        most: dict[tuple[str, Lane], float] = {}
        for action, base in zip(row, bases_of(rows, places, here, spans), strict=True):
            key = action.verb, Lane(action.stage, action[1:] in split)
            most[key] = max(most.get(key, 0.0), base)
        division = Division(pipeline=ranks, order=order, micro_batches=count, stage=here)
        found: dict[tuple[str, Lane], float] = {}
        trace = in_order(_trace, division, {})
        for one in trace.passes:
            verb = {"forward": "F", "quiet": "I", "weights": "W", "last_weights": "W"}.get(one.section, "B")
            peak = max(event.peak for event in trace.events[one.begin : one.end])
            found[verb, one.lane] = max(found.get((verb, one.lane), 0.0), peak)
        assert found == most


def test_the_first_part_of_a_backward_leaves_what_the_second_needs() -> None:
    """Inputs of products and gradients of their outputs, and gradients of other weights: less than a forward keeps and
    more than nothing; with units recomputed it is the gradients of all of them."""
    subject = Subject(GPT(SHAPE), _batch(), division=Division(pipeline=2, order="zb-h1", micro_batches=4, stage=1))
    keep, again = (spans_of(subject.alone("fp32", mode, 2, Lane(1, True))) for mode in ("keep", "recompute"))
    assert 0 < keep["I"].keeps < 1.5 * keep["F"].keeps and keep["W"].keeps == 0
    blocks = sum(p.nbytes for block in GPT(SHAPE).blocks[2:] for p in block.parameters())
    assert again["I"].keeps >= blocks and again["F"].keeps < again["I"].keeps
    whole = spans_of(subject.alone("fp32", "keep", 2, Lane(1, False)))
    assert whole["B"].gives == keep["I"].gives == keep["F"].gives or whole["F"].gives == keep["F"].gives == 0


def test_what_a_stage_receives_from_its_own_rank_is_kept_once() -> None:
    """The second stage of a V's last rank keeps what one on a rank of its own keeps, without its input."""

    def kept(order: str, stage: int) -> float:
        subject = Subject(GPT(SHAPE), _batch(), division=Division(pipeline=2, order=order, stage=stage % 2))
        return spans_of(subject.alone("fp32", "keep", 2, Lane(stage, False)))["F"].keeps

    received = 2 * SHAPE.context * SHAPE.d_model * 4
    alone = Subject(GPT(SHAPE), _batch(), division=Division(pipeline=4, stage=2)).alone("fp32", "keep", 2, Lane(2))
    handed = Subject(GPT(SHAPE), _batch(), division=Division(pipeline=2, order="zbv", stage=1))
    assert spans_of(alone)["F"].keeps - spans_of(handed.alone("fp32", "keep", 2, Lane(2)))["F"].keeps == received
    assert kept("interleaved:2", 2) == spans_of(alone)["F"].keeps


@pytest.mark.parametrize("order", ["interleaved:2", "zbv"])
def test_a_pass_runs_the_program_of_its_stage(order: str) -> None:
    """Gathers and sums of units of that stage, and of what all stages have; sums of the latter in the last alone."""
    subject = Subject(GPT(SHAPE), _batch(), division=Division(pipeline=2, order=order, micro_batches=4))
    trace = subject.trace("fp32", "keep")
    setting = subject.setting(
        trace, layout="zero3", precision="fp32", mesh={"pipeline": 2, "intra": 2}, micro_batches=4
    )
    points = plan_memory(setting, trace).points

    def within(begin: int, end: int, point: Point) -> bool:
        return point.op is not None and begin <= point.event < end and bool(point.op.unit)

    seen: set[str] = set()
    for one in trace.passes:
        assert one.part is not None
        units = {p.op.unit for p in points if within(one.begin, one.end, p) and p.op is not None}
        assert units <= one.part.units | one.part.common
        seen |= units
    assert {"blocks.0", "blocks.2"} & seen and len(seen) > 2
