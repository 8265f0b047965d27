"""Ordinary PyTorch code: what trains under DDP trains here with the same numbers, under every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import UsageError
from shardfold.testing import Ranks, same_training
from tests.support.options import grouped

pytestmark = pytest.mark.product

WIDTH = 16
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
LAYOUTS = list(sf.PRESETS)
SPLIT = [name for name, table in sf.PRESETS.items() if table.comes_and_goes]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Base(nn.Module):
    """Input, three blocks, output; ``forward(x, y)`` is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def features(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.features(x)), y)


def batches(steps: int = 6, rows: int = 24) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 4, generator=g), torch.randint(3, (rows,), generator=g)) for _ in range(steps)]


def world_of(layout: str) -> int:
    return 4 if layout in ("hsdp", "hpz") else 2


def mesh_of(layout: str) -> dict[str, int] | None:
    world = dist.get_world_size() if dist.is_initialized() else world_of(layout)
    return {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") else None


def check(ranks: Ranks, build: Callable[[], nn.Module], layout: str, **options: Any) -> None:
    options = {"steps": 6, "tol": 1e-6, "parameter_tol": 2e-5, "optimizer": ADAMW, **options}
    same_training(
        build,
        batches(),
        **grouped(layout=layout, mesh=mesh_of(layout), **options),
        world_size=world_of(layout),
        ranks=ranks,
    )


# -- weights that another module reads


class ReadsChild(Base):
    """The parent multiplies by the head's weight itself, and ties features to the middle block's first weight."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.features(x)
        h = h + F.linear(h, self.blocks[1].a.weight[:WIDTH])
        return F.cross_entropy(F.linear(h, self.out.weight, self.out.bias), y)


class ReadsChildFirst(Base):
    """A weight is read before its own block runs, and again behind it."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = self.blocks[2].b.bias.abs().mean() + 1
        h = self.features(x * scale)
        return F.cross_entropy(self.out(h), y) + 1e-3 * self.blocks[0].a.weight.square().sum()


class GathersInside(Base):
    """gathered() in the middle of forward."""

    engine: Any = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.features(x)
        if self.engine is not None:
            with self.engine.gathered("blocks.0.a.weight") as w:
                h = h + F.linear(h, w[:WIDTH])
        else:
            h = h + F.linear(h, self.blocks[0].a.weight[:WIDTH])
        return F.cross_entropy(self.out(h), y)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", [ReadsChild, ReadsChildFirst])
def test_a_weight_may_be_read_by_another_module(ranks: Ranks, build: Any, layout: str) -> None:
    check(ranks, build, layout, units=["blocks.*", "out"], accumulate=2)


def _regularized(layout: str | None) -> list[float]:
    """Weight decay written by hand in the training loop's loss, read outside of forward inside gathered()."""
    torch.manual_seed(0)
    model: Any = GathersInside()
    losses = []
    if layout is None:
        optimizer = SGD(model.parameters())
        for x, y in batches():
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    engine = sf.Engine(model, optimizer=SGD, layout=layout, init=sf.Init(units=["blocks.*"]), parallel=mesh_of(layout))
    model.engine = engine
    for x, y in batches():
        rows = x.chunk(engine.world_size)[engine.rank], y.chunk(engine.world_size)[engine.rank]
        loss = engine(*rows)
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.detach()))
    assert engine.memory().transient == 0
    return losses


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_may_be_entered_inside_forward(ranks: Ranks, layout: str) -> None:
    plain = _regularized(None)
    for losses in ranks.run(_regularized, layout, world_size=world_of(layout)):
        assert losses == pytest.approx(plain, rel=1e-6)


class ReadsBehind(Base):
    """A weight is read right behind its own block, while it has not been given back yet."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inp(x)
        for block in self.blocks:
            h = block(h)
            h = h + 0.1 * F.linear(h, self.blocks[1].a.weight[:WIDTH]) if block is self.blocks[1] else h
        return F.cross_entropy(self.out(h), y)


class ReadsLater(Base):
    """From the third step on a weight is read that the recorded order has on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        h = self.blocks[0](self.inp(x))
        if self.calls > 2:
            h = h + 0.1 * F.linear(h, self.blocks[1].a.weight[:WIDTH])
        return F.cross_entropy(self.out(self.blocks[2](self.blocks[1](h))), y)


class CallsItself(Base):
    """The model's forward calls the model, once as a target without gradients and once as a part of itself."""

    depth = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.depth:
            return self.features(x)
        self.depth = 1
        try:
            with torch.no_grad():
                target = self(x, y)
            h = self(x + 0.1, y)
        finally:
            self.depth = 0
        return F.cross_entropy(self.out(h), y) + (h - target).square().mean()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("build", [ReadsBehind, ReadsLater, CallsItself])
def test_a_weight_read_behind_its_block_or_later_and_a_model_that_calls_itself(
    ranks: Ranks, build: Any, layout: str
) -> None:
    check(ranks, build, layout, units=["blocks.*", "out"], accumulate=1 if build is ReadsLater else 2)


class Reports(Base):
    """Calls the engine inside of its own forward."""

    engine: Any = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().forward(x, y)
        self.engine.mean(loss.detach())
        return loss


