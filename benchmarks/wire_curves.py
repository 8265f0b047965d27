"""What formats do to training: losses of the demo's GPT and of a small ViT on four ranks, two nodes of two.

    python benchmarks/wire_curves.py                                        # 600 steps of one, 300 of the other
    python benchmarks/wire_curves.py --only zero3 zeropp --picture a.png

All runs of a model and a seed begin with the same weights and read the same samples. Printed is the loss on samples
that no run has trained on, by the weights at the end: of each case at the better of two learning rates, the mean over
seeds, and beside plain training the mean of the differences of runs of the same seed, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfold as sf
from shardfold.optim import OneBitAdam, warmup_cosine
from shardfold.plan.presets import named
from shardfold.testing import run_ranks
from shardfold.tools.recipes._corpus import load_corpus, windows_at
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import GPTConfig

MESH = {"inter": 2, "intra": 2}
ROUND = 10
"""Steps of a round of DiLoCo's."""


class Case(NamedTuple):
    """What is on the link.

    Attributes:
        layout, wires: a preset and what is other in it.
        dense: which part of the steps, the first ones, is sent as it is and in every step; 0: none.
        outer: what ranks of the two nodes send each other.
    """

    layout: str
    wires: Mapping[str, str] = {}
    dense: float = 0.0
    outer: Any = None


DILOCO = partial(sf.Outer, every=ROUND, optimizer="nesterov")
CASES: dict[str, Case] = {
    "zero3": Case("zero3"),
    "zeropp": Case("zeropp"),
    "1-bit Adam": Case("zero1", dense=0.25, outer=sf.Signs()),
    "DiLoCo": Case("zero1", dense=0.25, outer=DILOCO(momentum=0.5)),
    "DiLoCo from the first step": Case("zero1", outer=DILOCO(momentum=0.5)),
    "zeropp, int4x2+error": Case("zeropp", {"reduce": "int4x2+error"}),
    "1-bit Adam, error dropped": Case("zero1", dense=0.25, outer=sf.Signs(error=False)),
    "DiLoCo, momentum 0.9": Case("zero1", dense=0.25, outer=DILOCO(momentum=0.9)),
    "gradients as sign+error": Case("zero3", {"reduce": "sign/1024+error"}),
    "gradients as sign": Case("zero3", {"reduce": "sign/1024"}),
}
RATES = (1.0, 0.5)
"""Learning rates, as factors of a task's."""
SEEN = 64
"""Samples of a batch of the last look, of which each rank has four."""


