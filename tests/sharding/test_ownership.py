"""A model belongs to one engine at a time: what begins it, and what is left of it when the engine ends."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import ShardfoldError
from shardfold.sharding import registry
from shardfold.sharding.model import ShardedModel
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

pytestmark = pytest.mark.product

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # whose updates grow no faster than the roundings of a gradient
LAYOUTS = list(sf.PRESETS)
TOLERANCE = 2e-6  # a few roundings of fp32 per step, which the sums over ranks order in another way


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mesh_of(layout: str) -> dict[str, int] | None:
    return {"inter": 2, "intra": world() // 2} if layout in ("hsdp", "hpz") and world() > 1 else None


def make(model: nn.Module, layout: str, **options: Any) -> sf.Engine:
    return sf.Engine(model, optimizer=SGD, **grouped(layout=layout, mesh=mesh_of(layout), **options))


def train(engine: sf.Engine, steps: range) -> None:
    for step in steps:
        tokens, targets = models.batches(step + 1)[step]
        engine.backward(engine(*(t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets))))
        engine.step()


def train_plain(model: nn.Module, steps: range) -> None:
    optimizer = SGD(model.parameters())
    for step in steps:
        model(*models.batches(step + 1)[step]).backward()
        optimizer.step()
        optimizer.zero_grad()


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return models.Small(layers=2)


def apart(a: nn.Module, b: nn.Module) -> float:
    state = b.state_dict()
    return max(float((value - state[name]).abs().max()) for name, value in a.state_dict().items())


def said_by(call: Any, kind: type[BaseException] = ShardfoldError) -> str:
    try:
        call()
    except kind as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# -- a second engine ------------------------------------------------------------------------------------------------


class ActorAndCritic(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def _second(layout: str) -> tuple[str, str, float]:
    model = fresh()
    first = make(model, layout)
    again = said_by(lambda: make(model, layout))
    train(first, range(2))  # the refused one has changed nothing
    plain = fresh()
    train_plain(plain, range(2))
    worst = max(float((v - plain.state_dict()[n]).abs().max()) for n, v in first.state_dict().items())
    first.close()
    body = nn.Linear(4, 4)
    actor = make(ActorAndCritic(body), layout)
    critic = said_by(lambda: make(ActorAndCritic(body), layout))
    actor.close()
    return again, critic, worst


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_engine_over_the_same_parameters_is_refused(ranks: Ranks, layout: str) -> None:
    """On every rank when it is made, naming parameters, also where only a part is shared; the first one goes on."""
    for again, critic, worst in [*ranks.run(_second, layout, world_size=2), *ranks.run(_second, layout, world_size=1)]:
        assert again.startswith("UsageError: 'embedding.weight', ") and "belong to another engine" in again
        assert critic.startswith("UsageError: 'body.weight', 'body.bias' belong to another engine")
        assert worst < TOLERANCE


def _only_here() -> str:
    model = fresh()
    if dist.get_rank() == 0:
        kept = ShardedModel.__new__(ShardedModel)  # what holds the parameters on one rank only
        kept.units = [_Unit(model)]  # type: ignore[list-item]
        registry.hold(kept)
    said = said_by(lambda: make(model, "zero3"))
    if dist.get_rank() == 0:
        registry.let_go(kept)
    return said


class _Unit:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def parameters(self) -> Any:
        return self._model.named_parameters()


def test_an_engine_on_one_rank_only_raises_on_all(ranks: Ranks) -> None:
    """No rank waits for one that refuses."""
    assert all("belong to another engine" in said for said in ranks.run(_only_here, world_size=2))


def _groups() -> list[str]:
    world = dist.distributed_c10d._world
    return [f"{world.pg_names[group]} of {dist.get_process_group_ranks(group)}" for group in world.pg_map]


def _dropped(layout: str) -> tuple[bool, list[str], bool]:
    groups, threads = _groups(), set(threading.enumerate())

    def use() -> weakref.ref[sf.Engine]:
        engine = make(fresh(), layout)
        train(engine, range(2))
        return weakref.ref(engine)

    gone = use()
    gc.collect()
    new = set(threading.enumerate()) - threads
    for thread in new:  # one that carries bytes is told to end, and not waited for in the middle of a collection
        thread.join(10.0)
    left = [name for name in _groups() if name not in groups] + [thread.name for thread in new if thread.is_alive()]
    dist.barrier()
    again = make(fresh(), layout)
    train(again, range(2))
    again.close()
    return gone() is None, left, dist.is_initialized()


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_that_is_dropped_with_its_model_is_collected(ranks: Ranks, layout: str) -> None:
    """Without close() its groups and threads are given back; the user's own group stays, and another engine runs."""
    assert ranks.run(_dropped, layout, world_size=2) == [(True, [], True)] * 2


