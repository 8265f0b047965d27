"""Copies, pickles and forks: a model's copy is a plain module, an engine has none."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

import shardfold as sf
from shardfold.errors import FreedParameterError, UsageError
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

pytestmark = pytest.mark.product

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LAYOUTS = list(sf.PRESETS)
SPLIT = [name for name, table in sf.PRESETS.items() if table.comes_and_goes]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")


def mesh_for(layout: str) -> dict[str, int] | None:
    return {"inter": 2, "intra": dist.get_world_size() // 2} if layout in ("hsdp", "hpz") else None


def make(layout: str, build: Callable[[], nn.Module] = models.tied, **options: Any) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(build(), optimizer=SGD, **grouped(layout=layout, mesh=mesh_for(layout), **options))


def step(engine: sf.Engine, seed: int = 0) -> float:
    tokens, targets = (t.chunk(engine.world_size)[engine.rank] for t in models.batches(1, seed=seed)[0])
    loss = engine(tokens, targets)
    engine.backward(loss)
    engine.step()
    return loss.item()


def through_pickle(module: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(module))


def through_torch(module: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch,
}  # fmt: skip


def _count(calls: list[int], module: nn.Module, args: Any, kwargs: Any = None) -> None:
    calls.append(1)


class Counted(models.Small):
    """The user's own hooks, some of them with keyword arguments, go along."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.calls: list[int] = []
        self.blocks[1].register_forward_pre_hook(partial(_count, self.calls), with_kwargs=True)


def _copied(layout: str, way: str) -> dict[str, Any]:
    engine = make(layout, Counted)
    step(engine)
    tokens, targets = models.batches(1, seed=5)[0]
    with engine.gathered():
        made = WAYS[way](engine.module)
        with torch.no_grad():
            expected = engine(tokens, targets)
            calls = len(engine.module.calls)
            same = torch.equal(made(tokens, targets), expected)
            calls = len(engine.module.calls) - calls
    before = engine.state_dict()
    values = all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    first = step(engine, seed=1)
    kept = all(torch.equal(value, before[name]) for name, value in made.state_dict().items())
    # The copy trains by itself, as a plain module does, and the engine does not notice.
    trained = engine.state_dict()
    optimizer = SGD(made.parameters())
    made(tokens, targets).backward()
    optimizer.step()
    untouched = all(torch.equal(value, trained[name]) for name, value in engine.state_dict().items())
    report = {
        "same forward": same,
        "true values": values,
        "independent of the engine": kept and untouched and first > 0,
        "user's hooks, of the copy": calls == 0 and len(made.calls) > 0,
        "no hooks of the engine": sum(len(getattr(m, name)) for m in made.modules() for name in HOOKS) == 2,
        "no state of the engine": not any("__reduce_ex__" in vars(x) for x in [*made.modules(), *made.parameters()]),
        "still tied": made.head.weight is made.embedding.weight,
        "memory of its own": all(p.untyped_storage().nbytes() == p.nbytes for p in made.parameters()),
        "plain parameters": all(type(p) is nn.Parameter for p in made.parameters()),
        "trained": not torch.equal(made.state_dict()["norm.weight"], before["norm.weight"]),
    }
    engine.close()
    return report


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_of_the_module_is_a_plain_module_with_its_values(ranks: Ranks, layout: str, way: str) -> None:
    for report in ranks.run(_copied, layout, way, world_size=2):
        assert all(report.values()), report


def _copied_outside(layout: str) -> list[str]:
    engine = make(layout)
    said = []
    for way in (*WAYS.values(), copy.copy):
        try:
            made = way(engine.module)
            made.blocks[0].up.weight.sum()
            said.append(f"{way} gave something")
        except FreedParameterError as error:
            said.append(str(error))
    step(engine)
    engine.close()
    return said


@pytest.mark.parametrize("layout", SPLIT)
def test_a_copy_of_a_module_that_is_not_whole_is_refused(ranks: Ranks, layout: str) -> None:
    for said in ranks.run(_copied_outside, layout, world_size=4):
        assert all("with engine.gathered('" in line for line in said), said


