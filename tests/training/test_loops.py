"""Training loops that people write (several forwards, losses, backwards, engines) are as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks

pytestmark = pytest.mark.product

WIDTH = 12
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
LAYOUTS = list(sf.PRESETS)


class Net(nn.Module):
    """Two heads on three blocks; ``forward`` gives both, and keeps a loss of its own on the side."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)
        )
        self.left, self.right = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return self.left(x), self.right(x)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.body = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)
        self.aside: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.aside = F.softmax(self.gate(x), -1).square().mean()
        return x + torch.tanh(self.body(x))


class Gated(Net):
    """Each block keeps a loss on the side."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.blocks = nn.ModuleList(Gate() for _ in range(3))


class Plain:
    """A model trained by hand: what an engine's three calls mean."""

    rank, world_size = 0, 1

    def __init__(self, model: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None) -> None:
        self.module = model
        self._optimizer = optimizer(model.parameters()) if optimizer is not None else None

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: Tensor, **options: Any) -> None:
        loss.backward(**options)

    def step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step()
        self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        assert self._optimizer is not None
        self._optimizer.zero_grad()

    def mean(self, value: Any) -> float:
        return float(value)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.module.state_dict().items()}


Make = Callable[..., Any]


def several_forwards(make: Make) -> list[Any]:
    """Two forwards, one backward of both; then a third whose backward comes alone."""
    net = make(Net())
    for x, y in _batches(5, net):
        (a, _), (b, v) = net(x), net(x * 0.5)
        net.backward(F.cross_entropy(a, y) + F.cross_entropy(b, y) + v.square().mean())
        net.step()
        c, _ = net(x + 1)
        net.backward(F.cross_entropy(c, y))
        net.step()
    return [net]


def several_losses(make: Make) -> list[Any]:
    """Two losses of one forward, backwards one after the other over the same graph; the second forward's alternate."""
    net = make(Net())
    for i, (x, y) in enumerate(_batches(5, net)):
        left, right = net(x)
        first, second = F.cross_entropy(left, y), right.square().mean()
        first.backward(retain_graph=True)
        net.backward(second if i % 2 else second + first)
        net.step()
    return [net]


def losses_on_the_side(make: Make) -> list[Any]:
    """A loss of what blocks keep on the side: with the outputs' loss, and alone."""
    net = make(Gated())
    for i, (x, y) in enumerate(_batches(6, net)):
        left, _ = net(x)
        aside = sum(block.aside for block in net.module.blocks)
        net.backward(aside if i in (0, 4) else F.cross_entropy(left, y) + aside)
        net.step()
    return [net]


def adversaries(make: Make) -> list[Any]:
    """A generator and a discriminator; the one's loss goes through the other, whose gradients are dropped."""
    maker, judge = make(Net(0)), make(Net(1))
    for x, _ in _batches(5, maker):
        fake = torch.cat([*maker(x), x], 1)[:, :WIDTH]
        judge.backward(F.softplus(-judge(x)[1]).mean() + F.softplus(judge(fake.detach())[1]).mean())
        judge.step()
        maker.backward(F.softplus(-judge(fake)[1]).mean())
        maker.step()
        judge.zero_grad()
    return [maker, judge]


def distillation(make: Make) -> list[Any]:
    """A frozen teacher without an optimizer, in evaluation mode."""
    student = make(Net(0))
    teacher = make(Net(1), None)
    for x, y in _batches(5, student):
        with torch.no_grad():
            soft = teacher(x)[0].softmax(-1)
        left, right = student(x)
        student.backward(F.cross_entropy(left, soft) + F.cross_entropy(left, y) + right.square().mean())
        student.step()
    return [student, teacher]


