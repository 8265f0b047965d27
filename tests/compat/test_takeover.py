"""A model that is given to ``deepspeed.initialize`` again, and what the face leaves in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.errors import UsageError
from shardfold.testing import Ranks

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def _given_twice(stage: int) -> tuple[list[float], str]:
    from shardfold.compat import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    config = {**CONFIG, "zero_optimization": {"stage": stage}}
    apart, first = [], None
    for _ in range(2):
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
        engine.backward(engine(x).square().mean())
        engine.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            apart.append(float((engine(x) - plain(x)).abs().max()))
        first = first or engine
    said = ""
    try:
        first.backward(torch.ones((), requires_grad=True) * 2)
    except UsageError as error:
        said = str(error)
    first.destroy()
    with torch.no_grad():
        apart.append(float((engine(x) - plain(x)).abs().max()))
    engine.destroy()
    return apart, said


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_may_be_given_to_initialize_again(ranks: Ranks, stage: int) -> None:
    """The engine that had it is closed and says so; values go over whole or split as they are, and train on as in plain
    PyTorch. Destroying the first one then does nothing to the second."""
    for apart, said in ranks.run(_given_twice, stage, world_size=2):
        assert max(apart) < 1e-6  # a few roundings of fp32
        assert "given to another deepspeed.initialize()" in said


def test_uninstall_takes_back_the_attributes_of_parameters() -> None:
    """PyTorch's classes are as before the face noted a parameter; another engine gives the attributes again."""
    from shardfold.compat.deepspeed.zero.attributes import note

    sf.compat.uninstall()
    before = [sorted(vars(kind)) for kind in (nn.Module, nn.Parameter, Tensor)]
    for _ in range(2):
        note(nn.Parameter(torch.ones(1)))
        assert isinstance(vars(nn.Parameter)["ds_id"], property) and hasattr(nn.Module, "all_parameters")
        sf.compat.uninstall()
        assert [sorted(vars(kind)) for kind in (nn.Module, nn.Parameter, Tensor)] == before


SCRIPT = """
import os
import torch
import shardfold as sf

sf.compat.install()
import deepspeed

config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
model = torch.nn.Linear(4, 4)
first, *_ = deepspeed.initialize(model=model, config=config)
first.destroy()
second, *_ = deepspeed.initialize(model=model, config=config)
second(torch.ones(4, 4))
second.destroy()  # its model is split, and nobody's, when the interpreter exits
with open(f"done-{os.environ['RANK']}", "w") as file:
    file.write("done")
"""


@pytest.mark.soak
def test_a_split_model_that_nobody_holds_does_not_disturb_the_exit(tmp_path: Path) -> None:
    """The interpreter ends without a word where the model of a destroyed engine is still there."""
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"],
        check=False, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=dict(os.environ),
    )  # fmt: skip
    assert run.returncode == 0 and "Traceback" not in run.stderr and "Exception ignored" not in run.stderr, run.stderr
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(2))
