"""Orders as data: they end, print and parse, keep as many micro-batches and wait as long as is said of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as drawn_from
from hypothesis import strategies as st

from shardfold.errors import ConfigError
from shardfold.parallel.pipeline._order_text import parse, render
from shardfold.parallel.pipeline.action import Action
from shardfold.parallel.pipeline.picture import drawn
from shardfold.parallel.pipeline.simulate import Times, check, timeline
from shardfold.parallel.pipeline.stage_order import ORDERS, OrderChoice, choose_order, forwards, lower, make_order

NAMES = [*ORDERS, "interleaved:3", "interleaved-zb:3"]
SIZES = [(ranks, batches) for ranks, batches in product((2, 3, 4), range(1, 13))]
LARGER = [(1, 3), (5, 7), (6, 12), (8, 4), (8, 32)]


@pytest.mark.parametrize("name", NAMES)
def test_every_order_is_complete_and_ends(name: str) -> None:
    """For fewer micro-batches than stages too; what it prints is what it is."""
    choice = choose_order(name)
    for ranks, batches in SIZES + LARGER:
        order = make_order(choice, ranks, batches)
        assert check(order, ranks, batches) == choice.places(ranks)
        assert parse(render(order)) == order
        assert check(forwards(choice, ranks, batches), ranks, batches, trains=False) == choice.places(ranks)


ACTIONS = st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 99), st.integers(0, 999))


@drawn_from(st.lists(st.lists(ACTIONS, min_size=1, max_size=9), max_size=5), st.sampled_from([" ", ",", " , ", ",,"]))
def test_what_an_order_prints_parses_to_it(rows: list[list[Action]], between: str) -> None:
    text = render(rows)
    assert parse(text) == rows
    assert parse("# a remark\n\n" + text.replace(" ", between).replace("\n", "  # of a rank\n")) == rows


def _line(name: str, ranks: int, batches: int) -> Any:
    choice = choose_order(name)
    return timeline(make_order(choice, ranks, batches), ranks * choice.chunks)


@pytest.mark.parametrize(("ranks", "batches"), SIZES)
def test_bubbles_and_what_is_kept_are_those_of_the_formulas(ranks: int, batches: int) -> None:
    """(p - 1) / (m + p - 1) of GPipe and 1F1B; 1F1B keeps p micro-batches on the first rank and 1 on the last;
    interleaved with v stages on each rank (p - 1) / (v m + p - 1)."""
    for name in ("gpipe", "1f1b"):
        line = _line(name, ranks, batches)
        assert line.bubble == pytest.approx((ranks - 1) / (batches + ranks - 1))
        kept = [batches if name == "gpipe" else min(batches, ranks - place) for place in range(ranks)]
        assert line.kept == kept
    if batches % ranks == 0:
        for name in ("interleaved:2", "looped-bfs:2"):
            assert _line(name, ranks, batches).bubble == pytest.approx((ranks - 1) / (2 * batches + ranks - 1))


@pytest.mark.parametrize("ranks", range(2, 9))
def test_zero_bubble_orders_wait_and_keep_what_their_papers_say(ranks: int) -> None:
    """In slots of F = I = W, with 1F1B's wait B = 3 (p - 1) and its p micro-batches: ZB-H1 waits B / 3 at p; ZBV 0
    between a rank's first and last action at p; V-Half at most B / 2 at p / 2 + 1; V-Min keeps p / 3 + 4 / 3."""
    batches = 3 * ranks
    b = 3 * (ranks - 1)
    old = _line("1f1b", ranks, batches)
    assert (max(old.waits), max(old.kept)) == (b, ranks)
    h1 = _line("zb-h1", ranks, batches)
    assert (max(h1.waits), max(h1.kept)) == (b / 3, ranks)
    assert h1.bubble == pytest.approx(b / 3 / (3 * batches + b / 3))
    zbv = _line("zbv", ranks, batches)  # slots, and what is kept, are of stages of half the size
    assert (max(zbv.waits), max(zbv.kept) / 2) == (0, ranks)
    half = _line("v-half", ranks, batches)
    assert max(half.waits) / 2 <= b / 2 and max(half.kept) / 2 <= ranks / 2 + 1
    assert max(_line("v-min", ranks, batches).kept) / 2 <= ranks / 3 + 4 / 3


