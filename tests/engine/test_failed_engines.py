"""An engine that could not be made, or that nobody closed, is no matter of the next one's: whatever the garbage
collectors of the ranks do, and when."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as torch_modules

import shardfold as sf
from shardfold.comm import mesh
from shardfold.errors import ShardfoldError
from shardfold.launch import die_with_parent, free_port
from shardfold.testing import Ranks
from tests.support import models
from tests.support.options import grouped

SGD = partial(torch.optim.SGD, lr=0.1)
LIMIT = 100.0  # seconds; a call takes a few


def small(layout: str = "zero1") -> sf.Engine:
    return sf.Engine(nn.Linear(4, 4), optimizer=SGD, layout=layout)


def trained(engine: sf.Engine) -> None:
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()


def bad(kind: str) -> partial[sf.Engine]:
    """What raises, in different places of the constructor."""
    model = nn.Linear(4, 4)
    if kind == "complex":
        model.c = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    elif kind == "lazy":
        model = nn.Sequential(nn.LazyLinear(4))
    elif kind == "aliased":
        model.other = nn.Parameter(model.weight.data.view(-1)[:8])
    options: dict[str, Any] = {
        "mesh": {"mesh": {"intra": 3}},
        "rules": {"precision": {"nothing.here": "bf16", "*": "fp32"}},
        "activations": {"activations": "recompute"},
        "weights": {"weights": {"weight": torch.ones(2, 2), "bias": torch.ones(4)}},
        "optimizer": {"optimizer": partial(torch.optim.SGD, lr=-1.0)},
    }.get(kind, {})
    return partial(sf.Engine, model, **grouped(**{"optimizer": SGD, "layout": "zero3", **options}))


def fails(kind: str) -> str:
    try:
        bad(kind)()
    except (ShardfoldError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


KINDS = ("complex", "lazy", "aliased", "mesh", "rules", "activations", "weights", "optimizer")

# -- processes as torchrun would start them: what an engine starts, and may end, is the default group -----------------


def rank() -> int:
    return int(os.environ["RANK"])


def collected_on_rank_1() -> None:
    if rank() == 1:
        gc.collect()


def failed() -> None:
    """One that cannot be made."""
    gc.disable()
    assert fails("complex").startswith("ModelError")


def dropped() -> None:
    """One that is dropped."""
    gc.disable()
    trained(small())


def dropped_beside_another() -> None:
    """One that is dropped while another lives, which is closed."""
    gc.disable()
    other = small()
    trained(small())
    collected_on_rank_1()
    other.close()


def dropped_and_released() -> None:
    """One that is dropped, and one that is released after that."""
    gc.disable()
    trained(small())
    collected_on_rank_1()
    engine = small("zero3")
    trained(engine)
    engine.release()(torch.ones(2, 4))


def sharded_and_dropped() -> None:
    """A model that is split while it is built, and goes before any engine has it."""
    gc.disable()
    with sf.sharded_init():
        nn.Linear(4, 4)


def sweep() -> None:
    """Models that cannot be trained, one after the other, with one that can in between; the collector as it is."""
    for kind in (*KINDS, *KINDS):
        assert "nothing was raised" not in fails(kind), kind
        if kind == "rules":
            engine = small("zero3")
            trained(engine)
            engine.release()


def on_rank_0_only() -> None:
    """One that only rank 0 cannot make: rank 1 raises too, and says what rank 0 found."""
    said = fails("complex" if rank() == 0 else "good")
    assert said.startswith("ModelError" if rank() == 0 else "OrderError"), said
    assert "complex64" in said


def late_on_rank_0() -> None:
    """One that rank 0 cannot make after all that it hears of rank 1: rank 1 has an engine, and closes it."""
    gc.disable()
    engine = None
    model = nn.Linear(4, 4)
    if rank() == 0:
        model.register_forward_hook = None  # type: ignore[method-assign]
    try:
        engine = sf.Engine(model, optimizer=SGD, layout="ddp")
    except TypeError:
        assert rank() == 0
    if engine is not None:
        engine.close()


CASES = [
    dropped, failed, dropped_beside_another, dropped_and_released, sharded_and_dropped, sweep, on_rank_0_only,
    late_on_rank_0,
]  # fmt: skip
LONG = (dropped_beside_another, dropped_and_released, sweep)


def then_two_more(case: str) -> None:
    globals()[case]()
    collected_on_rank_1()
    for _ in range(2):
        engine = small()
        trained(engine)
        engine.close()


def forked(call: str, port: int) -> int:
    """How a process ends that a rank forks for it, in which there is no group but what its engines start."""
    if not (pid := os.fork()):
        status = 1
        try:
            die_with_parent()
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            exec(call, globals())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    "case", [pytest.param(case.__name__, marks=pytest.mark.soak if case in LONG else ()) for case in CASES]
)
def test_the_next_engines_are_made_whatever_became_of_the_last(ranks: Ranks, case: str) -> None:
    """Engines fail or are dropped, and garbage is collected on one rank only: the ranks still agree about whether there
    is a default group, so that two more engines are made, trained and closed."""
    call = f"then_two_more({case!r})"
    assert ranks.run(forked, call, free_port(), world_size=2, distributed=False, timeout=LIMIT) == [0, 0]


def many() -> None:
    counts = []
    for number in range(20):
        engine = small("zero3" if number % 2 else "zero1")
        trained(engine)
        del engine
        if number in (3, 19):
            gc.collect()
            for thread in threading.enumerate():  # those that were told to end
                if thread.name.startswith("shardfold"):
                    thread.join(LIMIT)
            counts.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task")])
    # A thread of the system may end a little after what it served; sixteen engines leave no eight of anything.
    assert all(after - before < 8 for before, after in zip(*counts, strict=True)), counts


@pytest.mark.soak
def test_engines_that_are_made_and_dropped_leave_nothing_open(ranks: Ranks) -> None:
    """After twenty engines that nobody closed there are no more file descriptors and threads than after four, but for
    a few that are about to end."""
    assert ranks.run(forked, "many()", free_port(), world_size=2, distributed=False, timeout=LIMIT) == [0, 0]


# -- what is left of one that failed ----------------------------------------------------------------------------------


def _held() -> dict[str, Any]:
    return {
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("shardfold")),
        "groups": len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0,
        "meshes": len(mesh._PROCESS.open),
        "hooks": [
            len(found) for name, found in sorted(vars(torch_modules).items())
            if name.startswith("_global_") and isinstance(found, dict)
        ],
        "tf32": torch.backends.cuda.matmul.allow_tf32,
    }  # fmt: skip


def _after(kind: str) -> tuple[str, list[str], bool]:
    gc.collect()
    gc.disable()
    try:
        before = _held()
        make = bad(kind)
        model = make.args[0]
        gone, said, hooked, lazy = weakref.ref(model), "", _hooked(model), kind == "lazy"  # which refers to itself
        try:
            make(precision=sf.Precision(tf32=not before["tf32"]), **make.keywords) if kind != "rules" else make()
        except (ShardfoldError, ValueError) as error:
            said = str(error)
        after = _held()
        usable = hooked == _hooked(model)
        usable = usable and (lazy or models_equal(model))
        del model, make
        return said, [name for name in before if before[name] != after[name]], usable and (gone() is None or lazy)
    finally:
        gc.enable()


def _hooked(model: nn.Module) -> list[tuple[int, int, bool]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in model.modules()]


def models_equal(model: nn.Module) -> bool:
    """Whether a linear layer still computes with its own values."""
    x, values = torch.ones(2, 4), dict(model.named_parameters())
    return bool(torch.equal(model(x), torch.nn.functional.linear(x, values["weight"], values["bias"])))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_cannot_be_made_gives_back_what_it_took_at_once(ranks: Ranks, kind: str) -> None:
    """Threads, groups, global hooks and switches are as before, with no garbage collection; the model computes as it
    did, and its memory goes when its user lets go of it."""
    for size in (1, 2):
        for said, changed, usable in ranks.run(_after, kind, world_size=size, timeout=LIMIT):
            assert said and not changed and usable, (said, changed, usable)


def _late(layout: str) -> tuple[list[str], bool, bool]:
    """A failure behind all that is sent, where the parameters are split already."""
    torch.manual_seed(0)
    model = models.Small(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = _held()
    model.register_forward_hook = None  # type: ignore[method-assign]
    with suppress(TypeError):
        sf.Engine(model, optimizer=optimizer, layout=layout)
    del model.register_forward_hook
    after = _held()
    changed = [name for name in before if before[name] != after[name]]
    guarded = "zero_grad" in vars(optimizer) or "state_dict" in vars(optimizer)
    another = sf.Engine(models.Small(layers=2), optimizer=SGD, layout=layout)
    tokens, targets = models.batches(1)[0]
    another.backward(another(tokens, targets))
    another.step()
    another.close()
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return changed, guarded, hooked


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
def test_a_late_failure_takes_hooks_and_guards_off_again(ranks: Ranks, layout: str) -> None:
    """Also when the engine's own hooks cannot be put on the model; another engine of another model trains."""
    assert ranks.run(_late, layout, world_size=2, timeout=LIMIT) == [([], False, False)] * 2
