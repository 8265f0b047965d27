"""Steps of a GPT on two nodes of two ranks, by what is sent and by rate of the link between the nodes.

    python benchmarks/links.py time                          # seconds of a step at 100mbit, 1gbit and unthrottled
    python benchmarks/links.py auto                          # what wire="auto" takes there, beside what it could take
    python benchmarks/links.py curves --picture curves.png   # losses, with feedback and without

`time` and `auto` need root (see shardfold.testing.links). Turns of all cases alternate at each rate, and each figure is
the median of its turns.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.optim import OneBitAdam
from shardfold.plan.presets import named
from shardfold.testing import run_ranks
from shardfold.testing.links import Links, sent, why_not
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import GPTConfig

MESH = {"inter": 2, "intra": 2}
RATES = ("100mbit", "1gbit", None)
ROUND = 200
"""Steps of a round of outer steps; papers have 500."""


@dataclass(frozen=True)
class Case:
    """A way to send.

    Attributes:
        beside: the case that it is compared with.
        dense: steps with dense gradients, of 1-bit Adam; None: AdamW.
        steps: of a turn; 0: as the command says.
    """

    beside: str
    layout: str = "zero3"
    wires: dict[str, str] = field(default_factory=dict[str, str])
    wire: str | None = None
    outer: Any = None
    dense: int | None = None
    overlap: dict[str, Any] = field(default_factory=dict[str, Any])
    steps: int = 0


TWO = {"gather": "computex2", "reduce": "reducex2"}
SIGNS = {"layout": "zero1", "outer": sf.Signs()}
GROUPS = {"layout": "zero1", "steps": ROUND}
CASES = {
    "zero3": Case("zero3"),
    "zero3 in two hops": Case("zero3", wires=TWO),
    "hpz": Case("zero3", "hpz"),
    "zeropp": Case("zero3", "zeropp"),
    "zeropp, int4x2+error": Case("zero3", "zeropp", {"reduce": "int4x2+error"}),
    "1-bit Adam, dense phase": Case("1-bit Adam, dense phase", dense=10**6, **SIGNS),
    "1-bit Adam, signs": Case("1-bit Adam, dense phase", dense=1, **SIGNS),
    "groups that never meet": Case("groups that never meet", outer=sf.Outer(every=10**6), **GROUPS),
    f"DiLoCo, every {ROUND}": Case(
        "groups that never meet", outer=sf.Outer(every=ROUND, optimizer="nesterov"), **GROUPS
    ),
    f"DiLoCo, every {ROUND}, streamed": Case(
        "groups that never meet", outer=sf.Outer(every=ROUND, optimizer="nesterov", fragments=2, delay=10), **GROUPS
    ),
}
WAYS = {
    "as they are": {},
    "as they are, in two hops": TWO,
    "int8": {"gather": "int8", "reduce": "int8"},
    "int8 in two hops": {"gather": "int8x2", "reduce": "int8x2"},
    "int4 in two hops": {"gather": "int4x2", "reduce": "int4x2"},
}
CHOICES = {
    **{name: Case("as they are", wires=wires) for name, wires in WAYS.items()},
    'wire="auto"': Case("as they are", wire="auto"),
    'wire="auto:0.01"': Case("as they are", wire="auto:0.01"),
    'wire="auto:0.2"': Case("as they are", wire="auto:0.2"),
}
CURVES: dict[str, tuple[str, dict[str, str]]] = {
    "zero3": ("zero3", {}),
    "zeropp": ("zeropp", {}),
    "zeropp, with error": ("zeropp", {"reduce": "int4x2+error"}),
    "int4 in blocks of 4096, without error": ("zeropp", {"reduce": "int4/4096x2"}),
    "the same, with error": ("zeropp", {"reduce": "int4/4096x2+error"}),
}


def _engine(case: Case, shape: GPTConfig, lr: float = 1e-3) -> sf.Engine:
    torch.manual_seed(0)
    adam = partial(torch.optim.AdamW, lr=lr)
    return sf.Engine(
        GPT(shape), optimizer=adam if case.dense is None else partial(OneBitAdam, lr=lr, freeze_step=case.dense),
        layout=named(case.layout).replace(**case.wires).with_outer(case.outer), parallel=MESH, wire=case.wire,
        overlap=sf.Overlap(**case.overlap),
    )  # fmt: skip


def _tokens(rank: int, step: int, shape: GPTConfig, rows: int) -> torch.Tensor:
    """Of a language with few rules: each token follows from the one before but for some that are drawn."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 256, (rows, shape.context + 1), generator=draw)
    for i in range(1, shape.context + 1):
        follows = (tokens[:, i - 1] * 7 + 13) % 256
        tokens[:, i] = torch.where(torch.rand(rows, generator=draw) < 0.8, follows, tokens[:, i])
    return tokens


