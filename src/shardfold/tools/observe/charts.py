"""Line charts as SVG, for pages: text, without a script and without a library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["ChartLine", "line_chart"]

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 56, 92, 10, 26
MOST_POINTS = 800  # of a line: more are not seen


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart.

    Attributes:
        name: written at its end; empty: nothing is.
        points: x and y; what is not finite is left out.
        kind: the class by which a style sheet draws it.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "train"


def line_chart(lines: Sequence[ChartLine], *, label: str) -> str:
    """A chart of these lines over one x axis, as an ``<svg>`` element; without a finite point, a sentence.

    Args:
        label: what a screen reader says of it.
    """
    finite = [ChartLine(each.name, _finite(each.points), each.kind) for each in lines]
    points = [point for line in finite for point in line.points]
    if not points:
        return "<p>There is nothing to draw.</p>"
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x or 1)
        up = (y - low) / (high - low or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">']
    for tick in ticks:
        _, y = place(low_x, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for x in (low_x, high_x):
        parts.append(
            f'<text class="tick" x="{place(x, low)[0]:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{x:g}</text>'
        )
    heights = _apart([place(*line.points[-1])[1] if line.points else 0.0 for line in finite])
    for line, height in zip(finite, heights, strict=True):
        if not line.points:
            continue
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line.points))
        parts.append(f'<polyline class="line {line.kind}" points="{path}"/>')
        if len(line.points) == 1:
            x, y = place(*line.points[0])
            parts.append(f'<circle class="dot {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>')
        if line.name:
            name = html.escape(f"{line.name} {line.points[-1][1]:.4g}")
            parts.append(f'<text class="name {line.kind}" x="{WIDTH - RIGHT + 6}" y="{height + 4:.1f}">{name}</text>')
    return "\n".join([*parts, "</svg>"])


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    kept = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    step = max(1, math.ceil(len(kept) / MOST_POINTS))
    return kept[:-1:step] + kept[-1:]


def _ticks(low: float, high: float) -> list[float]:
    """Four to seven round numbers, the first and last of which are around all values."""
    span = (high - low) or abs(high) or 1.0
    step = next(
        size for size in (10.0**power * digit for power in range(-18, 40) for digit in (1, 2, 5)) if span / size <= 5
    )
    first, last = math.floor(low / step), math.ceil(high / step)
    return [step * number for number in range(first, max(last, first + 1) + 1)]


def _apart(heights: Sequence[float], gap: float = 13.0) -> list[float]:
    """Heights of names, each near to its line and none on another."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    found = list(heights)
    for before, after in pairwise(order):
        found[after] = max(found[after], found[before] + gap)
    return found
