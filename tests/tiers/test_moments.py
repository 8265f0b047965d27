"""States in slower tiers: one protocol for memory of every kind, and training that is the same to the bit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, ShardfoldError
from shardfold.plan.bind import bind
from shardfold.plan.cost import Moved, moves, resting_bytes, state_bytes, step_of, tier_bytes
from shardfold.plan.layout import PRECISIONS, Layout, Tier
from shardfold.plan.lifetimes import ALONE, Lifetimes
from shardfold.plan.program import Op, Program, lower, parse
from shardfold.plan.rewrites import AHEAD, Overlap, apply, prefetch
from shardfold.testing import Ranks
from shardfold.tiers import disk as disks
from shardfold.tiers.device import DeviceTier
from shardfold.tiers.disk import DiskRegion, DiskTier
from shardfold.tiers.tier import Region
from shardfold.tiers.tiers import Tiers
from tests.support import models
from tests.support.options import grouped

NAMES = ("device", "host", "disk")
SLOWER = NAMES[1:]
CPU = torch.device("cpu")
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


def in_tier(layout: str, tier: str) -> Layout:
    return sf.PRESETS[layout].edit("moments", tier=Tier(tier))


# -- the protocol


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    made = Tiers(DeviceTier(CPU))
    yield made
    made.close()


def numbers(start: float, size: int = 5000, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(size, dtype=dtype) + start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_comes_back(tiers: Tiers, name: str, dtype: torch.dtype) -> None:
    """In every tier: as often as it is asked for, into memory that is given, in parts, and each value after the last
    one that was stored, whatever was fetched before."""
    region = tiers.named(name).allocate((50, 100), dtype)
    assert (region.tier, region.nbytes, region.dtype) == (name, 5000 * dtype.itemsize, dtype)
    for start in (0.0, 7.0):
        values = numbers(start, dtype=dtype).view(50, 100)
        region.store(values.clone())
        assert torch.equal(region.get(), values) and torch.equal(region.get(), values)
        into = torch.full((50, 100), -1.0, dtype=dtype)
        region.fetch(into)
        got = region.get()
        assert got.data_ptr() == into.data_ptr() and torch.equal(into, values)
        assert torch.equal(region.values(), values.view(-1))
        assert torch.equal(region.values(slice(17, 130)), values.view(-1)[17:130])
        assert region.values(slice(30, 30)).numel() == 0
    region.fetch(torch.empty(50, 100, dtype=dtype))
    region.store(numbers(9.0, dtype=dtype))
    assert torch.equal(region.get().view(-1), numbers(9.0, dtype=dtype)), "what was fetched before is not what there is"


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_range_is_written_and_the_rest_stays(name: str, stored: bool) -> None:
    """In every tier, also over the edges of chunks, of zeros that nothing was stored over, and in another dtype; what
    was fetched before is not what there is."""
    tiers = Tiers(DeviceTier(CPU))
    tier = DiskTier(CPU, chunk=4096) if name == "disk" else tiers.named(name)
    region = tier.allocate((5000,), torch.float32, zero=True)
    expected = numbers(1.0) if stored else torch.zeros(5000)
    if stored:
        region.store(numbers(1.0))
    for start, stop in ((3, 4), (1000, 3100), (4990, 5000), (0, 5000), (1024, 2048)):
        region.fetch(torch.empty(5000))
        values = numbers(7.0 * stop, stop - start, torch.float64)
        region.write(start, values)
        expected[start:stop] = values
        assert torch.equal(region.values(), expected), (start, stop)
    assert torch.equal(region.get(), expected)
    region.drop()
    tier.close()
    tiers.close()


@pytest.mark.parametrize("name", NAMES)
def test_values_that_are_given_may_go_at_once(tiers: Tiers, name: str) -> None:
    """A region has its own copy, unless it is given its own memory."""
    region = tiers.named(name).allocate((5000,), torch.float32)
    values = numbers(1.0)
    region.store(values)
    region.get()
    values.zero_()
    assert torch.equal(region.get(), numbers(1.0))
    whole = region.values()
    whole[:3] = 5.0
    region.store(whole)
    assert region.values(slice(0, 4)).tolist() == [5.0, 5.0, 5.0, 4.0]


@pytest.mark.parametrize("name", NAMES)
def test_room_is_used_again_and_zeros_are_zeros(tiers: Tiers, name: str) -> None:
    """A region that is dropped leaves its room, in which another's values are not seen."""
    tier = tiers.named(name)
    first = tier.allocate((5000,), torch.float32)
    first.store(numbers(1.0))
    if isinstance(first, DiskRegion):
        first.flush()
    first.drop()
    first.drop()
    assert first.nbytes == 0
    second = tier.allocate((5000,), torch.float32, zero=True)
    assert not second.get().any() and not second.values().any()
    if isinstance(tier, DiskTier):
        assert tier.drives[0].size == 5000 * 4 + (-5000 * 4) % 4096, "the second took the first's place in the file"


