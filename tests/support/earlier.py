"""Runs whose checkpoints were written by an earlier Shardfold (tests/data/checkpoints), and what came after them.

The loss is linear in the weights and all data are whole numbers, so gradients are the same in whatever order they are
summed, on any machine; what is left is the optimizer's update, element by element.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardfold as sf
from shardfold.testing import run_ranks

FOLDER = Path(__file__).parents[1] / "data" / "checkpoints"
RANKS, BEFORE, AFTER = 2, 3, 2  # steps


class Linear(nn.Module):
    """A loss that is linear in every parameter: tied, frozen and ordinary ones, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 6) for _ in "ab")
        self.base = nn.Linear(4, 3)
        self.head = nn.Linear(8, 5, bias=False)
        self.tied = nn.Linear(8, 5)
        self.tied.weight = self.head.weight
        self.base.requires_grad_(False)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += len(x)
        total = self.base(y).sum() + self.head(x).sum() + 2 * self.tied(x).sum()
        for number, block in enumerate(self.blocks):
            total = total + (block(x) * (number + 1)).sum()
        return total


class Case(NamedTuple):
    layout: str
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    precision: str = "fp32"
    average: bool = False


CASES = {
    "zero1": Case("zero1", lambda p: torch.optim.SGD(p, lr=2**-4, momentum=0.5)),
    "zero3": Case("zero3", lambda p: torch.optim.AdamW(p, lr=1e-2), precision="bf16", average=True),
    "fsdp2": Case("fsdp2", lambda p: sf.optim.AdamW8bit(p, lr=1e-2, block=16, min_8bit_size=20)),
    "zero2": Case("zero2", lambda p: sf.optim.Adafactor(p, lr=1e-2)),
}


def engine(name: str) -> sf.Engine:
    """Of a case; the values of its parameters are whole numbers divided by 8."""
    case = CASES[name]
    model = Linear()
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-16, 17, parameter.shape, generator=draw) / 8)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    made = sf.Engine(model, optimizer=case.optimizer(trained), layout=case.layout, precision=case.precision)
    if case.average:
        sf.Average(made, 0.75)
    return made


def train(made: sf.Engine, steps: int) -> None:
    for _ in range(steps):
        draw = torch.Generator().manual_seed(100 * made.steps + made.rank)
        x, y = (torch.randint(-2, 3, (3, width), generator=draw).float() for width in (8, 4))
        dtype = next(made.module.parameters()).dtype
        made.backward(made(x.to(dtype), y.to(dtype)))
        made.step()


def values(made: sf.Engine) -> dict[str, Tensor]:
    """Everything that has values, whole and on every rank: ``{"STATE/PARAMETER": values}``."""
    found = {f"weight/{name}": value.clone() for name, value in made.state_dict().items()}
    update = made.sharded.updater
    assert update is not None
    for state in update.state_dtypes():
        with made.gathered(of=state) as states:
            found |= {f"{state}/{name}": v.float().clone() for name, v in states.items() if v is not None}
    for average in made.sharded.run.averages:
        found |= {f"average/{name}": value.clone() for name, value in average.state_dict().items()}
    return found


def write(name: str, folder: str) -> None:
    """On every rank: the run, its checkpoint, and beside it what it was and what it became."""
    made = engine(name)
    train(made, BEFORE)
    made.save(f"{folder}/{name}", latest=False, state={"epoch": Epoch()}, wait=True)
    before = values(made)
    train(made, AFTER)
    after = values(made)
    if made.rank == 0:
        said = {f"before/{key}": v for key, v in before.items()} | {f"after/{key}": v for key, v in after.items()}
        save_file({key: value.contiguous() for key, value in said.items()}, f"{folder}/{name}.safetensors")
    made.close()


def go_on(name: str, folder: str) -> dict[str, Tensor]:
    """On every rank: loads what :func:`write` left into an engine that has trained otherwise, and trains on."""
    made = engine(name)
    train(made, 1)
    report = made.load(f"{folder}/{name}")
    assert (report.step, report.missing, report.unexpected, report.state) == (BEFORE, (), (), {"epoch": {"number": 4}})
    found = {f"before/{key}": value for key, value in values(made).items()}
    train(made, AFTER)
    found |= {f"after/{key}": value for key, value in values(made).items()}
    made.close()
    return found


class Epoch:
    """State of the user's own."""

    def state_dict(self) -> dict[str, Any]:
        return {"number": 4}


def expected(name: str) -> dict[str, Tensor]:
    return load_file(FOLDER / f"{name}.safetensors")


def main() -> None:
    """Writes the folder anew: only for a new version of the format, and beside what is there."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    for name in CASES:
        run_ranks(write, RANKS, name, str(target))
    (target / "latest").unlink()


if __name__ == "__main__":
    main()
