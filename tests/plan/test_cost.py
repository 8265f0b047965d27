"""Cost: what a table holds and a program sends equals the papers' formulas to the byte, and padding has a name.

The formulas stand here a second time, written down from ZeRO (arXiv 1910.02054, sections 5 and 7), ZeRO++ (arXiv
2306.10209) and MiCS (arXiv 2205.00119), so that the program is not its own judge.
Everything is an exact fraction.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.plan import presets
from shardfold.plan.bind import bind
from shardfold.plan.cost import (
    Sent,
    encoded_bytes,
    resting_bytes,
    ring_bytes,
    section_traffic,
    state_bytes,
    summed_bytes,
    traffic,
)
from shardfold.plan.explain import explain
from shardfold.plan.layout import ITEMSIZE, PRECISIONS, Cell, Layout, Precision
from shardfold.plan.lifetimes import ALONE, Behaviour, Lifetimes, in_use, peak_bytes
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec, pack
from shardfold.plan.presets import ddp, fsdp2, hpz, zero1, zero2, zero3, zeropp
from shardfold.plan.program import SECTIONS, Op, lower, parse
from shardfold.plan.rewrites import Overlap, apply

NAMES = presets.NAMES
PRECISION = {
    "bf16, 16-bit gradients": Precision(compute="bf16", grads="bf16", reduce="bf16"),
    "bf16, fp32 gradients": PRECISIONS["bf16"],
    "bf16, fp32 gradients that travel as bf16": Precision(compute="bf16", grads="fp32", reduce="bf16"),
    "fp32": PRECISIONS["fp32"],
}
IN_PLACE = ("ddp", "zero1")  # they reduce gradients where they lie, so these have the dtype that travels


def factorizations(n: int) -> list[tuple[int, int]]:
    """``(inter, intra)``: one node, all nodes of one rank, nodes of 2 and 8 ranks, and the two nearest to a square."""
    pairs = [(n // intra, intra) for intra in range(1, n + 1) if n % intra == 0]
    middle = len(pairs) // 2
    return [p for i, p in enumerate(pairs) if p[1] in (1, 2, 8, n) or i in (middle - 1, middle)]


MESHES = [
    {"inter": inter, "intra": intra}
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024)
    for inter, intra in factorizations(n)
]
MESH = {"inter": 2, "intra": 4}


def dense(name: str, numel: int, dtype: str, *, trainable: bool = True, root: bool = False) -> UnitSpec:
    """A unit with no padding."""
    return UnitSpec(name, (SegmentSpec((Slot(f"{name}.w", (numel,), 0),), numel, dtype, trainable),), root)


def model(dtype: str) -> list[UnitSpec]:
    """A root and two units whose lengths divide by every number of ranks here, so that all sums are whole."""
    return [dense("(root)", 3 * 1024, dtype, root=True), dense("a", 6 * 1024, dtype), dense("b", 9 * 1024, dtype)]


NUMEL = 18 * 1024


# -- the papers


def paper_bytes(name: str, mesh: dict[str, int], precision: Precision) -> Fraction:
    """Bytes at rest per parameter with Adam, which has two fp32 moments and an fp32 master copy (K = 12)."""
    nodes, m = Fraction(mesh["inter"]), Fraction(mesh["intra"])
    n = nodes * m
    two_copies = 1 < m < n  # hpZ's second copy, within a node: only if there are several nodes of several ranks
    if precision.compute == "fp32":  # master is the owner's range of params: 4 + 4 + 8
        return {
            "ddp": Fraction(16),
            "zero1": 8 + 8 / n,
            "zero2": 4 + 12 / n,
            "zero3": 16 / n,
            "fsdp2": 16 / n,
            "hsdp": 16 / m,
            "hpz": 16 / n + (4 / m if two_copies else 0),
            "zeropp": 16 / n + (4 / m if two_copies else 0),
            "offload": 4 + 16 / n,  # a master of its own, as it rests elsewhere than params
            "infinity": 16 / n,
        }[name]
    if precision.grads == "fp32":  # fp32 accumulation: 2 + 4 + 12
        return {
            "ddp": Fraction(18),
            "zero1": 6 + 12 / n,
            "zero2": 2 + 16 / n,
            "zero3": 18 / n,
            "fsdp2": 16 / n if n > 1 else Fraction(18),  # one rank gathers nothing and keeps its cast copy
            "hsdp": 18 / m,
            "hpz": 18 / n + (2 / m if two_copies else 0),
            "zeropp": 18 / n + (2 / m if two_copies else 0),
            "offload": 2 + 16 / n,
            "infinity": 18 / n,
        }[name]
    return {
        "ddp": Fraction(16),
        "zero1": 4 + 12 / n,
        "zero2": 2 + 14 / n,
        "zero3": 16 / n,
        "fsdp2": 14 / n if n > 1 else Fraction(16),
        "hsdp": 16 / m,
        "hpz": 16 / n + (2 / m if two_copies else 0),
        "zeropp": 16 / n + (2 / m if two_copies else 0),
        "offload": 2 + 14 / n,
        "infinity": 16 / n,
    }[name]


def paper_sent(name: str, mesh: dict[str, int], k: int) -> tuple[Fraction, Fraction, Fraction]:
    """Elements sent per parameter and step of ``k`` micro-batches: gathered, reduced, and summed in a second hop.

    The second hop sums gradients that were scattered and accumulated within a node, over the nodes.
    """
    nodes, m = Fraction(mesh["inter"]), Fraction(mesh["intra"])
    n = nodes * m
    ring, within, between = (n - 1) / n, (m - 1) / m, 2 * (nodes - 1) / nodes / m
    none = Fraction(0)
    return {
        "ddp": (none, 2 * ring, none),
        "zero1": (ring, ring, none),
        "zero2": (ring, k * ring, none),
        "zero3": (2 * k * ring, k * ring, none),
        "fsdp2": (2 * k * ring, k * ring, none),
        "hsdp": (2 * k * within, k * within, between),
        "hpz": (k * ring + k * within, k * ring, none),
        "offload": (ring, k * ring, none),
        "infinity": (2 * k * ring, k * ring, none),
    }[name]


INT8, INT4 = 1 + Fraction(4, 256), Fraction(1, 2) + Fraction(4, 256)
"""Bytes per element: codes, and for 256 of them a scale in fp32."""


def zeropp_sent(mesh: dict[str, int], k: int, wide: int) -> tuple[Fraction, Fraction]:
    """Bytes gathered and reduced by ZeRO++: between nodes 1/m of what within, as ranks of a node share it."""
    nodes, m = Fraction(mesh["inter"]), Fraction(mesh["intra"])
    within, between = (m - 1) / m, (nodes - 1) / nodes / m
    if 1 < m < nodes * m:  # forward in int8, over both hops; backward from the second copy, as it rests
        gathered = INT8 * (within + between) + wide * within
    else:  # one hop, and no second copy but, with one rank per node, the gathered parameters themselves
        gathered = INT8 * (within + between) * (2 if nodes == 1 else 1)
    return k * gathered * NUMEL, k * INT4 * (within + between) * NUMEL


def sent_by_purpose(found: dict[Sent, tuple[int, float]]) -> dict[str, Fraction]:
    total = {"gather": Fraction(0), "reduce": Fraction(0)}
    for kind, (_, sent) in found.items():
        total[kind.purpose] += Fraction(sent)
    return total


@pytest.mark.sampled(40)
@pytest.mark.parametrize("policy", PRECISION)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_at_rest_equal_the_papers_formula(name: str, policy: str):
    precision = PRECISION[policy]
    units = model(precision.compute)
    for mesh in MESHES:
        if name in IN_PLACE and precision.grads != precision.reduce:
            continue
        if prod(mesh.values()) > 1 and name == "hsdp" and mesh["intra"] == 1 and precision.grads != precision.reduce:
            continue  # on nodes of one rank hsdp is ddp
        held = sum(Fraction(n) for n in state_bytes(presets.named(name).bind(precision, mesh), units, mesh).values())
        assert held == paper_bytes(name, mesh, precision) * NUMEL, mesh


@pytest.mark.sampled(80)
@pytest.mark.parametrize("policy", PRECISION)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 4])
def test_bytes_sent_equal_the_papers_formula(name: str, policy: str, k: int):
    precision = PRECISION[policy]
    units = model(precision.compute)
    wide = {role: ITEMSIZE[getattr(precision, role)] for role in ("compute", "reduce", "grads")}
    for mesh in MESHES:
        try:
            layout = presets.named(name).bind(precision, mesh)
        except ValueError:
            assert precision.grads != precision.reduce and (name in IN_PLACE or mesh["intra"] == 1)
            continue
        program = lower(layout, units, mesh)
        sent = sent_by_purpose(traffic(program, layout, units, mesh, micro_batches=k))
        if name == "zeropp":
            assert (sent["gather"], sent["reduce"]) == zeropp_sent(mesh, k, wide["compute"]), mesh
            continue
        gathered, reduced, summed = paper_sent(name, mesh, k)
        assert sent["gather"] == gathered * NUMEL * wide["compute"], mesh
        assert sent["reduce"] == (reduced * wide["reduce"] + summed * wide["grads"]) * NUMEL, mesh


def test_a_second_hop_needs_payloads_of_a_slice():
    """Of a flat of 1024 elements on 4 nodes of 8 ranks the first hop encodes all, and the second one the slice of 128
    that is a rank's: what is sent and what comes, in codes of 4 bits, and in fp32 the sum and a row, and the slice."""
    mesh, unit = {"inter": 4, "intra": 8}, dense("a", 1024, "bf16")
    table = zeropp.replace(gather="int8/16x2", reduce="int4/16x2")  # pyright: ignore
    bound = table.bind(PRECISION["bf16, 16-bit gradients"], mesh)
    ops = {op.verb: op for op in lower(bound, [unit], mesh).last}
    coded = 8 + 4  # bytes of a block
    first = 2 * 64 * coded + 2 * 4 * 128 + 4 * 128
    second = 2 * 8 * coded + 2 * 4 * 32 + 4 * 128
    assert encoded_bytes(ops["REDUCE_WITHIN"], bound, unit, mesh) == first
    assert encoded_bytes(ops["REDUCE_BETWEEN"], bound, unit, mesh) == second