def policy_and_value(make: Make) -> list[Any]:
    """As in PPO: a rollout without gradients, then epochs on it, for a policy, a value and a reference model."""
    policy, value, reference = make(Net(0)), make(Net(1)), make(Net(0), None)
    for x, y in _batches(3, policy):
        with torch.no_grad():
            old = policy(x)[0].log_softmax(-1)
            anchor = reference(x)[0].log_softmax(-1)
            baseline = value(x)[1].squeeze(-1)
        for _ in range(2):
            new = policy(x)[0].log_softmax(-1)
            ratio = (new - old).gather(1, y[:, None]).squeeze(1).exp()
            gain = torch.min(ratio * baseline, ratio.clamp(0.8, 1.2) * baseline).mean()
            policy.backward(-gain + F.kl_div(new, anchor, log_target=True, reduction="batchmean"))
            policy.step()
            value.backward((value(x)[1].squeeze(-1) - y.float()).square().mean())
            value.step()
    return [policy, value, reference]


def freezing_between_steps(make: Make) -> list[Any]:
    """Parameters are frozen for some steps: no gradient, no update, no decay."""
    net = make(Net())
    for i, (x, y) in enumerate(_batches(6, net)):
        for parameter in net.module.blocks[1].parameters():
            parameter.requires_grad_(i not in (2, 3))
        left, right = net(x)
        net.backward(F.cross_entropy(left, y) + right.square().mean())
        net.step()
    return [net]


def unused_by_all(make: Make) -> list[Any]:
    """A head that no rank uses in some steps keeps its values, moments and step count."""
    net = make(Net())
    for i, (x, y) in enumerate(_batches(6, net)):
        left, right = net(x)
        net.backward(F.cross_entropy(left, y) if i % 2 else right.square().mean())
        net.step()
    return [net]


def a_target_between(make: Make) -> list[Any]:
    """A forward without gradients between a forward and its backward."""
    net = make(Net())
    for x, y in _batches(5, net):
        left, right = net(x)
        with torch.no_grad():
            target = net(x * 0.5)[1]
        net.backward(F.cross_entropy(left, y) + (right - target).square().mean())
        net.step()
    return [net]


LOOPS = [
    a_target_between,
    several_forwards,
    several_losses,
    losses_on_the_side,
    adversaries,
    distillation,
    policy_and_value,
    freezing_between_steps,
    unused_by_all,
]


def _batches(steps: int, engine: Any) -> list[tuple[Tensor, Tensor]]:
    """This rank's rows of the same batches everywhere."""
    g = torch.Generator().manual_seed(3)
    whole = [(torch.randn(12, WIDTH, generator=g), torch.randint(3, (12,), generator=g)) for _ in range(steps)]
    return [(x.chunk(engine.world_size)[engine.rank], y.chunk(engine.world_size)[engine.rank]) for x, y in whole]


def _run(loop: Callable[[Make], list[Any]], layout: str) -> list[dict[str, Tensor]]:
    world = dist.get_world_size()
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") else None

    def make(model: nn.Module, optimizer: Any = ADAMW) -> sf.Engine:
        return sf.Engine(model, optimizer=optimizer, layout=layout, parallel=mesh, init=sf.Init(units=["blocks.*"]))

    engines: Sequence[sf.Engine] = loop(make)
    for engine in engines:
        memory = engine.memory()
        assert memory.transient == 0, memory
    return [engine.state_dict() for engine in engines]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_training_loop_ends_where_plain_pytorch_ends(
    ranks: Ranks, loop: Callable[[Make], list[Any]], layout: str
) -> None:
    expected = [plain.state_dict() for plain in loop(lambda model, optimizer=ADAMW: Plain(model, optimizer))]
    answers = ranks.run(_run, loop, layout, world_size=4 if layout in ("hsdp", "hpz") else 2)
    if layout == "hpz":  # one rank per node: units stay full from forward to backward
        answers += ranks.run(_run, loop, layout, world_size=2)
    for answer in answers:
        for mine, plain in zip(answer, expected, strict=True):
            assert mine.keys() == plain.keys()
            for name, value in plain.items():
                torch.testing.assert_close(mine[name], value, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
