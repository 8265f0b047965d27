"""Seconds of a step as planned, beside seconds as measured: on this machine, and over links between two nodes.

    python benchmarks/planned_seconds.py here                       # two ranks, the demo's models under all layouts
    python benchmarks/planned_seconds.py here --profile here.json   # as `shardfold doctor --measure here.json` wrote it
    python benchmarks/planned_seconds.py links                      # at 100mbit, 1gbit and unthrottled

Without `--profile` the machine is measured first, as `shardfold doctor --measure` does. `links` needs root (see
shardfold.testing.links): two nodes of one rank, whose link is measured at each rate as `wire="auto"` measures it. Turns
of all cases alternate, each figure is the median of its turns, and of each turn the rank that took longest counts. A
pair of cases has an order if medians differ by more than a tenth. Nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.comm.links import measured as measured_links
from shardfold.plan.layout import Layout
from shardfold.plan.presets import PRESETS, named
from shardfold.planner.hardware import Device, Interconnect, read_device
from shardfold.planner.memory import plan_memory
from shardfold.planner.seconds import plan_seconds
from shardfold.planner.setting import Subject
from shardfold.testing import Ranks
from shardfold.testing.links import Links, why_not
from shardfold.tools.doctor._rates import measure
from shardfold.tools.recipes.gpt import GPT, GPTConfig

ORDERED = 0.1
"""By which part of the smaller two medians differ that have an order."""
RATES = ("100mbit", "1gbit", None)
EVERY = 10
"""Steps of a round of outer steps, and of a turn over links."""
FAR = (("ALL_GATHER", ("inter",)), ("REDUCE_SCATTER", ("inter",)))


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        layout: name of a preset.
        wires: formats by journey.
        outer: outer steps.
    """

    layout: str
    wires: dict[str, str] = field(default_factory=dict[str, str])
    outer: sf.Outer | None = None

    @property
    def table(self) -> Layout:
        """The layout with all of it."""
        return named(self.layout).replace(**self.wires).with_outer(self.outer)


WAYS = {
    "zero1": Case("zero1"),
    "zero3": Case("zero3"),
    "zero3, int8": Case("zero3", {"gather": "int8", "reduce": "int8"}),
    "zero3, int4": Case("zero3", {"gather": "int4", "reduce": "int4"}),
    f"DiLoCo, every {EVERY}": Case("zero1", outer=sf.Outer(every=EVERY, optimizer="nesterov")),
}