def test_zeropp_sends_three_quarters_of_an_element_between_nodes_where_zero3_sends_three():
    """ZeRO++, section 3: of 16-bit elements, 3 to 0.75, each node's; besides, 1/64 and 1/32 are scales. One hop of int4
    would send as many times more as a node has ranks."""
    mesh, precision = {"inter": 4, "intra": 8}, PRECISION["bf16, 16-bit gradients"]
    units, across = model("bf16"), Fraction(3, 4)  # (M - 1) / M

    def between(layout: Layout) -> Fraction:
        """Bytes per parameter that the ranks of a node send to others, of hops that do nothing else."""
        bound = layout.bind(precision, mesh)
        sent = traffic(lower(bound, units, mesh), bound, units, mesh)
        return 8 * sum(Fraction(n) for kind, (_, n) in sent.items() if kind.axes == ("inter",)) / NUMEL

    assert between(zero3.replace(gather="computex2", reduce="reducex2")) == 3 * 2 * across  # pyright: ignore
    assert between(zeropp) == (INT8 + INT4) * across == (Fraction(3, 4) * 2 + Fraction(4, 256) * 2) * across
    one = hpz.replace(reduce="int4").bind(precision, mesh)  # pyright: ignore
    sent = traffic(lower(one, units, mesh), one, units, mesh)[Sent("reduce", "REDUCE_SCATTER", ("inter", "intra"))][1]
    # Each rank sends to every rank of other nodes.
    crossing = Fraction(sent) * Fraction(24, 31) * 8 / NUMEL
    assert crossing == 8 * INT4 * across


