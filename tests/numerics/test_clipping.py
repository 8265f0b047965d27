"""Clipping over shards is torch's clipping of the whole model, by any norm and by value."""

from __future__ import annotations

from functools import partial
from math import inf
from typing import Any

import pytest
import torch
from torch import nn

import shardfold as sf
from shardfold.errors import ConfigError, NonFiniteError
from shardfold.numerics.clipping import clip_coefficient
from shardfold.testing import Ranks
from tests.support import models

LAYOUTS = list(sf.PRESETS)
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
CLIPS = [
    sf.Clip(norm=0.3, p=1.0),
    sf.Clip(norm=0.05, p=2.0),
    sf.Clip(norm=0.02, p=3.5),
    sf.Clip(norm=0.01, p=inf),
    sf.Clip(value=1e-3),
]
STEPS = 4


def build() -> nn.Module:
    """A tied weight, which counts once, and frozen parameters, which do not count."""
    torch.manual_seed(0)
    model = models.Small(tied=True)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    return model


def plain(clip: sf.Clip) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, norms = build(), []
    optimizer = SGD([p for p in model.parameters() if p.requires_grad])
    for batch in models.batches(STEPS, rows=8):
        model(*batch).backward()
        if clip.value is not None:
            nn.utils.clip_grad_value_(model.parameters(), clip.value)
        else:
            assert clip.norm is not None
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip.norm, clip.p).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, model.state_dict()


def clips_as_torch(layout: str, clips: list[sf.Clip], loss_scale: float | None, precision: Any = "fp32") -> None:
    rounding = 2e-6 if precision == "fp32" else 1e-4  # fp16 rounds partial sums of 1e-2, of which SGD adds up nine
    mesh = {"inter": 2, "intra": 1} if layout in ("hsdp", "hpz") else None
    for clip in clips:
        engine = sf.Engine(
            build(), optimizer=SGD, layout=layout, parallel=mesh, clip_norm=clip, accumulate=2, loss_scale=loss_scale,
            precision=precision,
        )  # fmt: skip
        norms = []
        for batch in models.batches(STEPS, rows=8):
            for micro in (0, 1):
                parts = [t.chunk(4)[2 * engine.rank + micro] for t in batch]
                engine.backward(engine(*parts))
                report = engine.step()
            assert report.updated
            norms.append(report.grad_norm)
        expected, state = plain(clip)
        if clip.value is None:
            assert all(norm > clip.norm for norm in expected)  # or nothing was shown
            assert norms == pytest.approx(expected, rel=1e-5)
        else:
            assert norms == [None] * STEPS
        for name, value in engine.state_dict().items():
            assert torch.allclose(value, state[name], rtol=1e-4, atol=rounding), (clip, name)
        engine.close()


@pytest.mark.product
@pytest.mark.parametrize("layout", LAYOUTS)
def test_norms_and_parameters_equal_torchs(ranks: Ranks, layout: str) -> None:
    ranks.run(clips_as_torch, layout, CLIPS, None, world_size=2)


def test_clipping_sees_unscaled_gradients(ranks: Ranks) -> None:
    ranks.run(clips_as_torch, "zero3", CLIPS, 1024.0, world_size=2)


def test_values_are_cut_of_unscaled_gradients(ranks: Ranks) -> None:
    """Gradients that travel in fp16 stay scaled until the update, and so does the range that they are cut to."""
    narrow = sf.Precision(compute="fp32", reduce="fp16")
    ranks.run(clips_as_torch, "zero3", [sf.Clip(value=1e-3)], 1024.0, narrow, world_size=2)


def test_gradients_within_the_limit_stay_as_they_are() -> None:
    """The coefficient is 1 below the limit and never more: clipping makes no gradient larger."""
    for norm, limit, wanted in ((0.5, 1.0, 1.0), (1e-9, 1.0, 1.0), (2.0, 1.0, 0.5), (8.0, 2.0, 0.25)):
        assert float(clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit)) == pytest.approx(wanted, 1e-6)


def raises_everywhere() -> None:
    engine = sf.Engine(build(), optimizer=SGD, layout="zero2", clip_norm=sf.Clip(norm=1.0, error_if_nonfinite=True))
    before = engine.state_dict()
    tokens, targets = models.batches(1, rows=4)[0]
    engine.backward(engine(tokens, targets) * (inf if engine.rank == 1 else 1.0))
    with pytest.raises(NonFiniteError, match=r"the norm of all gradients is nan .* nothing was updated"):
        engine.step()
    engine.zero_grad()
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    engine.backward(engine(tokens, targets))
    assert engine.step().updated
    engine.close()


def test_error_if_nonfinite_raises_on_every_rank_and_training_can_go_on(ranks: Ranks) -> None:
    ranks.run(raises_everywhere, world_size=2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": 1.0, "value": 1.0},
        {"norm": -1.0},
        {"norm": 1.0, "p": 0.0},
        {"value": 1.0, "p": inf},
        {"value": True},
    ],
)
def test_clips_that_mean_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Clip"):
        sf.Clip(**options)
