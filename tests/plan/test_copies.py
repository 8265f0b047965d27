"""The column of copies: what it takes, what it sends, who holds what then, and what it prints."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from shardfold.errors import LayoutError
from shardfold.plan.axes import Mesh
from shardfold.plan.copies import Copies
from shardfold.plan.cost import Moved, Sent, moves, regions_in, resting_bytes, state_bytes, step_of, traffic
from shardfold.plan.explain import explain_preset
from shardfold.plan.holders import holders
from shardfold.plan.layout import PRECISIONS, Layout, Tier
from shardfold.plan.offload import offloaded
from shardfold.plan.outer import Outer
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec, shard_range
from shardfold.plan.presets import PRESETS, hsdp, offload, zero1, zero2, zero3
from shardfold.plan.program import Program, lower, parse

N = 96
SPLIT = ("zero1", "zero2", "zero3", "fsdp2", "hpz")
MESHES = [{"inter": 1, "intra": 3}, {"inter": 2, "intra": 2}, {"inter": 3, "intra": 2}]


def units(dtype: str = "fp32") -> list[UnitSpec]:
    return [UnitSpec(name, (SegmentSpec((), N, dtype),), name == "r") for name in ("r", "a", "b")]


def bound(table: Layout, sizes: dict[str, int], to: str = "rank", precision: str = "fp32") -> tuple[Layout, Program]:
    layout = table.replace(copies=to).bind(PRECISIONS[precision], sizes)
    return layout, lower(layout, units(layout.rest.dtype), sizes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", SPLIT)
def test_bytes_of_copies_and_their_log(name: str, precision: str) -> None:
    """16 bytes of each parameter of a rank's part in fp32: master, two moments, a log; 4 of them are sent in a step."""
    for sizes in MESHES:
        mesh, length = Mesh.of(sizes), 3 * N
        layout, program = bound(PRESETS[name], sizes, precision=precision)
        without = PRESETS[name].bind(PRECISIONS[precision], sizes)
        shapes = units(layout.rest.dtype)
        held, before = (state_bytes(table, shapes, mesh, padded=True) for table in (layout, without))
        assert {state: n - before.get(state, 0.0) for state, n in held.items() if n != before.get(state)} == {
            "copies": 12 * sum(s.length for u in shapes for s in u.segments) / mesh.size,
            "log": 4 * sum(s.length for u in shapes for s in u.segments) / mesh.size,
        }
        sent = traffic(program, layout, shapes, mesh)
        assert sent[Sent("copies", "LOG", ("intra",))] == (3, 4 * length / mesh.size)
        plain = traffic(lower(without, shapes, sizes), without, shapes, mesh)
        assert {kind: each for kind, each in sent.items() if kind.op != "LOG"} == plain


@pytest.mark.parametrize(
    ("offload", "tier", "moved", "rests"),
    [
        ("host", None, {}, ("host", "host")),
        ({"optimizer": "disk", "grads": "host"}, None, {"FETCH": "disk", "STORE": "disk"}, ("disk", "host")),
        ({"moments": "host"}, None, {"FETCH": "host", "STORE": "host"}, ("host", "device")),
        (None, "disk", {"FETCH": "disk", "STORE": "disk"}, ("disk", "device")),
        (None, None, {}, ("device", "device")),
    ],
)
def test_copies_rest_in_a_tier(offload: Any, tier: str | None, moved: dict[str, str], rests: tuple[str, str]) -> None:
    """They come to where originals are updated, and go back: 12 bytes a parameter, each way."""
    mesh = Mesh.of(MESHES[1])
    table = offloaded(zero3, offload).replace(copies=Copies(to="rank", tier=tier))
    layout = table.bind(PRECISIONS["fp32"], MESHES[1])
    program = lower(layout, units(), MESHES[1])
    shapes, without = units(), lower(layout.replace(copies=None), units(), MESHES[1])
    held = resting_bytes(layout, shapes, mesh, padded=True)
    where = {state: str(each) for state, each in held if state in ("copies", "log")}
    assert (where["copies"], where["log"]) == rests
    regions = [sum(sizes) for sizes in regions_in(Tier(rests[0]), layout, shapes, mesh, 2).values()]
    assert sum(regions) == sum(n for (_, each), n in held.items() if each == rests[0])
    both = [moves(each, layout, shapes, mesh, step_of(1, each)) for each in (program, without)]
    more = {kind: n - both[1].get(kind, (0, 0.0))[1] for kind, (_, n) in both[0].items()}
    expected = {Moved(each, verb): 12.0 * 3 * N / 4 for verb, each in moved.items()}
    if rests[1] == "host":
        expected[Moved("host", "STORE")] = expected.get(Moved("host", "STORE"), 0.0) + 4.0 * 3 * N / 4
    assert {kind: n for kind, n in more.items() if n} == expected
    assert parse(str(program)) == program