def test_bytes_per_parameter_of_zero_on_64_ranks_are_those_of_the_papers_table():
    """ZeRO, figure 1 and table 1: 7.5B parameters on 64 GPUs take 120, 31.4, 16.6 and 1.9 GB."""
    precision, mesh = PRECISION["bf16, 16-bit gradients"], {"inter": 8, "intra": 8}
    units = [dense("all", 7_500_000_000, "bf16")]
    gigabytes = {
        name: round(sum(state_bytes(presets.named(name).bind(precision, mesh), units, mesh).values()) / 1e9, 1)
        for name in ("ddp", "zero1", "zero2", "zero3")
    }
    assert gigabytes == {"ddp": 120.0, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}


def test_the_states_that_hold_the_bytes_are_named():
    layout = hpz.bind(PRECISIONS["bf16"], MESH)
    found = state_bytes(layout, [dense("u", 800, "bf16")], MESH)
    assert found == {"params": 200.0, "held": 400.0, "grads": 400.0, "master": 400.0, "moments": 800.0}
    in_fp32 = state_bytes(zero1.bind(PRECISIONS["fp32"], MESH), [dense("u", 800, "fp32")], MESH)
    assert in_fp32 == {"params": 3200.0, "grads": 3200.0, "moments": 800.0}


@pytest.mark.parametrize("num_moments", [0, 1, 2])
def test_each_moment_of_the_optimizer_is_one_more_share(num_moments: int):
    layout = zero2.bind(PRECISIONS["bf16"], MESH)
    found = state_bytes(layout, [dense("u", 800, "bf16")], MESH, num_moments=num_moments)
    assert found.get("moments", 0.0) == 400.0 * num_moments


