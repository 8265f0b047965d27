"""Folders that DeepSpeed itself wrote, kept in ``tests/data``: their elements are imported and their run goes on."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.checkpoint import Checkpoint, import_from
from shardfold.compat.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from shardfold.testing import Ranks

DATA = Path(__file__).parents[1] / "data"
STAGES = (1, 2, 3)
STEPS = 3  # before the checkpoint
MOMENTS = ("exp_avg", "exp_avg_sq")


class Theirs(nn.Module):
    """What DeepSpeed trained: sizes that two ranks do not divide, and a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.second(torch.tanh(self.first(x)))


def said(stage: int) -> dict[str, Any]:
    return json.loads((DATA / f"deepspeed_zero{stage}" / "expected.json").read_text())


def kept(stage: int, name: str, shape: torch.Size) -> Tensor:
    """What DeepSpeed said of a tensor; a float32 is written with as many digits as it needs."""
    return torch.tensor(said(stage)["values"][name]).view(shape)


@pytest.mark.parametrize("stage", STAGES)
def test_every_element_is_theirs(tmp_path: Path, stage: int) -> None:
    """fp32 weights, both moments and the buffer bit for bit; the step and the client state."""
    report = import_from(DATA / f"deepspeed_zero{stage}", tmp_path / "new")
    with Checkpoint(report.path) as found:
        for name, parameter in Theirs().named_parameters():
            assert torch.equal(found.parameter(name).float(), kept(stage, name, parameter.shape)), name
            for moment in MOMENTS:
                theirs = kept(stage, f"{moment}/{name}", parameter.shape)
                assert torch.equal(found.read(name, moment).view_as(theirs), theirs), (name, moment)
        assert found.buffer("seen").item() == STEPS
        assert found.index.step == STEPS


@pytest.mark.parametrize("stage", STAGES)
def test_the_weights_alone_are_read_by_their_function(tmp_path: Path, stage: int) -> None:
    """`get_fp32_state_dict_from_zero_checkpoint` of the interface gives the fp32 weights and the buffer."""
    folder = shutil.copytree(DATA / f"deepspeed_zero{stage}", tmp_path / "theirs")
    weights = get_fp32_state_dict_from_zero_checkpoint(folder)
    assert set(weights) == set(Theirs().state_dict())
    for name, parameter in Theirs().named_parameters():
        assert torch.equal(weights[name], kept(stage, name, parameter.shape)), name


def continued(path: Path, layout: str, precision: str) -> tuple[list[float], object]:
    model = Theirs()
    optimizer = partial(torch.optim.AdamW, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    schedule = partial(sf.optim.WarmupLR, warmup_num_steps=6, warmup_type="linear")
    engine = sf.Engine(model, optimizer=optimizer, layout=layout, precision=precision, lr_schedule=schedule)
    report = engine.load(path)
    assert engine.steps == STEPS
    losses: list[float] = []
    for step in range(STEPS, 2 * STEPS):
        draw = torch.Generator().manual_seed(step)
        x, y = (torch.randn(4, n, generator=draw).chunk(2)[engine.rank] for n in (5, 3))
        loss = F.mse_loss(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.detach()))
    assert model.seen.item() == 2 * STEPS
    engine.close()
    return losses, report.state


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage, layout", [(1, "zero3"), (2, "zero1"), (3, "zero2")])
def test_their_run_goes_on(ranks: Ranks, tmp_path: Path, stage: int, layout: str) -> None:
    """The losses of the three steps behind the checkpoint are those that DeepSpeed had. In bf16 both round sums of few
    products, in orders of their own, to 8 bits."""
    path = import_from(DATA / f"deepspeed_zero{stage}", tmp_path / "new").path
    narrow = stage == 2
    (losses, state), _ = ranks.run(continued, path, layout, "bf16" if narrow else "fp32", world_size=2)
    assert losses == pytest.approx(said(stage)["losses"][STEPS:], rel=2**-7 if narrow else 1e-5)
    assert state is not None and state["epoch"] == 2