def _step(engine: sf.Engine, tokens: torch.Tensor) -> float:
    loss = engine(tokens[:, :-1], tokens[:, 1:])
    loss = loss[0] if isinstance(loss, tuple) else loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def timed(case: Case, shape: GPTConfig, steps: int) -> dict[str, Any]:
    """Seconds of a step of this rank, and bytes of a step that its node has sent."""
    steps = case.steps or steps
    engine = _engine(case, shape)
    ahead = 0 if case.steps else 2  # a round of outer steps is one from its first step on
    batches = [_tokens(engine.rank, step, shape, 1) for step in range(8)]
    for step in range(ahead):
        _step(engine, batches[step])
    dist.barrier()
    before, begun = sent(), perf_counter()
    for step in range(steps):
        _step(engine, batches[step % 8])
    dist.barrier()
    found: dict[str, Any] = {"seconds": (perf_counter() - begun) / steps, "sent": (sent() - before) / steps}
    found["numel"] = sum(segment.spec.numel for segment in engine.sharded.segments())
    found["wires"] = f"gather as {engine.layout.gather}, reduce as {engine.layout.reduce}" if case.wire else ""
    engine.close()
    return found


def curve(name: str, shape: GPTConfig, steps: int) -> list[float]:
    """The losses of all ranks, averaged."""
    layout, wires = CURVES[name]
    engine = _engine(Case("", layout, wires), shape, 3e-3)
    losses: list[float] = []
    for step in range(steps):
        loss = torch.tensor(_step(engine, _tokens(engine.rank, step, shape, 4)))
        dist.all_reduce(loss)
        losses.append(float(loss) / engine.world_size)
    engine.close()
    return losses


def time(cases: dict[str, Case], shape: GPTConfig, rounds: int, steps: int, picture: str | None) -> None:
    if reason := why_not():
        print(f"{reason}.")
        return
    table: dict[str, dict[str, float]] = {}
    with Links(2, 2) as links:
        for rate in RATES:
            links.limit(rate)
            seconds: dict[str, list[float]] = {name: [] for name in cases}
            crossed: dict[str, float] = {}
            taken: dict[str, str] = {}
            for _ in range(rounds):
                for name, case in cases.items():
                    found = links.run(timed, case, shape, steps, timeout=600)
                    seconds[name].append(max(each["seconds"] for each in found))
                    crossed[name] = found[0]["sent"] / found[0]["numel"]
                    taken[name] = found[0]["wires"]
            for name, each in seconds.items():
                middle, beside = median(each), cases[name].beside
                ratio = median(a / b for a, b in zip(seconds[beside], each, strict=True))
                table.setdefault(rate or "unthrottled", {})[name] = ratio
                row = [
                    rate or "unthrottled",
                    name,
                    f"{crossed[name]:.2f}",
                    f"{middle:.3f}",
                    f"{ratio:.2f}",
                    taken[name],
                ]
                print(f"| {' | '.join(row)} |", flush=True)
    if picture is not None:
        _bars(table, Path(picture))


def _bars(table: dict[str, dict[str, float]], path: Path) -> None:
    """How often faster than what it is compared with each case is, by rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = [name for name in next(iter(table.values())) if CASES.get(name, Case("")).beside != name]
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    width = 0.8 / len(table)
    for number, (rate, ratios) in enumerate(table.items()):
        places = [at + number * width for at in range(len(names))]
        axes.barh(places, [ratios[name] for name in names], width, label=rate)
    axes.set_yticks([at + width for at in range(len(names))], names)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_xlabel("times as fast as what it is compared with")
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=110)


def curves(shape: GPTConfig, steps: int, picture: str | None) -> None:
    found = {name: run_ranks(curve, 4, name, shape, steps, timeout=3000)[0] for name in CURVES}
    for name, losses in found.items():
        print(f"| {name} | {sum(losses[-20:]) / 20:.4f} |")
    print(json.dumps({name: [round(x, 4) for x in losses[-3:]] for name, losses in found.items()}))
    if picture is not None:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for name, losses in found.items():
            last = [losses[max(0, i - 9) : i + 1] for i in range(len(losses))]
            smooth = [sum(some) / len(some) for some in last]
            axes.plot(smooth, label=name, linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel("loss, mean of the last 10")
        axes.legend()
        figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "auto", "curves"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a round, or of the curves")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--picture")
    given = parser.parse_args()
    if given.what != "curves":
        shape = GPTConfig(layers=given.layers, d_model=given.width, heads=4, context=32)
        cases = CASES if given.what == "time" else CHOICES
        cases = {name: case for name, case in cases.items() if not given.only or name in given.only}
        time(cases, shape, given.rounds, given.steps or 2, given.picture)
    else:
        curves(GPTConfig(layers=2, d_model=64, heads=4, context=32), given.steps or 300, given.picture)


if __name__ == "__main__":
    main()
