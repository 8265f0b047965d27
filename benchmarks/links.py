"""Steps of a GPT on two nodes of two ranks, by layout and by rate of the link between the nodes.

    python benchmarks/links.py time                          # seconds of a step at 100mbit, 1gbit and unthrottled
    python benchmarks/links.py curves --picture curves.png   # losses, with feedback and without

`time` needs root (see shardfold.testing.links). Turns of all layouts alternate at each rate, and each figure is the
median.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.plan.presets import named
from shardfold.testing import run_ranks
from shardfold.testing.links import Links, sent, why_not
from shardfold.tools.recipes.config import GPTConfig
from shardfold.tools.recipes.gpt import GPT

MESH = {"inter": 2, "intra": 2}
RATES = ("100mbit", "1gbit", None)
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "zero3": ("zero3", {}),
    "zero3, two hops": ("zero3", {"gather": "computex2", "reduce": "reducex2"}),
    "hpz": ("hpz", {}),
    "zeropp": ("zeropp", {}),
    "zeropp, with error": ("zeropp", {"reduce": "int4x2+error"}),
}
CURVES: dict[str, tuple[str, dict[str, str]]] = {
    "zero3": ("zero3", {}),
    "zeropp": ("zeropp", {}),
    "zeropp, with error": ("zeropp", {"reduce": "int4x2+error"}),
    "int4 in blocks of 4096, without error": ("zeropp", {"reduce": "int4/4096x2"}),
    "the same, with error": ("zeropp", {"reduce": "int4/4096x2+error"}),
}


def _engine(table: tuple[str, dict[str, str]], shape: GPTConfig, lr: float = 1e-3) -> sf.Engine:
    torch.manual_seed(0)
    layout = named(table[0]).replace(**table[1])
    return sf.Engine(GPT(shape), optimizer=partial(torch.optim.AdamW, lr=lr), layout=layout, mesh=MESH)


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


def timed(name: str, shape: GPTConfig, steps: int) -> dict[str, Any]:
    """Seconds of a step of this rank, and bytes of a step that its node has sent."""
    engine = _engine(TABLES[name], shape)
    batches = [_tokens(engine.rank, step, shape, 1) for step in range(steps + 2)]
    for tokens in batches[:2]:
        _step(engine, tokens)
    dist.barrier()
    before, begun = sent(), perf_counter()
    for tokens in batches[2:]:
        _step(engine, tokens)
    dist.barrier()
    found = {"seconds": (perf_counter() - begun) / steps, "sent": (sent() - before) / steps}
    found["numel"] = sum(segment.spec.numel for segment in engine.sharded.segments())
    engine.close()
    return found


def curve(name: str, shape: GPTConfig, steps: int) -> list[float]:
    """The losses of all ranks, averaged."""
    engine = _engine(CURVES[name], shape, 3e-3)
    losses: list[float] = []
    for step in range(steps):
        loss = torch.tensor(_step(engine, _tokens(engine.rank, step, shape, 4)))
        dist.all_reduce(loss)
        losses.append(float(loss) / engine.world_size)
    engine.close()
    return losses


def time(shape: GPTConfig, rounds: int, steps: int) -> None:
    if reason := why_not():
        print(f"{reason}.")
        return
    with Links(2, 2) as links:
        for rate in RATES:
            links.limit(rate)
            seconds: dict[str, list[float]] = {name: [] for name in TABLES}
            crossed: dict[str, float] = {}
            for _ in range(rounds):
                for name in TABLES:
                    found = links.run(timed, name, shape, steps, timeout=600)
                    seconds[name].append(max(each["seconds"] for each in found))
                    crossed[name] = found[0]["sent"] / found[0]["numel"]
            plain = median(seconds["zero3"])
            for name, each in seconds.items():
                middle = median(each)
                row = f"{rate or 'unthrottled'} | {name} | {crossed[name]:.2f} | {middle:.3f} | {plain / middle:.2f}"
                print(f"| {row} |", flush=True)


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
    parser.add_argument("what", choices=["time", "curves"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of a round, or of the curves")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--picture")
    given = parser.parse_args()
    if given.what == "time":
        shape = GPTConfig(layers=given.layers, d_model=given.width, heads=4, context=32)
        time(shape, given.rounds, given.steps or 2)
    else:
        curves(GPTConfig(layers=2, d_model=64, heads=4, context=32), given.steps or 300, given.picture)


if __name__ == "__main__":
    main()
