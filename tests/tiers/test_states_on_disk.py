"""Masters, gradients and parameters in files: training that is the same to the bit, and what passes through memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks
from shardfold.tiers.disk import DiskRegion, DiskTier
from tests.support import models
from tests.support.options import grouped
from tests.tiers.test_offload import ADAMW, make, states, train

OPTIMIZER = {"optimizer": "disk"}
SUMS = {**OPTIMIZER, "grads": "disk"}
ALL = {**SUMS, "params": "disk"}
MOMENTUM = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
OVERFLOWS = {"precision": "fp16", "loss_scale": sf.LossScale(initial=2.0**40, backoff=2.0**-30)}  # the first step

CASES: list[tuple[str, Mapping[str, str], dict[str, Any]]] = [
    ("zero3", OPTIMIZER, {"precision": "bf16"}),
    ("zero3", ALL, {**OVERFLOWS, "clip_norm": 0.05, "accumulate": 2}),
    ("zero3", ALL, {"accumulate": 2}),
    ("fsdp2", SUMS, {"precision": "bf16", "clip_norm": 0.05, "overlap": sf.Overlap(update_thread=True)}),
    ("ddp", SUMS, {"clip": sf.Clip(value=1e-3), "overlap": sf.Overlap(order="any")}),
    ("zero3", {"optimizer": "host", "params": "disk", "grads": "disk"}, {"precision": "bf16"}),
    ("zero2", SUMS, {"optimizer": partial(torch.optim.SGD, lr=1e-2)}),  # which has no moments
    (
        "infinity",
        {"master": "disk"},
        {"precision": "bf16", "optimizer": partial(torch.optim.SGD, lr=1e-2, momentum=0.9)},
    ),
]


def _compare(layout: str, tiers: Mapping[str, str], options: dict[str, Any], steps: int) -> list[str]:
    """What is different from the same training on the device; by what rests where, the bytes that the table says."""
    near = make("zero3" if layout == "infinity" else layout, **options)
    losses, values = train(near, steps), states(near)
    near.close()
    far = make(layout, offload=tiers, **options)
    wrong = [] if train(far, steps) == losses else ["losses"]
    found = states(far)
    wrong += [name for name in values if not torch.equal(values[name], found[name])]
    wrong += [f"{row} of the table" for row in far.memory().rows if row.held != row.table + row.padding]
    moved = far.traffic().moved
    wrong += [f"{row} of the program" for row in moved if row.moved != row.program or not row.calls]
    wrong += [] if any(row.tier == "disk" for row in moved) else ["nothing moved"]
    far.close()
    return wrong


def _compare_some(cases: list[tuple[str, Mapping[str, str], dict[str, Any]]], steps: int) -> list[str]:
    return [f"{case}: {wrong}" for case in cases for wrong in _compare(*case, steps)]


@pytest.mark.parametrize("world", [1, 2])
def test_training_is_the_same_with_states_in_files(ranks: Ranks, world: int) -> None:
    """Losses, skipped steps, values and moments equal to the bit; bytes held are the table's, bytes moved the
    program's: optimizer, gradients and parameters in files, alone and together."""
    assert ranks.run(_compare_some, CASES[world % 2 :: 2], 3, world_size=world) == [[]] * world


def _counted(accumulate: int) -> dict[str, tuple[float, float]]:
    """Of a step: bytes that the program moves from and to files, beside those that the tier counted, which are whole
    blocks, where each store waits for its writes: what is not written yet would come from memory."""
    store = DiskRegion.store

    def store_and_wait(region: DiskRegion, values: Tensor) -> None:
        store(region, values)
        region.flush()

    DiskRegion.store = store_and_wait
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])  # shards of whole blocks
    options = {"precision": "bf16", "clip_norm": 0.05, "accumulate": accumulate}
    engine = sf.Engine(
        model, optimizer=ADAMW, **grouped(layout="infinity", units=[nn.Linear], **options), offload="disk"
    )
    tier = engine.sharded.tiers.named("disk")
    assert isinstance(tier, DiskTier)
    before = 0, 0
    for _ in range(3):  # the first records the order of units
        before = tier.bytes_read, tier.bytes_written
        for _ in range(accumulate):
            engine.backward(engine(torch.ones(2, 64)).float().square().mean())
            engine.step()
    rows = [row for row in engine.traffic().moved if row.tier == "disk"]
    read, written = (sum(r.program for r in rows if (r.op == "STORE") is way) for way in (False, True))
    counted = tier.bytes_read - before[0], tier.bytes_written - before[1]
    engine.close()
    DiskRegion.store = store
    return {"read": (read, counted[0]), "written": (written, counted[1])}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_files_are_read_and_written_as_the_program_says(ranks: Ranks, accumulate: int) -> None:
    """What went to the files and came from them is what the program says, to the byte; nothing is read for the norm,
    which was taken on the way to the file."""
    for found in ranks.run(_counted, accumulate, world_size=2):
        for way, (program, counted) in found.items():
            assert program == counted > 0, way


class Half(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor, whole: bool) -> Tensor:
        return self.two(self.one(x)) if whole else self.one(x)


