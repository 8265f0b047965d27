"""Models and training loops whose graphs are unusual: right, or refused in a sentence, never silently wrong."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.errors import ConfigError
from shardfold.testing import Ranks, same_training
from tests.support.options import grouped

pytestmark = pytest.mark.product

WIDTH = 16
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SPLIT = [name for name, table in sf.PRESETS.items() if table.comes_and_goes]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.out = nn.Linear(WIDTH, 3)

    def block(self) -> nn.Module:
        return Block()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x), y)


class ObjectBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(hidden=super().forward(x))


class ObjectOutputs(Base):
    """Units return objects of the user's own."""

    def block(self) -> nn.Module:
        return ObjectBlock()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x).hidden
        return F.cross_entropy(self.out(x), y)


class DetachedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.weight.detach().t() @ self.b.weight.detach().t()


class Detached(Base):
    """Backward reads weights that get no gradient there."""

    def block(self) -> nn.Module:
        return DetachedBlock()


class SkippingBlock(Block):
    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        return x if skip else super().forward(x)


class PassThrough(Base):
    """One unit returns its input unchanged."""

    def block(self) -> nn.Module:
        return SkippingBlock()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = block(x, skip=i == 1)
        return F.cross_entropy(self.out(x), y)


class SharedModule(Base):
    """Two units have a module in common."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].a = self.blocks[0].a


class Buffers(Base):
    """Buffers whose elements share memory, and of a dtype that no collective takes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.ones(1, 1).expand(4, 4))
        self.register_buffer("short", torch.arange(5, dtype=torch.int16))


class Checkpointed(Base):
    """A checkpoint around several units, of the older kind: they first run without gradients."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.blocks[1](self.blocks[0](x)), self.inp(x), use_reentrant=True)
        return F.cross_entropy(self.out(self.blocks[2](x)), y)


def batches(steps: int = 4) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 4, generator=g), torch.randint(3, (16,), generator=g)) for _ in range(steps)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("layout", ["ddp", "zero2", *SPLIT])
@pytest.mark.parametrize(
    "model", [ObjectOutputs, Detached, PassThrough, SharedModule, Buffers, Checkpointed], ids=lambda m: m.__name__
)
def test_an_unusual_model_trains_as_in_plain_pytorch(ranks: Ranks, model: Any, layout: str) -> None:
    same_training(
        model, batches(), layout=layout, world_size=4, parallel={"inter": 2, "intra": 2}, optimizer=SGD, steps=4,
        parameter_tol=1e-5, ranks=ranks, accumulate=2,
    )  # fmt: skip


def _whole_checkpoint(layout: str) -> float:
    """A re-entrant checkpoint around the engine's whole model: its only forward with gradients is in backward."""
    mesh = {"inter": 2, "intra": 2}
    torch.manual_seed(0)
    engine = sf.Engine(Base(), optimizer=SGD, layout=layout, parallel=mesh)
    torch.manual_seed(0)
    plain = Base()
    optimizer = SGD(plain.parameters())
    for x, y in batches():
        mine = [t.chunk(engine.world_size)[engine.rank] for t in (x, y)]
        loss = checkpoint(engine, mine[0].requires_grad_(), mine[1], use_reentrant=True)
        assert isinstance(loss, Tensor)
        engine.backward(loss)
        engine.step()
        plain(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = engine.state_dict()
    engine.close()
    return max((state[k] - v).abs().max().item() for k, v in plain.state_dict().items())


@pytest.mark.soak
@pytest.mark.parametrize("layout", list(sf.PRESETS))
def test_a_checkpoint_around_the_whole_model(ranks: Ranks, layout: str) -> None:
    assert max(ranks.run(_whole_checkpoint, layout, world_size=4)) < 1e-6


class OnlyTheSide(Base):
    """In later steps backward comes by a tensor from inside of a unit only: no event tells when it needs the unit."""

    aside = False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.aside:
            return super().forward(x, y)
        x = self.inp(x)
        kept: list[Tensor] = []
        handle = self.blocks[0].b.register_forward_pre_hook(
            lambda module, args: kept.append(args[0] @ module.weight.t())
        )
        for block in self.blocks:
            x = block(x)
        handle.remove()
        return kept[0].square().mean()


def _side(layout: str, hooked: bool) -> str:
    torch.manual_seed(0)
    model = OnlyTheSide()
    engine = sf.Engine(model, optimizer=SGD, layout=layout)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t) if hooked else nullcontext()
    try:
        for model.aside in (False, False, True):
            with hooks:
                loss = engine(*batches()[0])
            engine.backward(loss)
            engine.step()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing was raised"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", SPLIT)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_backward_that_only_later_comes_by_a_tensor_kept_aside_raises_instead_of_reading_freed_memory(
    ranks: Ranks, layout: str, hooked: bool
) -> None:
    """Also under saved-tensor hooks of the user's own, with which autograd compares no versions."""
    found = "storage of size 0" if hooked else "modified by an inplace operation"
    for said in ranks.run(_side, layout, hooked, world_size=2):
        assert found in said and "return it from the unit's forward" in said