def _reports(layout: str) -> str:
    model = Reports()
    model.engine = engine = sf.Engine(model, optimizer=SGD, layout=layout)
    try:
        engine.backward(engine(*batches(1)[0]))
    except UsageError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("layout", ["ddp", "zero2", "zero3"])
def test_a_call_of_the_engine_inside_of_a_pass_is_refused_in_a_sentence(ranks: Ranks, layout: str) -> None:
    for said in ranks.run(_reports, layout, world_size=2):
        assert "engine.mean() inside of the model's forward or backward" in said


# -- modules used in unusual ways


class Skips(Base):
    """A block is skipped by all ranks in some passes; one runs twice in a row, one twice with others between."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += self.training
        h = self.inp(x)
        for i in ([0, 1, 2], [2, 0], [1, 1, 0, 1], [0], [1, 2, 1, 2], [2, 2])[self.calls % 6]:
            h = self.blocks[i](h)
        return F.cross_entropy(self.out(h), y)


class Loops(Base):
    """One block runs as often as the data says; the number differs from rank to rank."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inp(x)
        for _ in range(1 + (dist.get_rank() if dist.is_initialized() else 0)):
            h = self.blocks[0](h)
        return F.cross_entropy(self.out(self.blocks[1](h)), y)


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_may_run_in_any_order_and_number_that_all_ranks_share(ranks: Ranks, layout: str) -> None:
    check(ranks, Skips, layout, units=["blocks.*"], steps=12)


