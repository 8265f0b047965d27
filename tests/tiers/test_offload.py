"""Masters, gradients and parameters in host memory, where they are updated: training that is the same to the bit."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError, LayoutError, ShardfoldError
from shardfold.plan.layout import Layout, Tier
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)
UPDATE = {"optimizer": "host"}
SUMS = {**UPDATE, "grads": "host"}
ALL = {**SUMS, "params": "host"}
NARROW = sf.Precision(compute="bf16", grads="bf16", reduce="bf16")

CASES: list[tuple[str, Mapping[str, str], dict[str, Any]]] = [
    ("ddp", UPDATE, {"clip_norm": 0.05}),
    ("ddp", SUMS, {}),
    ("zero1", UPDATE, {"precision": "bf16", "accumulate": 2}),
    ("zero2", SUMS, {"precision": "bf16", "clip_norm": 0.05, "accumulate": 2}),
    ("zero2", SUMS, {"precision": sf.Precision(reduce="bf16")}),
    ("zero2", UPDATE, {"precision": "fp16", "loss_scale": 4.0}),
    ("zero3", ALL, {"accumulate": 2, "optimizer": partial(torch.optim.Adagrad, lr=1e-2)}),
    ("zero3", ALL, {"precision": "fp16", "loss_scale": sf.LossScale(initial=2.0**40), "clip_norm": 0.05}),
    ("zero3", SUMS, {"optimizer": partial(torch.optim.SGD, lr=1e-2, momentum=0.9), "overlap": sf.Overlap(order="any")}),
    ("fsdp2", SUMS, {"precision": "bf16", "overlap": sf.Overlap(update_thread=True)}),
    ("hpz", ALL, {"precision": "bf16"}),
    ("zero3", ALL, {"clip": sf.Clip(value=1e-3), "optimizer": partial(sf.optim.AdamW8bit, lr=1e-2)}),
]


def train(engine: sf.Engine, steps: int, first: int = 0) -> list[float]:
    losses: list[float] = []
    for tokens, targets in models.batches(first + steps)[first:]:
        for micro in range(engine.accumulate):
            part = engine.rank + micro * engine.world_size
            rows = [t.chunk(engine.world_size * engine.accumulate)[part].to(engine.device) for t in (tokens, targets)]
            loss = engine(*rows)
            engine.backward(loss)
            report = engine.step()
            losses += [loss.item(), float(bool(report and report.skipped))]
    return losses


def make(layout: str | Layout, *, optimizer: Any = ADAMW, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(models.Small(), optimizer=optimizer, **grouped(layout=layout, **options))


def states(engine: sf.Engine) -> dict[str, Tensor]:
    """All values and all moments, whole."""
    found = dict(engine.state_dict())
    assert engine._updater is not None
    for state in engine._updater.state_dtypes():
        with engine.gathered(of=state) as values:
            found |= {f"{state} of {name}": value.clone() for name, value in values.items() if value is not None}
    return found


def _compare(case: int, steps: int) -> list[str]:
    """What is different; by what rests where, the bytes that the table says."""
    layout, tiers, options = CASES[case]
    near = make(layout, **options)
    losses, values = train(near, steps), states(near)
    near.close()
    far = make(layout, offload=tiers, **options)
    wrong = [] if train(far, steps) == losses else ["losses"]
    found = states(far)
    wrong += [name for name in values if not torch.equal(values[name], found[name])]
    assert far._updater is not None
    rows = [row for row in far.memory().rows if far._updater.fused or row.state != "moments"]
    wrong += [f"{row} of the table" for row in rows if row.held != row.table + row.padding]
    moved = far.traffic().moved
    wrong += [f"{row} of the program" for row in moved if row.moved != row.program or not row.calls]
    slower = [name for name, cell in far.layout.cells().items() if cell.tier is not Tier.DEVICE]
    wrong += [] if set(tiers) & {"grads", "params"} <= {*slower} and moved else ["nothing moved"]
    far.close()
    return wrong


@pytest.mark.sampled(24)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{name}-{len(tiers)}" for name, tiers, _ in CASES])
def test_training_is_the_same_wherever_states_rest(ranks: Ranks, case: int, world: int) -> None:
    """Losses, skipped steps, values and moments equal to the bit; bytes held are the table's, bytes moved the
    program's."""
    if (world, CASES[case][0], "grads" in CASES[case][1]) == (2, "ddp", True):
        assert CASES[case][2].get("accumulate", 1) == 1, "sums of micro-batches would be taken in another order"
    assert ranks.run(_compare, case, 3, world_size=world) == [[]] * world


def _bytes_of_a_step() -> tuple[dict[tuple[str, str], float], int]:
    engine = make("offload", precision=NARROW)
    train(engine, 2)
    moved = {(row.tier, row.op): float(row.moved) for row in engine.traffic().moved}
    length = sum(segment.spec.length for segment in engine.sharded.segments())
    engine.close()
    return moved, length


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_go_down_once_and_parameters_come_up_once(ranks: Ranks, world: int) -> None:
    """ZeRO-Offload (arXiv 2101.06840, section 4.1): two bytes of gradients down and two of parameters up for each
    element that a rank updates, and nothing else."""
    for moved, length in ranks.run(_bytes_of_a_step, world_size=world):
        assert moved == {("host", "STORE"): 2 * length / world, ("host", "FILL"): 2 * length / world}


