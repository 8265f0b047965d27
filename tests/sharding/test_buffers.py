"""Buffers are rank 0's wherever ranks read them together, as under DDP, and taking them over disturbs no backward."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import Ranks

WIDTH = 6
SGD = partial(torch.optim.SGD, lr=0.1)
EXACT = 1e-12


class Kept(nn.Module):
    """Buffers of every kind that a training forward changes, each in another way; DDP takes none that is expanded."""

    def __init__(self, expands: bool) -> None:
        super().__init__()
        self.expands = expands
        self.inner, self.norm, self.out = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("mean", torch.zeros(WIDTH))  # as a kernel writes it, without a trace
        self.register_buffer("var", torch.ones(WIDTH))
        self.register_buffer("average", torch.ones(WIDTH))  # in place
        self.register_buffer("moved", torch.ones(WIDTH), persistent=False)  # by another
        self.register_buffer("hidden", torch.ones(WIDTH))  # by way of .data
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))
        self.register_buffer("wide", torch.ones(3, WIDTH))  # elements may share memory
        self.mean: Tensor
        self.var: Tensor
        self.average: Tensor
        self.hidden: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x))
        x = F.batch_norm(x, self.mean, self.var, training=self.training)
        if self.training:
            seen = x.detach().abs().mean(0)
            self.average.mul_(0.5).add_(seen)
            self.moved = self.moved * 0.5 + seen
            self.hidden.data.mul_(0.5).add_(seen)
            self.rows += (seen > 0.8).sum()
            self.wide = seen.expand(3, WIDTH) if self.expands else seen.repeat(3, 1)
        kept = self.average + self.moved + self.hidden + self.rows + self.wide.sum(0)
        return self.out(x * kept)


def _net(expands: bool = True) -> Kept:
    torch.manual_seed(0)
    return Kept(expands).double()


def _batch(i: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * i + dist.get_rank())
    return (1 + dist.get_rank()) * torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)


def _loss(model: Any, i: int) -> Tensor:
    return (model(_batch(i)) - 1).square().mean()


def _evaluated(model: Any, module: nn.Module) -> float:
    module.eval()
    with torch.no_grad():
        value = model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().item()
    module.train()
    return value


def _train(model: Any, module: nn.Module, backward: Any, number: int) -> Iterator[float]:
    """A step of some kind; the loss, and what an evaluation between a forward and its backward gave."""
    first = 3 * number
    loss = _loss(model, first)
    if number % 3 == 1:
        loss = loss + 2 * _loss(model, first + 1)
    yield loss.item()
    if number % 3 == 2:
        yield _evaluated(model, module)
    backward(loss)


def _of_first(state: dict[str, Tensor]) -> dict[str, Tensor]:
    box = [{name: value.detach().clone() for name, value in state.items()}]
    dist.broadcast_object_list(box)
    return box[0]


def _apart(state: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert state.keys() == other.keys()
    return max((state[name].double() - other[name].double()).abs().max().item() for name in other)


def _programs(layout: str, debug: bool) -> dict[str, float]:
    """By what ranks did behind a step: how far off its numbers were from DDP's, whose rank 0 has what is right."""
    found: dict[str, float] = {}
    reference = nn.parallel.DistributedDataParallel(_net(expands=False))
    plain = SGD(reference.parameters())
    engine = sf.Engine(
        _net(),
        optimizer=SGD,
        layout=layout,
        init=sf.Init(units=["inner"]),
        runtime=sf.Runtime(debug=debug, patience=5),
    )

    def plain_step(loss: Tensor) -> None:
        loss.backward()
        plain.step()
        plain.zero_grad()

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    def note(what: str, *pairs: tuple[float, float]) -> None:
        found[what] = max(abs(a - b) for a, b in [(found.get(what, 0.0), 0.0), *pairs])

    for number in range(8):
        wanted = list(_train(reference, reference.module, plain_step, number))
        note("training", *zip(_train(engine, engine.module, step, number), wanted, strict=True))
        right = _of_first(reference.module.state_dict())
        if number in (1, 5):
            note("state_dict()", (_apart(engine.state_dict(), reference.module.state_dict()), 0.0))
        if number in (2, 3):
            with engine.gathered(*["out.weight"] * (number - 2)):
                kept = {name: value for name, value in engine.module.named_buffers() if name in right}
                note("gathered()", (_apart(kept, {name: right[name] for name in kept}), 0.0))
                inside = _evaluated(engine, engine.module) if number == 2 else None
            seen = _evaluated(reference, reference.module)
            note("evaluation", *[(value, seen) for value in (inside, _evaluated(engine, engine.module)) if value])
        if number == 4:
            note("evaluation", (_evaluated(engine, engine.module), _evaluated(reference, reference.module)))
    engine.release()
    note("release()", (_apart(engine.module.state_dict(), _of_first(reference.module.state_dict())), 0.0))
    return found


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_ranks_train_evaluate_lend_and_keep_with_rank_0s_as_under_ddp(ranks: Ranks, layout: str) -> None:
    """One and two forwards before a backward, an evaluation between, buffers that change with and without a trace."""
    for found in ranks.run(_programs, layout, layout == "zero2", world_size=2):
        assert len(found) == 5 and all(off < EXACT for off in found.values()), found


