"""Pictures of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shardfold.plan.report import MemoryRow
from shardfold.tools.observe.readable import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["loss_picture"]

INK, MUTED, GRID = "#22252b", "#7d8590", "#e7e9ec"
LINE = 0.045  # height of a line of text, of that of the axes
TRAIN, HELD_OUT, PREDICTED = "#2166ac", "#c2410c", "#c9d6e4"


def loss_picture(
    path: Path,
    *,
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    baselines: Mapping[str, float],
    memory: Sequence[MemoryRow],
    title: str,
) -> None:
    """Write a picture of bits per byte over steps, beside what each state was predicted to hold and held."""
    figure = Figure(figsize=(11, 5.2), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)  # draws into memory: no display, and none of pyplot's global state
    left, right = figure.subplots(1, 2, width_ratios=(2.5, 1))
    draw_loss(left, train, held_out, baselines)
    draw_memory(right, memory)
    figure.text(0.045, 0.945, title, fontsize=14, color=INK, weight="bold")
    figure.subplots_adjust(left=0.045, right=0.985, top=0.83, bottom=0.1, wspace=0.62)
    figure.savefig(path)


def smoothed(values: Sequence[float], half: int) -> list[float]:
    """Return the mean over `half` values on either side of each, and over fewer near the start.

    Centred, so that unlike a running average it does not lag behind a curve that falls; at the end, where the curve is
    flat, it is the mean of what there is, so that one last value does not bend it.
    """
    means = []
    for place in range(len(values)):
        reach = min(half, place)
        window = values[place - reach : place + reach + 1]
        means.append(sum(window) / len(window))
    return means


def plain(axes: Axes, heading: str) -> None:
    """Take everything away that is not data."""
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, colors=MUTED, labelsize=9)
    axes.set_title(heading, loc="left", fontsize=10.5, color=MUTED, pad=12)


def draw_loss(
    axes: Axes,
    train: Sequence[tuple[int, float]],
    held_out: Sequence[tuple[int, float]],
    baselines: Mapping[str, float],
) -> None:
    last = max((step for step, _ in train), default=1)
    train, held_out = [[each for each in line if math.isfinite(each[1])] for line in (train, held_out)]
    steps, values = [step for step, _ in train], [value for _, value in train]
    plain(axes, "bits per byte, less is better")
    axes.yaxis.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for value in baselines.values():
        axes.axhline(value, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    axes.plot(steps, values, color=TRAIN, linewidth=0.7, alpha=0.25)
    smooth = smoothed(values, half=len(values) // 40)
    axes.plot(steps, smooth, color=TRAIN, linewidth=2, solid_capstyle="round")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o", color=HELD_OUT, markersize=6, markeredgecolor="white", zorder=5)
    everything = [*values, *(value for _, value in held_out), *baselines.values()]
    low, high = min(everything, default=0.0), max(everything, default=8.0)
    axes.set_ylim(max(0.0, low - 0.08 * (high - low) - 0.15), high + 0.06 * (high - low))
    axes.set_xlim(0, last * 1.01)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))  # there are no half steps
    place_labels(axes, last, baselines, (steps, smooth), held_out)
    axes.set_xlabel("optimizer step", fontsize=9.5, color=MUTED, loc="right")


def place_labels(
    axes: Axes,
    last: int,
    baselines: Mapping[str, float],
    training: tuple[Sequence[int], Sequence[float]],
    held_out: Sequence[tuple[int, float]],
) -> None:
    """Name the lines: right of the axes, one below the other, so that no name stands on a line or on another name."""
    names = [(value, f"{name} {value:.2f}", MUTED, False) for name, value in baselines.items()]
    if held_out:
        names.append((held_out[-1][1], f"held-out {held_out[-1][1]:.2f}", HELD_OUT, True))
    if training[1]:
        names.append((training[1][-1], f"training {training[1][-1]:.2f}", TRAIN, False))
    low, high = axes.get_ylim()
    names = sorted((each for each in names if math.isfinite(each[0])), key=lambda each: -each[0])
    heights = spread([value for value, *_ in names], LINE * (high - low))
    for (value, note, color, bold), height in zip(names, heights, strict=True):
        axes.annotate(
            note,
            (last, value),
            (last * 1.03, height),
            annotation_clip=False,
            va="center",
            fontsize=9.5,
            color=color,
            weight="bold" if bold else "normal",
        )


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Return heights from the highest down, at least `gap` apart and each as near to its value as that allows."""
    groups: list[list[float]] = []  # of values that stand in one block, which is centred on them
    for value in sorted(values, reverse=True):
        groups.append([value])
        while len(groups) > 1 and bottom(groups[-2], gap) - top(groups[-1], gap) < gap:
            last = groups.pop()
            groups[-1] += last
    return [top(group, gap) - gap * place for group in groups for place in range(len(group))]


def top(group: Sequence[float], gap: float) -> float:
    return sum(group) / len(group) + gap * (len(group) - 1) / 2


def bottom(group: Sequence[float], gap: float) -> float:
    return top(group, gap) - gap * (len(group) - 1)


def draw_memory(axes: Axes, rows: Sequence[MemoryRow]) -> None:
    """Draw a wide pale bar for what was predicted and a narrow one in it for what is held."""
    plain(axes, "bytes per rank by state")
    axes.xaxis.set_visible(False)
    names = [row.state if row.tier == "device" else f"{row.state}\n({row.tier})" for row in rows]
    places = range(len(rows))
    predicted = [row.table + row.padding for row in rows]
    axes.barh(places, predicted, height=0.62, color=PREDICTED)
    axes.barh(places, [row.held for row in rows], height=0.2, color=TRAIN)
    widest = max([*predicted, *(row.held for row in rows), 1.0])
    for place, row in zip(places, rows, strict=True):
        end = max(predicted[place], row.held)
        for note, height, color in (
            (f"{format_bytes(row.held)} held", 7, TRAIN),
            (f"{format_bytes(predicted[place])} predicted", -7, MUTED),
        ):
            axes.annotate(
                note, (end, place), (6, height), textcoords="offset points", va="center", fontsize=8.5, color=color
            )
    axes.set_yticks(places, names)
    axes.tick_params(axis="y", labelsize=10, labelcolor=INK)
    axes.set_ylim(max(len(rows), 4) - 0.5, -0.5)  # few rows keep slim bars, at the top
    axes.set_xlim(0, widest * 2.3)
