"""A search through stages and wires: what it finds fits, is what a plan of it says, and trains as it prints."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.parallel.pipeline.simulate import Times, timeline
from shardfold.parallel.pipeline.stage_order import choose_order, make_order
from shardfold.plan.auto_wire import AutoWire
from shardfold.planner.candidate import Candidate
from shardfold.planner.choice import options
from shardfold.planner.division import Division
from shardfold.planner.hardware import cluster
from shardfold.planner.ranking import Ranking, rank
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.planner.staged import places_of
from shardfold.planner.staged_walks import PassTimes, ends_of
from shardfold.testing import Ranks
from shardfold.tools.planning.command import print_plan
from shardfold.tools.recipes.gpt import GPT, GPTConfig

SHAPE = GPTConfig(d_model=64, layers=4, heads=4, context=32)
STAGED = [Division(pipeline=2), Division(pipeline=2, order="zbv"), Division(pipeline=4, tensor=2)]


def _batch(rows: int = 2) -> dict[str, torch.Tensor]:
    return {name: torch.randint(256, (rows, SHAPE.context)) for name in ("tokens", "targets")}


def _found(divisions: list[Division], memory: str, batch: int = 64) -> Ranking:
    subject, where = Subject(GPT(SHAPE), _batch()), cluster("8xA100-40G", memory=memory)
    return rank(subject, where, divisions, layouts=("zero1", "zero2"), modes=("recompute",), batch=batch)


def test_what_a_search_finds_through_stages_is_what_a_plan_of_it_says() -> None:
    """Peaks of the stage that needs the most, within the budget; micro-batches of a step as samples ask for."""
    where, found = cluster("8xA100-40G", memory="20MiB"), _found(STAGED, "20MiB")
    assert {str(each.candidate.division) for each in found.found} == {str(division) for division in STAGED}
    each = found.found[-1]
    one = each.candidate
    stages = [
        Subject(GPT(SHAPE), _batch(), division=replace(one.division, stage=stage, streams=True))
        for stage in range(one.division.pipeline)
    ]
    on = PlannedRank.on(where, stages[0].division, micro_batches=one.accumulate)
    (planned,) = options(stages, on, {one.layout: one.table}, [one.mode], one.micro_batch)
    assert planned.seconds is not None and planned.seconds == pytest.approx(each.seconds)
    assert planned.plan.peak == pytest.approx(each.peak) and each.peak <= 20 * 2**20
    readers = where.size // one.division.ranks
    assert one.micro_batch * one.accumulate * readers >= 64 > one.micro_batch * (one.accumulate - 1) * readers


@pytest.mark.soak
def test_an_order_of_the_users_own_has_its_micro_batches() -> None:
    """Sizes of a micro-batch are those that make as many of a step; where none does it is said. The fastest of several
    orders is what an engine takes, and a DeepSpeed config has no words for it."""
    own = "0F0 0F1 0B0 0B1\n1F0 1I0 1F1 1I1 1W0 1W1"
    found = _found([Division(pipeline=2, order=own)], "20MiB")
    assert found.found and {each.candidate.accumulate for each in found.found} == {2}
    assert {each.candidate.micro_batch for each in found.found} <= {8, 9, 10, 11, 12, 13, 14, 15}
    one = found.best.candidate
    assert one.train["order"] == own and one.engine["parallel"] == sf.Parallel(mesh={"pipeline": 2}, pipeline=own)
    assert "pipeline=2 in order an order of its own (the order is of sf.Parallel(pipeline=))" in one.unsaid
    refused = _found([Division(pipeline=2, order=own)], "20MiB", batch=3).refused
    assert {each.why for each in refused} == {
        "the order has 2 micro-batches, which no size of one makes of 3 samples a step."
    }


def test_what_fits_through_no_stages_is_said_with_the_stage() -> None:
    """Of states alone, and of one sample; and what cannot be planned or does not divide."""
    little = _found([Division(pipeline=2)], "100KiB")
    assert not little.found and "of stage 0 what rests takes" in little.refused[0].why
    (refused,) = _found([Division(pipeline=2, order="pipedream")], "2MiB").refused
    assert "'pipedream' has backwards of steps before" in refused.why
    (refused,) = _found([Division(pipeline=2, order="interleaved:4")], "2MiB").refused
    assert "8 stages, but the model has 7 pieces" in refused.why and "order with 3 stages on each rank" in refused.why
    (refused,) = _found([Division(pipeline=3)], "2MiB").refused
    assert "pipeline=3 does not divide" in refused.why


@pytest.mark.parametrize(
    "order", ["1f1b", "gpipe", "interleaved:2", "looped-bfs:3", "zb-h1", "zbv", "v-min", "dualpipev"]
)
def test_an_order_takes_as_long_as_it_is_simulated(order: str) -> None:
    """With times of stages that differ and what crosses borders between ranks; long orders go on as they began."""
    ranks, send = 3, 0.25
    stages = len(places_of(order, ranks))
    forward, inputs, weights = ([base + 0.5 * (n % 3) for n in range(stages)] for base in (1.0, 1.25, 0.75))
    row, nothing, sent = np.ones(1), np.zeros(1), np.full(1, send)
    times = [
        PassTimes({"F": f * row, "B": (i + w) * row, "I": i * row, "W": w * row}, nothing, sent, sent)
        for f, i, w in zip(forward, inputs, weights, strict=True)
    ]
    for count in (1, 2, 5, 18, 40):
        line = timeline(
            make_order(choose_order(order), ranks, count), stages,
            Times(forward=forward, inputs=inputs, weights=weights, send=send),
        )  # fmt: skip
        assert float(np.max(ends_of(order, ranks, times, count))) == pytest.approx(line.end)


class Even(nn.Module):
    """Blocks whose forward and both parts of whose backward are a product each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