class Task(NamedTuple):
    """What is trained.

    Attributes:
        model: makes it.
        loss: ``loss(model, samples)``.
        draw: ``draw(number, generator)``: so many samples.
        held: as ``draw``, of what is not trained on.
        steps: by default.
        rows: samples of a rank in a step.
        lr: at its peak.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    draw: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    held: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    steps: int
    rows: int
    lr: float


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Of pictures of 16 by 16, in patches of 4 by 4."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 4, stride=4)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def _pictures(number: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """One of ten patterns of 8 by 8 in noise, at the edge of a patch; three labels of ten are drawn anew, so that no
    model comes below a loss of 1.18."""
    patterns = (torch.rand(10, 8, 8, generator=torch.Generator().manual_seed(5)) < 0.5).float()
    labels = torch.randint(10, (number,), generator=draw)
    images = torch.randn(number, 1, 16, 16, generator=draw) * 0.5
    places = (4 * torch.randint(0, 3, (number, 2), generator=draw)).tolist()
    for image, label, (down, right) in zip(images, labels.tolist(), places, strict=True):
        image[0, down : down + 8, right : right + 8] += patterns[label]
    anew = torch.rand(number, generator=draw) < 0.3
    return images, torch.where(anew, torch.randint(10, (number,), generator=draw), labels)


def _vit() -> Task:
    def loss(model: nn.Module, samples: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(samples[0]), samples[1])

    return Task(ViT, loss, _pictures, _pictures, 300, 16, 3e-3)


def _gpt() -> Task:
    shape, corpus = GPTConfig.named("demo"), load_corpus()

    def windows(text: Tensor, number: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - shape.context - 1, (number,), generator=draw)
        tokens = windows_at(text, starts, shape.context + 1)
        return tokens[:, :-1], tokens[:, 1:]

    def loss(model: nn.Module, samples: tuple[Tensor, Tensor]) -> Tensor:
        return model(*samples)

    return Task(
        lambda: GPT(shape), loss, partial(windows, corpus.train), partial(windows, corpus.held_out), 600, 4, 2e-3
    )


TASKS: dict[str, Callable[[], Task]] = {"GPT": _gpt, "ViT": _vit}


def train(which: str, case: str, steps: int, seed: int, rate: float, folder: Path) -> tuple[list[float], float]:
    """Losses by step, averaged over ranks, and the one of samples that were not trained on.

    Groups that meet rarely begin, as in DiLoCo's paper, with what dense training has saved in ``folder``.
    """
    task = TASKS[which]()
    steps = steps or task.steps
    given, lr = CASES[case], task.lr * rate
    dense, signs = round(steps * given.dense), isinstance(given.outer, sf.Signs)
    adam: Any = partial(torch.optim.AdamW, lr=lr)
    if signs:
        adam = partial(OneBitAdam, lr=lr, freeze_step=dense, weight_decay=0.01)
    draw = torch.Generator().manual_seed(1000 * seed + int(os.environ["RANK"]))
    losses: list[float] = []

    def trained(upto: int, outer: Any) -> sf.Engine:
        torch.manual_seed(seed)
        engine = sf.Engine(
            task.model(),
            optimizer=adam,
            layout=named(given.layout).replace(**given.wires).with_outer(outer),
            parallel=MESH,
            clip_norm=1.0,
            lr_schedule=warmup_cosine(warmup=max(1, steps // 12), total=steps),
        )
        if losses:
            engine.load(folder)
        while len(losses) < upto:
            loss = task.loss(engine, task.draw(task.rows, draw))  # pyright: ignore[reportArgumentType]
            engine.backward(loss)
            engine.step()
            said = loss.detach().clone()
            dist.all_reduce(said)
            losses.append(float(said) / engine.world_size)
        return engine

    if dense and not signs:
        engine = trained(dense, None)
        engine.save(folder)
        engine.close()
    engine = trained(steps, given.outer)
    engine.outer_step()
    with torch.no_grad():
        draw = torch.Generator().manual_seed(10**6 + engine.data_rank)
        seen = torch.stack([task.loss(engine, task.held(SEEN, draw)).detach() for _ in range(4)]).mean()  # pyright: ignore
        dist.all_reduce(seen)
    engine.close()
    return losses, float(seen) / dist.get_world_size()


def _draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, each = plt.subplots(1, len(curves), figsize=(5 * len(curves), 4), layout="constrained", squeeze=False)
    for axes, (which, found) in zip(each[0], curves.items(), strict=True):
        size = max(1, max(map(len, found.values())) // 30)
        for name, losses in found.items():
            smooth = torch.tensor(losses).unfold(0, size, 1).mean(1)
            axes.plot(range(size - 1, len(losses)), smooth, label=name, linewidth=1)
        axes.set_title(which)
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss, mean of the last {size}")
        axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--only", nargs="*", default=list(CASES), help="names of cases")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES), help="factors of the learning rate")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a file of runs: those that are in it are not done again")
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    kept: dict[str, Any] = {}
    if given.keep is not None and given.keep.exists():
        kept = json.loads(given.keep.read_text(encoding="utf-8"))
    curves: dict[str, dict[str, list[float]]] = {}

    def run(*what: Any) -> tuple[list[float], float]:
        name = ", ".join(map(str, what))
        if name not in kept:
            with TemporaryDirectory() as folder:
                kept[name] = run_ranks(train, 4, *what, Path(folder) / "dense", timeout=3000.0)[0]
            if given.keep is not None:
                given.keep.write_text(json.dumps(kept), encoding="utf-8")
        return kept[name]

    for which in given.tasks:
        plain: list[float] = []
        for case in given.only:
            rates = given.rates
            rate = (
                min(rates, key=lambda rate: run(which, case, given.steps, 0, rate)[1]) if len(rates) > 1 else rates[0]
            )
            found = [run(which, case, given.steps, seed, rate) for seed in range(given.seeds)]
            curves.setdefault(which, {})[case] = found[0][0]
            held = [loss for _, loss in found]
            plain = plain or held
            ratios = [a / b - 1 for a, b in zip(held, plain, strict=True)]
            error = stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan")
            row = (which, case, f"x{rate:g}", f"{mean(held):.4f}", f"{mean(ratios):+.1%}", f"{error:.1%}")
            print("| " + " | ".join(row) + " |", flush=True)
    if given.picture is not None:
        _draw(curves, given.picture)


if __name__ == "__main__":
    main()
