"""Losses over classes that are split over ranks, against plain PyTorch with all classes on one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.nn import parallel_cross_entropy, parallel_margin_loss
from shardfold.nn.axis_group import OneRank
from shardfold.parallel.module_group import group_of
from shardfold.testing import Ranks

CLASSES, WIDTH, ROWS = 23, 6, 10
ALONE = OneRank("tensor")


class Tailor(nn.Module):
    """A module through which an engine gives a group."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        group_of(self, "tensor")


def problem(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    hidden, weight, bias = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) * scale
        for shape in ((2, ROWS // 2, WIDTH), (CLASSES, WIDTH), (CLASSES,))
    )
    targets = torch.randint(CLASSES, (2, ROWS // 2), generator=draw)
    targets[0, 1] = -100
    return hidden, weight, bias, targets


def angular(hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, angle: float, less: float) -> Tensor:
    """ArcFace and CosFace as their papers write them, with angles."""
    cosine = F.normalize(hidden.flatten(0, -2)) @ F.normalize(weight).t()
    own = F.one_hot(targets.flatten().clamp(min=0), len(weight)).bool()
    theta = cosine.clamp(-1 + 1e-15, 1 - 1e-15).acos()
    far = theta + angle > math.pi
    bent = torch.where(far, cosine - angle * math.sin(angle), (theta + angle).cos()) - less
    return scale * torch.where(own, bent, cosine)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"label_smoothing": 0.1, "reduction": "sum", "chunk": 3},
    {"softcap": 2.0, "reduction": "none", "bias": True},
]
MARGINS: list[dict[str, Any]] = [
    {"scale": 8.0, "angle": 0.5},
    {"scale": 8.0, "angle": 0.0, "cosine": 0.35, "reduction": "sum", "chunk": 4},
    {"scale": 4.0, "angle": 1.5, "reduction": "none"},  # most angles pass pi
]


def _weighed(loss: Tensor) -> Tensor:
    return (loss * torch.arange(1.0, 1 + loss.numel(), dtype=loss.dtype).view(loss.shape)).sum()


def _expected(options: dict[str, Any], margin: bool) -> list[Tensor]:
    hidden, weight, bias, targets = problem()
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    if margin:
        logits = angular(hidden, weight, targets, options["scale"], options["angle"], options.get("cosine", 0.0))
    else:
        logits = F.linear(hidden, weight, bias if options.get("bias") else None).flatten(0, 1)
        if cap := options.get("softcap"):
            logits = cap * (logits / cap).tanh()
    loss = F.cross_entropy(logits, targets.flatten(), label_smoothing=options.get("label_smoothing", 0.0),
                           reduction=options.get("reduction", "mean"))  # fmt: skip
    loss = loss.view(targets.shape) if loss.dim() else loss
    return [loss.detach(), *torch.autograd.grad(_weighed(loss), inputs, allow_unused=True, materialize_grads=True)]


def _compared(ranks: int) -> None:
    engine = sf.Engine(Tailor(), parallel={"tensor": ranks}, layout="ddp")
    group = group_of(engine.module, "tensor")
    sizes = [CLASSES // ranks + (r < CLASSES % ranks) for r in range(ranks)]
    for margin, options in [*((False, each) for each in OPTIONS), *((True, each) for each in MARGINS)]:
        hidden, weight, bias, targets = problem()
        mine, my_bias = (each.split(sizes)[group.rank].clone().requires_grad_() for each in (weight, bias))
        hidden.requires_grad_()
        given = {key: value for key, value in options.items() if key != "bias"}
        if margin:
            loss = parallel_margin_loss(hidden, mine, targets, ranks=group, classes=CLASSES, **given)
        else:
            given["bias"] = my_bias if options.get("bias") else None
            loss = parallel_cross_entropy(hidden, mine, targets, ranks=group, classes=CLASSES, **given)
        inputs = [hidden, mine, my_bias]
        got = [loss.detach(), *torch.autograd.grad(_weighed(loss), inputs, allow_unused=True, materialize_grads=True)]
        expected = _expected(options, margin)
        expected[2:] = [each.split(sizes)[group.rank] for each in expected[2:]]
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13, msg=lambda text, o=options: f"{o}: {text}")
    # A sample of classes is the same loss over these: those of targets are among them.
    hidden, weight, _, targets = problem()
    mine = weight.split(sizes)[group.rank].clone().requires_grad_()
    draw = torch.Generator().manual_seed(group.rank)
    loss = parallel_margin_loss(
        hidden, mine, targets, ranks=group, classes=CLASSES, sample=0.5, generator=draw, scale=8.0
    )
    (grad,) = torch.autograd.grad(loss, [mine])
    touched = (grad.abs().sum(1) > 0).nonzero().flatten()
    start = sum(sizes[: group.rank])
    own = {int(t) - start for t in targets.flatten() if start <= t < start + sizes[group.rank]}
    assert own <= set(touched.tolist()) and len(touched) == max(len(own), round(sizes[group.rank] * 0.5))
    chosen = group.all_gather(F.pad(touched + start, (0, CLASSES - len(touched)), value=-1), 0)
    kept = chosen[chosen >= 0]
    place = torch.searchsorted(kept, targets.clamp(min=0)).where(targets >= 0, -100)
    logits = angular(hidden, weight[kept], place, 8.0, 0.5, 0.0)
    torch.testing.assert_close(loss, F.cross_entropy(logits, place.flatten()), rtol=1e-12, atol=0)
    with pytest.raises(ConfigError, match="whose part of 24 classes"):
        parallel_cross_entropy(hidden, weight[:3], targets, ranks=group, classes=24)
    engine.close()


@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_split_classes(ranks: Ranks, world: int) -> None:
    """Losses, gradients of hidden, of this rank's rows and of its bias are those of all classes on one process, to
    1e-12, where classes do not divide: with smoothing, ignored rows, softcap, and margins of angle and of cosine."""
    ranks.run(_compared, world, world_size=world)


@pytest.mark.parametrize("options", MARGINS)
def test_margins_on_one_rank(options: dict[str, Any]) -> None:
    """Without other ranks the same; and gradients are those that finite differences show."""
    hidden, weight, _, targets = problem()
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = parallel_margin_loss(hidden, weight, targets, ranks=ALONE, **options)
    got = [loss.detach(), *torch.autograd.grad(_weighed(loss), inputs)]
    for ours, theirs in zip(got, _expected(options, margin=True)[:3], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 0.0}, "scale is 0.0"),
        ({"scale": math.inf}, "scale is inf, but must be more than 0 and finite"),
        ({"angle": 2.0}, "0 to pi / 2"),
        ({"cosine": -1.0}, "cosine is -1.0"),
        ({"cosine": math.nan}, "cosine is nan"),
        ({"sample": 0.0}, "sample is 0.0"),
        ({"sample": "all"}, "sample is 'all'"),
        ({"chunk": 1.5}, "chunk is 1.5"),
        ({"classes": "5"}, "classes is '5', but must be a whole number"),
        ({"reduction": "men"}, "mean 'mean'"),
        ({"classes": 5}, "whose part of 5 classes"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], words: str) -> None:
    """Each is refused with a sentence."""
    hidden, weight, _, targets = problem()
    with pytest.raises(ConfigError, match=words):
        parallel_margin_loss(hidden, weight, targets, ranks=ALONE, **options)


@pytest.mark.parametrize("target", [-1, CLASSES])
def test_a_target_that_is_no_class_raises(target: int) -> None:
    """Its value is told, and the classes that there are; also where some of them are sampled."""
    hidden, weight, _, targets = problem()
    targets[1, 1] = target
    words = f"a target is {target}, but there are {CLASSES} classes, 0 to {CLASSES - 1}, and -100 for a row that does"
    for sample in (1.0, 0.5):
        with pytest.raises(ConfigError, match=words):
            parallel_margin_loss(hidden, weight, targets, ranks=ALONE, sample=sample)
