"""Ranks that use different parts of a model in one step end where DDP with find_unused_parameters ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardfold as sf
from shardfold.testing import Ranks

pytestmark = pytest.mark.product

WIDTH = 12
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
}


class Experts(nn.Module):
    """A trunk, experts of which each call uses some, and a head; the experts are a unit each."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, w), nn.GELU(), nn.Linear(w, WIDTH)) for w in widths)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        x = self.trunk(x)
        for i in chosen:
            x = x + self.experts[i](x)
        return self.head(x)


#: Which experts rank r uses in step s, of four. In "unused by all" none is used by anybody in odd steps; in the last
#: two experts run in another order than they are defined in, from the first step on.
CHOICES: dict[str, Any] = {
    "alternate": lambda r, s: [(r + s) % 2],
    "one skips half": lambda r, s: [0, 1, 2, 3] if r == 0 else [1],
    "grow apart": lambda r, s: [0, 1] if s < 2 else [[2], [0, 3]][r % 2],
    "unused by all": lambda r, s: [] if s % 2 else [r % 4],
    "downwards": lambda r, s: [[3, 1], [2, 0], [3, 2, 1, 0], [1]][(r + s) % 4],
    "again": lambda r, s: [[2, 0, 2], [0, 2]][(r + s) % 2],
}
STEPS = 20


def _compare(layout: str, choice: str, optimizer: str, equal_shapes: bool, accumulate: int) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    widths = (8, 8, 8, 8) if equal_shapes else (8, 5, 16, 3)
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") else None

    def build() -> Experts:
        torch.manual_seed(0)
        return Experts(widths)

    reference = DistributedDataParallel(build(), find_unused_parameters=True)
    plain = OPTIMIZERS[optimizer](reference.parameters())
    engine = sf.Engine(
        build(),
        optimizer=OPTIMIZERS[optimizer],
        layout=layout,
        parallel=mesh,
        init=sf.Init(units=["experts.*"]),
        accumulate=accumulate,
    )
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        for micro in range(accumulate):
            x, y = torch.randn(4, WIDTH, generator=generator), torch.randint(3, (4,), generator=generator)
            chosen = CHOICES[choice](rank, step + micro)
            (F.cross_entropy(reference(x, chosen), y) / accumulate).backward()
            engine.backward(F.cross_entropy(engine(x, chosen), y))
            engine.step()
        plain.step()
        plain.zero_grad()
    state = engine.state_dict()
    worst = max((state[k] - v).abs().max().item() for k, v in reference.module.state_dict().items())
    named = dict(reference.module.named_parameters())
    for key in ("exp_avg", "exp_avg_sq") if optimizer == "AdamW" else ():
        with engine.gathered(of=key) as moments:
            for name, value in moments.items():
                expected = plain.state[named[name]].get(key, torch.zeros(()))  # none of a parameter that never ran
                worst = max(worst, (value - expected).abs().max().item())
    traffic = engine.traffic()
    assert engine.memory().transient == 0
    engine.close()
    assert all(row.sent >= row.program for row in traffic.rows), traffic
    return worst


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", list(sf.PRESETS))
@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_that_use_different_parts_end_with_ddps_parameters(ranks: Ranks, choice: str, layout: str) -> None:
    world = 4 if layout in ("hsdp", "hpz") else 2
    for optimizer, equal, accumulate in (("AdamW", True, 1), ("AdamW", False, 2), ("SGD", False, 1)):
        answers = ranks.run(_compare, layout, choice, optimizer, equal, accumulate, world_size=world)
        assert max(answers) < 1e-6, (optimizer, equal, accumulate, answers)


def _average(model: nn.Module) -> None:
    """What DDP does: the mean over ranks, in which what a rank did not use counts as zeros."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def _turns(layout: str) -> float:
    """Behind the second step rank 0's backward goes through the experts in another order; then it is the other
    engine's turn, before the first one's next."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = {"inter": 1, "intra": world} if layout in ("hsdp", "hpz") else None
    models, engines = [], []
    for seed in (0, 1):
        for made in (models, engines):
            torch.manual_seed(seed)
            made.append(Experts((8, 5, 16, 3)))
        engines[seed] = sf.Engine(
            engines[seed], optimizer=OPTIMIZERS["SGD"], layout=layout, parallel=mesh, init=sf.Init(units=["experts.*"])
        )
    updates = [OPTIMIZERS["SGD"](model.parameters()) for model in models]
    for step in range(4):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
        for calls in (models, engines):
            for call in calls:
                loss = call(x, [0, 1, 2, 3]).square().mean()
                if step >= 2:
                    loss = loss + call(x, [0 if rank == 0 else 3]).square().mean()
                loss.backward()
        for engine in engines:
            engine.step()
        for model, update in zip(models, updates, strict=True):
            _average(model)
            update.step()
            update.zero_grad()
    worst = 0.0
    for model, engine in zip(models, engines, strict=True):
        state = engine.state_dict()
        worst = max(worst, *((state[k] - v).abs().max().item() for k, v in model.state_dict().items()))
        engine.close()
    return worst


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "world"), [("hpz", 2), ("zero3", 3)])
def test_a_rank_gets_more_of_a_backward_while_the_others_are_at_another_engine(
    ranks: Ranks, layout: str, world: int
) -> None:
    """A pass in which one rank needs a unit that the order has passed ends as in plain PyTorch, also where the other
    ranks, which had ended it, wait at another engine's next pass."""
    assert max(ranks.run(_turns, layout, world_size=world)) < 1e-6