@pytest.mark.parametrize(
    ("ranks", "batches", "of"), [(8, 8, (0.467, 0.294, 0.360)), (8, 64, (0.099, 0.050, 0.066)), (2, 8, (1 / 9, 1 / 17))]
)
def test_what_vs_wait_beside_1f1b_depends_on_how_many_micro_batches_there_are(
    ranks: int, batches: int, of: tuple[float, ...]
) -> None:
    """What docs/pipeline.md says of them: about a half and two thirds of it, of few micro-batches more."""
    found = [_line(name, ranks, batches).bubble for name in ("1f1b", "v-half", "v-min")]
    assert found[: len(of)] == pytest.approx(of, abs=5e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("times", "least"), [(4, 0.8), (8, 8 / 9)])
def test_efficiency_is_m_over_m_and_k_less_one(times: int, least: float) -> None:
    """Of K stages and M = 4 K or 8 K micro-batches, M / (M + K - 1): falls to 0.80 and 0.889 with more stages."""
    before = 1.0
    for ranks in (2, 3, 4, 8, 16, 32, 64):
        for name in ("gpipe", "1f1b"):
            busy = 1 - _line(name, ranks, times * ranks).bubble
            assert busy == pytest.approx(times * ranks / (times * ranks + ranks - 1))
            assert least <= busy < before
        before = busy
    assert before - least < 0.003


def test_times_of_stages_and_of_messages_count() -> None:
    order = make_order(choose_order("gpipe"), 2, 2)
    slow = Times(forward=[1, 4], inputs=0.5, weights=0.25, send=10)
    line = timeline(order, 2, slow)
    starts = [[begin for begin, _ in row] for row in line.rows]
    assert starts == [[0, 1, 29.75, 30.5], [11, 15, 19, 19.75]]
    assert line.end == 31.25 and line.busy == [3.5, 9.5] and line.waits == [27.75, 0]