def _half(options: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Half()
    groups = [{"params": model.one.parameters()}, {"params": model.two.parameters(), "weight_decay": 0.5}]
    engine = sf.Engine(model, optimizer=torch.optim.AdamW(groups, lr=1e-2), **grouped(**options))
    for whole in (True, False, True):
        engine.backward(engine(torch.ones(2, 8) * (engine.rank + 1), whole).square().mean())
        engine.step()
    found = states(engine)
    engine.close()
    return found


def _halves() -> list[str]:
    late = {"overlap": sf.Overlap(delayed_update=True), "layout": "zero2"}
    wrong: list[str] = []
    for near, fars in (
        ({"layout": "zero3"}, [{"moments": "host"}, {"moments": "disk"}, SUMS, ALL]),
        ({**late, "offload": {"optimizer": "host", "grads": "host"}}, [{"optimizer": "disk", "grads": "host"}]),
    ):
        expected = _half(near)
        for far in fars:
            found = _half({**near, "offload": far})
            wrong += [f"{far}: {name}" for name in expected if not torch.equal(found[name], expected[name])]
    return wrong


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2])
def test_a_part_of_a_unit_that_no_rank_used_stays_as_it_is(ranks: Ranks, world: int) -> None:
    """A unit has two groups of the optimizer, of which one has no gradients in a step: what was fetched of it goes back
    unchanged, to the bit, to host memory and to files, in the step and behind it."""
    assert ranks.run(_halves, world_size=world) == [[]] * world


