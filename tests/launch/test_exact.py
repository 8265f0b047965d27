"""The same bits, whatever ranks die, come in, and read for each other."""

from __future__ import annotations

import random
import sys
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from math import fsum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.engine._virtual_ranks import VirtualRanks
from shardfold.errors import ConfigError, LayoutError, ModelError
from shardfold.numerics.ordered_sums import joined_slices, largest_power, slice_sums
from shardfold.plan.bind import bind
from shardfold.plan.cost import traffic
from shardfold.plan.layout import Precision, Wire
from shardfold.plan.lifetimes import ALONE, in_use
from shardfold.plan.placement import SegmentSpec, UnitSpec
from shardfold.plan.program import lower, parse
from shardfold.testing import Ranks
from tests.launch.survivors import Plan, changing, other_bits

linux = pytest.mark.skipif(sys.platform != "linux", reason="launchers leave notes for ranks in a memfd")
CPU = torch.device("cpu")
WIDTH, SAMPLES = 37, 60  # no multiple of what a vector of the processor has
ADAMW = partial(torch.optim.AdamW, lr=1e-2)

# -- sums


@pytest.mark.parametrize("p", [1, 2])
def test_a_norm_is_the_same_in_any_order_and_parts(p: int) -> None:
    """And as exact as fp64 is, over 15 orders of magnitude."""
    flat = torch.randn(70_001) * torch.logspace(-12, 3, 70_001)
    largest, count = largest_power([flat], p), flat.numel()
    whole = slice_sums([flat], p, largest, count, CPU)
    mixed = [slice_sums([part], p, largest, count, CPU) for part in flat[torch.randperm(count)].chunk(7)]
    assert torch.equal(torch.stack(mixed).sum(0), whole)
    assert abs(float(joined_slices(whole, largest)) / fsum((flat.double().abs() ** p).tolist()) - 1) < 1e-15


def test_a_norm_of_nothing_and_of_what_is_not_finite() -> None:
    assert largest_power([torch.zeros(0), torch.zeros(3)], 2) == 0
    assert joined_slices(slice_sums([torch.zeros(3)], 2, 0.0, 3, CPU), 0.0) == 0
    for bad in (float("inf"), float("nan")):
        largest = largest_power([torch.tensor([1.0, bad])], 2)
        assert joined_slices(torch.zeros(3), largest).isnan()


# -- the program


def test_each_micro_batch_is_summed_by_all_ranks_at_once() -> None:
    """What a rank keeps of others' parts comes in the last one; on one rank it is added at its own place, too."""
    unit, mesh = UnitSpec("u", (SegmentSpec((), 256, "fp32"),)), {"inter": 2, "intra": 2}

    def of(preset: str, sizes: dict[str, int]) -> tuple[list[str], list[str], float]:
        table = sf.PRESETS[preset].replace(reduce="reduce+ordered").bind(Precision(), sizes)
        assert str(table).splitlines()[-1] == "communication: gather as fp32, reduce as fp32+ordered"
        program = lower(table, [unit], sizes)
        assert parse(str(program)) == program
        sent = traffic(program, table, [unit], sizes, micro_batches=3)
        first, last = ([str(op) for op in ops if op.is_sum] for ops in (program.backward, program.last))
        return first, last, sum((n for kind, (_, n) in sent.items() if kind.purpose == "reduce"), 0.0)

    every = ["REDUCE_SCATTER u [inter+intra] fp32", "WAIT u grads", "DROP u"]
    each = 4 * 256 * 3 / 4  # a whole unit, but for this rank's part
    for preset in ("zero1", "zero2", "zero3"):
        assert of(preset, mesh) == (every, every, 3 * each)
    assert of("ddp", mesh) == (every, [*every, "SPREAD u [inter+intra] fp32", "WAIT u grads"], 4 * each)
    assert of("hsdp", mesh) == (every, [*every, "SPREAD u [inter] fp32", "WAIT u grads"], 3 * each + 4 * 128 / 2)
    for preset in ("ddp", "zero3"):
        assert of(preset, {"inter": 1, "intra": 1}) == (every[1:], every[1:], 0.0)