def _input_gradients() -> list[bool]:
    """torch.autograd.grad between micro-batches is not one."""
    torch.manual_seed(0)
    engine = sf.Engine(Base(), optimizer=SGD, layout="zero3", accumulate=2)
    updated = []
    for x, y in batches(2):
        probe = x.clone().requires_grad_()
        torch.autograd.grad(engine(probe, y), probe)
        engine.backward(engine(x, y))
        updated.append(engine.step().updated)
    engine.close()
    return updated


def test_a_gradient_of_an_input_is_no_micro_batch(ranks: Ranks) -> None:
    assert ranks.run(_input_gradients, world_size=2) == [[False, True]] * 2


def _order() -> list[str]:
    torch.manual_seed(0)
    engine = sf.Engine(Base(), optimizer=SGD, layout="zero3", accumulate=2)
    for x, y in batches(2):
        engine.backward(engine(x, y))
        engine.step()
    names = [name for name in engine.order if name.startswith("blocks")]
    engine.close()
    return names


def test_the_order_seen_with_accumulation_is_the_forwards(ranks: Ranks) -> None:
    assert ranks.run(_order, world_size=2) == [[f"blocks.{i}" for i in range(3)]] * 2


def _different_models() -> str:
    model = Base()
    if dist.get_rank() == 1:
        model.out = nn.Linear(WIDTH, 4)
    try:
        sf.Engine(model, optimizer=SGD)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_ranks_that_build_different_models_are_told_so(ranks: Ranks) -> None:
    for said in ranks.run(_different_models, world_size=3):
        assert "of rank 1 differ from rank 0's" in said


GIVEN_APART: dict[str, dict[str, Any]] = {
    "the optimizer's settings": {"optimizer": partial(torch.optim.AdamW, lr=0.02)},
    "the optimizer": {"optimizer": partial(torch.optim.Adam, lr=0.01)},
    "the layout or the precision": {"precision": "bf16"},
    "the clipping": {"clip_norm": 1.0},
    "the schedule": {"lr_schedule": partial(torch.optim.lr_scheduler.StepLR, step_size=1)},
    "accumulate=": {"accumulate": 2},
    "the loss scale": {"precision": "fp16", "loss_scale": 8.0},
    "overlap=": {"overlap": sf.Overlap(prefetch=0)},
    "overlap= (delayed)": {"layout": "offload", "precision": "bf16", "overlap": sf.Overlap(delayed_update=True)},
}


def _given_apart() -> dict[str, str]:
    said: dict[str, str] = {}
    usual: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=0.01), "layout": "ddp"}
    for what, other in GIVEN_APART.items():
        mine = (
            other
            if dist.get_rank() == 1
            else {k: v for k, v in other.items() if k in ("precision", "layout") and len(other) > 1}
        )
        try:
            sf.Engine(nn.Linear(2, 2), **grouped(**{**usual, **mine})).close()
            said[what] = "nothing was raised"
        except ConfigError as error:
            said[what] = str(error)
    return said


def test_ranks_that_are_given_different_arguments_are_told_which(ranks: Ranks) -> None:
    """Rates, optimizers, precisions, clipping and the like that differ between ranks would train them apart."""
    for said in ranks.run(_given_apart, world_size=2):
        for what, text in said.items():
            assert text.startswith(f"{what.split(' (')[0]} of rank 1 differ from rank 0's"), (what, text)
            assert not re.search(r"[A-Z]\w*\(", text), f"{what}: as Python writes it, and not as a reader does: {text}"
        layout = said["the layout or the precision"]  # the first cell that differs
        assert "(ddp, params: split over nothing, bf16, device and ddp, params: split over nothing, fp32" in layout
        assert "(norm=1.0 and None)" in said["the clipping"], said
        assert "lr=0.02" in said["the optimizer's settings"] and "lr=0.01" in said["the optimizer's settings"]
        assert "(delayed_update=True and delayed_update=False)" in said["overlap= (delayed)"], said


def test_narrow_compute_casts_inputs() -> None:
    engine = sf.Engine(Base(), optimizer=SGD, precision="bf16")
    loss = engine(*batches()[0])
    assert loss.dtype == torch.float32 and torch.equal(loss, loss.bfloat16().float())  # computed in bf16
    engine.backward(loss)
    engine.step()
