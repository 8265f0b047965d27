"""Formats with feedback: what reductions lose is a state, which a run has, saves, and loads on any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.support import models

SGD = partial(torch.optim.SGD, lr=1.0)
FP64 = sf.Precision(compute="fp64", grads="fp64", reduce="fp64", master="fp64", moments="fp64")


class Given(nn.Module):
    """Gradients are what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(700)), nn.Parameter(torch.zeros(3, 5))

    def forward(self, grads: torch.Tensor) -> torch.Tensor:
        return (torch.cat([self.one, self.other.view(-1)]) * grads).sum()


def _gradients(step: int, rank: int) -> torch.Tensor:
    """In fp64, with the digits of fp32."""
    return torch.randn(715, generator=torch.Generator().manual_seed(10 * step + rank)).double()


def _applied(layout: str, reduce: str, mesh: Any, steps: range, folder: str, load: bool) -> dict[str, Any]:
    """What updates have added up to, and on this rank what is kept, by element of the parameters."""
    table = sf.PRESETS[layout].replace(reduce=reduce)
    engine = sf.Engine(Given(), optimizer=SGD, layout=table, precision=FP64, parallel=mesh)
    notes = engine.load(folder).notes if load else []
    for step in steps:
        engine.backward(engine(_gradients(step, engine.rank)))
        engine.step()
    kept = torch.zeros(715, dtype=torch.float64)
    for segment in engine.sharded.segments():
        for slot in segment.spec.slots:
            assert segment.format_state is not None
            at = 0 if slot.name == "one" else 700
            kept[at : at + slot.numel] = segment.format_state[slot.offset : slot.offset + slot.numel]
    memory = {row.state: (row.table, row.held) for row in engine.memory().rows}
    whole = engine.state_dict()
    engine.save(folder)
    engine.close()
    weights = torch.cat([whole["one"], whole["other"].view(-1)])
    return {"applied": -weights, "kept": kept, "memory": memory, "notes": notes}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "reduce"), [("hsdp", "int4+error"), ("zero2", "int8+error"), ("zero3", "int4x2+error")]
)
def test_the_sum_of_what_was_applied_differs_from_the_true_one_by_what_is_kept(
    ranks: Ranks, tmp_path: Path, layout: str, reduce: str
) -> None:
    """Over 80 steps, with a save on 4 ranks and a load, mostly on 2, in between, to 1e-6: error feedback telescopes."""
    folder, mesh = str(tmp_path / "run"), {"inter": 2, "intra": 2} if layout != "zero2" else None
    ranks.run(_applied, layout, reduce, mesh, range(40), folder, False, world_size=4)
    fewer, mesh = (4, mesh) if layout == "hsdp" else (2, None)  # of hsdp two ranks have the same part
    found = ranks.run(_applied, layout, reduce, mesh, range(40, 80), folder, True, world_size=fewer)
    true = torch.zeros(715, dtype=torch.float64)
    for step in range(80):
        world = 4 if step < 40 else fewer
        true += sum(_gradients(step, rank) for rank in range(world)) / world
    kept, applied = sum(each["kept"] for each in found), found[0]["applied"]
    assert float((applied - true).abs().max()) > 1e-3
    assert float((applied + kept - true).abs().max()) < 1e-6
    assert not [note for note in found[0]["notes"] if "lost" in note]
    table, held = found[0]["memory"]["format"]
    assert table == 4 * 715 <= held  # on one node, where one hop is left


def _other(folder: str, reduce: str) -> list[str]:
    engine = sf.Engine(Given(), optimizer=SGD, layout=sf.PRESETS["zero1"].replace(reduce=reduce), precision=FP64)
    notes = engine.load(folder).notes
    engine.close()
    return notes


@pytest.mark.soak
def test_a_run_without_feedback_is_told_that_the_checkpoint_has_some_and_the_other_way_round(
    ranks: Ranks, tmp_path: Path
) -> None:
    folder = str(tmp_path / "run")
    ranks.run(_applied, "zero2", "int8+error", None, range(2), folder, False, world_size=2)
    (notes, _) = ranks.run(_other, folder, "int8", world_size=2)
    assert [note for note in notes if "is not added here: none of this run's do so." in note]
    (notes, _) = ranks.run(_other, folder, "int8+error", world_size=2)
    assert not [note for note in notes if "lost in rounding" in note]


