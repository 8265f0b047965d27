"""The rooms of the package and who imports whom, measured on the import graph, imports of types included.

python benchmarks/rooms.py              floors, arrows and the largest circle, as text
python benchmarks/rooms.py FILE.png     the same as a picture (docs/pictures/rooms.png)
"""

from __future__ import annotations

import graphlib
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import grimp

LEFT_OUT = {"__init__", "__main__", "testing"}  # the door's lazy names, the command, and what may import anything
LOW = {"errors", "torch_internals", "data"}  # files beside the rooms


def measured() -> tuple[dict[str, set[str]], Counter[str]]:
    """Which rooms each imports, and how many modules each has."""
    graph = grimp.build_graph("shardfold", exclude_type_checking_imports=False, cache_dir=None)
    down: dict[str, set[str]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for module in graph.modules:
        room = _room(module)
        if room in LEFT_OUT:
            continue
        sizes[room] += 1
        down[room] |= {_room(other) for other in graph.find_modules_directly_imported_by(module)} - {room} - LEFT_OUT
    return dict(down), sizes


def _room(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def floors(down: dict[str, set[str]]) -> list[list[str]]:
    """Rooms from the lowest floor up; two doors that know each other share one."""
    mutual = {frozenset((a, b)) for a in down for b in down[a] if a in down.get(b, ())}
    apart = {a: {b for b in down[a] if frozenset((a, b)) not in mutual} for a in down}
    height: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(apart).static_order():
        height[room] = 1 + max((height[below] for below in apart[room]), default=-1)
    for pair in mutual:
        for room in pair:
            height[room] = max(height[each] for each in pair)
    return [sorted(room for room in height if height[room] == floor) for floor in range(max(height.values()) + 1)]


def reduced(down: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without the arrows that follow from others; doors that know each other are none of these."""
    one_way = {a: {b for b in under if a not in down.get(b, ())} for a, under in down.items()}

    def below(room: str, seen: set[str]) -> set[str]:
        for other in one_way.get(room, set()) - seen:
            seen.add(other)
            below(other, seen)
        return seen

    return {
        room: {b for b in under if not any(b in below(other, {room}) - {room} for other in under - {b})}
        for room, under in down.items()
    }


def draw(path: Path, down: dict[str, set[str]], sizes: Counter[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch

    levels = floors({room: below - LOW for room, below in down.items() if room not in LOW})
    shown = reduced({room: below - LOW for room, below in down.items() if room not in LOW})
    figure, axes = pyplot.subplots(figsize=(7, 7))
    at: dict[str, tuple[float, float]] = {}
    for floor, level in enumerate(levels):
        places = {1: (0.5,), 2: (0.38, 0.74), 3: (0.1, 0.5, 0.9)}.get(len(level), range(len(level)))
        at |= {room: (x, float(floor)) for room, x in zip(level, places, strict=True)}
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.6, len(levels) - 0.4)
    axes.axis("off")
    axes.set_title("Imports only go down; arrows that follow from others are left out", fontsize=10)
    boxes: dict[str, Any] = {}
    for room, (x, y) in at.items():
        modules = f"{sizes[room]} module{'s' * (sizes[room] > 1)}"
        boxes[room] = axes.text(
            x, y, f"{room}\n{modules}", ha="center", va="center", fontsize=10,
            bbox={"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "0.2"},
        )  # fmt: skip
    figure.tight_layout()
    figure.canvas.draw()  # boxes have their sizes behind it, and arrows end at them
    for room, (x, y) in at.items():
        for below in shown[room] & at.keys():
            u, v = at[below]
            bend = 0.0 if y - v <= 1 or u != x else 0.2
            axes.add_patch(
                FancyArrowPatch((x, y), (u, v), arrowstyle="-|>", mutation_scale=9, lw=1.0, color="0.4", zorder=1,
                                patchA=boxes[room].get_bbox_patch(), patchB=boxes[below].get_bbox_patch(),
                                connectionstyle=f"arc3,rad={bend}")
            )  # fmt: skip
    figure.savefig(path, dpi=130)


def main() -> None:
    down, sizes = measured()
    for floor, level in reversed(list(enumerate(floors(down)))):
        print(f"{floor:>3}  {'  '.join(f'{room} ({sizes[room]})' for room in level)}")
    print(f"{sum(map(len, down.values()))} arrows between {len(down)} rooms and files on {len(floors(down))} floors")
    if len(sys.argv) > 1:
        draw(Path(sys.argv[1]), down, sizes)


if __name__ == "__main__":
    main()
