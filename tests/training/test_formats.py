"""Layouts whose formats round what travels train as plain PyTorch does by rounded values."""

from __future__ import annotations

import os
from functools import partial
from math import prod
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.plan.formats import FORMATS
from shardfold.testing import Ranks
from tests.support import models
from tests.support.formats import BLOCK, add_blocks

SGD = partial(torch.optim.SGD, lr=0.25)  # a power of 2: each update is rounded once, however it is computed
STEPS = 5


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def _plain(world: int, *, gather: bool, reduce: bool) -> list[list[float]]:
    """Losses by rank of plain PyTorch in fp32, whose forward reads weights rounded to bf16 (``gather``) and which sums
    gradients rounded to bf16 (``reduce``), in the order of ranks; what is updated is not rounded."""
    torch.manual_seed(0)
    model = models.small()
    optimizer = SGD(model.parameters())
    parameters, losses = list(model.parameters()), [list[float]() for _ in range(world)]
    for batch in models.batches(STEPS):
        exact = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in parameters]
        with torch.no_grad():
            for p in parameters if gather else ():
                p.copy_(_bf16(p))
        for rank in range(world):
            loss = model(*(t.chunk(world)[rank] for t in batch))
            losses[rank].append(float(loss.detach()))
            for into, grad in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                into += _bf16(grad / world) if reduce else grad / world
        for p, values, grad in zip(parameters, exact, total, strict=True):
            p.data.copy_(values)
            p.grad = grad
        optimizer.step()
    return losses


def _layout(name: str, wires: dict[str, str]) -> sf.Layout:
    return sf.PRESETS[name].replace(**wires)


def _train(layout: str, wires: dict[str, str], near: bool = True, debug: bool = False) -> tuple[list[float], Any]:
    """Losses of this rank, and of the last step: gathered and reduced bytes by program and as sent, what explain says,
    and what the formats keep."""
    os.environ["SHARDFOLD_NEAR"] = str(int(near))
    add_blocks()
    torch.manual_seed(0)
    mesh = {"inter": 2, "intra": 2} if layout in ("hsdp", "hpz") else None
    engine = sf.Engine(
        models.small(), optimizer=SGD, layout=_layout(layout, wires), parallel=mesh, runtime=sf.Runtime(debug=debug)
    )
    losses: list[float] = []
    for batch in models.batches(STEPS):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    rows = {f"{row.purpose} {'+'.join(row.axes)}": (row.program, row.sent) for row in engine.traffic().rows}
    world = prod(engine.mesh.sizes.values())
    segments = [segment for unit in engine.units for segment in unit.segments]
    cut = all(
        segment.spec.length % (world * BLOCK) == 0 and all(slot.offset % BLOCK == 0 for slot in segment.spec.slots)
        for segment in segments
    )
    kept = [s.format_state is not None and bool(s.format_state.count_nonzero()) for s in segments]
    held = engine.memory()
    found = {"rows": rows, "text": engine.explain(), "cut": cut, "kept": kept, "held": str(held)}
    engine.close()
    return losses, found


ROUNDED = [
    ("zero3", {"gather": "bf16"}),
    ("fsdp2", {"gather": "bf16", "reduce": "bf16"}),
    ("zero2", {"reduce": "bf16"}),
    ("zero1", {"reduce": "bf16"}),
    ("hpz", {"gather": "bf16"}),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("layout", "wires"), ROUNDED, ids=[f"{name}-{'+'.join(wires)}" for name, wires in ROUNDED])
def test_what_is_rounded_to_travel_trains_as_plain_pytorch_by_rounded_values(
    ranks: Ranks, layout: str, wires: dict[str, str]
) -> None:
    """To the bit, and over Gloo as over memory that is read across processes. (Of four ranks' gradients autograd and a
    table of two axes form the sum in one order.)"""
    world = 4 if layout == "hpz" else 2
    plain = _plain(world, gather="gather" in wires, reduce="reduce" in wires)
    for near in (True, False):
        trained = ranks.run(_train, layout, wires, near, world_size=world)
        assert [losses for losses, _ in trained] == plain
    assert plain != _plain(world, gather=False, reduce=False)


def test_bf16_for_fp32_parameters_halves_what_is_gathered_and_is_counted_exactly(ranks: Ranks) -> None:
    exact, half = (ranks.run(_train, "zero3", wires, world_size=2)[0][1] for wires in ({}, {"gather": "bf16"}))
    for program, sent in (*exact["rows"].values(), *half["rows"].values()):
        assert program == sent > 0
    assert half["rows"]["gather intra"][1] * 2 == exact["rows"]["gather intra"][1]
    assert half["rows"]["reduce intra"] == exact["rows"]["reduce intra"]
    assert "communication: gather as bf16, reduce as fp32" in half["text"]
    assert "ALL_GATHER blocks.0 params -> flat [intra] bf16" in half["text"]
    assert "REDUCE_SCATTER blocks.0 [intra] fp32" in half["text"]


class Writes(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight[0] = 0.1
        return super().forward(input)


def _written() -> tuple[bool, bool]:
    """Whether what forward wrote is in the weights, and whether all others have the digits that they had."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(Writes(16, 16), Writes(16, 16))
    before = model[1].weight.detach().clone()
    layout = sf.PRESETS["zero3"].replace(gather="bf16")
    engine = sf.Engine(model, optimizer=SGD, layout=layout, init=sf.Init(units=["*"]), runtime=sf.Runtime(debug=True))
    engine.backward(engine(torch.ones(2, 16)).sum())
    with engine.gathered():
        after = model[1].weight.detach().clone()
    engine.close()
    return bool((after[0] == 0.1).all()), torch.equal(after[1:], before[1:])


def test_what_forward_did_not_write_keeps_the_digits_that_do_not_travel(ranks: Ranks) -> None:
    assert ranks.run(_written, world_size=2) == [(True, True)] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reduce", ["blocks", "feedback"])
def test_a_format_of_blocks_is_cut_counted_and_kept_as_it_says(ranks: Ranks, reduce: str) -> None:
    """One class and its name are all that the engine has to know of it."""
    exact, coded = (
        ranks.run(_train, "zero3", wires, world_size=2)[0] for wires in ({}, {"gather": "blocks", "reduce": reduce})
    )
    rows, found = coded[1]["rows"], coded[1]
    assert found["cut"] and all(found["kept"]) == (reduce == "feedback") == any(found["kept"])
    assert ("format" in found["text"].split("bytes at rest")[1].split("bytes sent")[0]) == (reduce == "feedback")
    for purpose in ("gather intra", "reduce intra"):
        program, sent = rows[purpose]
        assert program == sent and sent % (BLOCK + 4) == 0
    assert "ALL_GATHER blocks.0 params -> flat [intra] blocks" in found["text"]
    assert f"REDUCE_SCATTER blocks.0 [intra] {reduce}" in found["text"]
    assert coded[0] != exact[0]
    assert coded[0] == pytest.approx(exact[0], rel=0.02)  # steps of 1/254 of a block's greatest value


def test_a_format_that_is_new_to_a_table_is_known_to_nobody_else() -> None:
    assert not {"blocks", "feedback"} & set(FORMATS)