def _sizes(layout: str) -> dict[str, int]:
    engine = make(layout, models.small)
    numel = sum(p.numel() for p in engine.module.parameters())
    with engine.gathered():
        buffer = io.BytesIO()
        torch.save(engine.module, buffer)
        state = io.BytesIO()
        torch.save(engine.module.state_dict(), state)
        one = len(pickle.dumps(engine.module.norm.weight))
        whole = len(pickle.dumps(engine.module))
    engine.close()
    sizes = {"module": buffer.tell(), "state_dict": state.tell(), "one": one, "pickle": whole}
    return {"bytes": 4 * numel, "parameters": len(list(engine.module.parameters())), **sizes}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pickle_holds_each_parameter_once_and_no_flat(ranks: Ranks, layout: str) -> None:
    for size in ranks.run(_sizes, layout, world_size=2):
        overhead = 1500 * size["parameters"]  # names, headers of the archive
        assert size["bytes"] < size["module"] < size["bytes"] + overhead, size
        assert size["bytes"] < size["pickle"] < size["bytes"] + overhead, size
        assert size["one"] < 4 * models.WIDTH + 1500, size
        # Detached views: each flat once, so at most the padding on top.
        assert size["state_dict"] < size["bytes"] + overhead, size


class Simple(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(models.WIDTH, models.WIDTH), nn.Tanh())


class Traced(nn.Module):
    """Its block is a GraphModule, which copies itself in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(fx.symbolic_trace(Simple()) for _ in range(2))
        self.kept = nn.ModuleList(Stateful() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.kept):
            x = block(x)
        return x


class Stateful(models.Block):
    """A module that says what its state is."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.pop("cache")


def _own_ways(layout: str) -> list[str]:
    engine = make(layout, Traced)
    wrong = []
    x = torch.randn(3, models.WIDTH)
    for name, way in WAYS.items():
        with engine.gathered(), torch.no_grad():
            made = way(engine.module)
            if not torch.equal(made(x), engine(x)):
                wrong.append(f"{name}: another forward")
        if any(getattr(m, hooks) for m in made.modules() for hooks in HOOKS):
            wrong.append(f"{name}: has hooks")
        with torch.no_grad():
            made(x)  # outside: it needs no engine
    engine(x).sum().backward()
    engine.step()
    engine.close()
    if any("__reduce_ex__" in vars(m) or "__deepcopy__" in vars(m) for m in engine.module.modules()):
        wrong.append("close() left something behind")
    return wrong


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_modules_that_copy_themselves_in_their_own_way_do_so_without_the_engine(ranks: Ranks, layout: str) -> None:
    assert ranks.run(_own_ways, layout, world_size=2) == [[], []]


def test_an_engine_is_not_copied_or_pickled() -> None:
    engine = sf.Engine(models.small(), optimizer=SGD)
    for way in (copy.copy, copy.deepcopy, pickle.dumps, through_torch):
        with pytest.raises(UsageError, match="an engine cannot be copied or pickled"):
            way(engine)  # type: ignore[arg-type]
    engine.close()


# -- forks ----------------------------------------------------------------------------------------------------------


def _in_child(call: Callable[[], object]) -> str:
    """What ``call`` raises in a forked child of this process."""
    read, write = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            call()
            said = "nothing"
        except UsageError as error:
            said = str(error)
        except BaseException:
            said = traceback.format_exc()
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def _forked(layout: str) -> list[str]:
    engine = make(layout)
    step(engine)
    said = [_in_child(call) for call in (lambda: step(engine), engine.state_dict, lambda: engine.mean(1.0))]
    closed = _in_child(engine.close)
    step(engine)  # the parent goes on
    engine.close()
    return [*said, closed]


@pytest.mark.parametrize("layout", ["ddp", "zero1", "zero3"])
def test_a_forked_child_that_uses_the_engine_is_told_why_it_can_not(ranks: Ranks, layout: str) -> None:
    for *said, closed in ranks.run(_forked, layout, world_size=2):
        whole = layout == "ddp"  # its state dict needs no other rank
        for line in said if not whole else (said[0], said[2]):
            assert "this process was forked from one that has an engine" in line, line
        assert closed == "nothing"