def disk(tiers: Tiers) -> tuple[DiskTier, DiskRegion]:
    tier = tiers.named("disk")
    assert isinstance(tier, DiskTier)
    return tier, tier.allocate((5000,), torch.float32)


@pytest.fixture
def gate(tiers: Tiers) -> Iterator[Event]:
    """Behind which the disk's threads may be held; open when the tiers are closed, also by a test that failed."""
    made = Event()
    yield made
    made.set()


def held(threads: ThreadPoolExecutor, gate: Event) -> None:
    """All threads of that kind are behind the gate, and what they are given next as well."""
    for _ in range(threads._max_workers):
        threads.submit(gate.wait)


def test_what_is_not_written_yet_comes_from_memory(tiers: Tiers, gate: Event) -> None:
    """Values that wait for the disk are given from where they wait, as often as they are asked for, and into the memory
    that is given; the file is written with the next ones."""
    tier, region = disk(tiers)
    held(tier.drives[0].writers, gate)
    region.store(numbers(1.0))
    into = torch.zeros(5000)
    region.fetch(into)
    assert torch.equal(region.get(), numbers(1.0)) and torch.equal(into, numbers(1.0))
    assert torch.equal(region.get(), numbers(1.0)) and torch.equal(region.values(slice(3)), numbers(1.0)[:3])
    gate.set()
    region.store(numbers(2.0))
    region.flush()
    assert torch.equal(region.get(), numbers(2.0))


def test_values_on_their_way_are_waited_for(tiers: Tiers, gate: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fetch`` gives nothing but the beginning: ``get`` returns when the values are there."""

    def waits(futures: Any) -> None:
        gate.set()
        wait(futures)

    tier, region = disk(tiers)
    region.store(numbers(1.0))
    region.flush()
    held(tier.drives[0].readers, gate)
    into = torch.zeros(5000)
    region.fetch(into)
    assert not into.any(), "the threads are busy with something else"
    with monkeypatch.context() as patched:
        patched.setattr(disks, "wait", waits)  # they go on when somebody waits for them, and not before
        assert torch.equal(region.get(), numbers(1.0)) and torch.equal(into, numbers(1.0))
    gate.clear()
    held(tier.drives[0].readers, gate)
    region.fetch(into)
    into.zero_()
    region.store(numbers(2.0))  # takes back what was asked for
    gate.set()
    assert torch.equal(region.get(), numbers(2.0))
    assert not into.any(), "it is another's since the store"


def test_a_disk_that_is_full_is_said(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stores next hears how much could not be written, where and why. Nothing is lost: the values are given
    from memory, and written again with the next ones, of which each store is waited for until one succeeds."""

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "")

    tier, region = disk(tiers)
    other = tier.allocate((10,), torch.float32)
    said = r"20,000 bytes of values could not be written to a file in .* \(at byte 0\): No space left on device"
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        region.store(numbers(1.0))
        with pytest.raises(OSError, match=said):
            region.flush()
        with pytest.raises(OSError, match=said) as error:
            other.store(numbers(5.0, 10))
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match=said):
            region.store(numbers(2.0))  # its own write
        into = torch.zeros(5000)
        region.fetch(into)
        assert torch.equal(region.get(), numbers(2.0)) and torch.equal(into, numbers(2.0))
        assert torch.equal(region.values(slice(3, 9)), numbers(2.0)[3:9]) and torch.equal(other.get(), numbers(5.0, 10))
    region.store(numbers(3.0))
    region.flush()
    before = tier.bytes_read
    assert torch.equal(region.get(), numbers(3.0)) and tier.bytes_read > before, "from the file"
    before = tier.bytes_read
    assert torch.equal(other.get(), numbers(5.0, 10)) and tier.bytes_read == before, "still in memory"