def test_gradients_that_are_sent_in_another_order_are_planned_twice() -> None:
    """Under ``hsdp`` each rank sums a part of what others keep, too."""
    unit = UnitSpec("u", (SegmentSpec((), 256, "fp32"),))

    def most(preset: str) -> float:
        table = bound(preset)
        ops = bind(table, [unit], MESH)
        each = [(number, n) for section, number, n in in_use(ops, ALONE) if section == "last"]
        return max(n for number, n in each if ops.program.last[number].verb == "REDUCE_SCATTER")

    assert most("hsdp") - most("zero3") == 256 * 4


REFUSED: dict[str, tuple[Any, str]] = {
    "narrow": (lambda: bound("zero2", Precision(reduce="bf16")), "not rounded to fewer bits"),
    "narrow sums": (lambda: bound("zero2", Precision(grads="bf16", reduce="bf16")), "not rounded to fewer bits"),
    "blocks": (lambda: sf.PRESETS["zero2"].replace(reduce="int8+ordered").bind(Precision(), MESH), "fewer bits"),
    "hops": (lambda: Wire(format="fp32", hops=2, ordered=True), "sums of sums"),
    "gather": (lambda: sf.PRESETS["zero3"].replace(gather="fp32+ordered"), "nothing is summed there"),
    "outer": (lambda: sf.PRESETS["zero1"].replace(outer=sf.Outer(every=2), reduce="fp32+ordered"), "outer"),
    "on the host": (lambda: bound("hsdp", tier="host"), "before they are whole"),
    "on disk": (lambda: bound("zero3", tier="disk"), "rest in the disk tier"),
}
MESH = {"inter": 2, "intra": 2}


def bound(preset: str, precision: Precision | None = None, tier: str = "device") -> sf.Layout:
    table = sf.PRESETS[preset].replace(reduce="reduce+ordered").edit("grads", "master", "moments", tier=tier)
    return table.bind(precision or Precision(), MESH)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_be_rounded_by_the_number_of_ranks_is_refused(what: str) -> None:
    make, said = REFUSED[what]
    with pytest.raises(LayoutError, match=said):
        make()


def test_engines_that_cannot_be_exact_are_refused() -> None:
    model, exact = nn.Linear(4, 4), sf.Runtime(exact=True)
    with pytest.raises(ConfigError, match=r"p=3.*p = 1, 2 and inf"):
        sf.Engine(model, optimizer=ADAMW, clip_norm=sf.Clip(norm=1.0, p=3), runtime=exact)
    with pytest.raises(ConfigError, match="reduce_once"):
        sf.Engine(model, optimizer=ADAMW, overlap=sf.Overlap(reduce_once=True), runtime=exact)
    model.bias.data = model.bias.data.bfloat16()
    with pytest.raises(ModelError, match="'bias' has dtype bf16"):
        sf.Engine(model, optimizer=ADAMW, runtime=exact)
    with closing(sf.Engine(nn.Linear(4, 4), optimizer=ADAMW, runtime=exact)) as engine:
        engine.set_micro_batches(1, of=3)
        with pytest.raises(ConfigError, match="give integers"):
            engine.backward(engine(torch.ones(2, 4)).sum(), weight=0.5)


# -- as many ranks as there are