@pytest.mark.soak
def test_orders_of_equal_stages_are_ranked_as_their_slots() -> None:
    """A step has the slots that `explain` counts, and up to a tenth more: what crosses borders, and the last backward.
    The fastest first is the one with the fewest."""
    with torch.device("meta"):
        model = Even()
    slots, planned = dict[str, float](), dict[str, float]()
    for order in ("1f1b", "interleaved:2", "zb-h1", "zbv"):
        subject = Subject(model, torch.empty(2, 2048, 2048, device="meta"), division=Division(pipeline=4, order=order))
        found = rank(subject, cluster("4xA100-80G"), layouts=("ddp",), modes=("keep",), batch=32, most=4).found
        seconds = next(each.seconds for each in found if each.candidate.accumulate == 8)
        stages = len(places_of(order, 4))
        slots[order] = timeline(make_order(choose_order(order), 4, 8), stages).end / (stages / 4)
        planned[order] = 3 * (seconds.step - seconds.update) / (seconds.compute / 8)  # a rank's three slots are one
        assert slots[order] <= planned[order] <= 1.1 * slots[order]
    assert sorted(planned, key=lambda order: planned[order]) == ["zbv", "zb-h1", "interleaved:2", "1f1b"]
    assert sorted(slots, key=lambda order: slots[order]) == ["zbv", "zb-h1", "interleaved:2", "1f1b"]


def test_a_step_through_stages_has_its_update() -> None:
    """As much longer with more moments as their update is; samples of a step are rounded up to whole micro-batches."""
    subject = Subject(GPT(SHAPE), _batch(), division=Division(pipeline=2, streams=True))
    found = [
        rank(subject, cluster("2xL4"), layouts=("ddp",), modes=("keep",), batch=5, most=2, moments=n).found
        for n in (0, 2)
    ]
    for each in found:
        assert sorted((one.candidate.micro_batch, one.candidate.accumulate) for one in each) == [(1, 5), (2, 3)]
    few, more = (next(one.seconds for one in each if one.candidate.micro_batch == 1) for each in found)
    assert more.update > few.update and more.compute == few.compute
    assert more.step - few.step == pytest.approx(more.update - few.update, rel=0.5)


@pytest.mark.soak
def test_more_micro_batches_take_a_smaller_part_of_a_step_in_bubbles() -> None:
    """And slower links take longer."""
    subject = Subject(GPT(SHAPE), _batch(), division=Division(pipeline=2, streams=True))

    def waits(batch: int, gpus: str = "2xA100-40G") -> float:
        found = rank(subject, cluster(gpus), layouts=("ddp",), modes=("keep",), batch=batch, most=1)
        return found.best.seconds.exposed / found.best.seconds.step

    parts = [waits(batch) for batch in (2, 4, 8, 16)]
    assert all(after < before for before, after in pairwise(parts)), parts
    assert waits(16, "2x1xL4") > waits(16, "2xL4")