# -- closing and releasing ------------------------------------------------------------------------------------------


def _calls(engine: sf.Engine, x: Tensor) -> dict[str, Any]:
    return {
        "call": lambda: engine(x, x),
        "backward": lambda: engine.backward(torch.ones((), requires_grad=True)),
        "scale": lambda: engine.scale(torch.ones((), requires_grad=True)),
        "step": engine.step,
        "zero_grad": engine.zero_grad,
        "reset": engine.reset,
        "gathered": lambda: engine.gathered().__enter__(),
        "grads": lambda: engine.gathered(of="grads").__enter__(),
        "no_sync": lambda: engine.no_sync().__enter__(),
        "state_dict": engine.state_dict,
        "load_state_dict": lambda: engine.load_state_dict({}),
        "save": lambda: engine.save("nowhere"),
        "load": lambda: engine.load("nowhere"),
        "mean": lambda: engine.mean(1.0),
        "agree": lambda: engine.max_over_ranks([1.0]),
        "release": engine.release,
    }


def _closed(layout: str) -> tuple[dict[str, str], list[str], str, float, bool]:
    model = fresh()
    engine = make(model, layout)
    train(engine, range(2))
    split = any(unit.split for unit in engine.units)
    engine.close()
    engine.close()
    tokens, targets = models.batches(1)[0]
    said = {name: said_by(call) for name, call in _calls(engine, tokens).items()}
    repr(engine), engine.explain(), engine.memory(), engine.traffic(), engine.stats()  # what sends nothing answers
    left = [said_by(lambda: model(tokens, targets)), said_by(lambda: make(model, layout))]
    worst = 0.0
    if left[0] == "nothing was raised":
        sf.engine_of(model.head.weight).close()  # type: ignore[union-attr]
        plain = fresh()
        train_plain(plain, range(2))
        for each in (model, plain):
            train_plain(each, range(2, 4))
        worst = apart(model, plain)
    return said, left, repr(engine), worst, split


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_closed_engine_says_so_and_what_became_of_its_model(ranks: Ranks, layout: str) -> None:
    """Every call raises UsageError with its own name. Where all values are here the model is a plain one that trains
    on, and another engine takes it; where they are split, both say so and what would have helped."""
    for size in (1, 2):
        for said, left, shown, worst, split in ranks.run(_closed, layout, world_size=size):
            assert all(text.startswith("UsageError: engine") and "is closed" in text for text in said.values()), said
            assert "closed at step 2" in shown
            if not split:
                assert left == ["nothing was raised"] * 2 and worst < TOLERANCE
            else:
                assert left[0].startswith("FreedParameterError") and left[1].startswith("UsageError")
                assert all("engine.release() in place of engine.close()" in text for text in left)


