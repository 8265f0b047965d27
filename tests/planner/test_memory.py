"""Peaks as planned are those of live storages in real steps; plans grow and shrink as they have to."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ModelError
from shardfold.plan.formats import format_named
from shardfold.plan.layout import Tier
from shardfold.plan.lifetimes import GPU
from shardfold.plan.program import REDUCTIONS
from shardfold.planner.division import Division
from shardfold.planner.hardware import DEVICES
from shardfold.planner.live import coding_bytes
from shardfold.planner.memory import MemoryPlan, plan_memory
from shardfold.planner.seconds import plan_seconds
from shardfold.planner.setting import PlannedRank, Subject
from shardfold.testing import Ranks
from shardfold.tools.bench.planned import compare
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.support.options import grouped

SHAPE = GPTConfig(d_model=64, layers=3, heads=4, context=64)
ABOVE, BELOW = 0.03, 0.01


def gpt_batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (rows, SHAPE.context)), torch.randint(256, (rows, SHAPE.context))


def _errors(layout: str | sf.Layout, precision: str, mode: str, more: dict[str, Any]) -> tuple[float, float]:
    found = compare(partial(GPT, SHAPE), gpt_batch(), layout=layout, precision=precision, mode=mode, **grouped(**more))
    return found.planned, found.measured


KEPT = sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute", until="step"))
SMALL = sf.PRESETS["zero3"].edit("params", small=5000)
CODED = sf.PRESETS["zero3"].replace(gather="int8", reduce="int8")
DILOCO = sf.PRESETS["zero1"].with_outer(sf.Outer(every=2, optimizer="nesterov"))
CASES = [  # pairs of what there is of each
    (1, "ddp", "fp32", "keep", {}),
    (1, "zero3", "bf16", "recompute", {"accumulate": 2}),
    (2, "zero1", "bf16", "keep", {"clip_norm": 1.0}),
    (2, "zero2", "fp32", "recompute", {"accumulate": 2}),
    (2, "zero3", "bf16", "keep", {}),
    (2, "fsdp2", "fp32", "select", {"clip_norm": 1.0}),
    (2, SMALL, "bf16", "recompute", {"accumulate": 2}),
    pytest.param(2, KEPT, "bf16", "recompute", {"accumulate": 2}, marks=pytest.mark.soak),
    pytest.param(2, KEPT, "fp32", "keep", {"accumulate": 3}, marks=pytest.mark.soak),
    pytest.param(2, CODED, "bf16", "keep", {}, marks=pytest.mark.soak),
    pytest.param(4, "hsdp", "bf16", "recompute", {"mesh": {"inter": 2, "intra": 2}}, marks=pytest.mark.soak),
    pytest.param(2, "zero3", "fp8", "keep", {}, marks=pytest.mark.soak),
    pytest.param(1, "ddp", "fp8-rowwise", "select", {"accumulate": 2}, marks=pytest.mark.soak),
    pytest.param(2, "zero1", "fp8", "recompute", {}, marks=pytest.mark.soak),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("world", "layout", "precision", "mode", "more"), CASES)
def test_planned_peaks_are_measured_ones(
    ranks: Ranks, world: int, layout: str | sf.Layout, precision: str, mode: str, more: dict[str, Any]
) -> None:
    """Within 3 % above and 1 % below, on every rank."""
    for planned, measured in ranks.run(_errors, layout, precision, mode, more, world_size=world):
        assert -BELOW <= planned / measured - 1 <= ABOVE, (planned, measured)


def _deep(layout: str, more: dict[str, Any]) -> tuple[float, float]:
    shape = replace(SHAPE, layers=16)
    found = compare(partial(GPT, shape), gpt_batch(), layout=layout, precision="bf16", **more)
    return found.planned, found.measured


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "more"), [("ddp", {}), ("zero2", {"accumulate": 2}), ("zero3", {})])
def test_blocks_that_are_one_unit_are_planned_so(ranks: Ranks, layout: str, more: dict[str, Any]) -> None:
    """Gathered, and their gradients held, until the last of them is over; more than of the blocks alone."""
    for planned, measured in ranks.run(_deep, layout, more, world_size=2):
        assert -BELOW <= planned / measured - 1 <= ABOVE, (planned, measured)


@pytest.mark.soak
def test_rounds_of_outer_steps_are_planned(ranks: Ranks) -> None:
    """What a round gives back for the next one to take, its sums among it, and the transport's room."""
    mesh = {"mesh": {"inter": 2, "intra": 1}}
    for planned, measured in ranks.run(_errors, DILOCO, "fp32", "keep", mesh, world_size=2):
        assert -BELOW <= planned / measured - 1 <= ABOVE, (planned, measured)