def batch_of(shape: GPTConfig, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch."""
    tokens = torch.randint(shape.vocab, (rows, shape.context), generator=torch.Generator().manual_seed(0))
    return tokens, tokens


def turns(
    cases: Mapping[str, Case], shape: GPTConfig, rows: int, precision: str, mesh: Mapping[str, int], rounds: int,
    steps: int,
) -> dict[str, list[float]]:  # fmt: skip
    """On a rank: seconds of a step in each turn of each case."""
    torch.manual_seed(0)
    adam = partial(torch.optim.AdamW, lr=1e-3)
    engines = {
        name: sf.Engine(GPT(shape), optimizer=adam, layout=case.table, precision=precision, parallel=mesh)
        for name, case in cases.items()
    }
    given = batch_of(shape, rows)

    def step(engine: sf.Engine) -> None:
        loss = engine(*given)
        engine.backward(loss[0] if isinstance(loss, tuple) else loss)
        engine.step()

    found: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(rounds + 1):  # in the first one orders are found, and what is made once is made
        for name, engine in engines.items():
            dist.barrier()
            begun = perf_counter()
            for _ in range(max(steps, 3) if turn == 0 else steps):
                step(engine)
            if turn:
                found[name].append((perf_counter() - begun) / steps)
    for engine in engines.values():
        engine.close()
    return found


def middle(found: Sequence[Mapping[str, list[float]]]) -> dict[str, float]:
    """By case, the median of turns; of each the rank that took longest."""
    return {name: median(max(each) for each in zip(*(rank[name] for rank in found), strict=True)) for name in found[0]}


def planned(
    cases: Mapping[str, Case], shape: GPTConfig, rows: int, precision: str, mesh: Mapping[str, int], device: Device
) -> dict[str, float]:
    """Seconds of a step by case."""
    subject = Subject(GPT(shape), batch_of(shape, rows))
    trace = subject.trace(precision, "keep", exact=True)
    found: dict[str, float] = {}
    for name, case in cases.items():
        setting = subject.setting(trace, layout=case.table, precision=precision, mesh=mesh)
        found[name] = plan_seconds(setting, plan_memory(setting, trace), device).step
    return found


def told(title: str, plan: Mapping[str, float], seen: Mapping[str, float]) -> list[float]:
    """Prints a table; errors in percent."""
    print(f"\n{title}\n\n|  | planned, ms | measured, ms | error |\n|---|---|---|---|")
    errors = [100 * (plan[name] / seen[name] - 1) for name in seen]
    for name, error in zip(seen, errors, strict=True):
        print(f"| {name} | {1e3 * plan[name]:.1f} | {1e3 * seen[name]:.1f} | {error:+.1f} % |")
    pairs = [
        (a, b) for a, b in itertools.combinations(seen, 2) if abs(seen[a] - seen[b]) > ORDERED * min(seen[a], seen[b])
    ]
    wrong = [(a, b) for a, b in pairs if (plan[a] < plan[b]) != (seen[a] < seen[b])]
    said = f": not {'; '.join(f'{a} and {b}' for a, b in wrong)}" if wrong else ""
    print(f"\n{len(pairs) - len(wrong)} of {len(pairs)} pairs are in the order that was planned{said}", flush=True)
    return errors


def here(device: Device, given: Any) -> None:
    """All layouts on two ranks of this machine."""
    cases = {name: Case(name) for name in given.layouts.split(",")}
    mesh, errors = {"intra": 2}, list[float]()
    with Ranks(2) as ranks:
        for size, precision in itertools.product(given.sizes.split(","), given.precisions.split(",")):
            shape, rows = GPTConfig.named(size), given.rows
            args = cases, shape, rows, precision, mesh
            seen = middle(ranks.run(turns, *args, given.rounds, given.steps, world_size=2, timeout=3000))
            title = f"{size}, {precision}, {rows} sequences of {shape.context} on each of two ranks"
            errors += told(title, planned(*args, device), seen)
    within = sum(abs(error) <= 20 for error in errors)
    print(f"\n{within} of {len(errors)} within 20 %, worst {max(errors, key=abs):+.1f} %")


def group_of(mesh: Mapping[str, int]) -> tuple[float, float]:
    """On a rank: the rate and the latency of the link between nodes, of the slower of what gathers and what sums."""
    engine = sf.Engine(torch.nn.Linear(8, 8), optimizer=partial(torch.optim.SGD, lr=0.0), layout="zero3", parallel=mesh)
    found = measured_links(engine.sharded.comm, FAR, ())
    engine.close()
    slowest = min(found.links.values(), key=lambda link: link.rate)
    return slowest.rate, slowest.latency


def links(device: Device, given: Any) -> None:
    """Ways to train on two nodes, at each rate of their link."""
    if reason := why_not():
        print(f"{reason}.")
        return
    mesh, shape = {"inter": 2, "intra": 1}, GPTConfig.named(given.sizes.split(",")[0])
    with Links(2, 1) as nodes:
        for rate in RATES:
            nodes.limit(rate)
            far = Interconnect(*nodes.run(group_of, mesh, timeout=600)[0])
            args = WAYS, shape, given.rows, given.precisions.split(",")[0], mesh
            seen = middle(nodes.run(turns, *args, given.rounds, EVERY, timeout=3000))
            title = f"{rate or 'unthrottled'}: {far.rate / 1e6:.1f} MB/s, {1e3 * far.latency:.2f} ms"
            told(title, planned(*args, replace(device, far=far)), seen)


def main() -> None:
    """Measures the machine, or reads what was measured, and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["here", "links"])
    parser.add_argument("--profile", type=Path, help="of this machine")
    parser.add_argument("--sizes", default="demo,tiny")
    parser.add_argument("--layouts", default=",".join(PRESETS))
    parser.add_argument("--precisions", default="fp32")
    parser.add_argument("--rows", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="of a turn on this machine")
    given = parser.parse_args()
    if given.profile is not None:
        device = read_device(given.profile)
    else:
        with tempfile.TemporaryDirectory() as folder:
            device = measure(Path(folder)).device
    (here if given.what == "here" else links)(device, given)


if __name__ == "__main__":
    main()