@pytest.mark.parametrize(("verb", "sent"), [("ALL_GATHER", 75.0), ("REDUCE_SCATTER", 75.0), ("ALL_REDUCE", 150.0)])
def test_a_ring_sends_all_but_its_own_share_once_and_twice_for_a_sum_that_all_keep(verb: str, sent: float):
    assert ring_bytes(verb, 100.0, 4) == sent
    assert ring_bytes(verb, 100.0, 1) == 0.0


UNNAMED = {
    # On 2 nodes of 4 ranks, elements per parameter gathered, and reduced, in a step of 3 micro-batches.
    "zero1 within a node": (
        ddp.edit("master", "moments", over=("intra",)),
        Fraction(3, 4),  # updated shards, within the node
        Fraction(3, 4) + 2 * Fraction(1, 2) / 4,  # scattered within the node, a quarter summed between nodes
    ),
    "params between nodes only": (
        zero2.edit("params", over=("inter",)),
        3 * 2 * Fraction(1, 2) + Fraction(3, 4) / 2,  # twice a micro-batch between nodes; updated halves within
        3 * Fraction(7, 8),
    ),
    "params within a node, the rest over all": (
        zero2.edit("grads", "master", "moments", over=("intra", "inter")).edit("params", over=("intra",)),
        3 * 2 * Fraction(3, 4) + Fraction(1, 2) / 4,  # twice a micro-batch within a node; updated quarters between
        3 * Fraction(7, 8),
    ),
    "params split, grads whole": (
        zero1.edit("params", over=("inter", "intra")),
        3 * 2 * Fraction(7, 8),
        Fraction(7, 8),
    ),
    "fsdp2 with a held copy": (
        fsdp2.replace(held=Cell(dtype="compute", over=("intra",))),
        3 * (Fraction(7, 8) + Fraction(3, 4)),
        3 * Fraction(7, 8),
    ),
    "fsdp2 that keeps units full for backward": (
        fsdp2.replace(held=Cell(dtype="compute")),
        3 * Fraction(7, 8),
        3 * Fraction(7, 8),
    ),
}


@pytest.mark.parametrize(("table", "gathered", "reduced"), UNNAMED.values(), ids=UNNAMED.keys())
def test_tables_without_a_name_send_what_their_cells_imply(table: Layout, gathered: Fraction, reduced: Fraction):
    layout, units = table.bind(PRECISION["bf16, 16-bit gradients"], MESH), model("bf16")
    sent = sent_by_purpose(traffic(lower(layout, units, MESH), layout, units, MESH, micro_batches=3))
    assert sent == {"gather": gathered * NUMEL * 2, "reduce": reduced * NUMEL * 2}


