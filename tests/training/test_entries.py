"""Methods that are forwards of a model, besides ``forward``: they train as in plain PyTorch under every layout."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.errors import ModelError, UsageError
from shardfold.testing import Ranks
from tests.support import models

pytestmark = pytest.mark.product

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # whose updates grow no faster than the roundings of a gradient
LAYOUTS = list(sf.PRESETS)
TOLERANCE = 2e-6  # a few roundings of fp32 per step, which the sums over ranks order in another way
WIDTH = models.WIDTH


class Coder(nn.Module):
    """Encodes and decodes; what is read by both is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(models.Block() for _ in range(2))
        self.up = nn.ModuleList(models.Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def encode(self, x: Tensor, *, times: float = 1.0) -> Tensor:
        for block in self.down:
            x = block(x)
        return self.norm(x) * times

    def decode(self, x: Tensor) -> Tensor:
        for block in self.up:
            x = block(x)
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


def loss_of(model: Any, program: str, x: Tensor) -> Tensor:
    """The loss of one micro-batch; ``model`` is the engine's or a plain one."""
    if program == "encode":
        return model.encode(x, times=2.0).tanh().square().mean()
    if program == "encode, decode":
        return (model.decode(model.encode(x)) - x).square().mean()
    if program == "forward, encode":
        return (model(x) - x).square().mean() + model.encode(x).sin().mean()
    assert program == "checkpoint"
    inner = checkpoint(model.encode, x, use_reentrant=False)
    return (model.decode(inner) - x).square().mean()


def _train(layout: str, programs: list[str], when: str = "before") -> tuple[float, int]:
    """The largest difference of any weight from plain PyTorch's, and the micro-batches that the engine counted."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world > 1 else None
    torch.manual_seed(0)
    plain: Any = Coder()
    model: Any = copy.deepcopy(plain)
    optimizer = SGD(plain.parameters())
    if when == "before":
        sf.register_forward(model, "encode")
        sf.register_forward(model, "decode")
    engine = sf.Engine(model, optimizer=SGD, layout=layout, parallel=mesh)
    if when == "after":
        sf.register_forward(model, "encode")
        sf.register_forward(model, "decode")
    draw = torch.Generator().manual_seed(1)
    counted = 0
    for program in programs:
        x = torch.randn(8, WIDTH, generator=draw)
        loss_of(plain, program, x).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(loss_of(model, program, x.chunk(world)[engine.rank]))
        counted += engine.micro_batch
        engine.step()
    with torch.no_grad():
        x = torch.randn(8, WIDTH, generator=draw)
        worst = float((model.encode(x) - plain.encode(x)).abs().max())
    for name, value in engine.state_dict().items():
        worst = max(worst, float((value - plain.state_dict()[name]).abs().max()))
    engine.close()
    return worst, counted


PROGRAMS = ["encode", "encode, decode", "forward, encode", "checkpoint", "encode", "forward, encode"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_registered_methods_train_as_in_plain_pytorch(ranks: Ranks, layout: str, when: str) -> None:
    """By themselves, one behind the other, mixed with forward in one step and under a checkpoint, on two ranks, whether
    they are registered before or after the engine is made; each backward is one micro-batch."""
    for worst, counted in ranks.run(_train, layout, PROGRAMS, when, world_size=2):
        assert worst < TOLERANCE and counted == len(PROGRAMS)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_registered_methods_train_on_one_rank(layout: str) -> None:
    """The same numbers without other ranks."""
    worst, counted = _train(layout, PROGRAMS)
    assert worst < TOLERANCE and counted == len(PROGRAMS)


def _sixteen() -> tuple[torch.dtype, bool, float]:
    model: Any = Coder()
    sf.register_forward(model, "encode")
    engine = sf.Engine(model, optimizer=SGD, layout="zero3", precision="bf16")
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        same = float((model.encode(x) - model.encode(x.bfloat16())).abs().max())
    out = model.encode(x)
    engine.close()
    return out.dtype, torch.equal(out, out.bfloat16().float()), same


def test_inputs_of_a_registered_method_follow_the_precision(ranks: Ranks) -> None:
    """As those of forward, they are cast to the compute dtype, in which it computes, and what it gives to fp32."""
    assert ranks.run(_sixteen, world_size=2) == [(torch.float32, True, 0.0)] * 2


def _errors() -> list[str]:
    model: Any = Coder()
    engine = sf.Engine(model, optimizer=SGD, layout="zero3")
    said: list[str] = []
    try:
        model.encode(torch.ones(2, WIDTH))
    except UsageError as error:
        said.append(str(error))
    sf.register_forward(model, "encode")
    try:
        model.encode(torch.ones(2, WIDTH + 1))
    except RuntimeError as error:
        said.append(type(error).__name__)
    engine.backward(model.encode(torch.ones(2, WIDTH)).sum())  # the interrupted pass was settled
    engine.step()
    engine.close()
    return said


def test_a_method_that_is_not_registered_names_what_registers_it(ranks: Ranks) -> None:
    """Outside of a forward split parameters raise a sentence with ``sf.register_forward``; an exception inside of a
    registered method is the user's own, and training goes on behind it."""
    for sentence, own in ranks.run(_errors, world_size=2):
        assert "sf.register_forward(model, 'encode')" in sentence
        assert own == "RuntimeError"


def test_what_cannot_be_registered_is_refused() -> None:
    """A method that does not exist is refused with the nearest name, and so is forward; twice is the same as once."""
    model: Any = Coder()
    with pytest.raises(ModelError, match="Did you mean 'encode'"):
        sf.register_forward(model, "encoed")
    with pytest.raises(UsageError, match="forward already"):
        sf.register_forward(model, "forward")
    for wrong in [(Coder, "encode"), (model, 3), (model, model.encode)]:
        with pytest.raises(UsageError, match="it takes a module, not its class, and the name of one of its methods"):
            sf.register_forward(*wrong)  # type: ignore[arg-type]
    part = next(name for name, _ in model.named_children())
    with pytest.raises(ModelError, match=f"a Coder has no method {part!r}"):
        sf.register_forward(model, part)
    sf.register_forward(model, "encode")
    wrapped = model.encode
    sf.register_forward(model, "encode")
    assert model.encode is wrapped


def test_copies_of_a_model_have_its_entries() -> None:
    """A deep copy and a pickle of a module with a registered method call their own method, with their own values."""
    model: Any = Coder()
    sf.register_forward(model, "encode")
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for other in (copy.deepcopy(model), torch.load(stored, weights_only=False)):
        assert other.encode.args[0] is other
        before = other.encode(torch.ones(2, WIDTH))
        with torch.no_grad():
            model.norm.weight.fill_(2.0)
        assert torch.equal(other.encode(torch.ones(2, WIDTH)), before)
        with torch.no_grad():
            model.norm.weight.fill_(1.0)
