"""Tests on the simulated device, and a small transformer that trains there.

The device stays in a process that has it, so a test runs in a rank of a pool of its own:

    @on_device(ranks=2)
    def test_something():
        with simulated() as sim: ...
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfold as sf
from shardfold.testing import Ranks
from shardfold.testing.simulated import is_supported, simulated
from tests.support.options import grouped

F = nn.functional
AdamW = partial(torch.optim.AdamW, lr=1e-2)


def on_device(ranks: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The test runs on so many processes that have the device, with a process group where there are several."""

    def mark(test: Callable[..., Any]) -> Callable[..., Any]:
        def run(sim_ranks: Ranks, **arguments: Any) -> None:
            if not is_supported():
                pytest.skip("this version of PyTorch lacks what the simulated device is made of")
            sim_ranks.run(_call, test.__module__, test.__qualname__, arguments, world_size=ranks, distributed=ranks > 1)

        own = inspect.signature(test)
        fixture = inspect.Parameter("sim_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = own.replace(parameters=[fixture, *own.parameters.values()])  # type: ignore[attr-defined]
        run.__name__, run.__qualname__, run.__module__ = test.__name__, test.__qualname__, test.__module__
        run.__doc__, run.inside = test.__doc__, test  # type: ignore[attr-defined]
        return run

    return mark


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name).inside(**arguments)


def line_of(file: str, mark: str) -> int:
    """The number of the line of a file that ends in this comment."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return next(number for number, text in enumerate(lines, 1) if text.endswith(f"# {mark}"))


# -- a model ------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Gpt(nn.Module):
    """A transformer of a few blocks; with ``again`` it goes through them twice."""

    def __init__(self, width: int = 16, depth: int = 3, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.emb, self.blocks = nn.Embedding(32, width), nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in [*self.blocks, *self.blocks] if self.again else self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def train(
    device: str,
    layout: Any,
    *,
    mode: str = "check",
    seed: int = 0,
    lag: int = 64,
    steps: int = 5,
    accumulate: int = 1,
    model: Callable[[], nn.Module] = Gpt,
    **options: Any,
) -> tuple[list[float], list[str], dict[str, int]]:
    """Trains on this rank; what it gives does not depend on the device, if the engine is right.

    Returns:
        The losses, the races, and the waits of the host in the third and later steps, by what and where.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(7)
    with simulated(mode, seed + rank, lag) if device == "sim" else nullcontext() as sim:
        engine = sf.Engine(
            model(),
            optimizer=options.pop("optimizer", AdamW),
            **grouped(layout=layout, device=device, units=[Block], **options),
            accumulate=accumulate,
        )
        draw = torch.Generator().manual_seed(100 + rank)
        # On the device before the first step: a copy from pageable memory stops the host, and hides races.
        batches = [torch.randint(0, 32, (2, 9), generator=draw).to(device) for _ in range(steps * accumulate)]
        losses: list[torch.Tensor] = []
        early: Counter[tuple[str, str]] = Counter()
        try:
            for step in range(steps):
                if sim is not None and step == 2:
                    early = Counter(sim.host_syncs)
                for _ in range(accumulate):
                    ids = batches.pop(0)
                    loss = F.cross_entropy(engine(ids[:, :-1]).reshape(-1, 32).float(), ids[:, 1:].reshape(-1))
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.detach())
            late = {} if sim is None else {f"{what} at {at}": n for (what, at), n in (sim.host_syncs - early).items()}
            values = [float(loss) for loss in losses]
            races = [] if sim is None else [str(race) for race in sim.take().races]
        finally:
            engine.close()
    return values, races, late
