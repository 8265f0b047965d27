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
        build(), optimizer=OPTIMIZERS[optimizer], layout=layout, mesh=mesh, units=["experts.*"], accumulate=accumulate
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


@pytest.mark.parametrize("layout", list(sf.PRESETS))
@pytest.mark.parametrize("choice", CHOICES)
def test_ranks_that_use_different_parts_end_with_ddps_parameters(ranks: Ranks, choice: str, layout: str) -> None:
    world = 4 if layout in ("hsdp", "hpz") else 2
    for optimizer, equal, accumulate in (("AdamW", True, 1), ("AdamW", False, 2), ("SGD", False, 1)):
        answers = ranks.run(_compare, layout, choice, optimizer, equal, accumulate, world_size=world)
        assert max(answers) < 1e-6, (optimizer, equal, accumulate, answers)