def _inside(layout: str) -> float:
    model = fresh()
    engine = make(model, layout)
    with engine.gathered():
        engine.close()
    train_plain(model, range(2))
    plain = fresh()
    train_plain(plain, range(2))
    return apart(model, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_closing_inside_of_gathered_keeps_what_is_whole(ranks: Ranks, layout: str) -> None:
    """Every rank has all values there, so the model stays whole, under every layout."""
    assert ranks.run(_inside, layout, world_size=2) == [0.0] * 2


def _released(layout: str, precision: str) -> dict[str, Any]:
    model, plain = fresh(), fresh()
    objects = list(model.parameters())
    engine = make(model, layout, precision=precision)
    train(engine, range(2))
    master, held = engine.state_dict(), {}
    with engine.gathered():
        held = {name: value.detach().clone() for name, value in model.state_dict().items()}
    out = engine.release(of="params" if precision == "fp32" else "master")
    report: dict[str, Any] = {
        "same object": out is model and all(a is b for a, b in zip(objects, model.parameters(), strict=True)),
        "bits": all(torch.equal(value, master[name]) for name, value in model.state_dict().items()),
        "held": all(torch.equal(value, held[name]) for name, value in model.state_dict().items()),
        "dtype": next(model.parameters()).dtype,
        "no hooks": not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()),
        "own memory": len({p.untyped_storage().data_ptr() for p in objects}) == len(objects),
        "grads": [p for p in objects if p.grad is not None],
        "copy": apart(copy.deepcopy(model), model),
        "held by": sf.engine_of(objects[0]),
    }
    if precision == "fp32":
        train_plain(plain, range(2))
        for each in (model, plain):
            train_plain(each, range(2, 4))
        report["plain"] = apart(model, plain)
        again = make(model, "zero3")
        train(again, range(2))
        again.release()
        train_plain(plain, range(2))
        report["again"] = apart(model, plain)
    return report


@pytest.mark.soak
@pytest.mark.parametrize("layout", LAYOUTS)
def test_release_gives_a_plain_module_back(ranks: Ranks, layout: str) -> None:
    """Whole values to the bit in the same parameter objects, each with memory of its own, no hooks; plain PyTorch goes
    on with it as with its own model, and so does another engine."""
    for size in (1, 2):
        for report in ranks.run(_released, layout, "fp32", world_size=size):
            assert report["same object"] and report["bits"] and report["no hooks"] and report["own memory"], report
            assert report["grads"] == [] and report["copy"] == 0 and report["held by"] is None, report
            assert report["plain"] < TOLERANCE and report["again"] < TOLERANCE, report


@pytest.mark.parametrize("layout", ["zero1", "zero3", "fsdp2"])
def test_release_gives_the_digits_of_the_master(ranks: Ranks, layout: str) -> None:
    """Under a 16-bit precision ``of="master"`` makes parameters of the values that state_dict() has."""
    for report in ranks.run(_released, layout, "bf16", world_size=2):
        assert report["bits"] and not report["held"] and report["dtype"] is torch.float32


def _refused() -> list[str]:
    engine = make(fresh(), "zero3")
    said = [said_by(lambda: engine.release(of="masters"))]
    with engine.gathered():
        said.append(said_by(engine.release))
    engine.close()
    return said


def test_release_refuses_what_it_cannot_do(ranks: Ranks) -> None:
    """A state that it does not know, and values that are lent; the engine is open still."""
    for state, lent in ranks.run(_refused, world_size=2):
        assert "Did you mean 'master'" in state and "inside `with engine.gathered():`" in lent


# -- what it says of itself, and of strides ---------------------------------------------------------------------


def test_an_engine_prints_as_one_line() -> None:
    """Model, layout, ranks, precision, units and parameters."""
    model = fresh()
    model.embedding.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    numel = sum(p.numel() for p in model.parameters())
    engine = make(model, "zero3", precision="bf16")
    trained = numel - model.embedding.weight.numel()  # type: ignore[union-attr, operator]
    shown = f"Engine(Small, zero3, 1 rank on cpu, bf16, {len(engine.units)} units, {numel:,} parameters"
    assert repr(engine) == f"{shown} ({trained:,} trained), step 0)"
    engine.close()
    assert repr(engine) == f"{shown} ({trained:,} trained), closed at step 0)"