def test_groups_that_meet_now_and_then_sum_no_gradients(subject: Subject) -> None:
    """A plan has the program of an engine: along the axis of outer steps nothing is summed between them."""
    trace = subject.trace("fp32", "keep", 4)
    setting = subject.setting(trace, layout=DILOCO, precision="fp32", mesh={"inter": 2, "intra": 1})
    assert not any(op.verb in REDUCTIONS for op in setting.bound.program.last)
    assert [op.verb for op in setting.bound.program.outer_send if op.axes] == ["PUSH"] * len(setting.bound.units)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["keep", "recompute"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", sorted(sf.PRESETS))
@pytest.mark.parametrize("world", [1, 2])
def test_planned_peaks_are_measured_ones_under_all_layouts(
    ranks: Ranks, world: int, layout: str, precision: str, mode: str
) -> None:
    """The same of every layout, precision and mode."""
    for planned, measured in ranks.run(_errors, layout, precision, mode, {}, world_size=world):
        assert -BELOW <= planned / measured - 1 <= ABOVE, (planned, measured)


class Recurrent(nn.Module):
    """Blocks of an LSTM, which a CPU runs as one kernel with a workspace, or of a GRU, which it runs step by step."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(kind(32, 32, batch_first=True)) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = rows + block(rows)[0]
        return rows


def _has_one_kernel(precision: str) -> bool:
    """Whether PyTorch runs an LSTM of this dtype as one kernel on this CPU."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        nn.LSTM(32, 32).to(dtype)(torch.zeros(2, 1, 32, dtype=dtype))
    return any(event.key == "aten::mkldnn_rnn_layer" for event in seen.key_averages())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_lstm_is_planned_with_the_workspace_of_its_kernel(precision: str) -> None:
    """Without memory less is held. Its products are counted: those of the gates, of all tokens, in forward once and in
    backward twice. A CPU that has no kernel for the dtype (bf16 without AVX-512) runs it step by step, as a GRU, and
    multiplies nothing for gradients that nobody needs: of the micro-batch, and of the state that a layer begins at."""
    batch = torch.randn(16, 32, 32)
    found = compare(Recurrent, batch, layout="zero1", precision=precision)
    assert -BELOW <= found.planned / found.measured - 1 <= ABOVE, found
    gates, samples, tokens = 4 * 32, 16, 16 * 32
    needless = 0 if _has_one_kernel(precision) else 2 * gates * 32 * (tokens + 3 * samples)
    assert Subject(Recurrent(), batch).trace(precision).flops == 3 * 2 * 3 * gates * (32 + 32) * tokens - needless


class Stacked(nn.Module):
    """One module of several recurrent layers, in both directions, of tokens before samples or behind them."""

    def __init__(self, layers: int, first: bool) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.LSTM(32, 32, num_layers=layers, bidirectional=True, batch_first=first)
        self.head = nn.Linear(64, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(rows if self.first else rows.transpose(0, 1))[0])


@pytest.mark.soak
@pytest.mark.parametrize(
    ("layers", "first", "precision"),
    [(1, True, "fp32"), (3, False, "fp32"), (3, True, "fp32"), (1, False, "bf16"), (3, True, "bf16")],
)
def test_layers_of_an_lstm_in_both_directions_are_planned(layers: int, first: bool, precision: str) -> None:
    """Each layer and direction is a kernel with a workspace of its own."""
    found = compare(partial(Stacked, layers, first), torch.randn(16, 32, 32), layout="zero1", precision=precision)
    assert -BELOW <= found.planned / found.measured - 1 <= ABOVE, found


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "precision", "mode"),
    [(nn.GRU, "fp32", "keep"), (nn.GRU, "bf16", "recompute"), (nn.LSTM, "fp32", "recompute")],
)
def test_recurrent_layers_are_planned_to_the_byte(kind: type[nn.RNNBase], precision: str, mode: str) -> None:
    """A view of the micro-batch, which a layer takes, is no memory of its own; and where of few samples the peak is in
    the gradients of weights, and of many in those of steps, it is that of many."""
    batch = torch.randn(16, 32, 32)
    found = compare(partial(Recurrent, kind), batch, layout="zero1", precision=precision, mode=mode)
    assert found.planned == pytest.approx(found.measured, abs=64)


