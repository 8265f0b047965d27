"""Memory of a rank against the number of ranks, time of a step against the number of parameters: a picture and JSON.

python benchmarks/growth.py                                   # growth.png and growth.json, some minutes
python benchmarks/growth.py --sizes 10e6 46e6 --ranks 1 2     # less of it

Left: the largest resident set of a rank in a training step, above what was resident before the model was built, for
one model on more and more ranks. The dashed line is all states of that model divided by the number of ranks. Right:
the median step of models of more and more parameters on two ranks. fp32, AdamW. A contender whose 16 bytes per
parameter and rank do not fit into the memory that is available is left out, and the reason printed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from shardfold.plan.checks import human
from shardfold.tools.bench.contenders import find
from shardfold.tools.bench.settings import Settings, gpt_shape
from shardfold.tools.bench.teams import ContenderFailed, Team
from shardfold.tools.bench.turns import available_bytes

COLORS = {
    "torch-ddp": "#7d8590",
    "torch-fsdp2": "#c2410c",
    "ddp": "#9ecae1",
    "zero1": "#6baed6",
    "zero2": "#2171b5",
    "zero3": "#08306b",
}
BY_SIZE = ["torch-ddp", "torch-fsdp2", "zero2", "zero3"]  # half a billion parameters take a minute each
INK, MUTED, GRID = "#22252b", "#6b7480", "#e7e9ec"
STATES = 16  # bytes per parameter in fp32: parameter, gradient, two moments
LIBRARIES = 0.4e9  # bytes of a process that has imported them


def measure(name: str, params: float, ranks: int, steps: int) -> dict[str, Any]:
    """One contender at one size on so many ranks: step in seconds and the largest rank's peak in bytes, or why not."""
    settings = Settings(params=params, ranks=ranks, steps=steps, warm=1, timeout=600)
    exact = gpt_shape(params, settings.context).num_parameters
    result: dict[str, Any] = {"contender": name, "params": exact, "ranks": ranks}
    needs, there = (STATES * exact + LIBRARIES) * ranks, available_bytes()
    if needs > there:
        reason = f"{STATES} bytes x parameters x ranks, and libraries, are {human(needs)}; {human(there)} are available"
        return result | {"left_out": reason}
    try:
        with Team(find(name), settings) as team:
            answers = team.turn(steps)
    except ContenderFailed as error:
        return result | {"left_out": f"{error.reason}: {error.said.splitlines()[-1:]}"}
    seconds = [max(each) for each in zip(*(answer["seconds"] for answer in answers), strict=True)]
    peaks = {field: max(answer[field] for answer in answers) for field in ("peak", "set_up_peak", "held")}
    return result | {"seconds": seconds, **peaks}


def plain(axes: Axes, heading: str, xlabel: str) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", length=0, colors=MUTED, labelsize=9.5)
    axes.set_title(heading, loc="left", fontsize=10.5, color=INK, pad=12)
    axes.set_xlabel(xlabel, fontsize=9.5, color=MUTED, loc="right")
    axes.minorticks_off()


def label_ends(axes: Axes, ends: Iterable[tuple[str, float, float]]) -> None:
    """Names at the ends of lines, pushed apart where they would overlap."""
    lowest = float("-inf")
    for name, x, y in sorted(ends, key=lambda end: end[2]):
        height = axes.transData.transform((x, y))[1]
        moved = max(height, lowest + 22)
        lowest = moved
        axes.annotate(
            name, (x, y), (9, (moved - height) * 72 / axes.figure.dpi), textcoords="offset points", va="center",
            fontsize=9.5, color=COLORS.get(name, MUTED),
        )  # fmt: skip


def lines(axes: Axes, results: list[dict[str, Any]], x: str, y: str, scale: float) -> list[tuple[str, float, float]]:
    ends = []
    for name, color in COLORS.items():
        points = sorted((r[x], r[y] / scale) for r in results if r["contender"] == name and y in r)
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, linewidth=2, markersize=5)
            ends.append((name, *points[-1]))
    return ends


def draw(file: Path, by_ranks: list[dict[str, Any]], by_size: list[dict[str, Any]]) -> None:
    figure = Figure(figsize=(11, 5), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.055, right=0.905, top=0.89, bottom=0.11, wspace=0.42)
    if by_ranks:
        params, ranks = by_ranks[0]["params"], sorted({r["ranks"] for r in by_ranks})
        plain(left, f"peak of a step per rank, GiB, {params / 1e6:.0f}M parameters", "ranks")
        left.set_xscale("log", base=2)
        left.set_xticks(ranks, [str(n) for n in ranks])
        left.plot(ranks, [STATES * params / n / 2**30 for n in ranks], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        ends = lines(left, by_ranks, "ranks", "peak", 2**30)
        left.set_ylim(0)
        ends.append(("all states / ranks", ranks[-1], STATES * params / ranks[-1] / 2**30))
        label_ends(left, ends)
    if by_size:
        sizes = sorted({r["params"] for r in by_size})
        plain(right, f"step, seconds, {by_size[0]['ranks']} ranks, 1 x 64 tokens each", "parameters")
        right.set_xscale("log")
        right.set_yscale("log")
        right.set_xticks(sizes, [f"{size / 1e6:.0f}M" for size in sizes])
        ends = lines(right, by_size, "params", "step", 1)
        low, high = right.get_ylim()
        marks = [mark for mark in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= mark <= high]
        right.set_yticks(marks, [f"{mark:g}" for mark in marks])
        right.minorticks_off()
        label_ends(right, ends)
    figure.savefig(file)


def sweep(points: Iterable[tuple[str, float, int]], steps: int) -> list[dict[str, Any]]:
    results = []
    for name, params, ranks in points:
        result = measure(name, params, ranks, steps)
        if "seconds" in result:
            result["step"] = median(result["seconds"])
            says = f"step {result['step']:.3f} s, peak {human(result['peak'])}, held {human(result['held'])}"
        else:
            says = f"left out: {result['left_out']}"
        print(f"{result['params'] / 1e6:.0f}M on {ranks}, {name}: {says}", flush=True)
        results.append(result)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="*", default=[10e6, 46e6, 100e6, 500e6])
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--params", type=float, default=25e6, help="of the model that more and more ranks share")
    parser.add_argument("--steps", type=int, default=2, help="timed")
    parser.add_argument("--by-ranks", nargs="*", default=list(COLORS), choices=list(COLORS), help="on the left")
    parser.add_argument("--by-size", nargs="*", default=BY_SIZE, choices=list(COLORS), help="on the right")
    parser.add_argument("--out", type=Path, default=Path("growth.png"), help="the picture; the JSON lies beside it")
    given = parser.parse_args()
    by_ranks = sweep([(name, given.params, ranks) for ranks in given.ranks for name in given.by_ranks], given.steps)
    by_size = sweep([(name, params, 2) for params in given.sizes for name in given.by_size], given.steps)
    record = {"by_ranks": by_ranks, "by_size": by_size}
    given.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    draw(given.out, by_ranks, by_size)
    print(f"Written: {given.out}, {given.out.with_suffix('.json')}")


if __name__ == "__main__":
    main()
