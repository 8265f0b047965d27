"""A plan walks the program as the engine does: the operations of a step are the same, in the same order.

Evaluations, gradients that come late, and backwards in parts run what the program prints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.plan.lifetimes import Behaviour
from shardfold.plan.program import MARKERS, VERBS, Op
from shardfold.planner.memory import plan_memory
from shardfold.planner.setting import Subject
from shardfold.testing import Ranks
from tests.support.options import grouped

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Branch(nn.Module):
    """A residual block, which is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.before(x).relu())


class Mixed(nn.Module):
    """Blocks, one that runs twice, one that never runs, a frozen one, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(5))
        self.blocks[3].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 3, 4):
            x = self.blocks[number](x)
        return (x * self.scale).square().mean()


MODELS = {
    "blocks": lambda: nn.Sequential(*(Branch() for _ in range(4)), nn.Flatten(0), nn.Linear(32, 1)),
    "mixed": Mixed,
}
UNITS = {"blocks": ["0", "1", "2", "3"], "mixed": ["blocks.*"]}


def loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).mean()


@contextmanager
def _seen() -> Iterator[list[str]]:
    """The operations that a profiler sees inside, in order, once it is left."""
    ran: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield ran
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    ran += [event.name for event in events if event.name.split(" ")[0] in VERBS]


def _words(*sections: Sequence[Op]) -> list[str]:
    return [str(op) for ops in sections for op in ops if op.verb not in MARKERS]


def _ran(name: str, options: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The operations of a step, of two micro-batches, that a profiler saw, and those of a plan of it."""
    torch.manual_seed(0)
    batch = torch.ones(4, 8)
    engine = sf.Engine(
        MODELS[name](), optimizer=ADAMW, **grouped(units=UNITS[name], clip_norm=1.0, **options), accumulate=2
    )

    def step() -> None:
        for _ in range(2):
            engine.backward(loss(engine, batch))
            engine.step()

    step()
    step()  # the orders are known
    with _seen() as ran:
        step()
    mesh = engine.mesh.sizes
    engine.close()
    subject = Subject(MODELS[name](), batch, compute=loss, units=UNITS[name])
    precision, mode = options.get("precision", "fp32"), options.get("activations", "keep")
    trace = subject.trace(precision, mode)
    setting = subject.setting(
        trace, layout=options["layout"], precision=precision, mesh=mesh, micro_batches=2, clip=True,
        behaviour=Behaviour(streams=False, transport="near"),
    )  # fmt: skip
    points = plan_memory(setting, trace).points
    return ran, [str(point.op) for point in points if point.op is not None and point.op.verb not in MARKERS]