def test_the_most_between_two_events_may_lie_elsewhere_for_more_samples() -> None:
    """What is found on lines is what a trace of so many samples has, though the peaks of the traces that the lines go
    through are at other operations."""
    subject, exact = (Subject(Recurrent(nn.GRU), torch.randn(2, 8, 32)) for _ in range(2))
    few, more, many = (exact.trace("bf16", "recompute", n, exact=True) for n in (2, 4, 64))
    found = subject.trace("bf16", "recompute", 64)
    assert [event.peak for event in found.events] == [event.peak for event in many.events]
    chord = [a.peak + (b.peak - a.peak) * 31 for a, b in zip(few.events, more.events, strict=True)]
    assert max(chord) < 0.99 * many.peak
    plan = plan_memory(subject.setting(few, layout="zero1", precision="bf16", mesh={"intra": 2}), few)
    assert plan.line(few, more, (2, 4)).at(np.array([64.0]))[0] == pytest.approx(plan.of(many).peak)


def test_formats_hold_what_they_encode_with() -> None:
    """As much as the temporaries of one call, however long; nothing where all is written at once; a format that keeps
    what it lost holds more."""
    few, many = (coding_bytes("int8/256", "bf16", numel, decodes=True) for numel in (2**12, 2**16))
    assert few >= 4 * 2**12 and many == 16 * few
    assert coding_bytes("int8/256", "bf16", 2**18, decodes=True) == coding_bytes(
        "int8/256", "bf16", 2**24, decodes=True
    )
    kept = coding_bytes(format_named("int8+error", "a test"), "fp32", 2**12, decodes=False)
    assert kept > coding_bytes("int8/256", "fp32", 2**12, decodes=False)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(GPT(SHAPE), gpt_batch())


def _plan(subject: Subject, layout: str, ranks: int = 4, mode: str = "keep", samples: int = 4) -> MemoryPlan:
    trace = subject.trace("bf16", mode, samples)
    setting = subject.setting(trace, layout=layout, precision="bf16", mesh={"intra": ranks}, behaviour=GPU)
    return plan_memory(setting, trace)


def test_terms_add_up_to_the_peak(subject: Subject) -> None:
    """Every byte of the peak has a name."""
    for layout in ("ddp", "zero3", "offload", "infinity"):
        plan = _plan(subject, layout)
        assert sum(plan.terms.values()) == pytest.approx(plan.peak, rel=1e-12)


def test_updates_take_a_block_in_the_dtype_of_the_master(subject: Subject) -> None:
    """Of the optimizer's step, some point has more than what lives between operations."""
    plan = _plan(subject, "zero1", ranks=2)
    updates = [point for point in plan.points if point.op is not None and point.op.verb == "UPDATE"]
    assert updates and all(point.terms.get("update", 0.0) > 0 for point in updates)