def test_values_asked_for_before_their_write_fails(tiers: Tiers, gate: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come from memory too, whole and in part."""
    begun = Event()

    def full(*_: Any) -> int:
        begun.set()
        gate.wait()
        raise OSError(errno.ENOSPC, "")

    _, region = disk(tiers)
    monkeypatch.setattr(os, "pwrite", full)
    region.store(numbers(1.0))
    begun.wait()
    into = torch.zeros(5000)
    region.fetch(into)
    gate.set()
    assert torch.equal(region.get(), numbers(1.0)) and torch.equal(into, numbers(1.0))
    assert torch.equal(region.values(slice(4)), numbers(1.0)[:4])


def test_a_file_that_lost_its_end_is_said(tiers: Tiers) -> None:
    """What cannot be read raises how much, where and why; values that are stored then can be read."""
    tier, region = disk(tiers)
    region.store(numbers(1.0))
    region.flush()
    os.truncate(tier.drives[0].fileno(), 100)
    for ask in (region.get, region.values):
        with pytest.raises(
            OSError, match=r"20,000 bytes .* read from a file in .*: the file has lost its end"
        ) as error:
            ask()
        assert error.value.errno == errno.ENODATA
    region.store(numbers(2.0))
    region.flush()
    assert torch.equal(region.get(), numbers(2.0))


def test_a_region_that_nobody_keeps_leaves_its_place(tiers: Tiers) -> None:
    """As one that is dropped."""
    tier, region = disk(tiers)
    region.store(numbers(1.0))
    region.flush()
    del region
    assert tier.allocate((5000,), torch.float32).nbytes == tier.drives[0].size - 480, "in the same place"


# -- programs


def specs() -> list[Any]:
    from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec

    def unit(name: str, numel: int, root: bool = False) -> UnitSpec:
        return UnitSpec(name, (SegmentSpec((Slot("w", (numel,), 0),), numel, "bf16"),), root)

    return [unit("(root)", 8, True), unit("a", 800), unit("b", 80)]


MESH = {"inter": 1, "intra": 2}


def program(layout: Layout, ahead: int) -> Program:
    return apply(lower(layout, specs(), MESH, clip=True), Overlap(prefetch=ahead))


def test_the_program_says_what_moves_between_tiers() -> None:
    """A unit's moments are fetched before its update, at most one unit ahead, and stored behind it; the text of the
    program has them, and reads back."""
    layout = in_tier("zero2", "host").bind(PRECISIONS["bf16"], MESH)
    made = program(layout, 1)
    assert parse(str(made)) == made
    assert [str(op) for op in made.step] == [
        "NORM",
        "STEP",
        "FETCH (root) moments @host",
        "FETCH a moments @host",
        "UPDATE (root)",
        "STORE (root) moments @host",
        "ALL_GATHER (root) master -> params [intra] bf16",
        "FETCH b moments @host",
        "UPDATE a",
        "STORE a moments @host",
        "ALL_GATHER a master -> params [intra] bf16",
        "UPDATE b",
        "STORE b moments @host",
        "ALL_GATHER b master -> params [intra] bf16",
        "WAIT (root) params",
        "WAIT a params",
        "WAIT b params",
    ]  # fmt: skip
    plain = program(layout.edit("moments", tier=Tier.DEVICE), 1)
    assert [op for op in made.step if op.verb not in ("FETCH", "STORE")] == list(plain.step)
    apart = [str(op) for op in program(layout, 0).step]
    assert apart.index("STORE a moments @host") < apart.index("FETCH b moments @host")


def test_bytes_are_counted_by_tier() -> None:
    """What rests, what a step moves, and what is on the device at once, as sums over the table and the program."""
    units = specs()
    near, far = (in_tier("zero2", tier).bind(PRECISIONS["bf16"], MESH) for tier in ("device", "host"))
    held = state_bytes(far, units, MESH, padded=True)
    assert held == state_bytes(near, units, MESH, padded=True)
    assert tier_bytes(resting_bytes(near, units, MESH, padded=True)) == {Tier.DEVICE: sum(held.values())}
    assert tier_bytes(resting_bytes(far, units, MESH, padded=True)) == {
        Tier.DEVICE: sum(held.values()) - 888 * 8 / 2,
        Tier.HOST: 888 * 8 / 2,
    }
    assert moves(program(near, 1), near, units, MESH, step_of(1, program(near, 1))) == {}
    each = (3, 888 * 8 / 2)
    assert moves(program(far, 1), far, units, MESH, step_of(1, program(far, 1))) == {
        Moved("host", "FETCH"): each,
        Moved("host", "STORE"): each,
    }
    lifetimes, besides = Lifetimes(bind(far, units, MESH, overlap=Overlap(prefetch=1)), ALONE), list[float]()
    for op in program(far, 1).step:
        lifetimes.begin(op)
        besides.append(lifetimes.terms.get("moments on their way", 0.0))
        lifetimes.end(op)
    assert max(besides) == (888 - 8) * 8 / 2, "the two largest units' moments"
    assert besides[-1] == 0


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_small_units_are_fetched_further_ahead_from_a_disk(ahead: int) -> None:
    """At least as many units as are asked for, and more while those ahead of the one that is updated have at most the
    bytes that are allowed, and no further; from the host as many as are asked for; always in the order of the units."""
    draw = Random(ahead)
    sizes = {f"u{i}": draw.choice((1, AHEAD // 7, AHEAD // 2, AHEAD, 3 * AHEAD)) for i in range(40)}
    for tier in ("disk", "host"):
        ops = tuple(Op(verb, name, source="moments", tier=tier) for name in sizes for verb in ("FETCH", "UPDATE"))
        moved = prefetch(ops, ahead, ("FETCH",), ("UPDATE",), lambda op: sizes[op.unit])
        assert sorted(map(str, moved)) == sorted(map(str, ops))
        assert [op.unit for op in moved if op.verb == "FETCH"] == list(sizes), "in order"
        names = list(sizes)
        for i, name in enumerate(names):
            at = next(n for n, op in enumerate(moved) if op.verb == "UPDATE" and op.unit == name)
            there = [op.unit for op in moved[:at] if op.verb == "FETCH"][i + 1 :]
            most = names[i + 1 : i + 1 + ahead]
            if tier == "disk" and ahead:
                while sum(sizes[n] for n in names[i + 1 : i + 2 + len(most)]) <= AHEAD and names[i + 1 + len(most) :]:
                    most = names[i + 1 : i + 2 + len(most)]
            assert there == most, f"{tier}: beside the update of {name}"


# -- training


class Branching(models.Small):
    """With a block that some steps leave out, so that not all parameters have the same count of updates."""

    def __init__(self) -> None:
        super().__init__(layers=3, tied=True)
        self.calls = 0

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks[2].parameters():
            block.requires_grad_(self.calls % 3 != 0)
        return super().forward(tokens, targets)


def make(layout: str | Layout, *, build: Any = models.Small, optimizer: Any = ADAMW, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(build(), optimizer=optimizer, **grouped(layout=layout, **options))


def train(engine: sf.Engine, steps: int, first: int = 0) -> list[float]:
    losses: list[float] = []
    accumulate = engine.accumulate
    for tokens, targets in models.batches(first + steps)[first:]:
        for micro in range(accumulate):
            part = engine.rank + micro * engine.world_size
            rows = [t.chunk(engine.world_size * accumulate)[part] for t in (tokens, targets)]
            loss = engine(*rows)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def everything(engine: sf.Engine) -> dict[str, Tensor]:
    """All values and all moments, whole."""
    found = dict(engine.state_dict())
    names = engine._updater.state_dtypes() if engine._updater is not None else ()
    for state in names:
        with engine.gathered(of=state) as values:
            found |= {f"{state} of {name}": value.clone() for name, value in values.items() if value is not None}
    return found


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if not torch.equal(a[name], b[name])]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("ddp", {}),
    ("zero1", {"clip_norm": 0.05}),
    ("zero2", {"precision": "bf16"}),
    ("zero3", {"clip_norm": 0.05, "accumulate": 2, "build": Branching}),
    ("zero3", {"precision": "fp16", "loss_scale": 4.0}),
    ("fsdp2", {"precision": "bf16", "clip_norm": 0.05}),
    ("zero2", {"precision": "bf16", "optimizer": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True)}),
    ("zero2", {"precision": sf.Precision(compute="bf16", grads="bf16", reduce="bf16", master="bf16", moments="bf16",
                                         rounding="stochastic")}),
]  # fmt: skip


def _equal(cases: Sequence[tuple[str, dict[str, Any]]], slower: Sequence[str]) -> list[list[tuple[str, str, int]]]:
    rows: list[list[tuple[str, str, int]]] = []
    for layout, options in cases:
        near = make(layout, **options)
        losses, values = train(near, 4), everything(near)
        held = {row.state: row for row in near.memory().rows}
        near.close()
        for tier in slower:
            far = make(in_tier(layout, tier), **options)
            assert train(far, 4) == losses
            assert_same(everything(far), values)
            memory, traffic = far.memory(), far.traffic()
            assert [row._replace(tier="device") for row in memory.rows] == list(held.values())
            assert [(row.state, row.tier) for row in memory.rows if row.tier != "device"] == [("moments", tier)]
            assert memory.tiers[tier] == held["moments"].held and memory.transient == 0
            assert [row[:2] for row in traffic.moved] == [(tier, "FETCH"), (tier, "STORE")]
            for row in traffic.moved:
                assert row.moved == row.program == held["moments"].held and row.calls == len(far.units)
            text = far.explain()
            assert f"({tier})" in text and f"STORE (root) moments @{tier}" in text
            rows.append([(row.state, row.tier, row.held) for row in memory.rows])
            far.close()
    return rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2])
def test_training_is_the_same_wherever_moments_rest(ranks: Ranks, world: int) -> None:
    """Losses, values and moments equal to the bit, under all kinds of layouts, with clipping, accumulation, loss
    scales, rounding, unused parameters; bytes are those of the table and of the program, under the tier's name."""
    for rows in ranks.run(_equal, CASES, SLOWER, world_size=world):
        assert len(rows) == len(CASES) * len(SLOWER)


class Frozen(models.Small):
    """Its first block is never trained, its last in every second forward."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.blocks[0].requires_grad_(False)
        self.calls = 0

    def features(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.blocks[1](self.blocks[0](self.embedding(tokens)))
        return self.norm(x if self.calls % 2 == 0 else self.blocks[2](x))


def _still(tier: str) -> list[dict[str, Any]]:
    near, far = make("zero2", build=Frozen), make(in_tier("zero2", tier), build=Frozen)
    trainable = [unit.name for unit in far.units if unit.trainable]
    found: list[dict[str, Any]] = []
    for number in range(3):
        assert train(near, 1, first=number) == train(far, 1, first=number)
        rows = far.traffic().moved
        found.append({
            "program": [(op.verb, op.unit) for op in far.program.step if op.verb in ("FETCH", "STORE")],
            "trainable": trainable,
            "calls": [row.calls for row in rows],
            "moved": [row.moved for row in rows],
            "predicted": [row.program for row in rows],
            "bytes": sum(shard.nbytes for unit in far.units if unit.name != "blocks.2" for segment in unit.trainable
                         for shard in [far._updater._fused[id(segment)]]),  # type: ignore[union-attr]
        })  # fmt: skip
    assert_same(everything(far), everything(near))
    near.close()
    far.close()
    return found


@pytest.mark.parametrize("tier", SLOWER)
def test_moments_of_what_is_not_updated_do_not_move(ranks: Ranks, tier: str) -> None:
    """A unit that has nothing to train has no moments and no operation; one that no rank used in a step is not fetched
    in it, and what is predicted for that step is what moved."""
    for first, second, third in ranks.run(_still, tier, world_size=2):
        for each in (first, second, third):
            assert "blocks.0" not in each["trainable"] and "blocks.2" in each["trainable"]
            assert sorted(each["program"]) == sorted(
                (verb, name) for name in each["trainable"] for verb in ("FETCH", "STORE")
            )
            assert each["moved"] == each["predicted"] and len(each["moved"]) == 2
        assert first["calls"] == third["calls"] == [len(first["trainable"])] * 2
        assert second["calls"] == [len(first["trainable"]) - 1] * 2
        assert second["moved"] == [second["bytes"]] * 2 and first["moved"][0] > second["moved"][0]


def _saved(path: str) -> None:
    near = make("zero2")
    train(near, 3)
    near.save(f"{path}/near", wait=True)
    far = {tier: make(in_tier("zero3", tier)) for tier in SLOWER}
    for tier, engine in far.items():
        engine.load(f"{path}/near")
        assert_same(everything(engine), everything(near))
        train(engine, 2, first=3)
        engine.save(f"{path}/{tier}", wait=True)
    train(near, 2, first=3)
    for tier, engine in far.items():
        assert_same(everything(engine), everything(near))
        for layout in ("zero1", in_tier("fsdp2", "host"), in_tier("ddp", "disk")):
            other = make(layout)
            train(other, 1)  # with moments that must not stay
            other.load(f"{path}/{tier}")
            assert_same(everything(other), everything(near))
            other.close()
        engine.close()
    near.close()


@pytest.mark.soak
def test_any_tier_loads_any_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """Saved from device, host or disk, loaded into another tier and another layout: the same to the bit, and so is
    what is trained from there."""
    ranks.run(_saved, str(tmp_path), world_size=2)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24), nn.Linear(24, 24)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _changed(tier: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    engine = sf.Engine(Growing(), optimizer=ADAMW, layout=in_tier("zero3", tier))
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    step()
    layers: Any = engine.module.layers
    layers.append(nn.Linear(24, 24))
    step()
    del layers[0]
    with engine.gathered(of="exp_avg", write=True) as values:
        for value in values.values():
            if value is not None:
                value.mul_(0.5)
    step()
    found = everything(engine)
    engine.close()
    return found


@pytest.mark.soak
def test_a_model_that_changes_keeps_its_moments_in_their_tier(ranks: Ranks) -> None:
    """Layers come and go, and moments are written by hand, as where all rests on the device."""
    near, *far = (ranks.run(_changed, tier, world_size=2)[0] for tier in NAMES)
    for found in far:
        assert_same(found, near)


def test_memory_of_an_update_is_given_back(tiers: Tiers) -> None:
    """Between steps nothing of the moments is on the device, in a pool neither."""
    engine = make(in_tier("zero2", "host"))
    train(engine, 2)
    assert not engine.sharded.comm.memory._spare
    assert all(not shard.here for shard in engine._updater._fused.values())  # type: ignore[union-attr]
    engine.close()


# -- what is refused


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.RMSprop,
        partial(sf.optim.Lion, lr=1e-3),
        partial(sf.optim.AdamW8bit, lr=1e-3),
    ],
)
def test_an_optimizer_with_a_state_of_its_own_is_refused(optimizer: Any) -> None:
    """Its state would stay on the device."""
    with pytest.raises(ShardfoldError) as error:
        make(in_tier("zero2", "host"), optimizer=optimizer)
    name = getattr(optimizer, "func", optimizer).__name__
    assert str(error.value) == (
        f"moments rest in the host tier, which works for AdamW, Adam and SGD, but {name} has an update and a state of "
        "its own: take one of these, or choose the device tier."
    )


def _groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "amsgrad": True}, {"params": others}])


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (
            partial(torch.optim.AdamW, differentiable=True),
            "AdamW(differentiable=True) is updated by torch: leave differentiable out",
        ),
        (
            partial(torch.optim.Adam, lr=torch.tensor(0.1), capturable=True),
            "Adam with a tensor as lr is updated by torch: give lr as a number",
        ),
        (_groups, "AdamW with amsgrad=True in some groups only is updated by torch: give it to all groups, or to none"),
    ],
)
def test_an_option_that_keeps_moments_on_the_device_is_named(optimizer: Any, said: str) -> None:
    """And what mends it, before anything is made."""
    with pytest.raises(ConfigError) as error:
        make(in_tier("zero2", "disk"), optimizer=optimizer)
    works = "moments rest in the disk tier, which works for AdamW, Adam and SGD"
    assert str(error.value) == f"{works}, but {said}, or choose the device tier."


def test_a_tier_s_name_is_the_tier() -> None:
    """In a table, where it is compared too."""
    named = sf.PRESETS["zero2"].edit("moments", tier="host")
    assert named == in_tier("zero2", "host") and named.moments.tier is Tier.HOST
    make(named.edit("moments", tier="device"), optimizer=torch.optim.RMSprop).close()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_moves_what_it_has(momentum: float) -> None:
    """With momentum one state per element, without it nothing."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    near, far = make("zero2", optimizer=sgd), make(in_tier("zero2", "host"), optimizer=sgd)
    assert train(near, 3) == train(far, 3)
    assert_same(near.state_dict(), far.state_dict())
    held = sum(segment.spec.length * 4 for segment in far.sharded.trainable()) if momentum else 0
    assert [row.moved for row in far.traffic().moved] == [held, held]
    assert [row.program for row in far.traffic().moved] == [held, held]
    near.close()
    far.close()


def regions_of(engine: sf.Engine) -> list[Region]:
    assert engine._updater is not None
    return [*engine._updater.regions(), *(r for s in engine.sharded.segments() for r in s.regions.values())]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_every_state_rests_in_a_region(ranks: Ranks, layout: str) -> None:
    """Of each cell of the table; what ``memory()`` counts is the sum of these."""
    assert ranks.run(_regions, layout, world_size=2) == [True, True]


def _regions(layout: str) -> bool:
    mesh = {"inter": 1, "intra": 2} if layout in ("hsdp", "hpz") else None
    engine = make(in_tier(layout, "host"), mesh=mesh, precision="bf16")
    train(engine, 1)
    total: dict[str, int] = {}
    for region in regions_of(engine):
        total[region.tier] = total.get(region.tier, 0) + region.nbytes
    found = engine.memory().tiers == total
    engine.close()
    return found