# -- what the formulas leave out: frozen parts, padding, control over sections


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "mesh", [{"inter": 1, "intra": 1}, {"inter": 1, "intra": 4}, MESH, {"inter": 4, "intra": 1}], ids=str
)
def test_a_frozen_unit_rests_as_parameters_only_and_sends_no_gradient(name: str, mesh: dict[str, int]):
    layout = presets.named(name).bind(PRECISION["bf16, 16-bit gradients"], mesh)
    units = [dense("frozen", 800, "bf16", trainable=False)]
    over = {"ddp": 1, "zero1": 1, "zero2": 1, "offload": 1, "hsdp": mesh["intra"]}.get(name, prod(mesh.values()))
    copy = 800 * 2 / mesh["intra"] if name in ("hpz", "zeropp") and 1 < mesh["intra"] < prod(mesh.values()) else 0
    expected = {"params": 800 * 2 / over, "held": copy}
    assert state_bytes(layout, units, mesh) == {state: n for state, n in expected.items() if n}
    program = lower(layout, units, mesh)
    assert {kind.op for kind in traffic(program, layout, units, mesh)} <= {"ALL_GATHER"}
    assert [op.verb for op in program.step] == ["STEP"]


def test_a_unit_partly_frozen_gathers_all_of_it_for_a_pass_and_only_what_was_updated_after_a_step():
    parts = tuple(
        SegmentSpec((Slot(f"p{i}", (800,), 0),), 800, "bf16", trainable) for i, trainable in enumerate((True, False))
    )
    units = [UnitSpec("u", parts)]
    for layout, calls, elements in ((zero3, 4, 2 * 1600), (zero2, 1, 800)):
        bound = layout.bind(PRECISION["bf16, 16-bit gradients"], MESH)
        found = traffic(lower(bound, units, MESH), bound, units, MESH)
        assert found[Sent("gather", "ALL_GATHER", ("inter", "intra"))] == (calls, elements * 2 * 7 / 8)
        assert found[Sent("reduce", "REDUCE_SCATTER", ("inter", "intra"))] == (1, 800 * 2 * 7 / 8)


padded_shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=5)


@given(
    st.lists(st.tuples(padded_shapes, st.booleans()), min_size=1, max_size=3),
    st.sampled_from([name for name in NAMES if name != "zeropp"]),  # of whose blocks padding may be a part
    st.sampled_from([{"inter": i, "intra": j} for i in (1, 2, 3) for j in (1, 2, 4)]),
    st.sampled_from(["bf16, 16-bit gradients", "bf16, fp32 gradients", "fp32"]),
    st.integers(1, 3),
)
def test_what_is_held_and_sent_beyond_the_formula_is_exactly_the_named_padding(
    parts: list[tuple[list[tuple[int, ...]], bool]], name: str, mesh: dict[str, int], policy: str, k: int
):
    precision = PRECISION[policy]
    layout = presets.named(name).bind(precision, mesh)
    segments: list[SegmentSpec] = []
    for shapes, trainable in parts:
        slots, length = pack({f"p{i}": shape for i, shape in enumerate(shapes)}, prod(mesh.values()), 64)
        segments.append(SegmentSpec(slots, length, precision.compute, trainable))
    unit = UnitSpec("u", tuple(segments))

    def only_padding(segment: SegmentSpec) -> SegmentSpec:
        return replace(segment, slots=(Slot("padding", (segment.padding,), 0),), length=segment.padding)

    def no_padding(segment: SegmentSpec) -> SegmentSpec:
        return replace(segment, length=segment.numel)

    real, named = state_bytes(layout, [unit], mesh, padded=True), state_bytes(layout, [unit], mesh)
    padding = [replace(unit, segments=tuple(map(only_padding, segments)))]
    pad = state_bytes(layout, padding, mesh)
    assert {state: named.get(state, 0) + pad.get(state, 0) for state in real} == pytest.approx(real, rel=1e-12)

    program = lower(layout, [unit], mesh)
    all_sent = traffic(program, layout, [unit], mesh, micro_batches=k)
    bare = [replace(unit, segments=tuple(map(no_padding, segments)))]
    split = [traffic(program, layout, units, mesh, micro_batches=k) for units in (bare, padding)]
    assert all_sent.keys() == split[0].keys() == split[1].keys()
    for kind, (calls, sent) in all_sent.items():
        assert [calls, calls] == [found[kind][0] for found in split]
        assert sum(found[kind][1] for found in split) == pytest.approx(sent, rel=1e-12)
        assert sent == int(sent)  # padded lengths divide evenly, so a rank sends whole elements


