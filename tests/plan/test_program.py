"""Programs: they print and parse, hold what a pass needs when it needs it, and passes only move things in time."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardfold.errors import ConfigError, LayoutError
from shardfold.plan import presets
from shardfold.plan.axes import Axis, Mesh
from shardfold.plan.bind import RunOrders, bind
from shardfold.plan.cost import Sent, traffic
from shardfold.plan.explain import Remarks
from shardfold.plan.formats import FORMATS
from shardfold.plan.layout import PRECISIONS, Cell, Layout, Precision
from shardfold.plan.order import with_missing
from shardfold.plan.placement import SegmentSpec, UnitSpec
from shardfold.plan.presets import PRESETS, ddp, fsdp2, zero1, zero2
from shardfold.plan.program import (
    BUNDLE,
    COLLECTIVES,
    MARKERS,
    OTHERS,
    PARTIAL,
    REDUCTIONS,
    SCATTERS,
    SECTIONS,
    TENSORS,
    VERBS,
    Op,
    Program,
    lower,
    parse,
    redistribute,
)
from shardfold.plan.rewrites import Overlap, apply, closing, defer_reduce, delay_waits, prefetch
from shardfold.plan.rewrites import late as late_section
from shardfold.plan.signs import Signs

GOLDEN = Path(__file__).parents[1] / "golden" / "program"
BF16 = PRECISIONS["bf16"]
MESH = {"inter": 2, "intra": 4}
FETCHES = ("CAST", "FILL", "ALL_GATHER")
INTER, INTRA, BOTH = ("inter",), ("intra",), ("inter", "intra")

# Tables that have no name: everything here follows from the cells, not from the presets.
UNNAMED = {
    "zero1 within a node": ddp.edit("master", "moments", over=INTRA),
    "params between nodes only": zero2.edit("params", over=INTER),
    "params within a node, the rest over all": zero2.edit("grads", "master", "moments", over=(*INTRA, *INTER)).edit(
        "params", over=INTRA
    ),
    "params split, grads whole": zero1.edit("params", over=BOTH),
    "fsdp2 with a held copy": fsdp2.replace(held=Cell(dtype="compute", over=INTRA)),
    "fsdp2 that keeps units full for backward": fsdp2.replace(held=Cell(dtype="compute")),
}
LAYOUTS = [*PRESETS.values(), *UNNAMED.values()]

meshes = st.builds(lambda i, j: {"inter": i, "intra": j}, st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 4]))
names = st.lists(st.from_regex(r"[a-z_][a-z0-9_]{0,6}(\.[a-z0-9_]{1,6}){0,2}", fullmatch=True), max_size=5, unique=True)


def unit(name: str, *, trainable: bool = True, root: bool = False) -> UnitSpec:
    return UnitSpec(name, (SegmentSpec((), 64, "bf16", trainable),), root)


@st.composite
def unit_lists(draw: st.DrawFn) -> list[UnitSpec]:
    units = [unit(name, trainable=draw(st.booleans())) for name in draw(names)]
    roots = [unit(name, root=True) for name in ["(root)", "(other)"][: draw(st.integers(0, 2))]]
    return roots + units


class Made(NamedTuple):
    layout: Layout
    units: list[UnitSpec]
    program: Program
    mesh: dict[str, int]


@st.composite
def programs(draw: st.DrawFn) -> Made:
    units, mesh = draw(unit_lists()), draw(meshes)
    layout = draw(st.sampled_from(LAYOUTS)).bind(BF16, mesh)
    return Made(layout, units, lower(layout, units, mesh, clip=draw(st.booleans())), mesh)


overlaps = st.builds(
    lambda depth, n: Overlap(prefetch=depth, reduces_in_flight=n), st.integers(0, 6), st.sampled_from([None, 0, 1])
)


def two_units(layout: Layout) -> Program:
    units = [unit("(root)", root=True), unit("blocks.0"), unit("blocks.1")]
    return lower(layout.bind(BF16, MESH), units, MESH, clip=True)


# -- text


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp", "hpz"])
def test_two_units_and_a_root_lower_to_the_golden_program(name: str):
    assert f"{two_units(presets.named(name))}\n" == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_prefetch_turns_zero3_into_the_golden_program_with_one_unit_ahead():
    ahead = apply(two_units(presets.zero3), Overlap(prefetch=1))
    assert f"{ahead}\n" == (GOLDEN / "zero3-prefetch-1.txt").read_text(encoding="utf-8")


@given(programs(), overlaps)
def test_a_program_parses_back_from_its_text(made: Made, overlap: Overlap):
    units, program = made.units, made.program
    late = frozenset(u.name for u in units[::2])
    assert parse(str(program)) == program
    assert parse(str(apply(program, overlap, late))) == apply(program, overlap, late)


@given(programs(), st.data())
def test_render_marks_one_operation_and_the_marked_text_still_parses(made: Made, data: st.DataObject):
    program = made.program
    section = data.draw(st.sampled_from([name for name in SECTIONS if program.section(name)]))
    index = data.draw(st.integers(0, len(program.section(section)) - 1))
    text = program.render(mark=(section, index))
    marked = [line for line in text.splitlines() if "<-- here" in line]
    assert marked == [f"  {program.section(section)[index]}   <-- here"]
    assert parse(text) == program
    if section != "last":  # which may be like another, but is printed where it is marked
        assert text.replace("   <-- here", "") == str(program)


def test_render_marks_the_named_section_only():
    program = Program(forward=(Op("END"),), backward=(Op("END"),))
    assert program.render(mark=("backward", 0)) == "forward:\n  END\nbackward:\n  END   <-- here\nlast:\nstep:"


@pytest.mark.parametrize(
    ("text", "number", "line"),
    [
        ("forward:\n  F a\n  ALL_GTHER a [intra] bf16", 3, "ALL_GTHER a [intra] bf16"),
        ("F a", 1, "F a"),
        ("forward:\nsideways:\n", 2, "sideways:"),
        ("\n\nforward:\n  F", 4, "F"),
        ("forward:\n  END a", 2, "END a"),
        ("forward:\n  F a [intra]", 2, "F a [intra]"),
        ("last:\n  ALL_REDUCE a", 2, "ALL_REDUCE a"),
        ("last:\n  ALL_REDUCE a intra fp32", 2, "ALL_REDUCE a intra fp32"),
        ("last:\n  ALL_REDUCE a local [] fp32", 2, "ALL_REDUCE a local [] fp32"),
        ("last:\n  ALL_REDUCE a local [intra] fp32 twice", 2, "ALL_REDUCE a local [intra] fp32 twice"),
        ("last:\n  ALL_REDUCE a lokal [intra] fp32", 2, "ALL_REDUCE a lokal [intra] fp32"),
        ("forward:\n  ALL_GATHER a params flat [intra] bf16", 2, "ALL_GATHER a params flat [intra] bf16"),
        ("forward:\n  ALL_GATHER a -> flat [intra] bf16", 2, "ALL_GATHER a -> flat [intra] bf16"),
    ],
)
def test_a_line_that_is_no_operation_is_refused_by_number_and_text(text: str, number: int, line: str):
    with pytest.raises(ConfigError, match=f"^line {number} of the program, ") as caught:
        parse(text)
    assert repr(line) in str(caught.value)


def test_sections_that_a_text_leaves_out_are_empty():
    assert parse("step:\n  UPDATE a\n") == Program(step=(Op("UPDATE", "a"),))
    assert parse("") == Program()


def test_all_that_can_run_is_in_the_golden_program_and_what_is_like_another_is_one_line():
    units = [unit("(root)", root=True), unit("blocks.0"), unit("blocks.1")]
    whole = bind(presets.ddp.bind(BF16, MESH), units, MESH, clip=True).whole
    assert f"{whole}\n" == (GOLDEN / "ddp-whole.txt").read_text(encoding="utf-8")


@given(programs(), overlaps, st.booleans(), st.booleans())
def test_every_section_that_the_engine_runs_is_printed_and_parses_back(
    made: Made, overlap: Overlap, turned: bool, staged: bool
):
    """What a rank can run is what :attr:`Bound.sections` has; gradients may come late to any unit. Parts of a backward
    are of stages only."""
    inner = [u.name for u in made.units if not u.root]
    orders = RunOrders.of(made.units, evaluation=inner[::-1] if turned else None)
    mesh = Mesh.of({**made.mesh, "pipeline": 2}) if staged else made.mesh
    bound = bind(made.layout, made.units, mesh, overlap=overlap, orders=orders)
    text = str(bound.whole)
    assert parse(text) == bound.whole
    runs = {name: ops for name, ops in bound.sections.items() if ops}
    runs["late"] = bound.late([u.name for u in made.units])
    for name, ops in runs.items():
        assert bound.whole.section(name) == ops
        assert (f"\n{name}:" in f"\n{text}") == bool(ops and (staged or "weights" not in name))
    headed = [line for line in text.splitlines() if "  # " in line]
    assert all(line.endswith(OTHERS[line.partition(":")[0]]) for line in headed)
    if not turned and not any(op.verb == "KEEP" for op in bound.program.first):
        assert "\neval: as forward  # " in text


def test_a_likeness_that_is_none_is_refused():
    text = "forward:\nbackward:\n  B a\n  FREE a\n  END\nlast: as backward\nstep:\nquiet: as backward"
    assert parse(text).also == ("quiet",) and parse(text).last == parse(text).backward
    with pytest.raises(ConfigError, match="the section 'quiet' of the program is not what follows"):
        parse(f"{text} without FREE")
    for wrong in ("late: as first", "late: as nothing", "forward: as backward", "late: as last mostly B"):
        with pytest.raises(ConfigError, match="is neither a section nor an operation in one"):
            parse(f"{text}\n{wrong}")


def test_passes_that_ask_before_each_unit_print_nothing_ahead():
    """With ``order="any"`` no pass follows the list of another; the step does."""
    units = [unit("(root)", root=True), unit("a"), unit("b")]
    layout = presets.zero3.bind(BF16, MESH)
    ahead, asks = (bind(layout, units, MESH, overlap=Overlap(prefetch=2, order=o)) for o in ("recorded", "any"))
    for name in ("forward", "eval", "backward", "last"):
        assert asks.sections[name] == asks.asked[name] == ahead.asked[name] != ahead.sections[name]
    assert asks.program.step == ahead.program.step


def test_operations_with_nothing_to_do_are_remarked_on():
    """What a run skips, as the device, the optimizer, or the number of micro-batches makes it needless."""
    mesh = {"inter": 1, "intra": 2}

    def said(layout: Layout, *, streams: bool = False, **options: Any) -> set[str]:
        overlap = Overlap(reduce_once=options.pop("once", False))
        bound = bind(layout.bind(BF16, mesh), [unit("a"), unit("b", trainable=False)], mesh, overlap=overlap)
        remarks = Remarks(bound=bound, streams=streams, **options)
        text = bound.whole.render(remark=remarks.of)
        assert parse(text) == bound.whole
        lines = [line for line in text.splitlines() if "  # " in line]
        heads = {line.partition(":")[0] + "; " + line.partition("; ")[2] for line in lines if "; " in line}
        return {line.strip() for line in lines if line[0] == " "} | {head for head in heads if head[0] != " "}

    assert said(presets.zero3) == set()
    host = presets.zero3.edit("grads", "master", "moments", tier="host")
    assert said(host) == {"STORE a grads @host  # the reduction has written there"}
    assert said(host, streams=True) == set()
    disk = presets.zero3.edit("grads", "master", "moments", tier="disk", folder="/tmp")
    assert said(disk) == {"ADD a @disk  # none in the only micro-batch"}
    assert said(disk, micro_batches=2) == {"ADD a @disk  # none in the first micro-batch"}
    own = "by the optimizer's own step() at STEP; here the compute-dtype copy, where there is one"
    assert said(presets.zero3, own_step=True) == {f"UPDATE a  # {own}"}
    assert said(presets.zero2, once=True, micro_batches=2) == {"GRADS a fp32  # in the first micro-batch of a step"}
    held = presets.zero3.replace(held=Cell(dtype="compute"))
    assert said(held) == {"eval; END: and what a backward would read is freed"}
    kept = presets.zero3.replace(held=Cell(dtype="compute", until="step"))
    assert {line.split("  # ")[-1] for line in said(kept)} == {"but what a step keeps"}
    bound = bind(presets.hpz.bind(BF16, MESH), [unit("a")], MESH)
    text = bound.whole.render(remark=Remarks(bound=bound, streams=False).of)
    assert "eval: as forward  # a forward without gradients; HOLD: where the model is in training mode" in text


# -- lowering


@given(st.sampled_from(LAYOUTS), unit_lists(), overlaps)
def test_one_rank_sends_nothing_and_frees_nothing(layout: Layout, units: list[UnitSpec], overlap: Overlap):
    mesh = {"inter": 1, "intra": 1}
    program = apply(lower(layout.bind(BF16, mesh), units, mesh), overlap)
    verbs = {op.verb for section in SECTIONS for op in program.section(section)}
    moved = {"GRADS", "FILL", "FREE", "STORE", "DROP"} if layout.updates_on == "host" else set[str]()
    assert verbs <= {*MARKERS, "UPDATE", *moved}, "what is moved is moved on one rank too"


@given(programs())
def test_every_unit_runs_once_per_pass_and_backward_reverses_forward(made: Made):
    units, program = made.units, made.program
    roots, inner = [u.name for u in units if u.root], [u.name for u in units if not u.root]
    assert [op.unit for op in program.forward if op.verb == "F"] == roots + inner
    for ops in (program.backward, program.last):
        assert [op.unit for op in ops if op.verb == "B"] == roots + inner[::-1]
    for ops in (program.forward, program.backward, program.last):
        assert [op.verb for op in ops].count("END") == 1


@given(st.sampled_from(LAYOUTS), meshes, st.data(), overlaps)
def test_units_may_run_in_any_order_and_several_times(
    layout: Layout, mesh: dict[str, int], data: st.DataObject, overlap: Overlap
):
    units = [unit("(root)", root=True), *(unit(name) for name in "abc")]
    orders = st.lists(st.sampled_from("abc"), max_size=6).map(
        lambda order: [name for i, name in enumerate(order) if not i or order[i - 1] != name]
    )
    forward, backward = with_missing(data.draw(orders), "abc"), with_missing(data.draw(orders), "cba")
    bound = layout.bind(BF16, mesh)
    program = apply(lower(bound, units, mesh, forward=forward, backward=backward), overlap)
    assert [op.unit for op in program.forward if op.verb == "F"] == ["(root)", *forward]
    for ops in (program.backward, program.last):
        assert [op.unit for op in ops if op.verb == "B"] == ["(root)", *backward]
    full: set[str] = set()  # some layouts keep units full from forward to backward
    for ops in (program.forward, program.last):
        for op in ops:
            if op.verb in ("FILL", "ALL_GATHER"):
                full.add(op.unit)
            elif op.verb == "FREE":
                assert op.unit in full
                full.remove(op.unit)
            elif op.verb in ("F", "B") and bound.comes_and_goes:
                assert op.unit in full, f"{op} finds its unit freed"
    for name in "abc":  # gradients are complete when a unit ran for the last time: reduced then, and once
        mine = [op for op in program.last if op.unit == name]
        sums = [op for op in mine if op.verb in REDUCTIONS]
        assert len(sums) == len({op.axes for op in sums})
        if sums:
            final = max(i for i, op in enumerate(mine) if op.verb == "B")
            assert mine.index(sums[0]) > final


@given(programs())
def test_what_is_frozen_is_neither_reduced_nor_updated_and_all_else_is_updated_once(made: Made):
    units, program = made.units, made.program
    trainable = [u.name for u in units if u.trainable]
    assert [op.unit for op in program.step if op.verb == "UPDATE"] == trainable
    reduced = {op.unit for section in SECTIONS for op in program.section(section) if op.verb in REDUCTIONS}
    assert reduced <= set(trainable)
    assert all(op.unit in trainable for op in program.step if op.verb in COLLECTIVES)


@given(programs())
def test_by_the_last_micro_batch_each_gradient_is_summed_over_every_rank_exactly_once(made: Made):
    for u in made.units:
        crossed = [axis for op in made.program.last if op.verb in REDUCTIONS and op.unit == u.name for axis in op.axes]
        axes = [axis for axis in made.mesh if made.mesh[axis] > 1]
        assert sorted(crossed) == (axes if u.trainable else [])


@given(programs())
def test_the_quiet_backward_is_the_backward_without_its_reductions(made: Made):
    program = made.program
    assert [op for op in program.backward if not op.is_sum and op.verb != "GRADS"] == list(program.quiet)
    assert program.section("quiet") == program.quiet


@given(programs())
def test_gradients_that_rest_whole_are_reduced_in_the_last_micro_batch_only(made: Made):
    layout, program = made.layout, made.program
    early = {op.verb for op in program.backward} & set(REDUCTIONS)
    assert early <= ({*SCATTERS} if layout.grads.over else set())


def test_the_norm_is_taken_before_any_update_and_only_if_the_step_clips():
    units = [unit("a"), unit("b")]
    layout = presets.zero2.bind(BF16, MESH)
    assert lower(layout, units, MESH, clip=True).step[:2] == (Op("NORM"), Op("STEP"))
    assert lower(layout, units, MESH, clip=True, clamp=True).step[:3] == (Op("CLAMP"), Op("NORM"), Op("STEP"))
    assert lower(layout, units, MESH).step[0] == Op("STEP")


def test_redistribute_derives_each_collective_from_how_a_tensor_lies_and_is_needed():
    format = {"gather": "bf16", "reduce": "fp16", "sum": "fp32"}

    def turn(have: tuple[str, ...] | None, need: tuple[str, ...]) -> list[str]:
        source, target = ("local", "grads") if have is PARTIAL else ("params", "flat")
        made = redistribute("u", have, need, data=("inter", "intra"), source=source, target=target, format=format)
        return [str(op) for op in made]

    assert turn(PARTIAL, ()) == ["ALL_REDUCE u local [inter+intra] fp16"]
    assert turn(PARTIAL, ("inter", "intra")) == ["REDUCE_SCATTER u [inter+intra] fp16"]
    assert turn(PARTIAL, ("intra",)) == ["REDUCE_SCATTER u [intra] fp16", "ALL_REDUCE u grads [inter] fp32"]
    assert turn(("inter", "intra"), ()) == ["ALL_GATHER u params -> flat [inter+intra] bf16"]
    assert turn(("inter", "intra"), ("inter",)) == ["ALL_GATHER u params -> flat [intra] bf16"]
    assert turn(("intra",), ("intra",)) == []
    with pytest.raises(LayoutError, match="no gather gives"):
        turn(("inter", "intra"), ("intra",))


# -- life of a unit, simulated


def most_full(layout: Layout, units: list[UnitSpec], program: Program) -> int:
    """Runs two micro-batches and a step; the most inner units that were full at a time.

    Fails when a marker finds its unit not gathered, a gather finds it full already, or anything else out of place.
    """
    roots = {u.name for u in units if u.root}
    names = {u.name for u in units}
    always = set() if layout.comes_and_goes else set(names)
    full, cast, held = set(always), set[str](), set[str]()
    most = 0
    for section in ("forward", "backward", "forward", "last"):
        source_is_held = section != "forward" and layout.held is not None and bool(layout.held.over)
        ended, ready = False, {name: False for name in names}
        for op in program.section(section):
            if op.verb == "FILL":  # and gathered behind that, or whole
                assert layout.rest.tier != "device" and op.unit not in full | cast
                (cast if layout.rest.over else full).add(op.unit)
            elif op.verb == "CAST":
                assert layout.params is None and op.unit not in full | cast
                cast.add(op.unit)
            elif op.verb == "ALL_GATHER":
                assert op.unit not in full and not ended
                assert (op.unit in cast) == (
                    (layout.params is None or layout.rest.tier != "device") and not source_is_held
                )
                assert op.unit in held or not source_is_held
                cast.discard(op.unit)
                full.add(op.unit)
            elif op.verb in ("F", "B"):
                assert op.unit in full and not ended
                ready[op.unit] = True
            elif op.verb == "END":
                assert all(ready.values())
                ended = True
            elif op.verb == "HOLD":
                assert op.unit in full and ready[op.unit]
                held.add(op.unit)
            elif op.verb == "FREE":
                assert op.unit in full and ready[op.unit] and (ended or op.unit not in roots)
                full.remove(op.unit)
            elif op.verb == "GRADS":
                assert not ready[op.unit]
            else:
                assert op.is_sum and ready[op.unit] and (ended or op.unit not in roots)
            most = max(most, len((full | cast) - roots - always))
        stays = section == "forward" and layout.held is not None and not layout.held.over
        assert full == (names if stays else always) and not cast
        if section != "forward":
            held.clear()
    return most


@given(programs(), overlaps)
def test_every_marker_finds_its_unit_gathered_and_at_most_prefetch_plus_one_inner_units_are_full(
    made: Made, overlap: Overlap
):
    layout, units, program = made.layout, made.units, made.program
    inner = sum(not u.root for u in units)
    most = most_full(layout, units, apply(program, overlap, frozenset(u.name for u in units[1::2])))
    if not layout.comes_and_goes:
        assert most == 0
    elif layout.held is not None and not layout.held.over:  # what backward needs stays full from forward on
        assert most == inner
    else:
        assert most == min(inner, overlap.prefetch + 1)


# -- passes


def markers_before(ops: tuple[Op, ...]) -> dict[Op, list[int]]:
    """How many markers stand before each occurrence of each operation."""
    seen, found = 0, dict[Op, list[int]]()
    for op in ops:
        found.setdefault(op, []).append(seen)
        seen += op.verb in MARKERS
    return found


@given(programs(), overlaps, st.data())
def test_passes_keep_all_operations_and_only_move_fetches_earlier_and_reductions_later(
    made: Made, overlap: Overlap, data: st.DataObject
):
    units, program = made.units, made.program
    late = frozenset(data.draw(st.sets(st.sampled_from([u.name for u in units])))) if units else frozenset[str]()
    moved = apply(program, overlap, late)
    assert moved.step == program.step
    for section in ("forward", "backward", "last"):
        before, after = program.section(section), moved.section(section)
        assert Counter(before) == Counter(after)
        was, now = markers_before(before), markers_before(after)
        for op in was:
            steps = [b - a for a, b in zip(was[op], now[op], strict=True)]
            if op.verb in FETCHES:
                assert all(-overlap.prefetch <= step <= 0 for step in steps)
            elif op.verb in ("WAIT", "STORE", "DROP") or (op.verb in REDUCTIONS and op.unit in late):
                assert all(step >= 0 for step in steps)
            else:
                assert not any(steps)
        for kind in (FETCHES, ("FREE", "HOLD", *MARKERS)):  # each kind keeps its own order
            assert [op for op in before if op.verb in kind] == [op for op in after if op.verb in kind]


@given(programs())
def test_a_prefetch_of_nothing_and_no_late_units_change_nothing(made: Made):
    assert apply(made.program, Overlap(prefetch=0)) == made.program


@given(programs(), st.data())
def test_late_units_are_reduced_behind_end_in_their_order(made: Made, data: st.DataObject):
    units, program = made.units, made.program
    late = frozenset(data.draw(st.sets(st.sampled_from([u.name for u in units])))) if units else frozenset[str]()
    ops = defer_reduce(program.last, late)
    tail = ops[ops.index(Op("END")) :]
    reductions = [op for op in program.last if op.verb in REDUCTIONS and op.unit in late]
    assert [op for op in tail if op.verb in REDUCTIONS and op.unit in late] == reductions


@given(programs(), overlaps, st.data())
def test_gradient_buffers_and_sums_on_their_way_begin_and_end_by_operations(
    made: Made, overlap: Overlap, data: st.DataObject
):
    """A buffer is there from before its unit's backward until its sum was awaited; as many units' sums as were asked
    for are on their way beside the next, and a second hop begins behind the end of the first."""
    layout, units = made.layout, made.units
    late = frozenset(data.draw(st.sets(st.sampled_from([u.name for u in units])))) if units else frozenset[str]()
    program = apply(made.program, overlap, late)
    in_flight, roots = overlap.reduces_in_flight or 0, {u.name for u in units if u.root}
    for section in ("backward", "last"):
        local, under_way = set[str](), list[str]()
        for op in program.section(section):
            if op.verb == "GRADS":
                assert op.unit not in local and op.format == layout.buffer
                local.add(op.unit)
            elif op.verb == "B":
                trained = {u.name for u in units if u.trainable}
                assert (op.unit in local) == (layout.buffered and op.unit in trained)
                assert len(under_way) <= in_flight
                if not late:
                    assert len(local - roots) <= in_flight + 1
            elif op.verb in REDUCTIONS:
                assert op.unit not in under_way
                assert op.source != "local" or (op.unit in local) == layout.buffered
                under_way.append(op.unit)
                assert len(under_way) <= max(1, in_flight)
            elif op.verb == "WAIT":
                assert op.target == "grads"
                under_way.remove(op.unit)
            elif op.verb == "DROP":
                assert op.unit not in under_way
                local.remove(op.unit)
        assert not local and not under_way


@given(programs(), overlaps, st.data())
def test_closing_reduces_what_only_the_last_backward_would_have_and_late_reduces_once_more(
    made: Made, overlap: Overlap, data: st.DataObject
):
    program = apply(made.program, overlap)

    def sums(ops: tuple[Op, ...]) -> Counter[Op]:
        return Counter(op for op in ops if op.verb in REDUCTIONS)

    last, ended = closing(program, overlap), late_section(program, frozenset(u.name for u in made.units))
    assert sums(program.backward) + sums(last) == sums(program.last) == sums(ended)
    chosen = frozenset(data.draw(st.sets(st.sampled_from([u.name for u in made.units])))) if made.units else frozenset()
    assert late_section(program, chosen) == tuple(op for op in ended if op.unit in chosen)
    for ops in (last, ended):
        assert all(op.is_sum for op in ops)
        for op, count in sums(ops).items():
            assert sum(other.verb == "WAIT" and other.unit == op.unit for other in ops) >= count


def test_a_cast_moves_together_with_its_gather():
    program = two_units(fsdp2)
    for ops in (program.forward, program.last):
        moved = prefetch(ops, 1)
        for i, op in enumerate(moved):
            if op.verb == "CAST":
                assert (moved[i + 1].verb, moved[i + 1].unit) == ("ALL_GATHER", op.unit)


@pytest.mark.parametrize("field", ["prefetch", "block"])
def test_a_negative_schedule_is_refused_by_name(field: str):
    with pytest.raises(ConfigError, match=f"Overlap.{field} is -1"):
        Overlap(**{field: -1})


def test_a_collective_says_the_format_of_every_segment_that_it_moves() -> None:
    """Segments of one unit may travel in several: frozen ones are gathered for a pass, but not reduced nor updated."""
    own, frozen = SegmentSpec((), 64, "fp32", own=True), SegmentSpec((), 64, "fp64", trainable=False, own=True)
    segments = (SegmentSpec((), 64, "bf16"), own, frozen, SegmentSpec((), 64, "bf16", group=1))
    mesh = {"inter": 1, "intra": 2}

    def said(preset: str, section: str) -> dict[str, str]:
        layout = PRESETS[preset].bind(Precision(compute="bf16", reduce="bf16"), mesh)
        program = lower(layout, [UnitSpec("u", segments)], mesh)
        assert parse(str(program)) == program
        for op in program.section(section):
            if op.format:
                moved = op.moves(UnitSpec("u", segments))
                assert [each.format for each in op.each(len(moved))] == [segment.dtype for segment in moved]
        return {op.verb: op.format for op in program.section(section) if op.format}

    assert said("zero3", "forward") == {"ALL_GATHER": "bf16+fp32+fp64+bf16"}
    reduced = dict.fromkeys(("GRADS", "REDUCE_SCATTER"), "bf16+fp32+bf16")
    assert said("zero3", "last") == {"ALL_GATHER": "bf16+fp32+fp64+bf16", **reduced}
    assert said("zero2", "step") == {"ALL_GATHER": "bf16+fp32+bf16"}
    one = Op("ALL_GATHER", "u", INTRA, "bf16", "params", "flat")
    assert one.each(3) == (one, one, one)
    with pytest.raises(ValueError, match="has 2 formats but moves 3 segments"):
        one._replace(format="bf16+fp32").each(3)


@given(programs())
def test_operands_say_which_tensor_of_the_table_is_read_and_written(made: Made):
    """So nothing else is asked to do an operation, or to count it: not the layout, nor the section it stands in."""
    layout = made.layout
    rest = "params" if layout.params is not None else "master"
    backward = "held" if layout.held is not None and layout.held.over else rest
    for section in SECTIONS:
        for op in made.program.section(section):
            assert op.verb in VERBS and {op.source, op.target} <= {*TENSORS, ""}
            if op.verb == "ALL_GATHER":
                source = {"step": "master", "forward": rest}.get(section, backward)
                assert (op.source, op.target) == (source, "params" if section == "step" else "flat")
                need = layout.params.over if op.target == "params" and layout.params is not None else ()
                assert getattr(layout, op.source).over == (*need, *op.axes)
            if op.verb == "ALL_REDUCE":
                assert op.source == ("grads" if layout.master.over else "local")


def test_a_second_hop_begins_behind_the_first_however_many_units_are_on_their_way() -> None:
    """What an all-reduce goes on with is what a reduce-scatter of the same unit gave."""
    hops: list[Op] = []
    for unit in "ab":
        hops += [Op("REDUCE_SCATTER", unit, ("intra",), "fp32"), Op("WAIT", unit, target="grads"), Op("DROP", unit)]
        hops += [Op("ALL_REDUCE", unit, ("inter",), "fp32", "grads"), Op("WAIT", unit, target="grads")]
    for in_flight in (0, 1, 2, 3):
        moved = [(op.verb, op.unit) for op in delay_waits(tuple(hops), in_flight)]
        assert sorted(moved) == sorted((op.verb, op.unit) for op in hops)
        for unit in "ab":
            first, second = moved.index(("REDUCE_SCATTER", unit)), moved.index(("ALL_REDUCE", unit))
            assert first < moved.index(("WAIT", unit)) < second


def test_signs_of_neighbouring_units_travel_as_one() -> None:
    """As many as a bundle has room for on a rank, in definition order; what is frozen has no momentum, and what is
    larger than a bundle travels alone. Each bundle is one collective, of the bytes of all its units."""
    mesh = Mesh([Axis("inter", 2), Axis("intra", 2)], "inter", meets=True)
    lengths = {"a": 2048, "b": 2048, "c": 4096, "d": 4 * BUNDLE, "e": 2048, "f": 2 * BUNDLE - 2048, "g": 2048}
    units = [  # of two segments each, which are no more collectives than one
        UnitSpec(name, (SegmentSpec((), length // 2, "fp32", name != "b"),) * 2) for name, length in lengths.items()
    ]
    bound = zero1.with_outer(Signs()).bind(Precision(), mesh)
    program = lower(bound, units, mesh, meets="signs")
    assert parse(str(program)) == program
    kinds = ("BLEND", "PUSH", "SERVE", "PULL", "WAIT")
    step = [str(op) for op in program.step if op.verb in kinds and "params" not in str(op)]
    sent = ["a..c", "d", "e..f", "g"]
    in_each = [["a", "c"], ["d"], ["e", "f"], ["g"]]
    expected: list[str] = []
    for verb, before, format in (("PUSH", "BLEND", "sign/1024:error"), ("PULL", "SERVE", "sign/1024")):
        for names, units_of in zip(sent, in_each, strict=True):
            expected += [*(f"{before} {name}" for name in units_of), f"{verb} {names} [inter] {format}"]
        expected += [f"WAIT {names} outer" for names in sent]
    assert step == expected
    by_name = {unit.name: unit for unit in units}
    assert [unit.name for unit in Op("PUSH", "a..c").among(by_name)] == ["a", "b", "c"]
    counted = traffic(program, bound, units, mesh)
    one_way = FORMATS["sign/1024"].nbytes(sum(lengths.values()) - lengths["b"]) / 2 / 2
    for verb in ("PUSH", "PULL"):
        assert counted[Sent("outer", verb, ("inter",))] == (4, one_way)