def _skipped() -> tuple[list[bool], bool, bool, bool]:
    """A step with an inf: is it found, what is kept before it and behind it, and are weights finite."""
    model = Given()
    precision = sf.Precision(compute="fp16", grads="fp32", reduce="fp32")
    engine = sf.Engine(
        model, optimizer=SGD, layout=sf.PRESETS["zero2"].replace(reduce="int8+error"), precision=precision
    )
    skipped: list[bool] = []
    kept: list[bool] = []
    for step in range(5):  # the first is skipped, as the loss scale begins beyond what fp16 holds
        grads = _gradients(step, engine.rank).to(torch.float16).to(engine.device) / 1024
        if step == 3 and engine.rank == 1:
            grads[17] = float("inf")
        engine.backward(engine(grads))
        skipped.append(engine.step().skipped)
        kept.append(any(bool(s.format_state.any()) for s in engine.sharded.segments() if s.format_state is not None))
    finite = all(bool(v.isfinite().all()) for v in engine.state_dict().values())
    engine.close()
    return skipped[2:], kept[2], kept[3], finite


def test_what_is_not_finite_is_found_and_a_skipped_step_keeps_nothing(ranks: Ranks) -> None:
    for skipped, before, behind, finite in ranks.run(_skipped, world_size=2):
        assert skipped == [False, True, False] and before and not behind and finite


def _losses(layout: str, wires: dict[str, str], precision: str) -> tuple[list[float], dict[str, tuple[float, int]]]:
    torch.manual_seed(0)
    engine = sf.Engine(
        models.small(), optimizer=partial(torch.optim.SGD, lr=0.25), layout=sf.PRESETS[layout].replace(**wires),
        precision=precision,
    )  # fmt: skip
    losses: list[float] = []
    for batch in models.batches(5):
        loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    rows = {row.purpose: (row.program, row.sent) for row in engine.traffic().rows}
    engine.close()
    return losses, rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "wires", "precision"),
    [
        ("zero3", {"gather": "int8", "reduce": "int8"}, "fp32"),
        ("fsdp2", {"gather": "fp8", "reduce": "int4+stochastic"}, "bf16"),
        ("hpz", {"gather": "int8+zero", "reduce": "fp8+error"}, "bf16"),
        ("zero1", {"reduce": "int4/64+zero+error"}, "fp32"),
    ],
)
def test_tables_of_blocks_train_close_to_those_without_and_send_what_programs_say(
    ranks: Ranks, layout: str, wires: dict[str, str], precision: str
) -> None:
    exact = ranks.run(_losses, layout, {}, precision, world_size=2)[0]
    coded = ranks.run(_losses, layout, wires, precision, world_size=2)[0]
    if precision == "fp32":  # bf16 may have no digits for it
        assert coded[0] != exact[0]
    assert coded[0] == pytest.approx(exact[0], rel=0.1)
    for purpose in wires:
        program, sent = coded[1][purpose]
        assert program == sent < 0.6 * exact[1][purpose][1]


class Loud(nn.Module):
    """A quadratic, and in the same block one weight whose gradient is always large and has no mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(256))

    def forward(self, target: torch.Tensor, noise: float) -> torch.Tensor:
        return 0.5 * (self.weights[:255] - target).square().sum() + noise * self.weights[255]


def _learned(reduce: str, steps: int) -> float:
    """What is left of the quadratic."""
    layout, sgd = sf.PRESETS["zero2"].replace(reduce=reduce), partial(torch.optim.SGD, lr=0.02)
    engine = sf.Engine(Loud(), optimizer=sgd, layout=layout)
    target = torch.randn(255, generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        engine.backward(engine(target, 100.0 * (-1) ** step))
        engine.step()
    left = float((engine.state_dict()["weights"][:255] - target).square().sum() / target.square().sum())
    engine.close()
    return left


@pytest.mark.soak
def test_without_feedback_one_loud_weight_hides_the_others_of_its_block(ranks: Ranks) -> None:
    """The step of int4 is 100 / 7, so that gradients below 7 are 0. With feedback they add up until they are sent: what
    is left is at most 0.02 of half a step for each element, and twice that while it waits."""
    plain, kept, lost = (ranks.run(_learned, name, 60, world_size=2)[0] for name in ("reduce", "int4+error", "int4"))
    assert plain < 0.1 and abs(kept - plain) < 0.05
    assert lost == 1
