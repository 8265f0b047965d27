"""Microseconds of host time per event of a unit, beside plain PyTorch, DDP, FSDP2 and DeepSpeed, as a Markdown table.

python benchmarks/overhead.py               # PyTorch's own, and ours
python benchmarks/overhead.py --peers       # DeepSpeed too, where it is installed

The model is 64 units whose work is next to nothing: four parameters of one element, four operations on one element.
What a step takes above a bare loop is then what the machinery takes. A unit has four events in a step: its forward
begins and ends, its backward begins, its gradients are complete. A contender's extra time in forward and backward,
divided by 4 x 64, is its time per event. The optimizer step is in a column of its own.

One rank alone has nothing to split, and engines leave out what they can then. Rows "of 2 ranks" have the machinery
without the communication: one process takes itself for the first of two ranks, and its collectives return at once.

    FSDP2    over PyTorch's "fake" backend, for which every collective is done when it is called
    ours     over a wire that copies its own shard to the other's place; what ranks agree on before each pass and step
             (three small reductions a step, however many units there are) is left out

Each contender is a process of its own with one thread. They take turns in rounds; a figure is the median over rounds
of the difference to the bare loop in the same round, where the time of a round is the median of its steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

EVENTS = 4  # of a unit in one step
OPTIMIZERS: dict[str, Any] = {  # so slow that no value leaves its range
    "sgd": partial(torch.optim.SGD, lr=1e-9),
    "adamw": partial(torch.optim.AdamW, lr=1e-9),
}

Step = tuple[Callable[[], object], Callable[[], object]]
"""Forward and backward; the optimizer step with what clears the gradients."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.zeros(1))
        self.other_scale = nn.Parameter(torch.ones(1))
        self.other_shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift) * self.other_scale + self.other_shift


class Model(nn.Module):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(1))
        self.blocks = nn.ModuleList(Block() for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.start
        for block in self.blocks:
            x = block(x)
        return x.sum()


# -- contenders


def join(ranks: int) -> None:
    """Initializes ``torch.distributed``: one rank over Gloo, or rank 0 of several that are not there."""
    if ranks == 1:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda: model(x).backward(), step


def bare(model: Model, optimizer: Any, x: Tensor) -> Step:
    return loop(model, optimizer(model.parameters()), x)


def ddp(model: Model, optimizer: Any, x: Tensor) -> Step:
    join(1)
    return loop(nn.parallel.DistributedDataParallel(model), optimizer(model.parameters()), x)


def fsdp2(model: Model, optimizer: Any, x: Tensor, *, ranks: int) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, optimizer(model.parameters()), x)


def deepspeed(model: Model, optimizer: Any, x: Tensor, *, stage: int) -> Step:
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    import deepspeed  # pyright: ignore[reportMissingImports]

    join(1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,  # it would clip at 1
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # its own would be compiled first
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model.parameters()), config=config)
    return lambda: engine.backward(engine(x)), engine.step


def ours(model: Model, optimizer: Any, x: Tensor, *, layout: str, ranks: int) -> Step:
    import shardfold as sf

    if ranks > 1:
        pretend(ranks)
    engine = sf.Engine(model, optimizer=optimizer, layout=layout)
    return lambda: engine.backward(engine(x)), engine.step


