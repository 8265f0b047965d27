"""What a pass that an exception has left leaves behind: nothing that reaches a later pass, a step, or gathered()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ShardfoldError, UsageError
from shardfold.sharding.unit import Life
from shardfold.testing import Ranks
from shardfold.torch_internals import top_saved_hooks
from tests.support.options import grouped

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
WIDTH = 6
LAYOUTS = ["ddp", "zero2", "zero3"]


class Failed(Exception):
    """Of the user's own."""


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, on: bool) -> Tensor:
        ctx.on = on
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.on:
            raise Failed
        return grads[0], None


class Fragile(nn.Module):
    """Blocks and a head, which reads the first block's weight too; fails in or behind a block if told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.at: tuple[str, int] | None = None
        self.raises: type[BaseException] = Failed
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = _Raises.apply(torch.tanh(block(x)), self.at == ("backward", i))  # pyright: ignore
            if self.at == ("forward", i):
                raise self.raises
        return self.head(F.linear(x, self.blocks[0].weight))  # pyright: ignore


def batch(number: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


class Pair:
    """An engine, and plain PyTorch that takes the batches of all ranks."""

    def __init__(self, layout: str, world: int = 2, **options: Any) -> None:
        self.plain, self.world = Fragile(), world
        self.update = SGD(self.plain.parameters())
        given = {"units": ["blocks.*"], "timeout": 30, "patience": 4, **options}
        self.engine = sf.Engine(Fragile(), optimizer=SGD, **grouped(layout=layout, **given))  # pyright: ignore
        self.number = 0

    def loss(self) -> Tensor:
        self.number += 1
        return self.engine(batch(self.number)).square().mean()

    def expect(self, *numbers: int) -> None:
        """Plain PyTorch steps with these batches."""
        for number in numbers:
            for rank in range(self.world):
                (self.plain(batch(number, rank)).square().mean() / (self.world * len(numbers))).backward()
        self.update.step()
        self.update.zero_grad()

    def train(self) -> None:
        first = self.number + 1
        for _ in range(self.engine.accumulate):
            self.engine.backward(self.loss())
        assert self.engine.step().updated
        self.expect(*range(first, self.number + 1))

    @contextmanager
    def failing(self, *places: tuple[str, int]) -> Iterator[None]:
        """Inside, each rank fails at its place."""
        self.engine.module.at = places[dist.get_rank()]  # pyright: ignore
        with pytest.raises(Failed):
            yield
        self.engine.module.at = None  # pyright: ignore

    def off(self) -> float:
        state = self.engine.state_dict()
        return max((state[name] - value).abs().max().item() for name, value in self.plain.state_dict().items())


def _written(pair: Pair) -> None:
    with pair.engine.gathered("head.bias", write=True) as value, torch.no_grad():
        value.fill_(0.25)
    with torch.no_grad():
        pair.plain.head.bias.fill_(0.25)


def _read(pair: Pair) -> None:
    with pair.engine.gathered("blocks.1.weight") as value:
        assert (value - pair.plain.blocks[1].weight).abs().max().item() < 1e-12  # pyright: ignore


def _stepped(pair: Pair) -> None:
    with pytest.raises(UsageError, match="no backward since the last step"):
        pair.engine.step()


AFTER: tuple[Callable[[Pair], object], ...] = (_written, _read, _stepped, Pair.off, lambda pair: pair.engine.reset())


def _next_calls(layout: str) -> float:
    pair = Pair(layout)
    pair.train()
    for number, after in enumerate(AFTER):
        with pair.failing(("backward", number % 3), ("backward", (number + 1) % 3)):
            pair.engine.backward(pair.loss())
        assert pair.engine.micro_batch == 0 and not pair.engine.gradients_ready  # what there was is lost
        freed = [unit for unit in pair.engine.units if unit.life is Life.RESTING]
        assert freed or layout != "zero3" or pair.engine.rank or number
        for _, parameter in (each for unit in freed for each in unit.parameters()):
            with pytest.raises(ShardfoldError, match="gathered"):  # the failed pass does not gather it any more
                parameter.sum()
        after(pair)
        pair.train()
    for kind in ("forward", "backward"):  # a loss whose forward ran before the exception
        early = pair.loss()
        number = pair.number
        with pair.failing((kind, 2), (kind, 0)):
            pair.loss().backward()
        early.backward()
        assert pair.engine.step().updated
        pair.expect(number)
    off = pair.off()
    pair.engine.close()
    return off


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_is_called_behind_an_exception_in_backward_ends_that_pass_first(ranks: Ranks, layout: str) -> None:
    """Ranks fail at different blocks; then gathered() reads and writes, a step is refused, the state dict is asked for,
    or a loss of before the exception goes backward: each as if the failed pass had not been."""
    assert max(ranks.run(_next_calls, layout, world_size=2)) < 1e-12


def _first_pass(layout: str) -> float:
    worst = 0.0
    for places in ((("forward", 0), ("forward", 2)), (("backward", 2), ("backward", 0)), (("forward", 1),) * 2):
        pair = Pair(layout, units=["blocks.0"])
        with pair.failing(*places):
            pair.engine.backward(pair.loss())
        pair.train()
        pair.train()
        worst = max(worst, pair.off())
        pair.engine.close()
    return worst


@pytest.mark.parametrize("layout", ["zero3", "fsdp2"])
def test_an_interrupted_pass_is_no_order_to_follow(ranks: Ranks, layout: str) -> None:
    """The first forward or backward fails, before the head has read the weight of a block: that the block is held
    through each pass is still found out in the next."""
    assert max(ranks.run(_first_pass, layout, world_size=2)) < 1e-12


# -- on one rank only


def _alone(layout: str) -> list[tuple[str, str]]:
    """What training says in which rank 0 catches an exception alone, by where that is and how many micro-batches."""
    answers = []
    for where in ("forward", "backward", "loss", "reset"):
        for accumulate in (1, 2):
            pair = Pair(layout, accumulate=accumulate)
            engine, said = pair.engine, "nothing"
            for number in range(6):
                fails = engine.rank == 0 and number == 2
                engine.module.at = (where, 1) if fails else None  # pyright: ignore
                try:
                    loss = pair.loss()
                    if fails and where == "loss":
                        loss.register_hook(_fail)
                    if fails and where == "reset":
                        raise Failed
                    engine.backward(loss)
                    if engine.gradients_ready:
                        engine.step()
                except Failed:
                    if where == "reset":
                        engine.reset()
                except ShardfoldError as error:
                    said = f"{type(error).__name__}: {error}"
                    break
            answers.append((where, said))
            engine.close()
    return answers


def _fail(grad: Tensor) -> None:
    raise Failed


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero2"])
def test_an_exception_that_one_rank_catches_alone_is_told_on_all(ranks: Ranks, layout: str) -> None:
    """Where a forward sends nothing no rank misses one that was left out: the next backward tells, before any update
    with gradients of different micro-batches, and names the rank and what it did."""
    for answers in ranks.run(_alone, layout, world_size=2):
        for where, said in answers:
            known = "rank 0 went on behind an exception that it caught" in said
            assert said.startswith("OrderError: ") and "rank 0" in said, (where, said)
            assert known or where == "backward", (where, said)  # which may have met another rank's step before


def _left_out_on_all(layout: str) -> float:
    """Rank 0 fails and tells the others by a collective of the user's own; all leave the micro-batch out."""
    pair = Pair(layout)
    pair.train()
    for kind in ("forward", "reset"):
        failed = torch.zeros(())
        pair.engine.module.at = ("forward", 1) if pair.engine.rank == 0 else None  # pyright: ignore
        try:
            pair.loss()
        except Failed:
            failed.fill_(1.0)
        pair.engine.module.at = None  # pyright: ignore
        dist.all_reduce(failed)
        assert failed.item() == 1.0
        if kind == "reset":
            pair.engine.reset()
        pair.train()
    off = pair.off()
    pair.engine.close()
    return off


