"""Micro-batches weighed by their tokens: what one process has that takes the mean over all of them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardfold as sf
from shardfold.errors import NonFiniteError
from shardfold.testing import Ranks
from tests.support.options import grouped

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
        clip_norm=clip,
        loss_scale=64.0 if precision == "fp16" else None,
        precision=precision,
        parallel={"inter": 2, "intra": 2} if world_of(layout) == 4 else None,
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


# -- what a step leaves to the next ------------------------------------------------------------------------------------


WEIGHTS = [3, 4]


class _Steps:
    """An engine in fp64, and plain PyTorch that takes each step's micro-batches of all ranks with their shares."""

    def __init__(self, layout: str, **options: object) -> None:
        self.plain, model = (_model().double() for _ in range(2))
        self.update = torch.optim.SGD(self.plain.parameters(), lr=0.5, momentum=0.9)
        make = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
        self.engine = sf.Engine(model, optimizer=make, **grouped(layout=layout, **options))  # pyright: ignore[reportArgumentType]
        self.number = 0
        self.came: list[tuple[int, bool]] = []  # since the last step: batches, and whether they have weights

    def batch(self, number: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)

    def loss(self, of: nn.Module, number: int, rank: int) -> torch.Tensor:
        return of(self.batch(number, rank)).square().mean()

    def micro(self, how: str, *, times: float = 1.0) -> None:
        """A backward: with a ``weight``, by the ``engine`` without one, or ``bare``."""
        self.number += 1
        rank = self.engine.rank
        loss = self.engine(self.batch(self.number, rank)).square().mean() * times
        if how == "weight":
            self.engine.backward(loss, weight=WEIGHTS[rank] * self.number)
        elif how == "bare":
            self.engine.scale(loss).backward()
        else:
            self.engine.backward(loss)
        self.came.append((self.number, how == "weight"))

    def step(self, *hows: str) -> None:
        for how in hows:
            self.micro(how)
        assert self.engine.step().updated
        total = sum(sum(WEIGHTS) * number for number, weighed in self.came if weighed)
        for number, weighed in self.came:
            for rank in range(2):
                share = WEIGHTS[rank] * number / total if weighed else 1 / (2 * len(self.came))
                (self.loss(self.plain, number, rank) * share).backward()
        self.update.step()
        self.update.zero_grad()
        self.came.clear()

    def close(self) -> float:
        state = self.engine.state_dict()
        off = max((state[name] - value).abs().max().item() for name, value in self.plain.state_dict().items())
        self.engine.close()
        return off


def _stop(grad: torch.Tensor) -> None:
    raise ArithmeticError


def _after_all_kinds_of_steps(layout: str) -> dict[str, float]:
    """How far weights are from plain PyTorch's behind steps of which one had weights, and ended in some way."""
    found: dict[str, float] = {}

    steps = _Steps(layout)
    for hows in ("weight", "bare", "bare", "weight", "engine", "weight"):
        steps.step(hows)
    found["one after the other"] = steps.close()

    steps = _Steps(layout)
    for again in ("bare", "weight"):  # a backward that fails in the user's own code, and one that cannot begin
        loss = steps.engine(steps.batch(0, steps.engine.rank)).square().mean()
        loss.register_hook(_stop)
        with pytest.raises(ArithmeticError):
            steps.engine.backward(loss, weight=100.0)
        with pytest.raises(RuntimeError, match="does not require grad"):
            steps.engine.backward(loss.detach(), weight=1000.0)
        steps.engine.backward(torch.ones((), dtype=torch.float64, requires_grad=True), weight=1000.0)  # of no weight
        steps.step(again)
    found["failed backwards"] = steps.close()

    steps = _Steps(layout, clip=sf.Clip(norm=1e9, error_if_nonfinite=True))
    steps.micro("weight", times=float("inf"))
    with pytest.raises(NonFiniteError):
        steps.engine.step()
    steps.engine.zero_grad()
    steps.came.clear()
    steps.step("bare")
    steps.step("weight")
    found["a step that was refused"] = steps.close()

    steps = _Steps(layout, loss_scale=8.0)
    steps.micro("weight", times=float("inf"))
    assert steps.engine.step().skipped
    steps.came.clear()
    steps.step("bare")
    found["a skipped step"] = steps.close()

    steps = _Steps(layout, accumulate=3)
    steps.micro("weight")
    steps.engine.optimizer.zero_grad()  # pyright: ignore[reportOptionalMemberAccess]
    steps.came.clear()
    steps.step("weight", "weight")
    steps.micro("weight")
    steps.engine.reset()
    steps.came.clear()
    steps.step("bare", "engine", "bare")
    found["dropped gradients"] = steps.close()

    steps = _Steps(layout, accumulate=3)
    steps.micro("weight")
    steps.engine.accumulate = 2
    steps.step("weight")
    steps.step("bare", "bare")
    steps.step("weight", "weight")
    found["another number of micro-batches"] = steps.close()
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_weights_are_those_of_their_step(ranks: Ranks, layout: str) -> None:
    """However a step with weights ended, the next one has its own, or none."""
    for found in ranks.run(_after_all_kinds_of_steps, layout, world_size=2):
        assert max(found.values()) < 1e-12, found


def _bare_among_them() -> str:
    steps = _Steps("zero2", accumulate=2)
    steps.micro("weight")
    steps.micro("bare")
    with pytest.raises(sf.ShardfoldError) as caught:
        steps.engine.step()
    steps.engine.close()
    return str(caught.value)


def test_a_bare_backward_has_no_weight(ranks: Ranks) -> None:
    """``loss.backward()`` among backwards with weights is refused as ``engine.backward(loss)`` is."""
    for said in ranks.run(_bare_among_them, world_size=2):
        assert "2 micro-batches had no weight=" in said