SETTINGS: dict[str, dict[str, Any]] = {name: {"layout": name} for name in sf.PRESETS if name not in ("hsdp", "hpz")}
SETTINGS |= {
    "zero3 bf16": {"layout": "zero3", "precision": "bf16"},
    "zero3 recomputed": {"layout": "zero3", "activations": "recompute"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_operations_of_a_plan_are_those_of_the_run(ranks: Ranks, setting: str, name: str) -> None:
    for ran, planned in ranks.run(_ran, name, SETTINGS[setting], world_size=2):
        assert ran == planned


def _evaluates(options: dict[str, Any]) -> tuple[list[str], list[str], str]:
    """Of an evaluation whose order is known, where the model runs in another order than in training."""
    torch.manual_seed(0)
    engine = sf.Engine(model := Turned(), optimizer=ADAMW, **grouped(units=["blocks.*"], **options))
    batch = torch.ones(4, 8)
    for _ in range(2):
        engine.backward(engine(batch).mean())
        engine.step()
    model.eval().turned = True
    with torch.no_grad():
        engine(batch)
        with _seen() as ran:
            engine(batch)
    text = str(engine.program)
    planned = _words(engine.program.section("eval"))
    engine.close()
    return ran, planned, text


class Turned(nn.Module):
    """Blocks that run in another order where ``turned`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branch() for _ in range(3))
        self.turned = False

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks][:: -1 if self.turned else 1]:
            x = block(x)
        return x


HELD = sf.PRESETS["zero3"].replace(held=sf.Cell(dtype="compute"))


@pytest.mark.parametrize("layout", ["zero2", "zero3", "fsdp2", HELD], ids=["zero2", "zero3", "fsdp2", "held"])
def test_an_evaluation_is_the_section_that_is_printed(ranks: Ranks, layout: Any) -> None:
    for ran, planned, text in ranks.run(_evaluates, {"layout": layout}, world_size=2):
        assert ran == planned
        assert "\neval: as forward  #" in text if layout == "zero2" else "\neval:  # a forward without" in text


def _two_losses(engine: Any, batch: Tensor) -> list[str]:
    """Two backwards through one forward: each is a micro-batch."""
    program, out = engine.program, engine(batch)
    engine.backward(out.mean(), retain_graph=True)
    engine.backward(out.square().mean())
    return _words(program.forward, program.backward, program.last)


def _quiet(engine: Any, batch: Tensor) -> list[str]:
    """A backward that reduces nothing, and one that does."""
    program = engine.program
    with engine.no_sync():
        engine.backward(engine(batch).mean())
    engine.backward(engine(batch).mean())
    return _words(program.forward, program.section("quiet"), program.forward, program.last)


def _closes(engine: Any, batch: Tensor) -> list[str]:
    """A backward that was not known to be the last."""
    program = engine.program
    engine.last_micro_batch = False
    engine.backward(engine(batch).mean())
    engine.last_micro_batch = True
    return _words(program.forward, program.backward, program.section("closing"))


def _late(engine: Any, batch: Tensor) -> list[str]:
    """Blocks run the other way round: the gradients of all but the last of the model come behind their reduction."""
    program = engine.program
    engine.last_micro_batch, engine.module.turned = True, True
    engine.backward(engine(batch).mean())
    late = [op for op in program.section("late") if op.unit != "blocks.0"]
    return _words(program.forward, program.last, late)


def _steps(options: dict[str, Any], step: Callable[[Any, Tensor], list[str]]) -> tuple[list[str], list[str]]:
    torch.manual_seed(0)
    engine = sf.Engine(Turned(), optimizer=ADAMW, **grouped(units=["blocks.*"], **options), accumulate=2)
    batch = torch.ones(4, 8)
    for _ in range(4):
        engine.backward(engine(batch).mean())
        engine.step()
    with _seen() as ran:
        planned = step(engine, batch)
        updates = _words(engine.program.step)
        engine.step()
    engine.close()
    return ran, [*planned, *updates]


PARTS: list[tuple[str, Callable[[Any, Tensor], list[str]]]] = [
    *((layout, step) for layout in ("ddp", "zero2", "zero3") for step in (_two_losses, _quiet, _closes)),
    ("zero2", _late),
]


@pytest.mark.parametrize(("layout", "step"), PARTS, ids=[f"{layout}-{step.__name__[1:]}" for layout, step in PARTS])
def test_a_step_of_other_parts_is_the_sections_that_are_printed(
    ranks: Ranks, layout: str, step: Callable[[Any, Tensor], list[str]]
) -> None:
    for ran, planned in ranks.run(_steps, {"layout": layout}, step, world_size=2):
        assert ran == planned


def _in_two_parts() -> tuple[Counter[str], Counter[str], list[str], str]:
    """Of a pipeline whose backwards are in two parts: operations that ran, and those of the sections that ran."""
    torch.manual_seed(0)
    engine = sf.Engine(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))),
        optimizer=ADAMW,
        layout="zero2",
        init=sf.Init(units=["0", "1", "2", "3"]),
        parallel=sf.Parallel(mesh={"pipeline": 2, "intra": 2}, pipeline="zb-h1", stages=["2"]),
        accumulate=2,
    )
    batch = torch.ones(8, 8)
    for _ in range(2):
        engine.train_batch(batch, loss)
        engine.step()
    with _seen() as ran:
        engine.train_batch(batch, loss)
        engine.step()
    sections = engine.sharded.comm.meter.last_sections
    planned = Counter(word for name, times in sections.items() for word in _words(engine.program.section(name)) * times)
    text = str(engine.program)
    engine.close()
    return Counter(ran), planned, sorted(name for name, times in sections.items() if times), text


def test_backwards_in_two_parts_are_the_sections_that_are_printed(ranks: Ranks) -> None:
    for ran, planned, names, text in ranks.run(_in_two_parts):
        assert ran == planned and ran
        assert {"quiet", "weights", "last_weights"} & {*names}
        assert all(f"\n{name}:" in f"\n{text}" for name in names)
