"""Element-wise optimizers on shards equal the same optimizers on the full model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import models
import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks, same_training

pytestmark = pytest.mark.product


class Lion(torch.optim.Optimizer):
    """A user's class (arXiv 2302.06675): element-wise, with state of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    # tanh in place of sign: a sign flips on a rounding error and could not be compared
                    p.add_(torch.tanh(1e3 * torch.lerp(p.grad, momentum, group["beta"])), alpha=-group["lr"])
                    momentum.lerp_(p.grad, 1 - group["beta"])


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "Adam with L2": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.01),
    "AdamW amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD Nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "Lion-like": partial(Lion, lr=1e-3),
}


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3", "fsdp2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_element_wise_optimizer_updates_shards_as_whole_parameters(ranks: Ranks, name: str, layout: str) -> None:
    same_training(
        models.small, models.batches(6), layout=layout, world_size=2, optimizer=OPTIMIZERS[name], steps=6,
        clip_norm=1.0, parameter_tol=1e-4, ranks=ranks,
    )  # fmt: skip


def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Decay for matrices only and a smaller rate for them."""
    every = list(parameters)
    matrices, rest = [p for p in every if p.dim() > 1], [p for p in every if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3, "lr": 3e-3}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )


@pytest.mark.parametrize("layout", ["zero2", "zero3", "hsdp"])
def test_parameter_groups_keep_their_hyper_parameters(ranks: Ranks, layout: str) -> None:
    same_training(
        models.small, models.batches(8), layout=layout, world_size=2, optimizer=grouped, steps=8, parameter_tol=1e-4,
        ranks=ranks,
    )  # fmt: skip


def _instance(layout: str, kind: str) -> tuple[bool, bool, float, list[float | None]]:
    """An existing optimizer with a schedule made before the engine, against the same in plain PyTorch."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
        torch.manual_seed(0)
        model = models.small()
        optimizer = grouped(model.parameters()) if kind == "fused" else Lion(model.parameters())
        return model, optimizer, LambdaLR(optimizer, lambda step: 1.0 / (1 + step))

    model, optimizer, schedule = build()
    groups = [id(group) for group in optimizer.param_groups]
    engine = sf.Engine(model, optimizer=optimizer, layout=layout)
    plain, reference, plain_schedule = build()
    rates = []
    for tokens, targets in models.batches(5):
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
        rates.append(engine.step().lr)
        plain(tokens, targets).backward()
        reference.step()
        reference.zero_grad()
        optimizer._opt_called = True  # type: ignore[attr-defined]
        schedule.step()
        plain_schedule.step()
    state, expected = engine.state_dict(), plain.state_dict()
    worst = max((state[k] - expected[k]).abs().max().item() for k in state)
    same_groups = groups == [id(group) for group in optimizer.param_groups]
    engine.close()
    return engine.optimizer is optimizer, same_groups, worst, rates


@pytest.mark.parametrize("kind", ["fused", "own"])
@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_an_existing_optimizer_keeps_its_object_groups_and_schedule(ranks: Ranks, layout: str, kind: str) -> None:
    for same, groups, worst, rates in ranks.run(_instance, layout, kind, world_size=2):
        assert same and groups and worst < 1e-5
        assert rates[1] == pytest.approx(rates[0] / 2)


def _scheduled() -> list[float | None]:
    schedule = sf.optim.warmup_cosine(warmup=2, total=6, floor=0.1)
    engine = sf.Engine(models.small(), optimizer=partial(torch.optim.AdamW, lr=1.0), schedule=schedule)
    rates = []
    for batch in models.batches(7):
        engine.backward(engine(*batch))
        rates.append(engine.step().lr)
    return rates


def test_the_schedule_warms_up_from_the_first_step_and_ends_at_its_floor() -> None:
    rates = _scheduled()
    assert rates[:2] == [0.5, 1.0] and rates[2] == 1.0 and rates[6] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="warmup <= total"):
        sf.optim.warmup_cosine(warmup=5, total=2)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        ("AdamW", "neither a torch.optim.Optimizer"),
        (lambda parameters: None, "made a NoneType"),
        (torch.optim.LBFGS, "LBFGS is not element-wise"),
    ],
)
def test_what_can_not_update_shards_is_refused(optimizer: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sf.Engine(models.small(), optimizer=optimizer)


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = models.small()
    optimizer = torch.optim.AdamW(model.parameters())
    model(*models.batches(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="already stepped"):
        sf.Engine(model, optimizer=optimizer)


def _norm(layout: str, scale: float) -> tuple[float, float]:
    torch.manual_seed(0)
    engine = sf.Engine(
        models.frozen(), optimizer=partial(torch.optim.SGD, lr=0.1), layout=layout, clip_norm=scale, accumulate=2
    )
    torch.manual_seed(0)
    plain = models.frozen()
    (tokens, targets), count = models.batches(1)[0], engine.world_size * 2
    for i in range(2):
        part = engine.rank * 2 + i
        engine.backward(engine(tokens.chunk(count)[part], targets.chunk(count)[part]))
        report = engine.step()
    plain(tokens, targets).backward()
    expected = torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], scale).item()
    engine.close()
    assert report.grad_norm is not None
    return report.grad_norm, expected


@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_the_norm_over_all_shards_is_clip_grad_norms(ranks: Ranks, layout: str) -> None:
    for got, expected in ranks.run(_norm, layout, 0.1, world_size=3):
        assert got == pytest.approx(expected, rel=1e-6)