def trained(
    layout: str, virtual: int, mesh: dict[str, int] | None, more: dict[str, Any], weights: bool
) -> list[Tensor]:
    """Weights, moments and norms of a few steps; ``weights``: of micro-batches."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2)) for _ in range(2)]
    runtime = sf.Runtime(exact=True)
    given: Any = {"layout": layout, "parallel": mesh, "optimizer": ADAMW, "runtime": runtime, **more}
    with closing(sf.Engine(nn.Sequential(*parts, nn.Linear(WIDTH, 3)), **given)) as engine:
        samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
        data = VirtualRanks(sf.Sampler(SAMPLES, 2, seed=3, rank=0, num_ranks=virtual), engine.accumulate)
        shares, of = data.shares(engine.data_ranks), engine.accumulate * virtual
        number, norms = engine.accumulate * max(shares.counts), list[Tensor]()
        for read in islice(data.reads(engine.data_rank, shares), 4 * number):
            engine.set_micro_batches(number, read.weight, of=of)
            loss = engine(samples[read.batch]).float().square().mean()
            engine.backward(loss, weight=1 + read.batch[0] % 5 if weights else None)
            if isinstance(norm := engine.step().norm, Tensor):
                norms.append(norm)
        with engine.gathered(of="exp_avg") as means, engine.gathered(of="exp_avg_sq") as squares:
            moments = [*means.values(), *squares.values()]
        return [*engine.state_dict().values(), *moments, *norms]


def on(ranks: Ranks, counts: list[int], *given: Any, meshes: dict[int, dict[str, int]] | None = None) -> None:
    """It comes to the same on each of these numbers of ranks."""
    layout, virtual, *rest = given
    found = [ranks.run(trained, layout, virtual, (meshes or {}).get(n), *rest, world_size=n)[0] for n in counts]
    for count, other in zip(counts[1:], found[1:], strict=True):
        assert all(map(torch.equal, found[0], other)), (count, given)


HSDP = {4: {"inter": 2, "intra": 2}, 3: {"inter": 3, "intra": 1}, 2: {"inter": 1, "intra": 2}}
MORE: dict[str, dict[str, Any]] = {
    "clipped": {"clip_norm": 0.01},
    "in bf16": {"precision": "bf16-autocast", "accumulate": 2},
    "in fp16": {"precision": "fp16", "clip_norm": 0.01},
}


def test_bits_do_not_depend_on_the_number_of_ranks(ranks: Ranks) -> None:
    """Where these divide the virtual ones and where they do not, with weights of micro-batches, and under ``hsdp``,
    whose ranks sum over other axes."""
    on(ranks, [3, 2, 1], "zero2", 3, MORE["clipped"], True)
    on(ranks, [4, 2], "hsdp", 4, MORE["clipped"], False, meshes={4: HSDP[4]})


@pytest.mark.soak
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz", "offload", "infinity"])
def test_bits_of_each_layout(ranks: Ranks, layout: str, more: str) -> None:
    on(
        ranks,
        [4, 3, 2, 1],
        layout,
        4,
        MORE[more],
        more != "in fp16",
        meshes=HSDP if layout in ("hsdp", "hpz") else None,
    )


# -- ranks that are killed


def hold(ranks: Ranks, plans: list[Plan], place: Path) -> None:
    """The first is one in which nobody dies."""
    timeout = 60.0 * sum(2 + plan.steps / 40 for plan in plans) + 120
    (wrong,) = ranks.run(other_bits, plans, str(place), world_size=1, distributed=False, timeout=timeout)
    assert not wrong, "\n".join(wrong)


@linux
def test_survivors_come_to_the_bits_of_who_was_not_disturbed(ranks: Ranks, tmp_path: Path) -> None:
    plan = Plan("zero2", 3, 8, ((1, 3, 0.0),), survive="rank", exact=True, clip=0.01)
    hold(ranks, [replace(plan, kills=()), plan], tmp_path)


@linux
@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "hsdp", "offload"])
def test_bits_of_three_hundred_steps_in_which_ranks_die_and_come_in(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Fifteen deaths at drawn moments, and as many that come in for the dead."""
    drawn = replace(changing(random.Random(11), layout, 4, 15, every=18), steps=300, rest=0.02)
    given = replace(drawn, exact=True, clip=0.01, precision="fp32" if layout == "zero1" else "bf16-autocast")
    hold(ranks, [replace(given, kills=(), replace=0, spares=0), given], tmp_path)


@linux
@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2", "zero3", "hsdp", "offload"])
def test_bits_of_ranks_that_die_around_a_step_that_is_skipped(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    """Of fp16, whose scale moves: in the mean of a loss behind the step before, that one and the next, and at moments
    that are drawn."""
    draw, number = random.Random(layout), 4 if layout == "hsdp" else 3
    skipped = draw.randrange(3, 6)
    copies = None if layout in ("ddp", "hsdp") else "rank"
    given = Plan(layout, number, 10, (), exact=True, precision="fp16", overflow=skipped, survive=copies, rest=0.02)
    moments = [(draw.randrange(number), skipped + more, 0.0) for more in (-1, 0, 1)]
    drawn = [(draw.randrange(number), skipped + more, draw.uniform(0, 80)) for more in (-1, 0)]
    killed = [replace(given, kills=(each,), at="mean") for each in moments]
    hold(ranks, [given, *killed, *(replace(given, kills=(each,)) for each in drawn)], tmp_path)