@given(st.sampled_from(NAMES), st.integers(1, 5))
def test_a_step_costs_the_sum_of_the_sections_it_ran(name: str, k: int):
    layout, units = presets.named(name).bind(PRECISIONS["bf16"], MESH), model("bf16")
    program = lower(layout, units, MESH)
    total: dict[Sent, list[float]] = {}
    for section, times in (("forward", k), ("backward", k - 1), ("last", 1), ("step", 1)):
        for kind, (calls, sent) in section_traffic(program, layout, units, MESH, {section: 1}).items():
            entry = total.setdefault(kind, [0, 0.0])
            entry[0] += times * calls
            entry[1] += times * sent
    expected = {kind: tuple(entry) for kind, entry in total.items() if entry[0]}
    assert traffic(program, layout, units, MESH, micro_batches=k) == expected


def test_a_quiet_backward_sends_no_gradient():
    layout, units = zero3.bind(PRECISIONS["bf16"], MESH), model("bf16")
    found = section_traffic(lower(layout, units, MESH), layout, units, MESH, {"quiet": 2})
    assert {kind.purpose for kind in found} == {"gather"}


@pytest.mark.parametrize("name", NAMES)
def test_prefetch_and_late_units_change_no_cost(name: str):
    layout, units = presets.named(name).bind(PRECISIONS["bf16"], MESH), model("bf16")
    program = lower(layout, units, MESH)
    moved = apply(program, Overlap(prefetch=2), frozenset({"a"}))
    assert traffic(moved, layout, units, MESH) == traffic(program, layout, units, MESH)


# -- peak


def named_parts(layout: Layout, units: list[UnitSpec], ahead: int, in_flight: int, temporary: float) -> float:
    """What a step holds at most beside its states, part by part: the gathered root, ``ahead + 1`` gathered units (all,
    where backward finds them gathered), gradients of the root and of ``in_flight + 1`` units, each of these as much
    again in the transport's ``temporary`` while it is on its way, and one parameter's gradient as autograd makes it."""
    full = {u.name: sum(s.length * ITEMSIZE[s.dtype] for s in u.segments) for u in units}
    grad = {u.name: sum(s.length for s in u.segments if s.trainable) * ITEMSIZE[layout.buffer] for u in units}
    roots, inner = [u.name for u in units if u.root], [u.name for u in units if not u.root]
    total = max((s.numel * ITEMSIZE[s.dtype] for u in units for s in u.segments if s.trainable), default=0.0)
    if layout.comes_and_goes:
        most = None if layout.held is not None and not layout.held.over else ahead + 1
        total += sum(full[name] for name in roots) + sum(sorted((full[n] for n in inner), reverse=True)[:most])
    if layout.buffered:
        total += sum(grad[name] for name in roots)
        total += sum(sorted((grad[n] for n in inner), reverse=True)[: in_flight + 1])
    return total + temporary * sum(sorted(grad.values(), reverse=True)[: max(1, in_flight)])


@given(
    st.sampled_from([name for name in NAMES if name != "zeropp"]),  # whose payloads are no named part
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5),
    st.booleans(),
    st.sampled_from([{"inter": i, "intra": j} for i in (1, 2, 3) for j in (1, 2, 4)]),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_a_walk_over_the_program_finds_at_most_the_sum_of_the_named_parts(
    name: str, sizes: list[tuple[int, bool]], root: bool, mesh: dict[str, int], ahead: int, in_flight: int
):
    """So a planner knows what is held at each operation: buffers come and go by operations, and by nothing else."""
    units = [
        dense(f"u{i}", size * 24, "bf16", trainable=trainable, root=root and i == 0)
        for i, (size, trainable) in enumerate(sizes)
    ]
    layout = presets.named(name).bind(PRECISIONS["bf16"], mesh)
    overlap = Overlap(prefetch=ahead)
    object.__setattr__(overlap, "reduces_in_flight", in_flight)  # the pass goes on where the engine's range ends
    bound = bind(layout, units, mesh, overlap=overlap)
    for temporary, transport in ((0.0, "near"), (1.0, "gloo")):
        lifetimes, most = Lifetimes(bound, Behaviour(streams=False, transport=transport)), 0.0
        for section in ("forward", "backward", "forward", "last", "step"):
            for op in bound.program.section(section):
                lifetimes.begin(op)
                most = max(most, lifetimes.total - lifetimes.terms.get("spare", 0.0))
                lifetimes.end(op)
        assert lifetimes.total == lifetimes.terms.get("spare", 0.0), "everything is given back by the end of a step"
        assert most <= named_parts(layout, units, ahead, in_flight, temporary)


