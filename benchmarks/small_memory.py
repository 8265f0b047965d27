"""A model whose states are four times the memory of its process: all of them on disk, memory that does not grow.

python benchmarks/small_memory.py                                      # a table
python benchmarks/small_memory.py --picture small-memory.png           # and a picture, and figures in small-memory.json
python benchmarks/small_memory.py --folder /mnt/nvme --states 8 16 --limit 2048
python benchmarks/small_memory.py --base nf4/64 --states 2 --limit 512 --rate 200

For each size a process is put into a control group (v1 or v2) whose memory the kernel limits, and trains a stack of
linear layers, built under ``meta_init``: one rank, bf16, AdamW, ``layout="infinity"``, ``offload="disk"``. The group's
own count is of all that its processes have and of every page of files that was read or written for them: a page cache
that held the states would be in it. ``resident`` is the process's largest resident set. The last row is the largest
model with its states in host memory under the same limit, which the kernel should end. With ``--base nf4/64`` layers
(4096 x 4096) are frozen, an adapter of rank 8 is beside each, and the states are the codes that the layers rest as.
``--rate`` has the kernel slow reads to so many MB a second; a step is then put beside what it should take: the larger
of its computation, measured without limits with states in host memory, and of the bytes that it reads by that rate.
Needs root, and a folder on a drive with room for the states.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from control_group import Group

STATES = 18  # bytes per parameter: 2 of it, 4 of its gradient, 12 of master and moments
MB, MIB, GIB = 10**6, 2**20, 2**30
UNLIMITED = 2**40
COLOR, LIMIT, INK, MUTED, GRID = "#2171b5", "#c2410c", "#22252b", "#6b7480", "#e7e9ec"


# -- in the group


def work(tier: str, folder: str, layers: int, steps: int, base: str) -> None:
    """Trains, and prints what it took."""
    width = width_of(base)
    tempfile.tempdir = folder
    import torch
    from torch import nn

    import shardfold as sf

    class Adapted(nn.Module):
        """A frozen layer with an adapter."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width, bias=False).requires_grad_(False)
            self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.up(self.down(x))

    torch.set_num_threads(1)
    libraries = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with sf.meta_init():
        model = nn.Sequential(*[Adapted() if base else nn.Linear(width, width, bias=False) for _ in range(layers)])
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    layout = sf.PRESETS["infinity"].replace(base=base or None)
    units = [Adapted] if base else [nn.Linear]
    engine = sf.Engine(
        model, optimizer=optimizer, layout=layout, offload=tier, precision="bf16", init=sf.Init(units=units)
    )
    seconds: list[float] = []
    losses: list[float] = []
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    for _ in range(steps):
        begun = perf_counter()
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        seconds.append(perf_counter() - begun)
        losses.append(loss.item())
    moved = {row.op: row.moved for row in engine.traffic().moved if row.tier == tier}
    states = engine.memory().tiers[tier]
    engine.close()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "libraries": libraries, "resident": resident, "states": states, "moved": moved, "seconds": seconds,
        "losses": losses,
    }))  # fmt: skip


# -- around it


def width_of(base: str) -> int:
    """Of a layer: those of a large base are large."""
    return 4096 if base else 1024


def of_parameter(base: str) -> float:
    """Bytes of a parameter's states, or of its codes."""
    if not base:
        return STATES
    from shardfold.plan.formats import FORMATS, format_named

    form = FORMATS[format_named(base, "base")]
    return form.nbytes(form.block) / form.block


def measure(tier: str, given: argparse.Namespace, states: int, limit: int, rate: int = 0) -> dict[str, Any]:
    """One training in a group of that limit of bytes, and of bytes that it reads a second; 0: any."""
    layers = round(states / of_parameter(given.base) / width_of(given.base) ** 2)
    group = Group("bench", limit, rate, given.folder)
    try:
        words = [sys.executable, __file__, "--work", tier, "--folder", given.folder, "--layers", str(layers)]
        words += ["--base", given.base, "--steps", str(given.steps)]
        done = group.start(words, stdout=subprocess.PIPE, text=True)
        told, _ = done.communicate()
        found: dict[str, Any] = {"tier": tier, "states": states, "limit": limit, "layers": layers}
        if done.returncode:
            return found | {"ended": done.returncode}
        return found | json.loads(told) | {"peak": group.peak()}
    finally:
        group.close()


