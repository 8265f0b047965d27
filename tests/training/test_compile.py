"""``torch.compile`` of blocks or of the whole model, before and after the engine is made: plain PyTorch's numbers."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import shardfold as sf
from shardfold.testing import Ranks
from tests.support import models

# Dynamo looks at ``.grad`` of every input, also of those that are no leaves; in plain PyTorch the same.
pytestmark = [
    pytest.mark.product,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
LAYOUTS = list(sf.PRESETS)
WAYS = ["block.compile()", "blocks[i] = torch.compile(block)", "model.compile()", "torch.compile(model)"]


class Graphs:
    """A backend that runs a graph as it is, and counts its nodes: how many graphs there are, and of which size."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: fx.GraphModule, inputs: Any) -> Any:
        self.sizes.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward


def compiled(model: Any, way: str, backend: Any) -> nn.Module:
    if way == "block.compile()":
        for block in model.blocks:
            block.compile(backend=backend)
    elif way == "model.compile()":
        model.compile(backend=backend)
    elif way == "torch.compile(model)":
        return torch.compile(model, backend=backend)
    else:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, backend=backend)
    return model


def _difference(layout: str, way: str, when: str, backend: str, checkpointing: str | None = None) -> dict[str, Any]:
    """Losses and parameters of three steps beside eager plain PyTorch."""
    torch._dynamo.reset()
    mesh = {"inter": 2, "intra": dist.get_world_size() // 2} if layout in ("hsdp", "hpz") else None
    torch.manual_seed(0)
    plain: Any = models.Small(layers=2, checkpointing=checkpointing)
    model: Any = copy.deepcopy(plain)
    optimizer = SGD(plain.parameters())
    graphs = Graphs()
    how: Any = graphs if backend == "graphs" else backend
    if when == "before" and way != "called":
        model = compiled(model, way, how)
    call: Any = torch.compile(model, backend=how) if (way, when) == ("called", "before") else None
    engine = sf.Engine(model, optimizer=SGD, layout=layout, parallel=mesh)
    if (way, when) == ("called", "after"):
        call = torch.compile(model, backend=how)
    elif when == "after":
        compiled(engine.module, way, how)
    call = engine if call is None else call  # a compiled module has no truth value
    worst = 0.0
    for tokens, targets in models.batches(3):
        mine = [t.chunk(engine.world_size)[engine.rank] for t in (tokens, targets)]
        expected = plain(tokens, targets)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = call(*mine)
        engine.backward(loss)
        engine.step()
        worst = max(worst, abs(engine.mean(loss.item()) / expected.item() - 1))
    if checkpointing is None:
        with torch.no_grad():
            worst = max(worst, abs(engine(tokens, targets).item() / plain(tokens, targets).item() - 1))
    state = {name.replace("_orig_mod.", ""): value for name, value in engine.state_dict().items()}
    for name, value in plain.state_dict().items():
        worst = max(worst, ((state[name] - value).abs().max() / value.abs().max()).item())
    rows = engine.traffic().rows
    report = {
        "worst": worst,
        "transient": engine.memory().transient,
        "wrong traffic": [row for row in rows if row.sent != row.program],
        "graphs": graphs.sizes,
    }
    engine.close()
    return report


def _check(reports: list[dict[str, Any]], tol: float = 1e-6) -> None:
    for report in reports:
        assert report["worst"] < tol, report
        assert report["transient"] == 0 and report["wrong traffic"] == [], report


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("way", "when", "backend"),
    [
        (WAYS[0], "before", "aot_eager"), (WAYS[0], "after", "eager"),
        (WAYS[1], "before", "eager"), (WAYS[1], "after", "aot_eager"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_blocks_train_as_in_plain_pytorch(
    ranks: Ranks, layout: str, way: str, when: str, backend: str
) -> None:
    _check(ranks.run(_difference, layout, way, when, backend, world_size=2))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("way", "when", "backend"),
    [(WAYS[2], "before", "eager"), (WAYS[2], "after", "aot_eager"), (WAYS[3], "before", "aot_eager")],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_model_trains_as_in_plain_pytorch(
    ranks: Ranks, layout: str, way: str, when: str, backend: str
) -> None:
    _check(ranks.run(_difference, layout, way, when, backend, world_size=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.soak)])
@pytest.mark.parametrize("layout", ["zero3", "ddp", "hpz"])
def test_a_compiled_model_that_is_called_itself_trains_as_in_plain_pytorch(
    ranks: Ranks, layout: str, when: str, backend: str
) -> None:
    """``torch.compile(model)`` made around the engine's model, and called in place of the engine."""
    _check(ranks.run(_difference, layout, "called", when, backend, world_size=2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("checkpointing", ["new", "reentrant"])
@pytest.mark.parametrize("layout", ["ddp", "zero3", "fsdp2"])
def test_compiled_blocks_under_checkpoints_train_as_in_plain_pytorch(
    ranks: Ranks, layout: str, checkpointing: str
) -> None:
    _check(ranks.run(_difference, layout, WAYS[0], "before", "aot_eager", checkpointing, world_size=2))


@pytest.mark.soak
@pytest.mark.parametrize("layout", ["ddp", "zero3", "fsdp2"])
def test_a_compiled_block_is_one_graph_that_all_blocks_share(ranks: Ranks, layout: str) -> None:
    """The engine's hooks break no block apart, and gathering again compiles nothing again."""
    for report in ranks.run(_difference, layout, WAYS[0], "before", "graphs", world_size=2):
        # LayerNorm, linear, GELU, linear, add: with gradients, and for the evaluation without.
        assert report["graphs"] == [5, 5], report["graphs"]


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["ddp", "zero3", "hpz"])
def test_inductor_trains_as_plain_pytorch_does(ranks: Ranks, layout: str, way: str) -> None:
    reports = ranks.run(
        _difference, layout, way, "before", "inductor", world_size=2, timeout=600, warnings_as_errors=False
    )
    _check(reports, tol=1e-5)


LATER = """
import copy, sys
from functools import partial
import torch
import shardfold as sf

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3)))
plain = copy.deepcopy(model)
made = partial(torch.optim.AdamW, lr=0.1)
sf.optim.Lion(model.parameters())
assert "torch._dynamo" not in sys.modules
engine = sf.Engine(model, optimizer=made, layout="zero3", init=sf.Init(units=["0", "1", "2"]))


def step(x):
    loss = engine(x).square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


batches = torch.randn(6, 4, 8)
found = [step(x) for x in batches[:3]]
assert "torch._dynamo" not in sys.modules
model.compile(backend="eager")
found += [step(x) for x in batches[3:]]
optimizer = made(plain.parameters())
for x, mine in zip(batches, found):
    loss = plain(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert abs(mine - loss.item()) < 1e-6, (found, loss)
engine.close()
"""


def test_the_compiler_is_imported_once_something_is_compiled() -> None:
    """To import it takes as long as torch; an optimizer of ours that is made by itself does not. An engine that was
    made before has the same losses afterwards."""
    subprocess.run([sys.executable, "-c", LATER], check=True, timeout=240)