def pretend(ranks: int) -> None:
    """Engines of this process take it for rank 0 of so many, whose collectives are copies."""
    import shardfold.actions
    import shardfold.engine
    from shardfold.mesh import DataMesh
    from shardfold.wires.plain import Pending

    class OneOfMany(DataMesh):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.sizes = {"inter": 1, "intra": ranks}
            self._groups[("intra",)] = None

    class Copies:
        def all_gather(self, full: Tensor, group: Any) -> Pending:
            full.view(ranks, -1)[1:] = full[: full.numel() // ranks]
            return Pending([])

        def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
            own = full[: full.numel() // ranks]
            _ = out.add_(own) if add else out.copy_(own)
            return Pending([])

        def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
            return Pending([])

        def temporary(self, num_bytes: int, ranks: int) -> int:
            return 0

    engine, actions = cast(Any, shardfold.engine), cast(Any, shardfold.actions)
    engine.DataMesh, actions.plain_wire = OneOfMany, lambda *_: Copies()


CONTENDERS: dict[str, Callable[..., Step]] = {
    "bare loop": bare,
    "DDP, 1 rank": ddp,
    "FSDP2, 1 rank": partial(fsdp2, ranks=1),
    "FSDP2, of 2 ranks": partial(fsdp2, ranks=2),
    **{f"DeepSpeed {stage}, 1 rank": partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    **{f"{layout}, 1 rank": partial(ours, layout=layout, ranks=1) for layout in ("ddp", "zero2", "zero3")},
    **{f"{layout}, of 2 ranks": partial(ours, layout=layout, ranks=2) for layout in ("ddp", "zero2", "zero3")},
}


# -- rounds


def contend(name: str, units: int, steps: int, optimizer: str) -> None:
    """Answers each line of standard input with the microseconds of one round: ``[forward and backward, step]``."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compute, step = CONTENDERS[name](Model(units), OPTIMIZERS[optimizer], torch.ones(1))
    for _ in range(5):  # orders are recorded, states made
        compute()
        step()
    print("ready", file=answers)
    for _ in sys.stdin:
        spent: tuple[list[float], list[float]] = [], []
        for _ in range(steps):
            a = perf_counter()
            compute()
            b = perf_counter()
            step()
            spent[0].append((b - a) * 1e6)
            spent[1].append((perf_counter() - b) * 1e6)
        print(json.dumps([median(part) for part in spent]), file=answers)


class Contender:
    """A process that runs a round when asked."""

    def __init__(self, name: str, arguments: list[str], log: Any) -> None:
        self.name = name
        command = [sys.executable, str(Path(__file__)), "--contend", name, *arguments]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        self.ready = self._answer() == "ready"

    def round(self) -> tuple[float, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        compute, step = json.loads(self._answer())
        return compute, step

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def compare(names: list[str], units: int, rounds: int, arguments: list[str], log: Any) -> None:
    contenders: list[Contender] = []
    for name in names:
        contender = Contender(name, arguments, log)
        if contender.ready:
            contenders.append(contender)
        else:
            print(f"{name}: left out, because it did not start; --log FILE keeps what it said", file=sys.stderr)
    assert contenders, "no contender could be started"
    assert contenders[0].name == names[0], "the bare loop did not start"
    seconds: dict[str, list[tuple[float, float]]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            seconds[contender.name].append(contender.round())
    for contender in contenders:
        contender.close()
    base = seconds[names[0]]
    print("| | forward and backward, above bare | per event of a unit | middle half of the rounds | step, above bare |")
    print("|---|---|---|---|---|")
    for name, measured in seconds.items():
        if name == names[0]:
            compute, step = (median(column) for column in zip(*base, strict=True))
            print(f"| {name} | (takes {compute:.0f} us) | | | (takes {step:.0f} us) |")
            continue
        extra = [mine[0] - other[0] for mine, other in zip(measured, base, strict=True)]
        step = median(mine[1] - other[1] for mine, other in zip(measured, base, strict=True))
        low, middle, high = (value / (EVENTS * units) for value in quantiles(extra, n=4))
        print(f"| {name} | {median(extra):.0f} us | {middle:.1f} us | {low:.1f} - {high:.1f} us | {step:.0f} us |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--peers", action="store_true", help="DeepSpeed too")
    parser.add_argument("--only", nargs="*", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--log", default=os.devnull, help="a file for what contenders print")
    parser.add_argument("--contend", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contend:
        contend(given.contend, given.units, given.steps, given.optimizer)
        return
    names = [n for n in CONTENDERS if n == "bare loop" or any(part in n for part in given.only)]
    if not given.peers:
        names = [name for name in names if "DeepSpeed" not in name]
    elif importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed: left out, because it is not installed", file=sys.stderr)
        names = [name for name in names if "DeepSpeed" not in name]
    arguments = ["--units", str(given.units), "--steps", str(given.steps), "--optimizer", given.optimizer]
    with open(given.log, "w") as log:
        compare(names, given.units, given.rounds, arguments, log)


if __name__ == "__main__":
    main()