def row(found: dict[str, Any], computing: float, rate: int) -> str:
    """Of a table; ``computing``: seconds of a step's computation."""
    states, limit = found["states"] / GIB, found["limit"] / GIB
    begin = f"| {states:.2f} | {found['tier']} | {limit:.2f} "
    if "ended" in found:
        return f"{begin}| ended by signal {-found['ended']} | | | | |"
    seconds, moved = min(found["seconds"][1:]), found["moved"]
    reading = sum(moved.get(op, 0) for op in ("READ", "FETCH"))
    should = f"{computing:.1f}, {reading / rate:.1f}" if rate else ""
    numbers = f"| {found['peak'] / MIB:.0f} | {found['resident'] / MIB:.0f} | {seconds:.1f} "
    return f"{begin}{numbers}| {sum(moved.values()) / 1e9:.2f} | {should} |"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Memory in use against the bytes of the states."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    sizes = [found["states"] / GIB for found in rows]
    end = max(sizes) * 1.08
    axes.plot([0, end], [0, end], color=MUTED, linestyle="--", linewidth=1.2)
    axes.annotate(
        "the states", (max(sizes) * 0.55, max(sizes) * 0.55), xytext=(-8, 4), textcoords="offset points",
        color=MUTED, ha="right", fontsize=9,
    )  # fmt: skip
    limit = rows[0]["limit"] / GIB
    axes.axhline(limit, color=LIMIT, linewidth=1.2)
    axes.annotate(
        "the limit of the control group", (end, limit), xytext=(-4, 4), textcoords="offset points", color=LIMIT,
        ha="right", fontsize=9,
    )  # fmt: skip
    peaks = [found["peak"] / GIB for found in rows]
    axes.plot(sizes, peaks, color=COLOR, marker="o", linewidth=1.8)
    for size, peak in zip(sizes, peaks, strict=True):
        axes.annotate(
            f"{peak * 1024:.0f} MiB", (size, peak), xytext=(0, -14), textcoords="offset points", color=COLOR,
            ha="center", fontsize=9,
        )  # fmt: skip
    axes.set_xlim(0, end)
    axes.set_ylim(0, max(sizes) * 1.05)
    axes.set_xlabel("states: parameters, gradients, masters and moments, GiB", color=INK)
    axes.set_ylabel("most memory in use, GiB", color=INK)
    axes.set_title("Training with all states on disk: memory in use", color=INK, loc="left", fontsize=11)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="of the states, on a drive")
    parser.add_argument("--states", type=float, nargs="+", default=[1, 2, 4], help="GiB")
    parser.add_argument("--limit", type=float, default=1024, help="MiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--base", default="", help="a format: layers are frozen and rest as its codes, adapters train")
    parser.add_argument("--rate", type=float, default=0, help="MB a second that the drive gives at most; 0: all it has")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.folder, given.layers, given.steps, given.base)
        return
    limit, rate = int(given.limit * MIB), int(given.rate * MB)
    try:
        Group("bench", limit).close()
    except OSError as error:
        print(f"No control group can be made here, which needs root: {error}: skipped.")
        return
    print(
        "| states, GiB | rest on | limit, GiB | most in use, MiB | resident, MiB | a step, s | moved in it, GB "
        "| computing, reading at that rate, s |\n" + "|---" * 8 + "|"
    )
    rows: list[dict[str, Any]] = []
    for size in given.states:
        states = int(size * GIB)
        computing = min(measure("host", given, states, UNLIMITED)["seconds"][1:]) if rate else 0.0
        rows.append(measure("disk", given, states, limit, rate))
        print(row(rows[-1], computing, rate), flush=True)
    rows.append(measure("host", given, int(given.states[-1] * GIB), limit))
    print(row(rows[-1], 0.0, 0))
    if given.picture:
        draw(given.picture, [found for found in rows if "peak" in found])
        given.picture.with_suffix(".json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
