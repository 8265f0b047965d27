"""A plan walks the program as the engine does: the operations of a step are the same, in the same order."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.plan.lifetimes import Behaviour
from shardfold.plan.program import MARKERS, VERBS
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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    events = sorted(profile.events() or (), key=lambda event: event.time_range.start)
    ran = [event.name for event in events if event.name.split(" ")[0] in VERBS]
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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_operations_of_a_plan_are_those_of_the_run(ranks: Ranks, setting: str, name: str) -> None:
    for ran, planned in ranks.run(_ran, name, SETTINGS[setting], world_size=2):
        assert ran == planned
