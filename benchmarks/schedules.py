"""Draws docs/pictures/schedules.png: the curves of the schedules of shardfold.optim, for two parameter groups.

python benchmarks/schedules.py --out schedules.png

A backbone and a head whose peak is four times as high; logarithmic, so that two groups whose rates keep their ratio are
two curves at one distance.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import shardfold as sf

BACKBONE, HEAD, UPDATES = 1e-4, 4e-4, 100
INK, MUTED, GRID = "#22252b", "#6b7480", "#e7e9ec"
COLORS = {"backbone": "#2171b5", "head": "#c2410c"}
WARMUP = {"warmup_num_steps": 25}
PEAKS = [BACKBONE, HEAD]
CURVES: dict[str, Callable[[Any], Any]] = {
    "WarmupLR": partial(sf.optim.WarmupLR, warmup_max_lr=None, **WARMUP),
    "WarmupDecayLR": partial(sf.optim.WarmupDecayLR, total_num_steps=UPDATES, warmup_max_lr=None, **WARMUP),
    "WarmupCosineLR": partial(
        sf.optim.WarmupCosineLR, total_num_steps=UPDATES, warmup_min_ratio=0.05, cos_min_ratio=0.05, **WARMUP
    ),
    "OneCycle": partial(
        sf.optim.OneCycle, cycle_min_lr=[rate / 20 for rate in PEAKS], cycle_max_lr=PEAKS, cycle_first_step_size=30,
        decay_step_size=10, decay_lr_rate=0.5,
    ),
    "LRRangeTest": partial(
        sf.optim.LRRangeTest, lr_range_test_min_lr=[rate / 20 for rate in PEAKS], lr_range_test_step_size=5
    ),
}  # fmt: skip


def rates(make: Callable[[Any], Any]) -> list[list[float]]:
    """The learning rates of each update, by group."""
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1, requires_grad=True)], "lr": BACKBONE},
        {"params": [torch.zeros(1, requires_grad=True)], "lr": HEAD},
    ]
    optimizer = torch.optim.AdamW(groups)
    schedule, seen = make(optimizer), []
    for _ in range(UPDATES):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return [list(each) for each in zip(*seen, strict=True)]


def draw(file: Path) -> None:
    figure = Figure(figsize=(13, 3.1), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(CURVES), sharey=True)
    for axes, (name, make) in zip(panels, CURVES.items(), strict=True):
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.grid(visible=True, color=GRID, linewidth=0.8)
        axes.tick_params(which="both", length=0, colors=MUTED, labelsize=9)
        axes.set_title(name, loc="left", fontsize=10.5, color=INK, pad=10)
        axes.set_yscale("log")
        for (group, color), values in zip(COLORS.items(), rates(make), strict=True):
            shown = [value if value > 0 else float("nan") for value in values]
            axes.plot(range(1, UPDATES + 1), shown, color=color, linewidth=2)
            if axes is panels[0]:
                axes.annotate(
                    group, (UPDATES, values[-1]), (0, -14), textcoords="offset points", ha="right", fontsize=9.5,
                    color=color,
                )  # fmt: skip
        axes.set_ylim(1e-6, 8e-4)
        axes.set_xlabel("update", fontsize=9, color=MUTED, loc="right")
    panels[0].set_ylabel("learning rate", fontsize=9, color=MUTED)
    panels[0].minorticks_off()
    figure.subplots_adjust(left=0.052, right=0.99, top=0.86, bottom=0.15, wspace=0.1)
    figure.savefig(file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("schedules.png"))
    draw(parser.parse_args().out)
