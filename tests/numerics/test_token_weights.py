"""Micro-batches weighed by their tokens: what one process has that takes the mean over all of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardfold as sf
from shardfold.testing import Ranks

IGNORED = -100
CLIP = sf.Clip(norm=0.5)
CUT = sf.Clip(value=0.02)
LAYOUTS = list(sf.PRESETS)


def world_of(layout: str) -> int:
    return 4 if layout in ("hsdp", "hpz") else 2


def _batches(step: int, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of four rows of which one to four count; the second of the first step has none at all."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for i in range(number):
        x, targets = torch.randn(4, 8, generator=generator), torch.randint(0, 5, (4,), generator=generator)
        targets[(i * 3 + step) % 4 + 1 :] = IGNORED
        if (step, i) == (0, 1):
            targets[:] = IGNORED
        found.append((x, targets))
    return found


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))


def _trained(
    layout: str, accumulate: int, precision: str, clip: sf.Clip = CLIP
) -> tuple[list[float], dict[str, torch.Tensor]]:
    make = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    engine = sf.Engine(
        _model(),
        optimizer=make,
        layout=layout,
        accumulate=accumulate,
        clip=clip,
        loss_scale=64.0 if precision == "fp16" else None,
        precision=precision,
        mesh={"inter": 2, "intra": 2} if world_of(layout) == 4 else None,
    )
    norms = []
    for step in range(4):
        batches = _batches(step, engine.world_size * accumulate)
        for x, targets in batches[engine.rank :: engine.world_size]:
            loss = F.cross_entropy(engine(x).float(), targets)
            engine.backward(loss, weight=int((targets != IGNORED).sum()))
            report = engine.step()
        norms.append(float("nan") if report.norm is None else float(report.norm))
    state = engine.state_dict()
    engine.close()
    return norms, state


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.product
def test_tokens_weigh_alike(ranks: Ranks, layout: str, accumulate: int) -> None:
    world = world_of(layout)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    expected = []
    for step in range(4):
        parts = _batches(step, world * accumulate)
        F.cross_entropy(model(torch.cat([x for x, _ in parts])), torch.cat([t for _, t in parts])).backward()
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for norms, state in ranks.run(_trained, layout, accumulate, "fp32", world_size=world):
        assert norms == pytest.approx(expected, rel=1e-6)
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-6, atol=1e-7), name


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_values_are_cut_of_what_is_weighed(ranks: Ranks, layout: str) -> None:
    """Elements are cut to the range after micro-batches got their shares, as those of one process that takes the mean
    over all tokens: its gradients, and not what micro-batches would give that count alike."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        parts = _batches(step, 4)
        F.cross_entropy(model(torch.cat([x for x, _ in parts])), torch.cat([t for _, t in parts])).backward()
        grads = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).abs()
        assert 0.2 < (grads > 0.02).float().mean() < 0.9  # some are cut, others are not
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        optimizer.zero_grad()
    for _, state in ranks.run(_trained, layout, 2, "fp32", CUT, world_size=2):
        for name, value in model.state_dict().items():
            assert torch.allclose(state[name], value, rtol=1e-6, atol=1e-7), name


def test_under_a_loss_scale(ranks: Ranks) -> None:
    (narrow, _), (wide, _) = (ranks.run(_trained, "zero2", 2, p, world_size=2)[0] for p in ("fp16", "fp32"))
    assert narrow == pytest.approx(wide, rel=1e-2)


def _mixed() -> str:
    engine = sf.Engine(_model(), optimizer=partial(torch.optim.SGD, lr=0.1), layout="zero3")
    x, targets = _batches(1, 1)[0]
    engine.backward(F.cross_entropy(engine(x), targets), weight=3 if dist.get_rank() == 0 else None)
    with pytest.raises(sf.ShardfoldError) as caught:
        engine.step()
    engine.zero_grad()
    engine.backward(F.cross_entropy(engine(x), targets))
    assert engine.step().updated
    with pytest.raises(sf.ShardfoldError, match="count of tokens"):
        engine.backward(F.cross_entropy(engine(x), targets), weight=-1.0)
    engine.close()
    return str(caught.value)


def test_all_weigh_or_none(ranks: Ranks) -> None:
    for said in ranks.run(_mixed, world_size=2):
        assert "1 micro-batches had no weight=" in said