class Either(nn.Module):
    """Two layers in one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: Tensor, swapped: bool) -> Tensor:
        return self.one(self.two(x)) if swapped else self.two(self.one(x))


def _late(offload: Any) -> tuple[dict[str, Tensor], list[tuple[float, float, float]]]:
    """Values, and of each step bytes that were read: of gradients and of all as the engine counts them, and by the
    tier."""
    torch.manual_seed(0)
    engine = sf.Engine(Either(), optimizer=ADAMW, layout="zero2", offload=offload, init=sf.Init(units=[nn.Linear]))
    tier = engine.sharded.tiers.named("disk")
    assert isinstance(tier, DiskTier)
    found: list[tuple[float, float, float]] = []
    for swapped in (False, False, False, True):
        before = tier.bytes_read
        engine.backward(engine(torch.ones(2, 64) * (engine.rank + 1), swapped).square().mean())
        tier.look(patient=True)  # what is still on its way to the file would come from memory
        engine.step()
        tier.look(patient=True)
        rows = {row.op: row.moved for row in engine.traffic().moved}
        found.append((rows.get("ADD", 0), rows.get("ADD", 0) + rows.get("FETCH", 0), tier.bytes_read - before))
    values = states(engine)
    engine.close()
    return values, found


def _late_both() -> tuple[list[str], list[tuple[float, float, float]]]:
    (near, _), (far, found) = _late(None), _late(SUMS)
    return [name for name in near if not torch.equal(near[name], far[name])], found


def test_gradients_that_come_late_are_counted_too(ranks: Ranks) -> None:
    """Of a unit whose backward comes behind its reduction, as layers ran in another order: what is in the file of its
    gradients is read once more, and the engine counts that."""
    for wrong, found in ranks.run(_late_both, world_size=2):
        assert not wrong
        assert [adds for adds, _, _ in found] == [0, 0, 0, 64 * 64 * 4 / 2]
        # What a late one is added to may still be on its way to the file, and comes from memory then.
        assert all(counted - read in (0, adds) for adds, counted, read in found[1:]), found


def _save(folder: str, offload: Any) -> None:
    """Trains, saves with states as they rest, and leaves whole values beside the checkpoint."""
    engine = make("zero3", offload=offload, precision="bf16")
    train(engine, 2)
    saving = engine.save(f"{folder}/step", wait=False)
    assert saving is not None and (saving.done or offload is None), "what lies in files is copied at once"
    found = states(engine)
    if engine.rank == 0:
        torch.save(found, f"{folder}/values.pt")
    engine.close()


def _load(folder: str, offload: Any) -> list[str]:
    """What is another than it was saved, and another one step later than without tiers."""
    expected = torch.load(f"{folder}/values.pt")
    wrong: list[str] = []
    later: list[Any] = []
    for tiers in (offload, None):
        engine = make("zero3", offload=tiers, precision="bf16")
        engine.load(f"{folder}/step")
        found = states(engine)
        wrong += [name for name in expected if not torch.equal(expected[name], found[name])]
        later.append((train(engine, 1, first=2), states(engine)))
        engine.close()
    (losses, values), (near_losses, near) = later
    wrong += [] if losses == near_losses else ["losses"]
    return wrong + [f"{name}, later" for name in near if not torch.equal(near[name], values[name])]


@pytest.mark.parametrize(("saved", "loaded", "worlds"), [(ALL, None, (2, 1)), (None, ALL, (1, 2))])
def test_any_tier_loads_any_checkpoint(
    ranks: Ranks, tmp_path: Path, saved: Any, loaded: Any, worlds: tuple[int, int]
) -> None:
    """States that rest in files are saved and loaded without tiers, and the reverse, on another number of ranks; what
    is trained on is the same to the bit."""
    ranks.run(_save, str(tmp_path), saved, world_size=worlds[0])
    assert ranks.run(_load, str(tmp_path), loaded or ALL, world_size=worlds[1]) == [[]] * worlds[1]


def _load_over(folder: str) -> list[int]:
    """Bytes that a load reads from the files of the states that it replaces, of one and of several dtypes."""
    read: list[int] = []
    for options in ({"precision": "bf16"}, {"optimizer": MOMENTUM}):
        engine = make("zero3", **{"offload": ALL, **options})
        tier = engine.sharded.tiers.named("disk")
        assert isinstance(tier, DiskTier)
        train(engine, 2)
        engine.save(f"{folder}/{len(read)}/step", wait=True)
        tier.look(patient=True)
        before = tier.bytes_read
        engine.load(f"{folder}/{len(read)}/step")
        read.append(tier.bytes_read - before)
        train(engine, 1, first=2)
        assert tier.bytes_read > before
        engine.close()
    return read


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2])
def test_a_load_reads_nothing_of_what_it_replaces(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """No byte comes from the files of parameters, masters and moments: what is there may be lost."""
    assert ranks.run(_load_over, str(tmp_path), world_size=world) == [[0, 0]] * world


def _beside(layout: str, offload: Any) -> list[Any]:
    """What is done to states between steps."""
    engine = make(layout, offload=offload, clip_norm=0.05)
    average = sf.Average(engine, decay=0.5)
    train(engine, 2)
    said: list[Any] = [train(engine, 1, 2)]
    with average.applied():
        said.append(engine.state_dict())
    with engine.gathered(of="master", write=True) as masters:
        next(iter(masters.values())).mul_(0.5)
    with engine.gathered(of="exp_avg", write=True) as moments:
        next(iter(moments.values())).mul_(0.5)
    state = {name: value * 1.5 for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    with engine.gathered(write=True) as values, torch.no_grad():
        list(values.values())[-1].add_(1.0)
    tokens, targets = models.batches(1)[0]
    engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
    with engine.gathered(of="grads", write=True) as grads:
        next(iter(grads.values())).mul_(3.0)
    said += [float(engine.step().norm), train(engine, 1, 3), states(engine), average.state_dict()]
    engine.close()
    return said


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    return a == b


def _beside_both(layout: str, offload: Any) -> list[int]:
    return [
        i
        for i, (a, b) in enumerate(zip(_beside(layout, offload), _beside(layout, None), strict=True))
        if not _same(a, b)
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world", [1, 2])
def test_what_lies_in_files_is_read_and_written_between_steps(ranks: Ranks, world: int) -> None:
    """An average, values, masters, moments and gradients that are lent and written, state dicts that are taken and
    given: each as without tiers."""
    assert ranks.run(_beside_both, "zero3", ALL, world_size=world) == [[]] * world


def _made(built: str, offload: Any) -> tuple[Any, ...]:
    """Of a model that is built without memory, or split while it is built, with a part that is frozen at first and one
    that comes later."""
    torch.manual_seed(0)
    with sf.meta_init() if built == "meta" else sf.sharded_init():
        model = models.Small()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    engine = sf.Engine(model, optimizer=ADAMW, layout="zero3", offload=offload, precision="bf16")
    said: list[Any] = [engine.state_dict(), train(engine, 2)]
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(True)
    torch.manual_seed(1)
    model.head = nn.Linear(model.head.in_features, model.head.out_features, device=engine.device)
    said += [train(engine, 2, 2), states(engine)]
    engine.close()
    return tuple(said)


def _made_both(built: str) -> list[int]:
    pairs = zip(_made(built, ALL), _made(built, None), strict=True)
    return [i for i, (a, b) in enumerate(pairs) if not _same(a, b)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("built", ["meta", "sharded"])
def test_models_too_big_to_build_go_into_files(ranks: Ranks, built: str) -> None:
    """First values, and training beyond a change of the model's structure, are those without tiers."""
    assert ranks.run(_made_both, built, world_size=2) == [[]] * 2


EVERY = [
    (layout, tiers, {**precision, **clip, "accumulate": accumulate})
    for layout, tiers, precision, clip, accumulate in itertools.product(
        ("zero3", "zero2", "hpz"),
        (OPTIMIZER, SUMS, ALL),
        ({}, {"precision": "bf16"}, OVERFLOWS),
        ({}, {"clip_norm": 0.05}, {"clip": sf.Clip(norm=0.05, p=3.0)}),
        (1, 2),
    )
    if (layout, tiers) != ("zero2", ALL)
]


@pytest.mark.soak
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("part", range(8))
def test_every_training_is_the_same_with_states_in_files(ranks: Ranks, part: int, world: int) -> None:
    """All products of what rests in files, precision, clipping and accumulation."""
    assert ranks.run(_compare_some, EVERY[part::8], 3, world_size=world) == [[]] * world