def _own_ways(layout: str) -> list[float]:
    """Of buffers, how far ranks are apart behind forwards that only one of them ran, all inside of gathered()."""
    engine = sf.Engine(
        _net(), optimizer=SGD, layout=layout, init=sf.Init(units=["inner"]), runtime=sf.Runtime(patience=5)
    )
    apart: list[float] = []

    def look() -> None:
        mine = dict(engine.module.named_buffers())
        apart.append(_apart(mine, _of_first(mine)))

    for alone in (0, 1, 0):
        with engine.gathered():
            if engine.rank == alone:
                engine(_batch(alone))  # in training, with gradients: what a user may forget to turn off
        _evaluated(engine, engine.module)
        look()
        with engine.gathered():
            if engine.rank == alone:
                engine(_batch(alone))
        engine.mean(torch.tensor(1.0))
        look()
        engine.backward(_loss(engine, alone))  # for which ranks meet as before
        engine.step()
        with torch.inference_mode(), engine.gathered():
            look()
    engine.close()
    return apart


def test_a_forward_of_one_rank_alone_leaves_no_rank_waiting_or_with_its_own(ranks: Ranks) -> None:
    for layout in ("ddp", "zero3"):
        for apart in ranks.run(_own_ways, layout, world_size=2):
            assert apart == [0.0] * 9


class Scaled(nn.Module):
    """Multiplies by a buffer, which autograd keeps; each evaluation makes ``last`` anew."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)
        self.scale: Tensor
        self.last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) * self.scale
        if not torch.is_grad_enabled():
            self.last = x.mean(0)
        return x


def _written(who: str) -> str:
    """What a backward says behind a write of ``who`` into a buffer that it needs, and an evaluation."""
    torch.manual_seed(0)
    module = Scaled().double()
    engine = sf.Engine(module, optimizer=SGD, layout="zero2", runtime=sf.Runtime(patience=5))
    engine.backward(_loss(engine, 0))
    engine.step()
    loss = _loss(engine, 1)
    if who == "users":
        with torch.no_grad():
            module.scale.add_(dist.get_rank())
    elif who == "nobody":
        module.scale.data.add_(dist.get_rank())  # so that rank 0's are written here
    with torch.inference_mode():
        engine(_batch(2))
    assert module.last.is_inference()
    try:
        engine.backward(loss)
    except RuntimeError as error:
        return str(error)
    _loss(engine, 3)
    engine.mean(torch.tensor(1.0))  # from here on ``last``, too, is rank 0's
    buffers = dict(module.named_buffers())
    return str(_apart(buffers, _of_first(buffers)))


def test_what_users_write_into_a_buffer_that_backward_needs_is_told_and_what_ranks_send_is_not(ranks: Ranks) -> None:
    assert ranks.run(_written, "nobody", world_size=2) == ["0.0", "0.0"]
    for said in ranks.run(_written, "users", world_size=2):
        assert "modified by an inplace operation" in said


class Hidden(nn.Module):
    """Keeps an average that autograd sees nothing of, and a version neither."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.training:
            self.average.data.mul_(0.5).add_(x.detach().mean(0))
        return x


def _unseen(device: str) -> list[float]:
    torch.manual_seed(0)
    engine = sf.Engine(Hidden().double(), optimizer=SGD, layout="zero2", runtime=sf.Runtime(device=device, patience=5))
    apart: list[float] = []
    for step in range(3):
        engine.backward((engine(_batch(step).to(device)) - 1).square().mean())
        engine.step()
        engine.mean(torch.tensor(1.0))
        buffers = {name: value.cpu() for name, value in engine.module.named_buffers()}
        apart.append(_apart(buffers, _of_first(buffers)))
    engine.close()
    return apart


def test_what_changes_without_a_trace_is_found(ranks: Ranks, sim_ranks: Ranks) -> None:
    """By its values: each time, or once, where to compare stops the host of a device with streams."""
    assert ranks.run(_unseen, "cpu", world_size=2) == [[0.0] * 3] * 2
    assert sim_ranks.run(_unseen, "sim", world_size=2) == [[0.0] * 3] * 2
