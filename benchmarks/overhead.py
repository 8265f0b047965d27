"""Microseconds of host time per event of a unit for one of two ranks, without the communication, as a Markdown table.

python benchmarks/overhead.py

`shardfold bench units` measures one rank alone, which has nothing to split. Here one process takes itself for the first
of two ranks, and its collectives return at once: what is left is the machinery that gathers, frees and reduces.

    FSDP2    over PyTorch's "fake" backend, for which every collective is done when it is called
    ours     over a wire that copies its own shard to the other's place; what ranks agree on before each pass and step
             (three small reductions a step, however many units there are) is left out

The model and the batches are those of the job `units`: 64 blocks of four parameters of one element. What a step takes
above a bare loop is what the machinery takes. A unit has four events in a step: its forward begins and ends, its
backward begins, its gradients are complete. The extra time in forward and backward, divided by 4 x 64, is the time per
event. The optimizer step is in a column of its own.

Each contender is a process of its own with one thread. They take turns in rounds; a figure is the median over rounds
of the difference to the bare loop in the same round, where the time of a round is the median of its steps.
"""

from __future__ import annotations

import argparse
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

from shardfold.tools.bench import jobs
from shardfold.tools.bench.settings import UNITS, Settings

RANKS = 2
EVENTS = 4  # of a unit in one step
OPTIMIZERS: dict[str, Any] = {  # so slow that no value leaves its range
    "sgd": partial(torch.optim.SGD, lr=1e-9),
    "adamw": partial(torch.optim.AdamW, lr=1e-9),
}

Step = tuple[Callable[[], object], Callable[[], object]]
"""Forward and backward; the optimizer step with what clears the gradients."""


# -- contenders


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Step:
    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return lambda: model(x).backward(), step


def bare(model: nn.Module, optimizer: Any, x: Tensor) -> Step:
    return loop(model, optimizer(model.parameters()), x)


def fsdp2(model: nn.Module, optimizer: Any, x: Tensor) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, optimizer(model.parameters()), x)


def ours(model: nn.Module, optimizer: Any, x: Tensor, *, layout: str) -> Step:
    import shardfold as sf

    pretend(RANKS)
    engine = sf.Engine(model, optimizer=optimizer, layout=layout, overlap=sf.Overlap(bucket=None))
    return lambda: engine.backward(engine(x)), engine.step


def pretend(ranks: int) -> None:
    """Engines of this process take it for rank 0 of so many, whose collectives are copies."""
    import shardfold.comm.comm
    import shardfold.engine.engine
    from shardfold.comm.mesh import DataMesh
    from shardfold.comm.transport import Pending

    class OneOfMany(DataMesh):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.sizes = {"inter": 1, "intra": ranks}
            self._groups[("intra",)] = None

        def groups(self) -> list[Any]:
            return []

    class Copies:
        def all_gather(self, full: Tensor, group: Any, **_: Any) -> Pending:
            full.view(ranks, -1)[1:] = full[: full.numel() // ranks]
            return Pending([])

        def reduce_scatter(self, full: Tensor, out: Tensor, group: Any, *, add: bool) -> Pending:
            own = full[: full.numel() // ranks]
            out = out[: own.numel()]
            _ = out.add_(own) if add else out.copy_(own)
            return Pending([])

        def all_reduce(self, tensor: Tensor, group: Any) -> Pending:
            return Pending([])

        def settle(self, waiter: Any) -> None:
            pass

        def close(self) -> None:
            pass

        def words(self, group: Any) -> None:
            pass

        def temporary(self, num_bytes: int, ranks: int) -> int:
            return 0

    engine, comm = cast(Any, shardfold.engine.engine), cast(Any, shardfold.comm.comm)
    engine.DataMesh, comm.data_transport = OneOfMany, lambda *_, **__: Copies()


CONTENDERS: dict[str, Callable[..., Step]] = {
    "bare loop": bare,
    "FSDP2": fsdp2,
    **{layout: partial(ours, layout=layout) for layout in ("ddp", "zero2", "zero3")},
}


# -- rounds


def contend(name: str, steps: int, optimizer: str) -> None:
    """Answers each line of standard input with the microseconds of one round: ``[forward and backward, step]``."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    settings = Settings(job="units", ranks=RANKS)
    (x,) = jobs.batches(settings, 0)[0]
    compute, step = CONTENDERS[name](jobs.build(settings), OPTIMIZERS[optimizer], x)
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


def compare(names: list[str], rounds: int, arguments: list[str], log: Any) -> None:
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
        low, middle, high = (value / (EVENTS * UNITS) for value in quantiles(extra, n=4))
        print(f"| {name} | {median(extra):.0f} us | {middle:.1f} us | {low:.1f} - {high:.1f} us | {step:.0f} us |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd")
    parser.add_argument("--only", nargs="*", default=[""], help="contenders whose names contain one of these")
    parser.add_argument("--log", default=os.devnull, help="a file for what contenders print")
    parser.add_argument("--contend", choices=CONTENDERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contend:
        contend(given.contend, given.steps, given.optimizer)
        return
    names = [n for n in CONTENDERS if n == "bare loop" or any(part in n for part in given.only)]
    arguments = ["--steps", str(given.steps), "--optimizer", given.optimizer]
    with open(given.log, "w") as log:
        compare(names, given.rounds, arguments, log)


if __name__ == "__main__":
    main()