def test_an_update_in_one_pass_needs_no_block_and_less_time(subject: Subject) -> None:
    """Planned as the engine does it: gradients are multiplied in the pass, and of 42 bytes 30 are moved."""
    found = {}
    for compiled in (False, True):
        trace = subject.trace("bf16", "keep", 4)
        setting = subject.setting(
            trace, layout="zero1", precision="bf16", mesh={"intra": 2}, behaviour=GPU, clip=True,
            overlap=sf.Overlap(compiled_update=compiled),
        )  # fmt: skip
        plan = plan_memory(setting, trace)
        updates = [point for point in plan.points if point.op is not None and point.op.verb == "UPDATE"]
        assert updates and all((point.terms.get("update", 0.0) > 0) == (not compiled) for point in updates)
        found[compiled] = plan_seconds(setting, plan, DEVICES["H200"]).update
    assert found[True] < found[False]


def test_host_memory_of_a_device_with_streams_is_pinned_in_slabs(subject: Subject) -> None:
    """The host's column has whole slabs, of 1 MiB at least; a CPU's has the states alone."""
    plan = _plan(subject, "offload", ranks=1)
    states = sum(n for (state, tier), n in plan.resting.items() if tier is Tier.HOST and state != "slabs")
    assert plan.tiers[Tier.HOST] % (1 << 20) == 0 and states < plan.tiers[Tier.HOST] < 2 * states + (1 << 20)
    trace = subject.trace("bf16", "keep", 4)
    setting = subject.setting(trace, layout="offload", precision="bf16", mesh={"intra": 1})
    assert plan_memory(setting, trace).tiers[Tier.HOST] == states


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3", "fsdp2"])
def test_more_ranks_never_need_more(subject: Subject, layout: str) -> None:
    """But for padding, which is below 256 bytes for each rank and segment."""
    peaks = [_plan(subject, layout, ranks).peak for ranks in (2, 4, 8, 16)]
    assert all(after <= before + 256 * 16 * 16 for before, after in pairwise(peaks)), peaks


def test_recomputing_never_needs_more(subject: Subject) -> None:
    """Of what is saved between forward and backward: all, products, inputs."""
    saved = [subject.trace("bf16", mode).saved for mode in ("keep", "select", "recompute")]
    assert saved == sorted(saved, reverse=True)


def test_micro_batches_lie_on_a_line(subject: Subject) -> None:
    """What is found on the line through two small ones is what a large one does, event by event."""
    subject.trace("bf16", "keep", 9)
    other = Subject(GPT(SHAPE), gpt_batch())
    exact, found = other.trace("bf16", "keep", 9, exact=True), subject.trace("bf16", "keep", 9)
    assert [event[:2] for event in found.events] == [event[:2] for event in exact.events]
    for a, b in zip(found.events, exact.events, strict=True):
        assert a.peak == pytest.approx(b.peak) and a.level == pytest.approx(b.level)
        assert a.work.flops == pytest.approx(b.work.flops)


def test_the_largest_micro_batch_fits_and_one_more_does_not(subject: Subject) -> None:
    """The largest that is named has a peak within the budget; the next has not."""
    budget = _plan(subject, "zero3", samples=4).peak * 3
    most = PlannedRank(budget=budget).largest(subject, _plan(subject, "zero3"))
    assert _plan(subject, "zero3", samples=most).peak <= budget < _plan(subject, "zero3", samples=most + 1).peak