def _theirs(name: str, ranks: int, batches: int, chunks: int) -> list[list[str]]:
    """PyTorch's own order, without what it waits."""
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules

    kinds = {
        "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "looped-bfs": "LoopedBFS",
        "interleaved-zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
    }  # fmt: skip
    kind: Any = getattr(schedules, "Schedule" + kinds[name])
    given = SimpleNamespace(
        _num_stages=ranks, _n_microbatches=batches, pp_group_size=ranks, n_local_stages=chunks,
        num_stages=ranks * chunks, microbatches_per_round=batches // max(1, batches // ranks), _stages=[None] * chunks,
    )  # fmt: skip
    if name in ("gpipe", "1f1b"):
        rows = list(kind._get_pipeline_order(given).values())
    else:
        rows = [kind._calculate_single_rank_operations(given, rank) for rank in range(ranks)]
    found: list[list[str]] = []
    for row in rows:
        every = [one for action in row if action is not None for one in action.sub_actions or (action,)]
        kept = [one for one in every if one.computation_type.value in "FBIW"]
        found.append([f"{one.stage_index}{one.computation_type.value}{one.microbatch_index}" for one in kept])
    return found


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "interleaved:2", "interleaved:3", "looped-bfs:2", "interleaved-zb:2", "interleaved-zb:3",
             "zbv", "dualpipev"],
)  # fmt: skip
def test_orders_are_those_of_pytorch(name: str) -> None:
    """All of torch.distributed.pipelining's schedules, wherever they take so many micro-batches."""
    choice = choose_order(name)
    compared = 0
    for ranks, batches in SIZES + LARGER:
        looped = choice.name in ("interleaved", "interleaved-zb")
        refused = {"1f1b": batches < ranks, "dualpipev": batches < 2 * ranks}
        if refused.get(choice.name) or (looped and batches % max(1, batches // ranks)):
            continue
        mine = [[action.short for action in row] for row in make_order(choice, ranks, batches)]
        theirs = _theirs(choice.name, ranks, batches, choice.chunks)
        if choice.name == "1f1b":  # the numbers that it shows for the last rank begin with 1
            mine, theirs = mine[:-1], theirs[:-1]
        assert mine == theirs, (ranks, batches)
        compared += 1
    assert compared >= 20


def test_what_crosses_borders_is_between_forwards_and_backwards() -> None:
    order = make_order(OrderChoice("1f1b", 1), 2, 2)
    assert [str(action) for action in lower(order[1], [0, 1])] == [
        "RECV_F stage 1 batch 0", "F stage 1 batch 0", "B stage 1 batch 0", "SEND_B stage 1 batch 0",
        "RECV_F stage 1 batch 1", "F stage 1 batch 1", "B stage 1 batch 1", "SEND_B stage 1 batch 1",
    ]  # fmt: skip
    v = make_order(choose_order("zbv"), 2, 1)
    assert [action.short for action in lower(v[1], [0, 1, 1, 0])] == [
        "1RECV_F0", "1F0", "2F0", "2SEND_F0", "2RECV_B0", "2I0", "2W0", "1I0", "1SEND_B0", "1W0",
    ]  # fmt: skip
    assert drawn(timeline(order, 2), 2) == ["   0 | 0 1 . .-0-0 .-1-1", "   1 | . 0-0-0 1-1-1 . ."]
    split = make_order(choose_order("zb-h1"), 2, 2)
    assert drawn(timeline(split, 2), 2) == ["   0 | 0 1 .-0+0-1+1", "   1 | . 0-0 1-1+0+1"]
    assert len(drawn(timeline(make_order(OrderChoice("interleaved", 2), 2, 2), 4), 2)) == 2


OWN = "0F0 0F1 0B0 0B1  # a remark\n\n1F0,1B0,,1F1,1B1\n"


def test_an_order_of_ones_own_is_a_text_or_a_file(tmp_path: Path) -> None:
    choice = choose_order(OWN)
    assert make_order(choice, 2, 2) == make_order(choose_order("1f1b"), 2, 2)
    (tmp_path / "mine.txt").write_text(OWN)
    assert choose_order(tmp_path / "mine.txt").rows == choice.rows
    with pytest.raises(ConfigError, match="cannot be read as the text of an order"):
        choose_order(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("0B1", ""), "rank 0 lacks 0B1"),
        (lambda text: text.replace("1F1", ""), "rank 1 lacks 1F1"),
        (lambda text: text.replace("1F1", "1F0"), "rank 1 has 1F0 twice"),
        (lambda text: text.replace("1B1", "1I1"), "rank 1 lacks 1W1"),
        (lambda text: text.replace("1B1", "1B1 1W1"), "rank 1 has 1B1 and a part of it, 1W1"),
        (lambda text: text.replace("1F0,1B0", "1B0,1F0"), "rank 0 waits in 0B0 for 1B0, rank 1 waits in 1B0 for 1F0"),
        (lambda text: text.replace("1F1", "0F1"), "rank 1 has 0F1, whose stage rank 0 has"),
        (lambda text: text.replace("1", "2"), "no rank has stage 1"),
        (lambda text: text.replace("0F1", "0X1"), "line 1 has '0X1', which is not an action"),
        (lambda text: text + "2F0 2B0 2F1 2B1 5F0", "no rank has stage 3"),
        (lambda text: "\n", "has no line of actions"),
    ],
)  # fmt: skip
def test_an_order_that_cannot_run_is_refused_with_rank_and_action(change: Callable[[str], str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_order(change(OWN))


def test_an_order_is_refused_where_ranks_or_micro_batches_are_others() -> None:
    choice = choose_order(OWN)
    with pytest.raises(ConfigError, match="where the axis has 3: give parallel= 2 ranks of pipeline"):
        choice.places(3)
    with pytest.raises(ConfigError, match="2 micro-batches, where accumulate= gives 3: give accumulate=2, or"):
        make_order(choice, 2, 3)
    with pytest.raises(ConfigError, match="2 micro-batches, where accumulate= gives 1: give accumulate=2, or"):
        make_order(choice, 2, 1)
    far = "".join(f"{i}F0 {i}B0 {j}F0 {j}B0\n" for i, j in ((0, 3), (1, 5), (2, 4), (6, 7)))
    with pytest.raises(ConfigError, match="stage 2 is on rank 2 and stage 3 on rank 0: stages that follow"):
        choose_order(far)
    with pytest.raises(ConfigError, match="rank 1 has 1 stages and rank 0 has 2: give all as many"):
        choose_order("0F0 2F0 2B0 0B0\n1F0 1B0\n")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("1f2b", "Did you mean '1f1b'"),
        (None, "is not an order"),
        ("gpipe:2", "one stage on each rank"),
        ("zbv:2", "two stages on each rank"),
        ("interleaved:1", "2 or more"),
        ("interleaved:two", "2 or more"),
    ],
)
def test_what_is_no_order_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_order(given)


def test_micro_batches_that_do_not_divide_into_rounds_leave_the_last_round_short() -> None:
    rows = [[action.short for action in row] for row in make_order(OrderChoice("interleaved", 2), 4, 9)]
    whole = [[action for action in row if action.batch < 9] for row in make_order(OrderChoice("interleaved", 2), 4, 12)]
    assert rows == [[action.short for action in row] for row in whole]
    assert make_order(OrderChoice("interleaved", 2), 2, 3)[0][0] == Action("F", 0, 0)
