"""Two hops: what is split over nodes and their ranks arrives as in one, and crosses between nodes once."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

import shardfold as sf
from shardfold.plan.axes import Mesh
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.presets import named
from shardfold.plan.program import lower
from shardfold.plan.rewrites import apply
from shardfold.testing import Ranks
from tests.support import models

MESH = {"inter": 2, "intra": 2}


def _train(layout: str, wires: dict[str, str], near: bool, accumulate: int = 1, **overlap: int) -> dict[str, Any]:
    os.environ["SHARDFOLD_NEAR"] = str(int(near))
    torch.manual_seed(0)
    engine = sf.Engine(
        models.small(), optimizer=partial(torch.optim.SGD, lr=0.25), layout=named(layout).replace(**wires),
        parallel=MESH, accumulate=accumulate, overlap=sf.Overlap(**overlap), runtime=sf.Runtime(debug=True),
    )  # fmt: skip
    losses: list[float] = []
    for number, batch in enumerate(models.batches(4 * accumulate)):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        engine.backward(loss)
        losses.append(float(loss.detach()))
        if number % accumulate == accumulate - 1:
            engine.step()
    rows = {(row.op, row.axes): (row.program, row.sent) for row in engine.traffic().rows}
    found = {"losses": losses, "rows": rows, "text": engine.explain(), "held": str(engine.memory())}
    found["weights"] = torch.cat([value.reshape(-1) for value in engine.state_dict().values()])
    engine.close()
    return found


@pytest.mark.parametrize(
    "layout", ["zero3", *(pytest.param(each, marks=pytest.mark.soak) for each in ("zero1", "zero2"))]
)
def test_two_hops_deliver_what_one_does(ranks: Ranks, layout: str) -> None:
    """Elements of a dtype are the same however they travel; sums of four are those of two and two."""
    wires = {"reduce": "reducex2"} | ({"gather": "computex2"} if layout == "zero3" else {})
    one = ranks.run(_train, layout, {}, False, 2, world_size=4)
    for near, ahead in ((False, {"reduces_in_flight": 1}), (True, {"prefetch": 2})):
        two = ranks.run(partial(_train, **ahead), layout, wires, near, 2, world_size=4)
        for a, b in zip(one, two, strict=True):
            assert b["losses"] == pytest.approx(a["losses"], rel=2e-6)
            torch.testing.assert_close(a["weights"], b["weights"], rtol=0, atol=1e-6)
        for program, sent in two[0]["rows"].values():
            assert program == sent > 0


@pytest.mark.soak
def test_zeropp_sends_what_its_program_says_and_trains_close_to_zero3(ranks: Ranks) -> None:
    """In the text: encoding the next unit goes on while one travels, and second hops wait for nothing else."""
    exact = ranks.run(_train, "zero3", {}, False, world_size=4)[0]
    coded = ranks.run(_train, "zeropp", {}, False, world_size=4)[0]
    assert coded["losses"] == pytest.approx(exact["losses"], rel=0.1) and coded["losses"] != exact["losses"]
    assert set(coded["rows"]) == {
        ("ALL_GATHER", ("inter",)), ("ALL_GATHER", ("intra",)), ("REDUCE_WITHIN", ("intra",)),
        ("REDUCE_BETWEEN", ("inter",)),
    }  # fmt: skip
    for program, sent in coded["rows"].values():
        assert program == sent > 0
    assert "communication: gather as int8/256x2, reduce as int4/256x2" in coded["text"]
    lines = [line.strip() for line in coded["text"].split("forward:")[1].split("\n")]
    order = ["ALL_GATHER blocks.1 params -> node [inter] int8/256", "ALL_GATHER blocks.0 node -> flat [intra] int8/256",
             "F blocks.0", "ALL_GATHER blocks.1 node -> flat [intra] int8/256"]  # fmt: skip
    assert [line for line in lines if line in order][:4] == order


def test_the_next_unit_is_encoded_before_a_second_hop_waits_for_the_first() -> None:
    """So that the link between nodes has something to carry meanwhile; in every pass, and with any reach."""
    mesh = Mesh.of(MESH)
    units = [UnitSpec(f"u{i}", (SegmentSpec((Slot("w", (4096,), 0),), 4096, "fp32"),)) for i in range(5)]
    table = named("zeropp").edit("held", over=("inter", "intra"))
    bound = table.bind(sf.Precision(), mesh)
    for depth in (1, 2):
        program = apply(lower(bound, units, mesh), sf.Overlap(prefetch=depth))
        for section, back in ((program.forward, False), (program.last, True)):
            gathers = [op for op in section if op.verb == "ALL_GATHER"]
            first = {op.unit: i for i, op in enumerate(gathers) if op.target == "node"}
            second = {op.unit: i for i, op in enumerate(gathers) if op.source == "node"}
            names = [f"u{i}" for i in range(5)][:: -1 if back else 1]
            for i, name in enumerate(names[:-depth]):
                assert first[names[i + depth]] < second[name]


@pytest.mark.parametrize("mesh", [{"inter": 1, "intra": 2}, {"inter": 2, "intra": 1}])
def test_where_an_axis_is_missing_there_is_one_hop(mesh: dict[str, int]) -> None:
    bound = named("zeropp").bind(sf.Precision(), mesh)
    assert bound.gather.hops == bound.reduce.hops == 1
    assert str(bound).splitlines()[-1] == "communication: gather as int8/256, reduce as int4/256"


def test_what_is_no_number_of_hops_is_refused() -> None:
    with pytest.raises(sf.errors.LayoutError, match="a format takes 1 hop, or 2"):
        sf.PRESETS["zero3"].replace(reduce="int4x3")