def test_wires_are_those_that_were_allowed() -> None:
    """Nothing that loses anything unless it is named; two hops where there are nodes."""
    subject = Subject(GPT(SHAPE), _batch())

    def wires(wire: str | None, gpus: str) -> set[str]:
        found = rank(subject, cluster(gpus), layouts=("zero3",), modes=("keep",), batch=64, wire=AutoWire.named(wire))
        return {each.candidate.wired for each in found.found}

    assert wires(None, "2x4xL4") == wires("auto", "8xL4") == {""}
    assert wires("auto", "2x4xL4") == {"", "gather computex2", "reduce reducex2", "gather computex2, reduce reducex2"}
    assert wires("auto:int8", "8xL4") == {"", "gather int8/256", "reduce int8/256", "gather int8/256, reduce int8/256"}
    slow = rank(subject, cluster("2x1x2080Ti"), layouts=("zero3",), modes=("keep",), batch=8,
                  wire=AutoWire.named("auto:int8"))  # fmt: skip
    assert slow.best.candidate.wires and slow.best.candidate.table.gather.format == "int8/256"
    assert "int8/256 (the layout of Engine)" in slow.best.candidate.unsaid


def _train(settings: dict[str, object], samples: int) -> float:
    engine = sf.Engine(GPT(SHAPE), optimizer=partial(torch.optim.AdamW, lr=1e-3), **settings)  # type: ignore[arg-type]
    loss = float(engine.train_batch(_batch(samples)))
    engine.step()
    engine.close()
    return loss


@pytest.mark.soak
def test_the_winner_of_stages_and_wires_trains_on_real_ranks(ranks: Ranks) -> None:
    """What is printed for an engine, as it is."""
    found = sf.plan.best(
        GPT(SHAPE), _batch(), gpus="4xL4", samples=16, layouts=("zero1",), modes=("recompute",),
        axes=({"pipeline": 2, "order": "gpipe"},), wire="auto:bf16",
    )  # fmt: skip
    one = replace(found.candidate, reduce="bf16")
    rows = one.micro_batch * one.accumulate
    losses = ranks.run(_train, one.engine, rows, world_size=4)
    assert all(4 < loss < 7 for loss in losses)
    assert one.train["activations"] == one.mode
    assert one.train["pipeline"] == 2 and one.train["order"] == "gpipe" and one.train["reduce"] == "bf16"


def test_a_candidate_says_its_wires() -> None:
    """In its name, to recipes, and in a file that a run reads."""
    one = Candidate(layout="zero3", gather="int8x2")
    assert str(one).startswith("zero3, gather int8x2, keep")
    assert json.loads(json.dumps(one.train))["gather"] == "int8x2"


@pytest.mark.soak
def test_the_command_that_trains_as_the_winner_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the model, the processes and the activations; not where ranks are on several nodes."""
    how: dict[str, Any] = dict(memory=None, precision="bf16", micro_batch=None, accumulate=1, length=None, batch=16)
    print_plan("tiny", "2xL4", tables={"zero2": sf.PRESETS["zero2"]}, modes=["recompute"], **how)
    said = capsys.readouterr().out
    assert "shardfold train --size tiny --procs 2 --layout zero2 --precision bf16 --activations recompute" in said
    print_plan("tiny", "2x1xL4", tables={"zero2": sf.PRESETS["zero2"]}, modes=["recompute"], **how)
    assert "shardfold train" not in capsys.readouterr().out
    tables = {"zero2": sf.Runtime(survive="rank", exact=True).in_table(sf.PRESETS["zero2"])}
    print_plan("tiny", "2xL4", tables=tables, modes=["recompute"], survive="rank", exact=True, **how)
    said = capsys.readouterr().out
    assert "--elastic --exact" in said and "zero2: if a rank dies and the others go on" in said
    assert "; with a spare, that reads" in said
