"""A residual network of bottlenecks with BatchNorm, as ResNet-50 is one, in two stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks

IMAGES, PIECE, CLASSES, STEPS = 120, 20, 5, 2
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 beside a way around, which has a layer of its own where the shape changes."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.reduce, self.middle, self.widen = nn.Sequential(), nn.Sequential(), nn.Sequential()
        sizes = ((given, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        for part, (i, o, size, step) in zip((self.reduce, self.middle, self.widen), sizes, strict=True):
            part.append(nn.Conv2d(i, o, size, step, size // 2, bias=False))
            part.append(nn.BatchNorm2d(o))
        same = given == 4 * width and stride == 1
        self.around = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        made = self.widen(F.relu(self.middle(F.relu(self.reduce(x), inplace=True)), inplace=True))
        return F.relu(made + self.around(x), inplace=True)


class ResNet(nn.Module):
    """Four groups of blocks, of which all but the first halve the image."""

    def __init__(self, blocks: Sequence[int], width: int) -> None:
        super().__init__()
        self.begin = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        groups, given = OrderedDict[str, nn.Module](), width
        for number, count in enumerate(blocks):
            now, made = width * 2**number, list[nn.Module]()
            for i in range(count):
                made.append(Bottleneck(given, now, 2 if number and not i else 1))
                given = 4 * now
            groups[f"group{number}"] = nn.Sequential(*made)
        self.groups = nn.Sequential(groups)
        self.head = nn.Linear(given, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.groups(self.begin(images)).mean((2, 3)))


def _model(blocks: Sequence[int]) -> ResNet:
    torch.manual_seed(0)
    return ResNet(blocks, 4).double()


def _loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(2)
    return [
        (torch.randn(IMAGES, 3, 8, 8, generator=draw, dtype=torch.float64),
         torch.randint(CLASSES, (IMAGES,), generator=draw))
        for _ in range(STEPS + 1)
    ]  # fmt: skip


def _trains(blocks: Sequence[int], layout: str, order: str) -> None:
    plain, parts = _model(blocks), IMAGES // PIECE
    optimizer = SGD(plain.parameters())
    engine = sf.Engine(
        _model(blocks),
        optimizer=SGD,
        layout=layout,
        parallel=sf.Parallel(mesh={"pipeline": 2}, pipeline=order),
        accumulate=parts,
    )
    *steps, last = _batches()
    for batch in steps:
        losses = list[float]()
        for part in zip(*(t.split(PIECE) for t in batch), strict=True):
            loss = _loss(plain, part)
            (loss / parts).backward()
            losses.append(loss.item())
        torch.testing.assert_close(engine.train_batch(batch, _loss).item(), sum(losses) / parts, rtol=1e-12, atol=0)
        with engine.gathered(of="grads") as found:
            for name, grad in found.items():
                torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-11, atol=1e-12, msg=name)
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    state = engine.state_dict()
    assert state.keys() == plain.state_dict().keys()
    for name, value in plain.state_dict().items():  # statistics of BatchNorm among them
        torch.testing.assert_close(state[name], value, rtol=1e-11, atol=1e-12, msg=name)
    engine.module.eval()
    with torch.no_grad():
        losses = [_loss(plain.eval(), part).item() for part in zip(*(t.split(PIECE) for t in last), strict=True)]
    torch.testing.assert_close(engine.eval_batch(last, _loss).item(), sum(losses) / parts, rtol=1e-11, atol=0)
    engine.close()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("blocks", "layout", "order"),
    [((1, 1, 1, 1), "zero2", "1f1b"),
     *(pytest.param((3, 4, 6, 3), layout, order, marks=pytest.mark.soak) for layout, order in
       (("zero3", "1f1b"), ("zero1", "zb-h1"), ("ddp", "zbv")))],
)  # fmt: skip
def test_a_residual_network_trains_in_two_stages(ranks: Ranks, blocks: Sequence[int], layout: str, order: str) -> None:
    """120 images in pieces of 20: losses, gradients, weights and statistics are plain PyTorch's on these pieces."""
    ranks.run(_trains, blocks, layout, order, world_size=2)
