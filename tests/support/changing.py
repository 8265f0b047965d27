"""Changes of a model's structure, and a pair of trainings that both go through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import FreedParameterError
from tests.support import models
from tests.support.models import WIDTH
from tests.support.options import grouped

LAYOUTS = list(sf.PRESETS)
WHOLE = ["ddp", "zero1", "zero2", "offload"]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, eps=1e-4),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02, eps=1e-4),
}


def world_for(layout: str) -> int:
    return 4 if layout in ("hsdp", "hpz") else 2


def mesh_for(layout: str) -> dict[str, int] | None:
    return {"inter": 2, "intra": 2} if layout in ("hsdp", "hpz") else None


def layouts(*default: str) -> list[Any]:
    """All layouts; those that are not ``default`` run in the long tests."""
    return [name if name in default else pytest.param(name, marks=pytest.mark.soak) for name in LAYOUTS]


def pairs(names: Iterable[str], default: Callable[[str, str], bool]) -> list[Any]:
    """Every name with every layout; the long tests run those for which ``default`` does not hold."""
    every = [(name, layout) for name in names for layout in LAYOUTS]
    return [pytest.param(*pair, marks=() if default(*pair) else pytest.mark.soak) for pair in every]


class Wrapped(nn.Module):
    """A linear layer with a low-rank correction beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Growing(models.Small):
    """Runs whatever it has: blocks, an adapter behind them, a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter: nn.Module | None = None
        self.shift: nn.Parameter | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.features(tokens)
        if self.adapter is not None:
            x = x + self.adapter(x)
        if self.shift is not None:
            x = x + self.shift
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def half_frozen() -> Growing:
    model = Growing()
    for p in [*model.embedding.parameters(), *model.blocks[1].parameters(), *model.blocks[2].up.parameters()]:
        p.requires_grad_(False)
    return model


# -- changes; each is made to the engine's model and to a plain one -----------------------------------------------


def unfreeze(model: Any) -> None:
    for p in [*model.embedding.parameters(), *model.blocks[1].parameters(), *model.blocks[2].up.parameters()]:
        p.requires_grad_(True)


def freeze(model: Any) -> None:
    model.blocks[0].requires_grad_(False)
    model.head.weight.requires_grad_(False)


def freeze_one_block(model: Any) -> None:
    model.blocks[0].requires_grad_(False)


def unfreeze_one_block(model: Any) -> None:
    model.blocks[0].requires_grad_(True)


def attach(model: Any) -> None:
    model.adapter = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    model.shift = nn.Parameter(torch.randn(WIDTH))


def append_a_block(model: Any) -> None:
    model.blocks.append(models.Block())


def replace_a_module(model: Any) -> None:
    model.head = nn.Linear(WIDTH, models.VOCAB)
    model.blocks[1].up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)


def assign_a_parameter(model: Any) -> None:
    model.norm.weight = nn.Parameter(torch.rand(WIDTH))
    model.blocks[0].down.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / 10)


def delete_modules(model: Any) -> None:
    del model.blocks[1]
    model.blocks[0].norm = nn.Identity()
    model.head.bias = None


def add_low_rank(model: Any) -> None:
    for block in model.blocks:
        block.requires_grad_(False)
        block.up = Wrapped(block.up)
        block.down = Wrapped(block.down)
    model.head = Wrapped(model.head)


CHANGES: dict[str, tuple[Callable[[], Growing], list[Callable[[Any], None]]]] = {
    "unfrozen": (half_frozen, [unfreeze]),
    "frozen": (Growing, [freeze]),
    "frozen and unfrozen again": (Growing, [freeze_one_block, unfreeze_one_block]),
    "attached": (Growing, [attach]),
    "appended": (Growing, [append_a_block, append_a_block]),
    "replaced": (Growing, [replace_a_module]),
    "assigned": (Growing, [assign_a_parameter]),
    "deleted": (Growing, [delete_modules]),
    "wrapped": (Growing, [add_low_rank]),
    "one after the other": (half_frozen, [add_low_rank, unfreeze, attach, delete_modules, append_a_block]),
}


class Pair:
    """An engine and the same model in plain PyTorch; both get every change, and the plain one all ranks' batches."""

    def __init__(self, layout: str, build: Callable[[], Any], optimizer: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = build()
        self.optimizer = OPTIMIZERS[optimizer]([p for p in self.plain.parameters() if p.requires_grad])
        torch.manual_seed(0)
        self.engine = sf.Engine(
            build(), optimizer=OPTIMIZERS[optimizer], **grouped(layout=layout, mesh=mesh_for(layout), **options)
        )
        self.seed = 0

    def train(self, steps: int) -> None:
        self.seed += 1
        for batch in models.batches(steps, seed=self.seed):
            parts = list(zip(*(t.chunk(self.engine.world_size) for t in batch), strict=True))
            expected = self.train_plain(parts)
            loss = self.engine(*parts[self.engine.rank])
            self.engine.backward(loss)
            self.engine.step()
            actual = self.engine.mean(loss.item())
            assert abs(actual - expected) <= 2e-6 * abs(expected), (actual, expected)

    def train_plain(self, parts: list[tuple[Tensor, ...]]) -> float:
        """A step of the plain model on what each rank gets, its gradients summed in the order of the layout's
        reductions; the mean loss.

        The gradients of a batch in parts differ from those of the whole by rounding, and an optimizer that divides by
        the root of a second moment near its ``eps`` makes that as large as it likes: RMSprop here from 1e-8 to 2e-5,
        in plain PyTorch too, and how much depends on the kernels of the machine.
        """
        engine, count = self.engine, len(parts)
        parameters = [p for p in self.plain.parameters() if p.requires_grad]
        losses: list[float] = []
        by_part: list[list[Tensor | None]] = []
        for part in parts:
            loss = self.plain(*part)
            (loss / count).backward()
            losses.append(loss.item())
            by_part.append([p.grad for p in parameters])
            for p in parameters:
                p.grad = None
        first = engine.mesh.parts(engine.layout.master.over) if engine.layout.master.over else count
        for p, *grads in zip(parameters, *by_part, strict=True):
            known = [grad for grad in grads if grad is not None]
            if known:  # of no part where forward does not use it
                rows = [sum(known[i + 1 : i + first], known[i]) for i in range(0, len(known), first)]
                p.grad = sum(rows[1:], rows[0])
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(losses) / count

    def change(self, change: Callable[[Any], None]) -> None:
        torch.manual_seed(7)
        change(self.plain)
        self.adopt()
        torch.manual_seed(7 + self.engine.rank)  # rank 0's values have to win
        change(self.engine.module)

    def adopt(self) -> None:
        """What the engine does for an optimizer that it made itself."""
        group = self.optimizer.param_groups[0]["params"]
        known = {id(p) for p in group}
        group.extend(p for p in self.plain.parameters() if p.requires_grad and id(p) not in known)

    def check(self, tolerance: float = 1e-6) -> None:
        """Values, names, reports and the state of every parameter are what they would be without a change."""
        engine = self.engine
        state, expected = engine.state_dict(), self.plain.state_dict()
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(state[name], value, rtol=tolerance, atol=tolerance), (
                name, (state[name] - value).abs().max(),
            )  # fmt: skip
        memory = engine.memory()
        fused = any(type(self.optimizer) is kind for kind in (torch.optim.AdamW, torch.optim.SGD))
        for row in memory.rows:
            if row.state == "moments" and not fused:  # a class of torch's own keeps none for padding, but counts steps
                continue
            assert row.held == pytest.approx(row.table + row.padding, abs=1), (row, memory)
        assert memory.transient == 0
        text = engine.explain()
        assert all(unit.name in text for unit in engine.units)
        named = {id(p): name for name, p in engine.module.named_parameters()}
        assert sorted(name for unit in engine.units for name, _ in unit.parameters()) == sorted(named.values())
        for unit in engine.units:
            for name, p in unit.parameters():
                assert named[id(p)] == name
                if unit.split:
                    with pytest.raises(FreedParameterError, match=f"'{name}'"):
                        p.sum()


def train(engine: sf.Engine, steps: int, seed: int = 0) -> None:
    for batch in models.batches(steps, seed=seed):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch)))
        engine.step()