class Watched(nn.Module):
    """Layers of equal size; notes how many have memory while each runs."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.flats: list[Tensor] = []
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.seen.append(sum(flat.untyped_storage().size() > 0 for flat in self.flats))
        return x.sum()


def _streams(layers: int) -> tuple[int, int, list[Any]]:
    model = Watched(layers, 32)
    engine = sf.Engine(model, optimizer=ADAMW, layout="infinity", init=sf.Init(units=[nn.Linear]))
    model.flats = [segment.flat for segment in engine.sharded.segments()]
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 32)))
        engine.step()
    memory = engine.memory()
    engine.close()
    return max(model.seen), memory.tiers.get("device", 0), [row for row in memory.rows if row.tier == "device"]


@pytest.mark.parametrize("layers", [3, 9])
def test_one_rank_streams_a_model_of_any_depth(ranks: Ranks, layers: int) -> None:
    """On one rank, too, parameters come unit by unit: as many have memory at a time as are prefetched, and one, and
    nothing rests on the device."""
    [(most, held, rows)] = ranks.run(_streams, layers, world_size=1)
    assert most == 2
    assert held == 0 and not rows


def _go_on(folder: str, before: str, behind: str) -> tuple[list[float], list[float]]:
    options = {"precision": "bf16", "clip_norm": 0.05}
    engine = make(before, **options)
    train(engine, 2)
    engine.save(f"{folder}/step")
    expected = train(engine, 2, first=2)
    engine.close()
    other = make(behind, **options)
    other.load(f"{folder}/step")
    losses = train(other, 2, first=2)
    other.close()
    return losses, expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("before", "behind"), [("infinity", "zero3"), ("zero2", "offload"), ("offload", "infinity")])
def test_a_checkpoint_of_any_tier_is_gone_on_from_in_any(
    ranks: Ranks, tmp_path: Path, before: str, behind: str
) -> None:
    """The losses behind a load are those that the engine which saved has."""
    for losses, expected in ranks.run(_go_on, str(tmp_path), before, behind, world_size=2):
        assert losses == expected


def _alone() -> list[bool]:
    engine = make("zero2", precision="bf16")
    train(engine, 2)
    assert engine._updater is not None
    memory = [weakref.ref(region.resting) for region in engine._updater.regions()]
    engine._updater.rest_in(Tier.HOST)
    gone = [each() is None for each in memory]
    engine._updater.rest_in(Tier.DEVICE)
    engine.close()
    return gone


def test_moments_that_move_leave_no_memory_behind(ranks: Ranks) -> None:
    """Once they rest elsewhere nobody holds the memory where they were."""
    for gone in ranks.run(_alone, world_size=2):
        assert gone and all(gone)


REFUSED: dict[str, tuple[dict[str, Any], type[ShardfoldError], str]] = {
    "a tier": ({"offload": "hots"}, ConfigError, "'hots' is not a tier. Did you mean 'host'"),
    "deepspeed's device": ({"offload": "cpu"}, ConfigError, "'cpu' is not a tier. Did you mean 'host'"),
    "deepspeed's drive": ({"offload": {"moments": "nvme"}}, ConfigError, "'nvme' is not a tier. Did you mean 'disk'"),
    "a state": ({"offload": {"grad": "host"}}, ConfigError, "'grad', which is not a state. Did you mean 'grads'"),
    "a tier of a state": ({"offload": {"optimizer": "hots"}}, ConfigError, "Did you mean 'host'"),
    "a number": ({"offload": 1}, ConfigError, "it is 'host', 'disk', or a dict of tiers"),
    "no params": ({"layout": "fsdp2", "offload": ALL}, ConfigError, "keeps no copy.* name 'optimizer'"),
    "gradients alone": ({"offload": {"grads": "host"}}, LayoutError, "grads rest in the host tier but master on"),
    "master alone": ({"offload": {"master": "host"}}, LayoutError, "master rests in the host tier but moments on"),
    "a class of its own": (
        {"offload": {"optimizer": "host", "grads": "disk"}, "optimizer": partial(torch.optim.Adagrad, lr=1e-2)},
        ConfigError,
        "grads rest in the disk tier, from which they come unit by unit: that works for AdamW, Adam and SGD",
    ),
    "one that asks other ranks": (
        {"offload": "disk", "optimizer": partial(sf.optim.Adafactor, lr=1e-2)},
        ConfigError,
        "Adafactor has an update and a state of its own: take one of these, or choose the host tier",
    ),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_rest_so_is_refused_in_a_sentence(case: tuple[dict[str, Any], type[ShardfoldError], str]) -> None:
    options, kind, words = case
    with pytest.raises(kind, match=words):
        make(**{"layout": "zero3", **options})


def _refuse_whole() -> str:
    try:
        make("zero2", offload=ALL)
    except LayoutError as error:
        return str(error)
    return ""


def test_parameters_that_other_ranks_update_rest_on_the_device(ranks: Ranks) -> None:
    """What is gathered behind an update would have to go to host memory: refused on all ranks."""
    for said in ranks.run(_refuse_whole, world_size=2):
        assert "split params as master is, as zero3 does" in said
