"""The choice of wires by figures of links: what it may take, what it takes, and that its seconds are the program's."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError
from shardfold.plan.auto_wire import (
    MARGIN,
    PURPOSES,
    WORKING,
    AutoWire,
    LinkFigure,
    Measured,
    WireOption,
    fastest,
    lost,
    wire_seconds,
    wires,
)
from shardfold.plan.axes import Mesh
from shardfold.plan.bind import Bound, bind
from shardfold.plan.cost import Codec, step_of, traffic
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.presets import named

POLICY, NUMEL = sf.Precision(), 2**16
UNITS = [UnitSpec(name, (SegmentSpec((Slot("w", (NUMEL,), 0),), NUMEL, "fp32"),)) for name in ("first", "second")]
TABLES = ("zero1", "zero2", "zero3", "fsdp2", "hpz", "zeropp")
LOSSES = st.sampled_from([(), 0.001, 0.002, 0.01, 0.2, ("int8",), ("int4+error", "fp8")])


class Figures(dict[Any, Any]):
    """The same of every kind over some axes."""

    def __missing__(self, key: tuple[str, tuple[str, ...]]) -> LinkFigure:
        return self["far" if "inter" in key[1] else "near"]


class Codecs(dict[str, Codec]):
    """The same of every format but those that are given."""

    def get(self, key: str, default: Any = None) -> Any:
        return self[key]

    def __missing__(self, key: str) -> Codec:
        return self["all"]


def _measured(
    far: float, near: float = 1e12, latency: float = 0.0, coded: float = 0.0, call: float = 0.0, **others: Codec
) -> Measured:
    links = Figures(far=LinkFigure(far, latency), near=LinkFigure(near, latency))
    return Measured(links, Codecs(all=Codec(coded, coded, coded, call), **others))


@cache
def _ways(table: str, purpose: str, auto: AutoWire, mesh: tuple[int, int]) -> list[tuple[WireOption, Bound]]:
    """Those that can be bound, with what they give."""
    found: list[tuple[WireOption, Bound]] = []
    for way in wires(named(table), purpose, auto):
        with suppress(LayoutError):
            sizes = Mesh.of(dict(zip(("inter", "intra"), mesh, strict=True)))
            layout = named(table).replace(**{purpose: way.wire}).bind(POLICY, sizes)
            found.append((way, bind(layout, UNITS, sizes)))
    return found


def _priced(table: str, purpose: str, auto: AutoWire, mesh: Mesh, measured: Measured) -> list[WireOption]:
    found: list[WireOption] = []
    for way, bound in _ways(table, purpose, auto, (mesh["inter"], mesh["intra"])):
        seconds, sent, working = wire_seconds(purpose, bound, step_of(2, bound.program), measured)
        found.append(way._replace(seconds=seconds, sent=sent, working=working))
    return found


def _taken(*args: Any) -> WireOption:
    return fastest(_priced(*args))


MESHES = st.sampled_from([{"inter": 2, "intra": 2}, {"inter": 4, "intra": 8}, {"inter": 1, "intra": 4}]).map(Mesh.of)
RATES = st.floats(1e6, 1e11)


@given(
    st.sampled_from(TABLES), st.sampled_from(list(PURPOSES)), LOSSES, MESHES, RATES, RATES,
    st.floats(0, 1e-2), st.floats(0, 1e-8),
)  # fmt: skip
def test_nothing_is_lost_that_is_not_allowed_and_nothing_is_slower_than_the_plain_wire(
    table: str, purpose: str, lossy: Any, mesh: Mesh, far: float, near: float, latency: float, coded: float
) -> None:
    auto, measured = AutoWire(lossy=lossy), _measured(far, near, latency, coded)
    options = _priced(table, purpose, auto, mesh, measured)
    taken = fastest(options)
    assert options[0].wire.format == PURPOSES[purpose] and options[0].wire.hops == 1
    own = getattr(named(table), purpose).format
    assert taken.wire.format in {PURPOSES[purpose], own, *auto.allowed}
    if isinstance(lossy, float) and taken.wire.format != own:
        assert taken.loses <= lossy
    assert taken == options[0] or taken.seconds < options[0].seconds * (1 - MARGIN)
    assert taken == _taken(table, purpose, auto, mesh, measured)
    exact = [option.seconds for option in options if not option.loses]
    assert not taken.loses or taken.seconds < min(exact)


@given(st.sampled_from(TABLES), st.sampled_from(list(PURPOSES)), LOSSES, st.floats(1e-9, 1e-8), st.floats(0, 1e-3))
def test_the_slower_a_link_the_less_is_sent_over_it(
    table: str, purpose: str, lossy: Any, coded: float, latency: float
) -> None:
    """And at both ends: a link that takes no time is left plain, one that takes all of it has the fewest bytes."""
    mesh, auto = Mesh.of({"inter": 1, "intra": 4}), AutoWire(lossy=lossy)
    rates = [10.0**power for power in range(15, 0, -1)]
    taken = [_taken(table, purpose, auto, mesh, _measured(rate, rate, latency, coded)) for rate in rates]
    sent = [option.sent for option in taken]
    assert sent == sorted(sent, reverse=True)
    assert taken[0].wire.format in (
        PURPOSES[purpose],
        "bf16",
    )  # in which gradients may wait, so that nothing is encoded
    options = _priced(table, purpose, auto, mesh, _measured(10.0, 10.0, latency, coded))
    least = min(option.sent for option in options)
    assert sent[-1] == (least if least < options[0].sent * (1 - MARGIN) else options[0].sent)


@given(st.sampled_from(TABLES), LOSSES, RATES, st.floats(0, 1e-2), st.floats(1e-3, 1e3))
def test_the_choice_is_of_ratios_only(table: str, lossy: Any, far: float, latency: float, unit: float) -> None:
    mesh, auto = Mesh.of({"inter": 2, "intra": 2}), AutoWire(lossy=lossy)
    one = _priced(table, "reduce", auto, mesh, _measured(far, 1e10, latency, 1e-9))
    other = _priced(table, "reduce", auto, mesh, _measured(far / unit, 1e10 / unit, latency * unit, 1e-9 * unit))
    for a, b in zip(one, other, strict=True):
        assert b.seconds == pytest.approx(a.seconds * unit, rel=1e-9)


@given(st.sampled_from(TABLES), st.sampled_from(list(PURPOSES)), MESHES, st.integers(1, 3))
def test_what_is_priced_is_what_the_program_sends(table: str, purpose: str, mesh: Mesh, micro_batches: int) -> None:
    bound = bind(named(table).bind(POLICY, mesh), UNITS, mesh)
    times, unit = step_of(micro_batches, bound.program), _measured(1.0, 1.0)
    seconds, sent, _ = wire_seconds(purpose, bound, times, unit)
    by_kind = traffic(bound.program, bound.layout, UNITS, mesh, micro_batches=micro_batches)
    rows = [figures for kind, figures in by_kind.items() if kind.purpose == purpose]
    assert seconds == pytest.approx(sent) and sent == pytest.approx(sum(n for _, n in rows))
    late, *_ = wire_seconds(purpose, bound, times, _measured(1.0, 1.0, latency=1e6))
    assert late - seconds == pytest.approx(1e6 * sum(calls for calls, _ in rows))


def test_two_hops_pay_where_the_far_link_is_slow_and_not_where_both_are_alike() -> None:
    """Nothing is lost: between nodes each element goes once and not once per rank of a node, within them once more."""
    mesh, auto = Mesh.of({"inter": 2, "intra": 8}), AutoWire()
    for purpose in PURPOSES:
        assert _taken("zero3", purpose, auto, mesh, _measured(1e7, 1e10)).wire.hops == 2
        assert _taken("zero3", purpose, auto, mesh, _measured(1e10, 1e10, coded=1e-9)).wire.hops == 1


def test_encoding_that_takes_longer_than_it_saves_is_not_taken() -> None:
    """Of 4 bytes for an element int8 leaves 1.016: at 1e9 bytes/s that saves 2.2 ns of 3 an element that is gathered
    by 4 ranks, so codecs of 1 ns are taken, and those of 4 ns not."""
    mesh, auto = Mesh.of({"inter": 1, "intra": 4}), AutoWire(lossy=("int8",))
    for coded, name in ((1e-9, "int8/256"), (4e-9, "compute")):
        assert _taken("zero3", "gather", auto, mesh, _measured(1e9, 1e9, coded=coded)).wire.format == name


def test_gradients_that_become_narrower_where_they_wait_cost_what_that_takes() -> None:
    """They are sent as they lie then, and are rounded nonetheless: of 4 bytes for an element bf16 leaves 2, which at
    1e9 bytes/s and 4 ranks saves 1.5 ns."""
    mesh, auto = Mesh.of({"inter": 1, "intra": 4}), AutoWire(lossy=("bf16",))
    for coded, name in ((0.1e-9, "bf16"), (1.5e-9, "reduce")):
        assert _taken("zero3", "reduce", auto, mesh, _measured(1e9, 1e9, coded=coded)).wire.format == name


def test_sums_are_as_slow_as_their_dtype_and_links_are_not() -> None:
    """A link that sums bf16 slowly does not show where fp32 is summed."""
    mesh, auto = Mesh.of({"inter": 1, "intra": 4}), AutoWire(lossy=("bf16",))
    for kind, name in (("REDUCE_SCATTER:bf16", "reduce"), ("REDUCE_SCATTER", "bf16")):
        measured = _measured(1e9, 1e9)
        measured.links[kind, ("inter", "intra")] = measured.links[kind, ("intra",)] = LinkFigure(1e8, 0.0)
        assert _taken("zero3", "reduce", auto, mesh, measured).wire.format == name


def test_calls_of_a_format_count_however_few_elements_they_have() -> None:
    """A reduction over N ranks decodes N payloads; a gather encodes once and decodes once."""
    mesh, auto, purposes = Mesh.of({"inter": 1, "intra": 4}), AutoWire(lossy=("int8",)), {"gather": 1, "reduce": 4}
    for purpose, calls in purposes.items():
        free, priced = (
            {o.wire.format: o.seconds for o in _priced("zero3", purpose, auto, mesh, _measured(1e9, 1e9, call=call))}
            for call in (0.0, 1.0)
        )
        collectives = {"gather": 2 * 2 * 2, "reduce": 2 * 2}[purpose]  # of two units and micro-batches; two passes
        assert priced["int8/256"] - free["int8/256"] == pytest.approx(calls * collectives)
        assert priced[PURPOSES[purpose]] == free[PURPOSES[purpose]]


@given(st.sampled_from(TABLES), st.sampled_from(list(PURPOSES)), RATES, st.floats(0, 1e-9), st.floats(0, 1))
def test_nothing_is_rounded_where_processors_are_what_sending_waits_for(
    table: str, purpose: str, rate: float, coded: float, working: float
) -> None:
    """As on one machine, however little a format takes: to hide what is sent is worth more there."""
    measured, auto = _measured(rate, rate, coded=coded), AutoWire(lossy=0.2)
    measured.links.update({name: LinkFigure(rate, 0.0, working) for name in ("far", "near")})
    options = _priced(table, purpose, auto, Mesh.of({"inter": 2, "intra": 2}), measured)
    plain = options[0]
    assert plain.working == pytest.approx(working * plain.seconds)
    if working > WORKING:
        assert not fastest(options).loses
    elif working < 0.4 and rate < 1e7:
        least = min(option.sent for option in options)
        assert fastest(options).loses or plain.sent * (1 - MARGIN) <= least


def test_formats_lose_what_the_page_says() -> None:
    for name, part in (("bf16", 0.0017), ("int8/256", 0.0070), ("fp8/256", 0.026), ("int4/256", 0.126)):
        assert lost(name) == pytest.approx(part, rel=0.05), name
    assert lost("fp32") == 0 and lost("int8/64") < lost("int8/256") < lost("int8/4096")
    assert AutoWire(lossy=0.01).allowed == ("bf16", "int8/256")
    assert AutoWire(lossy=0.001).allowed == () and AutoWire(lossy=0.9).allowed == ("bf16", "int8/256", "int4/256")


def test_names_have_values_and_what_is_none_a_sentence() -> None:
    assert AutoWire.named(None) is None
    for text, value in (("auto", AutoWire()), ("auto:0.01", AutoWire(lossy=0.01)),
                        ("auto:int8,int4+error", AutoWire(lossy=("int8", "int4+error")))):  # fmt: skip
        assert AutoWire.named(text) == value
        assert AutoWire.named(str(value)) == value
    for text, words in (
        ("fast", "wire='fast': it is 'auto'"),
        ("auto:", "wire='auto:'"),
        (3, "wire=3: it is"),
        ("auto:2", "lossy is 2.0: .*below 1"),
        ("auto:nan", "lossy is nan"),
    ):
        with pytest.raises(ConfigError, match=words):
            AutoWire.named(text)
    for lossy, words in (
        (-1, "AutoWire.lossy is -1"), (0, "lossy is 0: .*above 0 and below 1"), (1, "lossy is 1"),
        (2.0, "lossy is 2.0"), (float("nan"), "lossy is nan"), ("int8", "give a tuple"), ((3,), "AutoWire.lossy has 3"),
        (("int8x2",), "AutoWire.lossy has 'int8x2': how many hops .*'int8' without x2"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            AutoWire(lossy=lossy)  # pyright: ignore
    with pytest.raises(LayoutError, match="Did you mean"):
        AutoWire(lossy=("int9",))
    signs = AutoWire(lossy=("sign",))
    assert {option.wire.format for option in wires(named("zero3"), "gather", signs)} == {"compute"}
    assert "sign/256" in {option.wire.format for option in wires(named("zero3"), "reduce", signs)}
