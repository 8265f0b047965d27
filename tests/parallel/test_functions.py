"""The collectives that autograd knows: what comes out, and the gradient of what all ranks' losses sum up to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardfold as sf
from shardfold.parallel import functions
from shardfold.parallel.module_group import group_of
from shardfold.testing import Ranks
from tests.parallel.test_module_group import Linked, everyones


def _expected(name: str, inputs: list[Tensor], slopes: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """By rank, output and gradient of the input, for the loss that is the sum of each rank's output times its slope
    (of what all ranks have alike, once)."""
    n, total = len(inputs), sum(slopes[1:], slopes[0])
    if name == "copy":
        return [(inputs[0], total)] * n
    if name == "reduce":
        return [(sum(inputs[1:], inputs[0]), slopes[0])] * n
    if name == "scatter":
        return [(inputs[0].chunk(n)[r], torch.cat([s.chunk(n)[q] for q, s in enumerate(slopes)])) for r in range(n)]
    if name == "gather":
        return [(torch.cat(inputs), torch.cat([slopes[0]] * n).chunk(n)[r]) for r in range(n)]
    if name == "spread":
        whole = torch.cat([s.chunk(n)[q] for q, s in enumerate(slopes)])
        return [(sum(inputs[1:], inputs[0]).chunk(n)[r], whole) for r in range(n)]
    return [(torch.cat(inputs), torch.cat([total] * n).chunk(n)[r]) for r in range(n)]


def _slope(name: str, mine: Tensor, like: Tensor, rank: int, n: int) -> Tensor:
    if name in ("scatter", "spread"):
        return mine.chunk(n)[rank]
    return torch.cat([mine] * n) if name in ("gather", "collect") else mine.view_as(like)


def _compared(ranks: int) -> None:
    engine = sf.Engine(Linked(), parallel={"tensor": ranks}, layout="ddp")
    group = group_of(engine.module, "tensor")
    me, alike = group.rank, ("copy", "scatter")
    for name in functions.__all__:
        whole, slopes = everyones(ranks, 2 * ranks, 3), everyones(ranks, 2 * ranks, 3)
        slopes = [each * (1 + i) for i, each in enumerate(slopes)]
        if name in alike:
            whole = [whole[0]] * ranks
        if name in ("reduce", "gather"):
            slopes = [slopes[0]] * ranks
        x = whole[me].clone().requires_grad_()
        call: Any = getattr(functions, name)
        y = call(x, group) if name in ("copy", "reduce") else call(x, group, 0)
        (grad,) = torch.autograd.grad((y * _slope(name, slopes[me], y, me, ranks)).sum(), [x])
        output, slope = _expected(name, whole, slopes)[me]
        torch.testing.assert_close(y.detach(), output, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(grad, slope, rtol=1e-14, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")
    engine.close()


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_pairs(ranks: Ranks, world: int) -> None:
    """Each function and its backward, which is the other one of its pair."""
    ranks.run(_compared, world, world_size=world)


class _Reversed(torch.autograd.Function):
    """Gives what it gets; its gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -grads[0]


def _copied() -> None:
    engine = sf.Engine(Linked(), parallel={"tensor": 2}, layout="ddp")
    group = group_of(engine.module, "tensor")
    halves, slopes = everyones(2, 2, 3), [each * (1 + i) for i, each in enumerate(everyones(2, 4, 3))]
    total, heard = slopes[0] + slopes[1], list[Tensor]()

    def hooked(y: Tensor) -> Tensor:
        y.register_hook(heard.append)
        return y

    cases: dict[str, tuple[Any, float]] = {
        "as it is": (lambda y: y, 1), "sliced": (lambda y: y[0:], 1), "half": (lambda y: y[:2], 1),
        "in place": (lambda y: y.mul_(3), 3), "doubled": (lambda y: 2 * y, 2), "reversed": (_Reversed.apply, -1),
        "heard": (hooked, 1),
    }  # fmt: skip
    for name, (change, factor) in cases.items():
        x = halves[group.rank].clone().requires_grad_()
        y = functions.copy(change(functions.gather(x, group, 0)), group)
        (grad,) = torch.autograd.grad((y * slopes[group.rank][: len(y)]).sum(), [x])
        expected = factor * total.clone()
        expected[len(y) :] = 0
        torch.testing.assert_close(grad, expected.chunk(2)[group.rank], rtol=1e-14, atol=1e-14,
                                   msg=lambda text, name=name: f"{name}: {text}")  # fmt: skip
    assert torch.equal(heard[0], total)
    engine.close()


def test_what_is_gathered_and_then_copied(ranks: Ranks) -> None:
    """Gradients of what was gathered and goes on into parts of a layer are summed, whatever lies between."""
    ranks.run(_copied, world_size=2)
