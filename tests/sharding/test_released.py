"""Units that are gathered once in a step are given back before any update: what forward wrote into them is kept then,
and what an update writes is not taken for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, NAdam, RMSprop

import shardfold as sf
from shardfold.testing import Ranks

ONCE = sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute", until="step"))
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(SGD, lr=0.1), "rmsprop": partial(RMSprop, lr=0.01, eps=1e-2),
    "adagrad": partial(Adagrad, lr=0.02, eps=1e-3), "nadam": partial(NAdam, lr=0.01, eps=1e-3),
}  # fmt: skip


class Clamped(nn.Module):
    """Forward writes into the weight that it reads, as codebooks and critics do."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.linear, self.bound = nn.Linear(6, 6), bound

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-self.bound, self.bound)
        return x + torch.tanh(self.linear(x))


def model(bound: float) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Clamped(bound) for _ in range(3))).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def farthest(optimizer: str, bound: float, debug: bool, threads: bool) -> float:
    """How far weights are from plain PyTorch's after some steps; ``bound``: 9 clamps nothing."""
    plain, overlap = model(bound), sf.Overlap(update_thread=threads)
    update = OPTIMIZERS[optimizer](plain.parameters())
    engine = sf.Engine(
        model(bound),
        optimizer=OPTIMIZERS[optimizer],
        layout=ONCE,
        init=sf.Init(units=[Clamped]),
        runtime=sf.Runtime(debug=debug, timeout=30),
        overlap=overlap,
    )
    for step in range(4):
        for rank in range(2):
            (plain(batch(step, rank)).square().mean() / 2).backward()
        update.step()
        update.zero_grad()
        engine.backward(engine(batch(step, engine.rank)).square().mean())
        engine.step()
    state = engine.state_dict()
    engine.close()
    return max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items())


def run(optimizer: str) -> list[float]:
    cases = [(bound, debug, threads) for bound in (0.2, 9.0) for debug, threads in ((False, False), (True, True))]
    return [farthest(optimizer, *case) for case in [*cases, (9.0, True, False)]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_forward_wrote_is_kept_and_what_an_update_writes_is_not_taken_for_it(ranks: Ranks, optimizer: str) -> None:
    for found in ranks.run(run, optimizer, world_size=2):
        assert max(found) < 1e-12, found