def test_peak_counts_the_transports_temporary_memory_once_and_not_on_one_rank():
    units, rest = model("bf16"), 1e6
    bound = bind(zero3.bind(PRECISIONS["bf16"], MESH), units, MESH)
    largest = 9 * 1024 * 4
    sent = Behaviour(streams=True, transport="nccl")
    assert peak_bytes(bound, sent, rest=rest) - peak_bytes(bound, ALONE, rest=rest) == largest / 8
    alone = {"inter": 1, "intra": 1}
    bound = bind(zero3.bind(PRECISIONS["bf16"], alone), units, alone)
    gradient = 9 * 1024 * 2  # gradients rest whole here: on top comes one parameter's, as autograd makes it
    passes = [n for section, _, n in in_use(bound, sent) if section != "step"]
    besides = max(n for *_, n in in_use(bound, sent))
    assert max(passes) == 0 and peak_bytes(bound, sent, rest=rest) - besides == rest + gradient


def test_a_held_copy_that_is_whole_keeps_every_unit_full_at_the_peak():
    mesh, units = {"inter": 4, "intra": 1}, [dense(f"u{i}", 1200, "bf16", trainable=False) for i in range(9)]
    assert peak_bytes(bind(hpz.bind(PRECISIONS["bf16"], mesh), units, mesh), ALONE, rest=0.0) == 9 * 2400


# -- text


def test_explain_shows_the_mesh_the_table_the_padding_the_bytes_and_the_program():
    layout = zero3.bind(PRECISIONS["fp32"], MESH)
    slots, length = pack({"w": (100,)}, 8, 64)
    units = [
        UnitSpec("(root)", (SegmentSpec(slots, length, "fp32"),), root=True),
        dense("a", 512, "fp32", trainable=False),
    ]
    bound = bind(layout, units, MESH)
    program = bound.program
    held = resting_bytes(layout, units, MESH, padded=True)
    text = explain(zero3, bound, held, micro_batches=2)
    for words in (
        "mesh: inter=2 x intra=4",
        "master is params",
        "(whole through each pass)",
        "fp32 frozen",
        "step of 2 micro-batches:",
    ):
        assert words in text
    assert str(zero3) in text and text.endswith(str(bound.whole))
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["(root)"][:2] == ["100", "412"] and rows["a"][:2] == ["512", "0"]
    assert "  reduce  REDUCE_SCATTER inter+intra      2 calls" in text
    assert all(str(op) in text for section in SECTIONS for op in program.section(section))
    assert "# Until the order of units is known, ranks ask each other" in text and parse(text[text.index("# Un") :])
    assert Op("FREE", "a") in program.forward


def test_sums_on_their_way_to_a_slower_tier_are_in_use():
    """This rank's shard of a unit's sums is there from its reduction until it is stored, in the dtype of gradients."""
    units = [dense("a", 800, "bf16"), dense("b", 1600, "bf16")]
    layout = presets.named("offload").bind(PRECISIONS["bf16"], MESH)
    bound = bind(layout, units, MESH)

    def most(*, streams: bool) -> list[float]:
        behaviour = Behaviour(streams=streams, transport="near")
        lifetimes, found = Lifetimes(bound, behaviour), list[float]()
        for op in bound.program.last:
            lifetimes.begin(op)
            found.append(lifetimes.total - lifetimes.terms.get("spare", 0.0))
            lifetimes.end(op)
        return found

    with_streams, without = most(streams=True), most(streams=False)
    besides = {op: a - b for op, a, b in zip(bound.program.last, with_streams, without, strict=True)}
    length = {unit.name: unit.segments[0].length for unit in units}
    for op, num_bytes in besides.items():
        under_way = op.verb in ("REDUCE_SCATTER", "WAIT", "STORE")
        assert num_bytes == (length[op.unit] * 4 / 8 if under_way else 0)
    assert summed_bytes(Op("ALL_REDUCE", "a"), layout, units[0], MESH) == 0