def test_a_micro_batch_that_all_ranks_leave_out_is_none(ranks: Ranks) -> None:
    """Only one of them raised: they go on, as under DDP."""
    assert max(ranks.run(_left_out_on_all, "ddp", world_size=2)) < 1e-12


# -- one rank is enough


def _one_rank(**options: Any) -> sf.Engine:
    return sf.Engine(Fragile(), optimizer=SGD, **grouped(units=["blocks.*"], **options))


def test_an_interrupted_forward_leaves_no_autocast_and_no_hooks_around_what_follows() -> None:
    """Ctrl+C in the model's own code calls no hooks of modules on its way out."""
    engine = sf.Engine(
        Fragile().float(), optimizer=SGD, precision=sf.Precision(autocast="bf16"), init=sf.Init(units=["blocks.*"])
    )
    x = torch.randn(4, WIDTH)
    engine.module.at, engine.module.raises = ("forward", 1), KeyboardInterrupt  # pyright: ignore
    with pytest.raises(KeyboardInterrupt):
        engine(x)
    engine.module.at = None  # pyright: ignore
    assert (x @ x.T).dtype == torch.float32
    assert top_saved_hooks() is None
    engine.backward(engine(x).square().mean())
    assert engine.step().updated
    engine.close()


def test_a_scaled_loss_of_before_an_exception_is_one_still() -> None:
    """``engine.scale(loss).backward()`` ends what an exception interrupted, and counts as scaled all the same; what an
    exception left of another does not make an unscaled one count."""
    engine = _one_rank(loss_scale=8.0)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    early = engine.scale(engine(x).square().mean())
    engine.module.at = ("forward", 1)  # pyright: ignore
    with pytest.raises(Failed):
        engine(x)
    engine.module.at = None  # pyright: ignore
    early.backward()
    assert engine.step().updated
    late = engine.scale(engine(x).square().mean())
    late.register_hook(_fail)
    with pytest.raises(Failed):
        late.backward()
    with pytest.raises(UsageError, match="not scaled"):
        engine(x).square().mean().backward()
    engine.close()
