"""How many ranks and hosts hold an element of each state is what is found by taking each of them away."""

from __future__ import annotations

from math import lcm

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.plan.axes import Mesh
from shardfold.plan.checks import human
from shardfold.plan.explain import explain_preset
from shardfold.plan.holders import Holders, holders, lost_told, usual_hosts
from shardfold.plan.layout import PRECISIONS, Layout
from shardfold.plan.placement import shard_range
from shardfold.plan.presets import PRESETS
from shardfold.testing import Ranks

MESHES = [
    {"inter": 1, "intra": 4},
    {"inter": 2, "intra": 2},
    {"inter": 3, "intra": 2},
    {"inter": 2, "intra": 2, "tensor": 2},
    {"pipeline": 2, "inter": 2, "intra": 2},
]


def by_hand(table: Layout, mesh: Mesh, per_host: int) -> dict[str, Holders]:
    """Each element of each state, and who still has it when a rank, or a host, is gone."""
    cells, found = table.cells(), dict[str, Holders]()
    whose = {"params": ["master"], "master": [], "grads": [], "moments": []}
    if "params" in cells:
        whose["params"].append("params")
        if cells["params"].dtype == cells["master"].dtype:
            whose["master"].append("params")
    length = lcm(*(cell.parts(mesh) for cell in cells.values()))
    for state, others in whose.items():
        have: dict[tuple[object, int], set[int]] = {}
        for rank in range(mesh.size):
            place = mesh.coords(rank)
            part = tuple(place[axis] for axis in ("tensor", "pipeline") if axis in place and axis != "tensor")
            for copy in {state if state != "params" else "master", *others}:
                for element in range(*shard_range(length, cells[copy].over, mesh, place)):
                    have.setdefault((part, element), set()).add(rank)
        found[state] = Holders(
            min(map(len, have.values())), min(len({rank // per_host for rank in ranks}) for ranks in have.values())
        )
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_holders_are_who_has_an_element_when_each_rank_and_host_is_taken_away(
    sizes: dict[str, int], precision: str
) -> None:
    """Parameters that no axis of tensor divides are whole along it; stages have other layers."""
    mesh = Mesh.of(sizes)
    for name, preset in PRESETS.items():
        table = preset.bind(PRECISIONS[precision], mesh)
        for per_host in (1, usual_hosts(mesh), mesh.size):
            assert holders(table, mesh, per_host) == by_hand(table, mesh, per_host), (name, per_host)


def test_what_is_lost_is_told() -> None:
    mesh = Mesh.of({"inter": 2, "intra": 2})

    def lost(name: str, precision: str) -> str:
        return lost_told(holders(PRESETS[name].bind(PRECISIONS[precision], mesh), mesh, 2))

    nothing = "nothing (the step is taken again)"
    assert lost("ddp", "bf16") == f"lost with any one rank: {nothing}; with any one host: {nothing}"
    assert lost("zero1", "bf16") == "lost with any one rank: master, moments; with any one host: master, moments"
    assert lost("zero1", "fp32") == "lost with any one rank: moments; with any one host: moments"
    assert lost("zero2", "bf16") == lost("zero1", "bf16")  # gradients are of a step
    assert lost("hsdp", "bf16") == f"lost with any one rank: {nothing}; with any one host: {nothing}"


def test_what_a_death_costs_is_told() -> None:
    """Bytes that a spare reads are those of its part of the states and of the copies that it holds, counted by hand;
    where a death ends the run, nothing is told."""
    numel, ranks = 4 * 256 * 256, 4
    table = PRESETS["zero3"].replace(copies="rank")
    copied = explain_preset(table, mesh={"inter": 1, "intra": ranks}, precision="bf16", params=numel)
    read = (4 + 8) * numel / ranks
    assert f"with a spare, that reads {human(2 * read)} of states" in copied
    assert "without a spare each has 1.33 times as much to do" in copied
    whole = explain_preset("ddp", mesh={"inter": 1, "intra": ranks}, params=numel)
    assert f"reads {human(12 * numel)} of states" in whole
    for name, sizes in (("zero3", {"inter": 1, "intra": ranks}), ("ddp", {"inter": 1, "intra": 2, "tensor": 2})):
        assert "if a rank dies" not in explain_preset(name, mesh=sizes, params=numel), name


def states(name: str) -> tuple[dict[str, set[float]], str]:
    """Of an engine: the values of each state that this rank holds, and what it tells."""
    model = nn.Linear(64, 64, bias=False)
    engine = sf.Engine(
        model,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.1),
        layout=name,
        precision="bf16",
        parallel={"inter": 2, "intra": 2},
    )
    for _ in range(2):
        engine.backward(model(torch.randn(4, 64)).float().square().sum())
        engine.step()
    found: dict[str, set[float]] = {"master": set()}
    for segment in engine.sharded.segments():
        if (region := segment.regions.get("master")) is not None and region.resting is not None:
            found["master"] |= set(region.resting.flatten().tolist())
    told = engine.explain()
    engine.close()
    return found, told


@pytest.mark.soak
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "hsdp", "hpz"])
def test_an_engine_holds_what_is_told(ranks: Ranks, name: str) -> None:
    """A master's values are all different: who holds one is counted in the memory of ranks."""
    each = ranks.run(states, name, world_size=4)
    every = set().union(*(found["master"] for found, _ in each)) - {0.0}
    count = min(sum(value in found["master"] for found, _ in each) for value in every)
    mesh = Mesh.of({"inter": 2, "intra": 2})
    assert count == holders(PRESETS[name].bind(PRECISIONS["bf16"], mesh), mesh, 2)["master"].ranks
    assert "holders of an element, of 4 ranks" in each[0][1] and "seconds that anybody waits:" in each[0][1]