def _loops(layout: str) -> float:
    torch.manual_seed(0)
    reference = nn.parallel.DistributedDataParallel(Loops(), find_unused_parameters=True)
    plain = SGD(reference.parameters())
    torch.manual_seed(0)
    engine = sf.Engine(
        Loops(), optimizer=SGD, layout=layout, init=sf.Init(units=["blocks.*"]), parallel=mesh_of(layout)
    )
    for x, y in batches(5):
        rows = x.chunk(engine.world_size)[engine.rank], y.chunk(engine.world_size)[engine.rank]
        reference(*rows).backward()
        plain.step()
        plain.zero_grad()
        engine.backward(engine(*rows))
        engine.step()
    state = engine.state_dict()
    return max((state[k] - v).abs().max().item() for k, v in reference.module.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_may_run_one_unit_different_numbers_of_times(ranks: Ranks, layout: str) -> None:
    assert max(ranks.run(_loops, layout, world_size=world_of(layout))) < 1e-6


# -- gradients inside of forward, and of gradients


class Forces(Base):
    """The model differentiates a part of itself in its forward (no second derivatives)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.blocks[1](self.blocks[0](self.inp(x))).square().sum()
            (slope,) = torch.autograd.grad(energy, x)
        return F.cross_entropy(self.out(self.features(x + 0.1 * slope)), y)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=() if n == "hpz" else pytest.mark.soak) for n in LAYOUTS])
def test_a_forward_may_take_gradients_of_a_part_of_itself(ranks: Ranks, layout: str) -> None:
    check(ranks, Forces, layout, units=["blocks.*"], accumulate=2)


def _evaluated_forces() -> float:
    torch.manual_seed(0)
    plain = Forces()
    engine = sf.Engine(
        copy.deepcopy(plain),
        optimizer=SGD,
        layout="hpz",
        parallel={"inter": 2, "intra": 2},
        init=sf.Init(units=[Block]),
    )
    step, off = SGD(plain.parameters()), 0.0
    for rows in batches(3):
        with torch.no_grad():
            off = max(off, abs(float(engine(*rows) - plain(*rows))))
        plain(*rows).backward()
        step.step()
        step.zero_grad()
        engine.backward(engine(*rows))
        engine.step()
    engine.close()
    return off


def test_an_evaluation_may_take_gradients_of_a_part_of_itself(ranks: Ranks) -> None:
    """Where backward gathers from what forward has kept, which one of an evaluation does not."""
    assert max(ranks.run(_evaluated_forces, world_size=4)) < 1e-5


def _penalty(layout: str | None, gathered: bool) -> list[float] | str:
    """Training with a gradient penalty: gradients of gradients."""
    torch.manual_seed(0)
    model: Any = Base()
    engine: Any = None
    if layout is None:
        optimizer = SGD(model.parameters())
    else:
        engine = sf.Engine(
            model, optimizer=SGD, layout=layout, init=sf.Init(units=["blocks.*"]), parallel=mesh_of(layout)
        )
    losses = []

    def run(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = (engine or model)(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = loss + slope.square().sum() / x.shape[0] * x.shape[0]
        loss.backward()
        return loss.detach()

    for x, y in batches(4, rows=4):
        if engine is None:
            loss = run(x, y)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            continue
        try:
            if gathered:
                with engine.gathered():
                    loss = run(x, y)  # every rank the same rows: the penalty is not a mean over rows
            else:
                loss = run(x, y)
        except UsageError as error:
            return str(error)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_gradients_are_right_or_refused_in_a_sentence(ranks: Ranks, layout: str) -> None:
    plain = _penalty(None, False)
    for said in ranks.run(_penalty, layout, False, world_size=world_of(layout)):
        if layout in SPLIT:
            assert isinstance(said, str) and "create_graph=True" in said and "engine.gathered()" in said
        else:
            assert said == pytest.approx(plain, rel=1e-5)
    for said in ranks.run(_penalty, layout, True, world_size=world_of(layout)):
        assert said == pytest.approx(plain, rel=1e-5)


# -- buffers


class Norms(Base):
    """Batch normalization: its statistics are rank 0's, as under DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(self.norm(self.features(x)) * self.scale), y)


def _norms(layout: str) -> tuple[float, float]:
    def eval_loss(model: Any, module: nn.Module) -> float:
        module.eval()
        with torch.no_grad():
            value = model(*batches(1)[0]).item()
        module.train()
        return value

    torch.manual_seed(0)
    reference = nn.parallel.DistributedDataParallel(Norms())
    plain = SGD(reference.parameters())
    torch.manual_seed(0)
    engine = sf.Engine(
        Norms(), optimizer=SGD, layout=layout, init=sf.Init(units=["blocks.*"]), parallel=mesh_of(layout)
    )
    worst = 0.0
    for x, y in batches(5):
        rows = x.chunk(engine.world_size)[engine.rank], y.chunk(engine.world_size)[engine.rank]
        reference(*rows).backward()
        plain.step()
        plain.zero_grad()
        engine.backward(engine(*rows))
        engine.step()
        worst = max(worst, abs(eval_loss(engine, engine.module) - eval_loss(reference, reference.module)))
    reference(*rows)  # brings the buffers of rank 0 to the others once more
    engine(*rows)
    state = engine.state_dict()
    apart = max((state[k].double() - v.double()).abs().max().item() for k, v in reference.module.state_dict().items())
    return worst, apart


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_are_rank_0s_as_under_ddp(ranks: Ranks, layout: str) -> None:
    for worst, apart in ranks.run(_norms, layout, world_size=world_of(layout)):
        assert worst < 1e-6 and apart < 1e-5


# -- exceptions


class Boom(Exception):
    """Thrown on purpose."""


class ThrowAt(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises at the n-th operation."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count - 1 == self.at:
            raise Boom
        return func(*args, **(kwargs or {}))


def _points(count: int, limit: int, offset: int) -> Iterator[int]:
    """``limit`` places spread over ``count`` operations."""
    step = max(1, count // limit)
    yield from range(offset, count, step)


def _faults(layout: str, where: str, spread: bool, limit: int) -> tuple[int, float]:
    """Throws at operation after operation; each time the step that follows is that of a model that never failed.

    ``spread``: ranks throw at different operations.
    """
    torch.manual_seed(0)
    model = Base()
    engine = sf.Engine(model, optimizer=SGD, layout=layout, init=sf.Init(units=["blocks.*"]), parallel=mesh_of(layout))
    torch.manual_seed(0)
    plain = Base()
    optimizer = SGD(plain.parameters())
    x, y = batches(1)[0]
    rows = x.chunk(engine.world_size)[engine.rank], y.chunk(engine.world_size)[engine.rank]

    def step() -> float:
        loss = plain(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mine = engine(*rows)
        engine.backward(mine)
        engine.step()
        return abs(engine.mean(mine.detach()) - loss.item()) / max(abs(loss.item()), 0.1)  # it falls towards 0

    worst = step()
    whole = ThrowAt(-1)
    loss = engine(*rows) if where == "backward" else None
    with whole:
        if loss is None:
            engine(*rows)
        else:
            loss.backward()
    engine.zero_grad()
    thrown = 0
    counts = engine.max_over_ranks([whole.count])
    for at in _points(
        int(counts[0]), limit, 1 if where == "backward" else 0
    ):  # a backward begins with its first gradient
        try:
            loss = engine(*rows) if where == "backward" else None
            with ThrowAt(at + (3 * engine.rank if spread else 0)):
                if loss is None:
                    engine(*rows)
                else:
                    loss.backward()
        except Boom:
            thrown += 1
        else:
            engine.zero_grad()
        worst = max(worst, step())
    memory = engine.memory()
    assert memory.transient == 0, memory
    return thrown, worst


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_at_any_operation_is_followed_by_a_correct_step(ranks: Ranks, where: str, layout: str) -> None:
    for thrown, worst in ranks.run(_faults, layout, where, False, 40, world_size=2, timeout=200):
        assert thrown >= 15
        assert worst < 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exceptions_at_different_operations_on_different_ranks_are_followed_by_a_correct_step(
    ranks: Ranks, where: str, layout: str
) -> None:
    for thrown, worst in ranks.run(_faults, layout, where, True, 25, world_size=2, timeout=200):
        assert thrown >= 10
        assert worst < 1e-6


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("spread", [False, True])
def test_an_exception_at_every_operation_is_followed_by_a_correct_step(
    ranks: Ranks, where: str, layout: str, spread: bool
) -> None:
    for thrown, worst in ranks.run(_faults, layout, where, spread, 10**6, world_size=2, timeout=280):
        assert thrown >= 15
        assert worst < 1e-6
