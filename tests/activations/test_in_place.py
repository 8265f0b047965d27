"""Blocks that write in place, by way of views that share a counter of changes and of views that do not, that save
views, and that take gradients inside of their forward: the bits of plain PyTorch under every mode."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.activations.partitioned_inputs import Slicer
from shardfold.testing import Ranks

SGD = partial(torch.optim.SGD, lr=0.01)
WIDTH, LENGTH = 6, 4


class Block(nn.Module):
    """``(batch, LENGTH, WIDTH)`` to the same."""


class Recurrent(Block):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        kind, self.turned = draw.choice(["RNN", "GRU", "LSTM"]), draw.random() < 0.5
        both = draw.random() < 0.5
        self.inner: nn.Module = getattr(nn, kind)(
            WIDTH, WIDTH // (1 + both), num_layers=draw.choice([1, 2]), bidirectional=both, batch_first=not self.turned
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.turned:
            return x + self.inner(x.transpose(0, 1))[0].transpose(0, 1)
        return x + self.inner(x)[0]


class Cells(Block):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.cell: nn.Module = getattr(nn, draw.choice(["RNNCell", "GRUCell", "LSTMCell"]))(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out, 1)


class Attends(Block):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.inner: nn.Module = draw.choice([
            lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True),
            lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.1, batch_first=True),
        ])()  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x)[0] if isinstance(self.inner, nn.MultiheadAttention) else self.inner(x)


class Normed(Block):
    """May take a gradient inside of its forward, in which its statistics count the batch once more."""

    def __init__(self, draw: Random, *, asks: bool = True) -> None:
        super().__init__()
        self.up, self.norm, self.asks = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(LENGTH), asks

    def forward(self, x: Tensor) -> Tensor:
        if self.asks:
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                h = self.up(inner)
                loss = self.norm(torch.tanh(h)).square().sum()
                h.mul_(2)  # a run for the gradient ends before it
                (grad,) = torch.autograd.grad(loss, inner)
            x = x + 0.1 * grad
        return x + self.norm(self.up(x))


class SavesViews(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        out = torch.cat([left * right, right], -1)
        ctx.save_for_backward(left, right, x, out[..., :1], out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        left, right, x, one, out = ctx.saved_tensors
        first, second = grad.chunk(2, -1)
        return torch.cat([first * right, first * left + second], -1) + 0 * (x + out + one)


class Functional(Block):
    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return x + SavesViews.apply(h) * h


class Saves(torch.autograd.Function):
    """Saves what it does not need."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.saved_tensors[0] * 0 + grad * 2


