"""Forwards without gradients between steps of training: plain PyTorch's numbers, and nothing left behind."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.support import models

pytestmark = pytest.mark.product

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LAYOUTS = list(sf.PRESETS)
MODES: dict[str, Any] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Model(models.Small):
    """Dropout tells training from evaluation, and a buffer is written in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.batch_norm = nn.BatchNorm1d(models.WIDTH, momentum=None)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = super().features(tokens)
        return self.dropout(x + 0 * self.batch_norm(x.flatten(0, 1)).view_as(x)) if self.training else 1.5 * x


def _evaluated_between_steps(layout: str, mode: str, evaluate: str, accumulate: int) -> dict[str, Any]:
    mesh = {"inter": 2, "intra": dist.get_world_size() // 2} if layout in ("hsdp", "hpz") else None
    torch.manual_seed(0)
    plain = Model()
    optimizer = SGD(plain.parameters())
    torch.manual_seed(0)
    engine = sf.Engine(Model(), optimizer=SGD, layout=layout, parallel=mesh, accumulate=accumulate)
    rank, world = engine.rank, engine.world_size
    worst, transient, inference = 0.0, [], []

    def both(data: Any, part: int, of: int) -> tuple[Any, Any]:
        tokens, targets = data
        return plain(tokens, targets), engine(tokens.chunk(of)[part], targets.chunk(of)[part])

    def look() -> None:
        nonlocal worst
        for model in (plain, engine.module):
            model.train(evaluate == "while training")
        with MODES[mode]():
            for data in models.batches(2, seed=99):
                expected, got = both(data, rank, world)
                worst = max(worst, abs(engine.mean(got.item()) / expected.item() - 1))
                if got.requires_grad or got.is_inference() != (mode == "inference_mode"):
                    inference.append("the output is not what the mode makes it")
        for model in (plain, engine.module):
            model.train()
        transient.append(engine.memory().transient)

    look()  # before the first step: its forward is the first of all
    for step in range(3):
        for micro in range(accumulate):
            tokens, targets = models.batches(1, seed=step)[0]
            count = world * accumulate
            part = micro * world + rank
            expected = plain(*(t.chunk(accumulate)[micro] for t in (tokens, targets)))
            loss = engine(tokens.chunk(count)[part], targets.chunk(count)[part])
            worst = max(worst, abs(engine.mean(loss.item()) / expected.item() - 1))
            (expected / accumulate).backward()
            engine.backward(loss)
            if evaluate == "between backward and step":
                look()
            engine.step()
        optimizer.step()
        optimizer.zero_grad()
        look()
    rows = engine.memory().rows
    tensors = [t for u in engine.units for s in u.segments for t in (s.flat, s.rest, s.grads, s.master, *s.parameters)]
    inference += [repr(type(t)) for t in tensors if t is not None and t.is_inference()]
    state = engine.state_dict()
    for name, value in plain.named_parameters():
        worst = max(worst, ((state[name] - value).abs().max() / value.abs().max()).item())
    report = {
        "worst": worst,
        "transient": transient,
        "inference": inference,
        "memory": [row for row in rows if abs(row.held - row.table - row.padding) > 1],
        "traffic": [row for row in engine.traffic().rows if row.sent != row.program],
    }
    engine.close()
    return report


@pytest.mark.sampled(6)
@pytest.mark.parametrize("evaluate", ["in eval", "while training", "between backward and step"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forwards_without_gradients_between_steps_change_nothing(
    ranks: Ranks, layout: str, mode: str, evaluate: str
) -> None:
    for accumulate in (1, 2):
        for report in ranks.run(_evaluated_between_steps, layout, mode, evaluate, accumulate, world_size=2):
            assert report["worst"] < 2e-6, report
            assert not any(report["transient"]), report
            assert report["inference"] == [] and report["memory"] == [] and report["traffic"] == [], report