@pytest.mark.parametrize("codes", ["", "int8/64"])
def test_frozen_parameters_that_are_split_are_held_twice(codes: str) -> None:
    for table, of in ((zero3, 1), (zero2, 0)):
        layout = table.replace(copies="rank").bind(PRECISIONS["fp32"], MESHES[1])
        spec = SegmentSpec((Slot("w", (N,), 0),), 256, "fp32", trainable=False, codes=codes)
        shapes, mesh = [UnitSpec("f", (spec,))], Mesh.of(MESHES[1])
        held = state_bytes(layout, shapes, mesh, padded=True)
        assert held.get("copies", 0.0) == of * held["params"]
        assert holders(layout, mesh, 2, shapes)["params"].ranks == (2 if of else 4)
        assert not {"LOG", "VOTE"} & {op.verb for op in lower(layout, shapes, MESHES[1]).step}


def test_nobody_updates_before_the_vote_and_nothing_is_sent_for_updates_behind_it() -> None:
    for name in SPLIT:
        _, program = bound(PRESETS[name], MESHES[1], "host")
        verbs = [op.verb for op in program.step]
        vote = verbs.index("VOTE")
        waits = [op for op in program.step[:vote] if op.verb == "WAIT" and op.target == "log"]
        assert verbs[:vote].count("LOG") == len(waits) == 3 and "LOG r [inter] fp32" in map(str, program.step)
        behind = verbs[vote + 1 :]
        assert behind.count("UPDATE") == behind.count("MIRROR") == 3 and not set(behind) & {"LOG", "NORM"}
        assert not {"UPDATE", "MIRROR"} & set(verbs[:vote])
        assert parse(str(program)) == program


def test_copies_go_where_others_do_not_have_the_same_anyway() -> None:
    cases = {
        ("zero3", "rank", 0): "intra",
        ("zero3", "host", 0): "intra",  # there is one host
        ("zero3", "host", 1): "inter",
        ("zero3", "inter", 1): "inter",
        ("zero3", "inter", 0): None,  # an axis of one rank
        ("ddp", "rank", 1): None,
        ("hsdp", "rank", 1): None,
        ("hsdp", "host", 1): None,
        ("hsdp", "intra", 1): "intra",
        ("hsdp", "rank", 0): "intra",
    }
    for (name, to, number), axis in cases.items():
        layout, program = bound(PRESETS[name], MESHES[number], to)
        assert (layout.copies and layout.copies.to) == axis, (name, to, number)
        assert ("VOTE" in str(program)) == layout.copied == (axis is not None)


@pytest.mark.parametrize("to", ["rank", "host"])
def test_with_copies_no_rank_or_no_host_takes_states_along(to: str) -> None:
    """By hand: each element of master, who has it, and who has the part of the rank before."""
    for sizes in MESHES:
        mesh = Mesh.of(sizes)
        for table in (zero1, zero2, zero3):
            layout, _ = bound(table, sizes, to, "bf16")
            assert layout.copies is not None
            where: dict[int, set[int]] = {}
            for rank in range(mesh.size):
                at = mesh.coords(rank)
                for coords in (at, layout.copies.held_at(at, mesh)):
                    for element in range(*shard_range(N, layout.master.over, mesh, coords)):
                        where.setdefault(element, set()).add(rank)
            found = holders(layout, mesh, mesh["intra"])
            for state in ("master", "moments"):
                assert found[state].ranks == min(map(len, where.values())) == 2
                hosts = min(len({rank // mesh["intra"] for rank in ranks}) for ranks in where.values())
                assert found[state].hosts == hosts >= (2 if to == "host" and mesh["inter"] > 1 else 1)


def test_a_neighbour_holds_each_part_once() -> None:
    mesh = Mesh.of({"inter": 2, "intra": 3})
    for to in ("inter", "intra"):
        held = [Copies(to=to).held_at(mesh.coords(rank), mesh) for rank in range(mesh.size)]
        assert sorted(tuple(each.values()) for each in held) == [tuple(mesh.coords(r).values()) for r in range(6)]
        assert all(one != other for one, other in pairwise(held))


def test_copies_are_shown() -> None:
    text = explain_preset(zero2.replace(copies="host"), mesh={"inter": 2, "intra": 2}, params=100_000, blocks=1)
    for words in (
        "copies: of master and moments on a rank of the next host",
        "copies: of master and moments on the next rank along inter",
        "copies 300,000",
        "log 100,000",
        "copies LOG inter 2 calls 100,000",
        "lost with any one rank: nothing (the step is taken again); with any one host: nothing (the step",
    ):
        assert words in " ".join(text.split()), words


def test_what_cannot_be_copied_is_refused_in_a_sentence() -> None:
    with pytest.raises(LayoutError, match=r"copies to 'rnak'.*Did you mean 'rank'"):
        zero3.replace(copies="rnak")
    with pytest.raises(LayoutError, match="copies of the table are 3"):
        zero3.replace(copies=3)
    with pytest.raises(LayoutError, match=r"grads rest in the disk tier.*'grads': 'host'"):
        offloaded(zero3, "disk").replace(copies="rank")
    with pytest.raises(LayoutError, match=r"copies rest in tier 'hots'.*Did you mean 'host'"):
        zero3.replace(copies=Copies(tier="hots"))
    with pytest.raises(LayoutError, match="copies rest in the device tier but master in the host tier"):
        offload.replace(copies=Copies(tier="device"))
    with pytest.raises(LayoutError, match="come together every so many steps"):
        hsdp.replace(copies="rank", outer=Outer(every=5))