def _channels_last(layout: str) -> tuple[bool, float]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    engine = make(model, layout)
    optimizer = SGD(plain.parameters())
    x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    for _ in range(3):
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(x.chunk(engine.world_size)[engine.rank]).square().mean())
        engine.step()
    state = engine.state_dict()
    engine.close()
    worst = max(float((value - state[name]).abs().max()) for name, value in plain.state_dict().items())
    return all(value.is_contiguous() for value in state.values()), worst


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_channels_last_weights_become_contiguous_with_the_same_numbers(ranks: Ranks, layout: str) -> None:
    """Strides of weights are not kept; training gives plain PyTorch's values all the same."""
    for contiguous, worst in ranks.run(_channels_last, layout, world_size=2):
        assert contiguous and worst < TOLERANCE


# -- what a process looks like --------------------------------------------------------------------------------------


def _looks() -> dict[str, Any]:
    from torch.nn.modules import module as torch_modules

    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "group": dist.is_initialized(),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "hooks": [
            len(found) for name, found in sorted(vars(torch_modules).items())
            if name.startswith("_global_") and isinstance(found, dict)
        ],
        "Module": sorted(vars(nn.Module)),
        "Parameter": sorted(vars(nn.Parameter)),
        "Tensor": sorted(vars(Tensor)),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "malloc": _malloc(),
    }  # fmt: skip


def _malloc() -> list[int]:
    from shardfold.tiers import pages as exact

    return sorted(exact._outside.values())


def _same_process(layout: str) -> list[str]:
    def use() -> None:
        engine = make(fresh(), layout, precision=sf.Precision(tf32=True), weights=None)
        train(engine, range(2))
        engine.close()

    use()  # what is imported on first use stays
    gc.collect()
    torch.manual_seed(5)
    before = _looks()
    model = fresh()
    torch.manual_seed(5)
    engine = make(model, layout, precision=sf.Precision(tf32=True))
    train(engine, range(2))
    engine.close()
    after = _looks()
    return [name for name in before if before[name] != after[name]]


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_process_looks_the_same_before_and_after_an_engine(ranks: Ranks, layout: str) -> None:
    """Threads, process groups, PyTorch's classes, global hooks and switches, random numbers and malloc's thresholds."""
    for size in (1, 2):
        assert ranks.run(_same_process, layout, world_size=size) == [[]] * size


def _started_here() -> list[bool]:
    first, second = make(fresh(), "zero3"), make(fresh(), "zero1")
    seen = [dist.is_initialized()]
    first.close()
    train(second, range(1))
    seen.append(dist.is_initialized())
    second.close()
    seen.append(dist.is_initialized())
    third = make(fresh(), "zero3")
    train(third, range(1))
    third.close()
    return [*seen, dist.is_initialized()]


SCRIPT = """
import sys
sys.path[:0] = {path!r}
from tests.sharding import test_ownership
seen = test_ownership._started_here()
open(f"seen-{{__import__('os').environ['RANK']}}", "w").write(repr(seen))
"""


@pytest.mark.soak
def test_the_last_engine_ends_the_group_that_the_first_started(tmp_path: Any) -> None:
    """Under torchrun, where an engine initializes torch.distributed, closing it leaves the process's others alone."""
    import subprocess
    import sys
    from pathlib import Path

    (tmp_path / "script.py").write_text(SCRIPT.format(path=[str(Path(__file__).parents[2])]))
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert (tmp_path / f"seen-{rank}").read_text() == "[True, True, False, False]"


_KEPT: list[sf.Engine] = []


def _keep(layout: str) -> None:
    """An engine that outlives its process group, as one in a traceback that somebody holds."""
    _KEPT.append(make(fresh(), layout))
    train(_KEPT[0], range(1))


def _forget_kept() -> None:
    _KEPT.clear()
    gc.collect()


def test_an_engine_of_groups_that_are_gone_keeps_no_thread_of_those_to_come(ranks: Ranks) -> None:
    ranks.run(_keep, "zero1", world_size=2)
    try:
        assert ranks.run(_dropped, "zero1", world_size=2) == [(True, [], True)] * 2
    finally:
        ranks.run(_forget_kept, world_size=2)
    assert ranks.run(_dropped, "zero1", world_size=2) == [(True, [], True)] * 2