def test_flops_of_a_gpt_are_six_for_each_parameter_and_token() -> None:
    """2 of forward and 4 of backward for each weight that multiplies, and attention's own; the embedding multiplies
    nothing, and no gradient flows to tokens. What is recomputed is work of the device and none of the model."""
    shape = GPTConfig(d_model=64, layers=2, heads=4, context=32)
    tokens = 3 * shape.context
    batch = (torch.randint(256, (3, shape.context)), torch.randint(256, (3, shape.context)))
    trace = Subject(GPT(shape), batch).trace("fp32")
    weights = shape.num_parameters - shape.vocab * shape.d_model - (2 * shape.layers + 1) * shape.d_model
    attention = sum(event.work.attention for event in trace.events)
    assert trace.flops - attention == 6 * weights * tokens
    # products of queries with keys and of weights with values, and 5 products in the flash kernel's backward
    assert attention == (2 + 5) * 2 * shape.layers * 3 * shape.context**2 * shape.d_model
    again = Subject(GPT(shape), batch).trace("fp32", "recompute")
    assert (again.flops, again.attention) == (trace.flops, trace.attention)
    forward = 2 * tokens * (weights - shape.vocab * shape.d_model) + attention * 2 / 7
    last = 2 * tokens * shape.layers * shape.d_ff * shape.d_model  # of a block, whose result nothing in it needs
    assert sum(event.work.flops for event in again.events) - trace.flops == forward - last


@pytest.mark.parametrize("streams", [False, True])
def test_work_without_memory_is_that_with_it(streams: bool) -> None:
    """A run on fake tensors has no operations that are not there on real ones, and nothing that is recomputed counts
    as the model's own, attention neither."""
    shape = GPTConfig(d_model=64, layers=2, heads=4, context=32)
    batch = (torch.randint(256, (3, shape.context)), torch.randint(256, (3, shape.context)))
    subject = Subject(GPT(shape), batch, division=Division(streams=streams))
    fake, again = (subject.trace("bf16", mode, exact=True) for mode in ("keep", "recompute"))
    real = replace(subject, real=True).trace("bf16", "keep", exact=True)
    assert fake.works.calls.sum() == pytest.approx(real.works.calls.sum(), rel=0.05)
    assert fake.works.other_bytes.sum() == pytest.approx(real.works.other_bytes.sum(), rel=0.05)
    assert (again.flops, again.attention) == (fake.flops, fake.attention) == (real.flops, real.attention)


class Experts(torch.nn.Module):
    """Rows in groups, each of which has a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 64, 32, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(8, 33, 8, dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x.to(torch.bfloat16), self.weight, offs=ends).float()


def test_products_of_groups_are_counted() -> None:
    """As many operations as a product of all rows with one of the weights: in the forward, and for the weights'
    gradients."""
    trace = Subject(Experts(), torch.zeros(32, 64)).trace("bf16", exact=True)
    assert trace.flops == 2 * (2 * 32 * 64 * 32)


class Hollow(torch.nn.Module):
    """Its forward asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        return (self.other(y) if float(y.detach().sum()) > 1e9 else y).square().mean()


def test_a_small_model_that_asks_for_values_is_run_on_zeros() -> None:
    """And one that is not small is refused in a sentence."""
    subject = Subject(Hollow(), torch.randn(4, 8))
    assert subject.trace("fp32").flops > 0
    with pytest.raises(ModelError, match="asks for values of tensors"):
        Subject(Hollow(), torch.randn(4, 8), real=False).trace("fp32")


class Skipping(nn.Module):
    """Four blocks, of which forward never uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layers[0], self.layers[1], self.layers[3]):
            x = layer(x)
        return x.square().mean()


def _skipping(layout: str) -> tuple[float, float]:
    found = compare(Skipping, torch.zeros(4, 512), layout=layout, precision="fp32")
    return found.planned, found.measured


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_a_unit_that_never_runs_is_planned_where_the_engine_has_it(ranks: Ranks, layout: str) -> None:
    """Its gradients have a buffer and are summed, in the place that the program has for it."""
    for planned, measured in ranks.run(_skipping, layout, world_size=2):
        assert -BELOW <= planned / measured - 1 <= ABOVE, (planned, measured)
