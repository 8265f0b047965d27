"""The pictures of docs/concepts and of the README; the bytes in them are those of the table.

python benchmarks/concepts.py docs/pictures     bytes-by-layout.png, who-keeps-what.png, collectives.png
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from shardfold.plan.cost import resting_bytes
from shardfold.plan.layout import Precision, Tier
from shardfold.plan.placement import SegmentSpec, Slot, UnitSpec
from shardfold.plan.presets import named

PARAMS = 7_000_000_000
COLORS = {"params": "#4C72B0", "grads": "#DD8452", "master": "#55A868", "moments": "#8172B3"}
WORDS = {"params": "parameters (bf16)", "grads": "gradients (fp32)", "master": "fp32 master", "moments": "moments"}
PIECES = ("#4C72B0", "#DD8452", "#55A868", "#C44E52")
GREY = "#777777"


def resting(layout: str, ranks: int) -> dict[str, float]:
    """Bytes on each device between steps by state: PARAMS parameters in bf16, fp32 gradients, AdamW."""
    mesh, policy = {"inter": 1, "intra": ranks}, Precision.named("bf16")
    segment = SegmentSpec((Slot("w", (PARAMS,), 0),), -(-PARAMS // ranks) * ranks, policy.compute)
    found = resting_bytes(named(layout).bind(policy, mesh), [UnitSpec("all", (segment,), False)], mesh)
    return {state: num_bytes for (state, tier), num_bytes in found.items() if tier is Tier.DEVICE}


def bytes_by_layout(path: Path) -> None:
    layouts = [("ddp", 8), ("zero1", 8), ("zero2", 8), ("zero3", 8), ("zero3", 64), ("offload", 8), ("infinity", 8)]
    figure, axes = plt.subplots(figsize=(8.4, 3.3), dpi=160)
    for row, (layout, ranks) in enumerate(reversed(layouts)):
        left = 0.0
        for state, num_bytes in resting(layout, ranks).items():
            axes.barh(row, num_bytes / 1e9, left=left, color=COLORS[state], height=0.7)
            left += num_bytes / 1e9
        axes.text(left + 1, row, f"{left:.3g} GB", va="center", fontsize=9, color=GREY)
    axes.set_yticks(range(len(layouts)), [f"{layout}, {ranks} GPUs" for layout, ranks in reversed(layouts)])
    for size in (24, 40, 80):
        axes.axvline(size, color=GREY, linewidth=0.8, linestyle=":")
        axes.text(size, len(layouts) - 0.45, f"{size} GB", fontsize=8, color=GREY, ha="center")
    axes.legend([Rectangle((0, 0), 1, 1, color=c) for c in COLORS.values()], WORDS.values(), fontsize=8, frameon=False)
    axes.set_xlabel("bytes on each GPU between steps, 7 billion parameters with AdamW (GB)", fontsize=9)
    _plain(axes)
    _save(figure, path)


def who_keeps_what(path: Path) -> None:
    layouts = ("ddp", "zero1", "zero2", "zero3")
    figure, grid = plt.subplots(1, len(layouts), figsize=(8.4, 2.6), dpi=160, sharey=True)
    for axes, layout in zip(grid, layouts, strict=True):
        bound = named(layout).bind(Precision.named("bf16"), {"inter": 1, "intra": 4})
        for row, state in enumerate(reversed(COLORS)):
            split = bool(getattr(bound, state).over)
            for rank in range(4):
                axes.add_patch(Rectangle((rank, row), 0.86, 0.8, facecolor="#eeeeee", edgecolor="none"))
                for piece in (rank,) if split else range(4):
                    axes.add_patch(Rectangle((rank + 0.215 * piece, row), 0.215, 0.8, facecolor=PIECES[piece]))
        axes.set(xlim=(-0.1, 4), ylim=(-0.1, 4), title=layout)
        axes.set_xticks([each + 0.43 for each in range(4)], [f"GPU {each}" for each in range(4)], fontsize=7)
        axes.set_yticks([each + 0.4 for each in range(4)], [WORDS[each].split(" (")[0] for each in reversed(COLORS)])
        _plain(axes)
        axes.tick_params(length=0)
    _save(figure, path)


COLLECTIVES = {
    "broadcast": ([[0], [], [], []], [[0], [0], [0], [0]]),
    "all-gather": ([[0], [1], [2], [3]], [[0, 1, 2, 3]] * 4),
    "reduce-scatter": ([[0, 1, 2, 3]] * 4, [["0"], ["1"], ["2"], ["3"]]),
    "all-reduce": ([[0, 1, 2, 3]] * 4, [["0", "1", "2", "3"]] * 4),
    "all-to-all": ([[(r, c) for c in range(4)] for r in range(4)], [[(c, r) for c in range(4)] for r in range(4)]),
}
"""What four ranks have before and after: a number is that piece, a word the sum of that piece over ranks, a pair the
piece that a rank has for another."""


def collectives(path: Path) -> None:
    figure, grid = plt.subplots(1, len(COLLECTIVES), figsize=(10.5, 2.7), dpi=160)
    for axes, (name, sides) in zip(grid, COLLECTIVES.items(), strict=True):
        for side, ranks in enumerate(sides):
            for rank, pieces in enumerate(ranks):
                axes.add_patch(Rectangle((side * 5.2, 3 - rank), 4, 0.8, facecolor="#eeeeee", edgecolor="none"))
                for piece in pieces:
                    _piece(axes, side * 5.2, 3 - rank, rank, piece)
        axes.annotate("", (5.1, 1.9), (4.1, 1.9), arrowprops={"arrowstyle": "->", "color": GREY})
        axes.set(xlim=(-0.2, 9.4), ylim=(-0.2, 4), xticks=[], title=name)
        axes.set_yticks([3.4 - rank for rank in range(4)], [f"rank {rank}" for rank in range(4)], fontsize=7)
        _plain(axes)
        axes.tick_params(length=0)
    _save(figure, path)


def _piece(axes: Any, x: float, y: float, rank: int, piece: Any) -> None:
    place, color = (piece[1] if piece[0] == rank else piece[0], piece[0]) if isinstance(piece, tuple) else (piece,) * 2
    axes.add_patch(Rectangle((x + int(place), y), 1, 0.8, facecolor=PIECES[int(color)]))
    if isinstance(piece, str):
        axes.text(x + int(place) + 0.5, y + 0.4, "Σ", ha="center", va="center", color="white", fontsize=8)
    if isinstance(piece, tuple):
        axes.text(x + int(place) + 0.5, y + 0.4, str(piece[1]), ha="center", va="center", color="white", fontsize=7)


def _plain(axes: Any) -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    bytes_by_layout(folder / "bytes-by-layout.png")
    who_keeps_what(folder / "who-keeps-what.png")
    collectives(folder / "collectives.png")