class Writes(Block):
    """Writes into the result of a product, by way of some views."""

    WAYS = ("unsafe_chunk", "unsafe_split", "slices", "no_grad", "data", "whole", "unbind", "out", "alias")

    def __init__(self, draw: Random, way: str = "") -> None:
        super().__init__()
        self.way = way or draw.choice(self.WAYS)
        self.up, self.scale = nn.Linear(WIDTH, 2 * WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.way == "unsafe_chunk":
            a, b = torch.unsafe_chunk(h, 2, -1)
            return x + a.sigmoid_() * b.tanh_()
        if self.way == "unsafe_split":
            a, b, c = torch.unsafe_split(h, WIDTH - 2, -1)
            return x + F.pad(a.sigmoid_() * b.add_(a.detach()).tanh_(), (0, 2)) * c.sigmoid_().sum(-1, keepdim=True)
        if self.way == "slices":
            h[..., WIDTH:].mul_(2)
            h[..., :WIDTH].sigmoid_()
            return x + h[..., :WIDTH] * torch.tanh(h[..., WIDTH:]) * self.scale
        if self.way == "no_grad":
            with torch.no_grad():
                h.chunk(2, -1)[0].clamp_(-0.1, 0.1)
            return x + (h * h)[..., :WIDTH] * torch.tanh(h)[..., WIDTH:]
        if self.way == "data":
            h.data.chunk(2, -1)[1].round_(decimals=1)
            return x + h[..., WIDTH:] * self.scale * h[..., :WIDTH]
        if self.way == "whole":
            return x + h.relu_()[..., :WIDTH] * self.scale
        if self.way == "alias":
            h.mul_(1)
            saved, other = Saves.apply(h), h.data
            other.sigmoid_()  # of the version that was saved
            return x + (saved * other)[..., :WIDTH]
        if self.way == "out":
            into = torch.empty_like(h.detach())
            torch.mul(h.detach(), 2, out=into)
            return x + (h * into)[..., WIDTH:]
        a, b = h.unflatten(-1, (2, WIDTH)).unbind(-2)
        return x + a * torch.sigmoid(b) * self.scale


class Draws(Block):
    """Random numbers that ``select`` may keep, and some behind them."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x) * F.dropout(self.up(x), 0.5)


KINDS: list[Callable[[Random], Block]] = [
    Recurrent, Recurrent, Cells, Cells, Attends, Normed, partial(Normed, asks=False), Functional, Draws,
    *(partial(Writes, way=way) for way in Writes.WAYS),
]  # fmt: skip


def drawn(seed: int, kinds: list[Callable[[Random], Block]] = KINDS) -> nn.Sequential:
    """Of each kind one, in some order, with settings of its own."""
    draw = Random(seed)
    torch.manual_seed(seed)
    return nn.Sequential(*(kind(draw) for kind in draw.sample(kinds, len(kinds)))).double()


def batches(count: int) -> list[Tensor]:
    return [torch.randn(3, LENGTH, WIDTH, generator=torch.Generator().manual_seed(s)).double() for s in range(count)]


def plainly(model: nn.Module, steps: int) -> dict[str, Tensor]:
    optimizer = SGD(model.parameters())
    for i, x in enumerate(batches(steps)):
        torch.manual_seed(i)
        model(x.requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def trained(model: nn.Module, steps: int, layout: str, activations: Any, *, counts: bool = False) -> dict[str, Tensor]:
    engine = sf.Engine(model, optimizer=SGD, layout=layout, activations=activations, init=sf.Init(units=[Block]))
    for i, x in enumerate(batches(steps)):
        torch.manual_seed(i)
        if counts:
            with engine.count_saved():
                engine.backward(engine(x.requires_grad_()).square().mean())
        else:
            engine.backward(engine(x.requires_grad_()).square().mean())
        engine.step()
    state = engine.state_dict()
    engine.close()
    return state


ATEN = torch.ops.aten
MODES: list[Any] = [
    "recompute", "select", "fit:1GiB",
    sf.Activations(mode="select", kept=(
        ATEN.rand_like.default, ATEN.tanh.default, ATEN.mul.Tensor, ATEN.sigmoid_.default, ATEN.view.default,
    )),
    *(sf.Activations(mode=mode, smallest=0) for mode in ("host", "disk", "packed")),
    sf.Activations(mode="recompute", inputs="host", smallest=0),
]  # fmt: skip


def _against_plain(seeds: list[int], layout: str, steps: int, modes: list[int]) -> list[str]:
    wrong = []
    for seed in seeds:
        expected = plainly(drawn(seed), steps)
        assert all(value.isfinite().all() for value in expected.values())
        for i in modes:  # operations are not sent to ranks
            mode = MODES[i]
            found = trained(drawn(seed), steps, layout, mode, counts=i % 2 == seed % 2)
            wrong += [f"{seed} {mode}: {k}" for k, v in expected.items() if not torch.equal(v, found[k])]
    return wrong


@pytest.mark.parametrize("seeds", [[0], pytest.param(list(range(1, 12)), marks=pytest.mark.soak)])
def test_blocks_that_write_in_place_are_those_of_plain_pytorch_to_the_bit(ranks: Ranks, seeds: list[int]) -> None:
    assert ranks.run(_against_plain, seeds, "ddp", 2, [*range(len(MODES))], world_size=1) == [[]]


def test_with_parameters_that_are_split(ranks: Ranks) -> None:
    """Both ranks read the same, so that gradients are the plain ones."""
    assert ranks.run(_against_plain, [5], "zero3", 1, [1, 4], world_size=2) == [[], []]


# -- one thing at a time


class One(Block):
    """Calls ``function`` with itself and its arguments."""

    def __init__(self, function: Callable[..., Any], width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.function = nn.Linear(WIDTH, width), function
        self.kept: Any = None  # on the side

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def _returned(block: One, x: Tensor) -> tuple[Tensor, Tensor]:
    h = block.up(x)
    return h, torch.tanh(h).cumprod(-1)


def _aside(block: One, x: Tensor) -> Tensor:
    block.kept = h = block.up(x)
    return torch.tanh(h).cumprod(-1)


def _of_the_side(block: One, x: Tensor) -> Tensor:
    return block.up(block.kept) * block.kept + x.sum()


class Outside(nn.Module):
    """Writes into what its blocks give, and calls two blocks with one tensor, which it writes into between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = One(_returned), One(_aside)
        self.third, self.fourth = One(lambda block, x: Saves.apply(x)), One(_of_the_side)

    def forward(self, x: Tensor) -> Tensor:
        h, more = self.first(x)
        a, b = torch.unsafe_chunk(h, 2, -1)
        more = more + torch.cat([a.sigmoid_(), b], -1)
        more = more + self.second(more)
        self.second.kept.mul_(2)
        more = more + self.second.kept
        shared = torch.tanh(more) + 0
        self.fourth.kept = shared.data
        shared.mul_(1)
        third = self.third(shared)
        self.fourth.kept.mul_(2)  # of the version of ``shared``
        return third + self.fourth(shared)


def _outside() -> list[str]:
    torch.manual_seed(0)
    expected = plainly(Outside().double(), 2)
    wrong = []
    for mode in MODES:
        torch.manual_seed(0)
        found = trained(Outside().double(), 2, "ddp", mode)
        wrong += [f"{mode}: {name}" for name, value in expected.items() if not torch.equal(value, found[name])]
    return wrong


def test_results_that_are_written_into_outside(ranks: Ranks) -> None:
    """Of a block: returned or kept on the side, by way of views of either kind."""
    assert ranks.run(_outside, world_size=1) == [[]]


def _twice(block: One, x: Tensor) -> Tensor:
    h = torch.exp(block.up(x))
    h.add_(1)
    return h


def _written_after() -> list[str]:
    """What a backward says that needs what was written into."""
    said = []
    fit = sf.Activations(mode="fit:1GiB", among=("keep",))
    cases: list[tuple[str, Any, bool]] = [
        ("ddp", "host", False), ("ddp", "keep", True), ("ddp", fit, False), ("zero3", "keep", False),
    ]  # fmt: skip
    for layout, mode, counts in cases:
        engine = sf.Engine(
            nn.Sequential(One(_twice), One(_twice)), layout=layout, activations=mode, init=sf.Init(units=[Block])
        )
        x = torch.zeros(2, LENGTH, WIDTH)
        try:
            if counts:
                with engine.count_saved():
                    engine.backward(engine(x).mean())
            else:
                engine.backward(engine(x).mean())
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
        engine.close()
    return said


def test_what_stays_is_not_used_when_it_was_written_into(ranks: Ranks) -> None:
    """As in plain PyTorch, which compares no versions where anybody sees what is saved."""
    for said in ranks.run(_written_after, world_size=2):
        assert ["modified by an inplace operation" in text for text in said] == [True] * 4, said


def _seen(block: One, x: Tensor) -> Tensor:
    h = torch.exp(block.up(x))
    block.kept = weakref.ref(h)
    return h * 2


def _forgotten() -> list[bool]:
    found = []
    for mode, counts in [("host", False), ("keep", True), ("select", False), ("fit:1GiB", False)]:
        blocks = [One(_seen), One(_seen)]
        model = nn.Sequential(*blocks)
        engine = sf.Engine(model, layout="ddp", activations=mode, init=sf.Init(units=[Block]))
        gc.collect()
        gc.disable()
        if counts:
            with engine.count_saved():
                engine(torch.zeros(2, LENGTH, WIDTH)).mean()
        else:
            engine(torch.zeros(2, LENGTH, WIDTH)).mean()
        found += [block.kept() is None for block in blocks]
        gc.enable()
        engine.close()
    return found


def test_a_forward_without_backward_keeps_nothing(ranks: Ranks) -> None:
    assert ranks.run(_forgotten, world_size=1) == [[True] * 8]


def _bytes(way: str, mode: str) -> tuple[int, int]:
    model = nn.Sequential(Writes(Random(0), way), Writes(Random(0), way)).double()
    engine = sf.Engine(
        model, layout="ddp", activations=sf.Activations(mode=mode, smallest=0), init=sf.Init(units=[Block])
    )
    with engine.count_saved() as saved:
        engine.backward(engine(*batches(1)).square().mean())
    engine.close()
    return saved.rows[2].device, saved.rows[2].outside


def _all_bytes() -> list[tuple[int, int]]:
    return [_bytes("unsafe_chunk", "host"), _bytes("unsafe_chunk", "select"), _bytes("slices", "host"),
            _bytes("unbind", "select")]  # fmt: skip


def test_bytes_of_what_is_written_into(ranks: Ranks) -> None:
    """Each part is copied once, and what is made again is not kept."""
    one = 3 * LENGTH * WIDTH * 8
    # The input and both halves; the input; the input, both halves as one, tanh of one; the input and both halves.
    assert ranks.run(_all_bytes, world_size=1) == [[(0, 3 * one), (one, 0), (0, 5 * one), (3 * one, 0)]]


def test_slices_of_views_that_count_their_changes_by_themselves() -> None:
    class Only:
        size, rank = 1, 0

        def all_gather(self, tensor: Tensor, dim: int) -> Tensor:
            return tensor

        def max(self, tensor: Tensor) -> Tensor:
            return tensor

    slicer = Slicer(Only(), lambda tensor, smallest: True, torch.device("cpu"))
    x = torch.zeros(8)
    other = x.data
    x.add_(1)
    leaves, cut = slicer.cut([x, other[2:]], 0, "it", compare=False)
    other.add_(1)
    again, cut_again = slicer.cut([x, other, other[2:]], 0, "it", compare=False)
    assert [each.tolist() for each in cut.whole(leaves)] == [[1] * 8, [1] * 6]
    assert [each.tolist() for each in cut_again.whole(again)[1:]] == [[2] * 8, [2] * 6]
    assert again[2] is None  # of one memory and one counter
