"""Orders of a pipeline: their picture, and what ranks wait for.

python benchmarks/pipeline.py picture docs/pictures/orders.png    # slots of every order, by the simulator
python benchmarks/pipeline.py waits                               # measured beside simulated, with actions of 20 ms
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import shardfold as sf
from shardfold.parallel.pipeline.action import Action
from shardfold.parallel.pipeline.order import choose_order, make_order
from shardfold.parallel.pipeline.simulate import Timeline, timeline
from shardfold.testing import run_ranks

ORDERS = ("gpipe", "1f1b", "interleaved:2", "zb-h1", "zbv", "v-half")
RANKS, BATCHES = 4, 8
INK, MUTED = "#22252b", "#6b7480"
COLORS = {"F": ("#2171b5", "#9ecae1"), "B": ("#238b45", "#a1d99b"), "I": ("#238b45", "#a1d99b"),
          "W": ("#c2410c", "#fdba8c")}  # fmt: skip
WORDS = {"F": "forward", "B": "backward, or its part for inputs", "W": "its part for weights"}


def line_of(name: str, ranks: int = RANKS, batches: int = BATCHES) -> Timeline:
    choice = choose_order(name)
    return timeline(make_order(choice, ranks, batches), ranks * choice.chunks)


def picture(path: str) -> None:
    """A panel for each order; time is in slots of a whole stage, of which a stage of half the size takes half."""
    figure = Figure(figsize=(13, 9.2), dpi=110)
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(len(ORDERS), 1, sharex=True), ORDERS, strict=True):
        line, chunks = line_of(name), choose_order(name).chunks
        for rank, row in enumerate(line.rows):
            for begin, action in row:
                width = line.times.of(action) / chunks
                color = COLORS[action.verb][action.stage >= RANKS]
                axes.barh(rank, width, left=begin / chunks, height=0.92, color=color, edgecolor="white", linewidth=0.5)
                ink = "white" if action.stage < RANKS else INK
                middle = begin / chunks + width / 2
                axes.text(middle, rank, str(action.batch), ha="center", va="center", fontsize=6.5, color=ink)
        kept = max(line.kept) / chunks
        axes.set_title(
            f"{name}: bubble {line.bubble:.1%}, keeps {kept:g} micro-batches of a rank's layers at most",
            loc="left", fontsize=9.5, color=INK,
        )  # fmt: skip
        axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=7.5, color=MUTED)
        axes.invert_yaxis()
        axes.tick_params(length=0, labelsize=7.5, colors=MUTED)
        for spine in axes.spines.values():
            spine.set_visible(False)
    axes.set_xlabel("slots: a forward of a rank's layers, and each part of their backward, takes one", color=MUTED)
    patches = [Patch(color=COLORS[verb][0], label=word) for verb, word in WORDS.items()]
    patches.append(Patch(color=COLORS["F"][1], label="light: the second stage of a rank"))
    figure.legend(handles=patches, loc="upper right", ncols=4, frameon=False, fontsize=8.5)
    figure.subplots_adjust(left=0.05, right=0.99, top=0.93, bottom=0.055, hspace=0.42)
    figure.savefig(path)
    print(path)


SECONDS = 0.02
"""That a forward of a rank's layers, and each part of their backward, takes."""


def _padded(order: str, ranks: int, batches: int) -> tuple[float | None, float | None]:
    """The bubble of a rank, and its seconds, where every action sleeps until its time is over."""
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2 * ranks)))
    adam = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"mesh": {"pipeline": ranks}, "accumulate": batches, "pipeline": order}
    engine = sf.Engine(model, optimizer=adam, layout="zero1", **options)
    runs: Any = engine._pipelined
    chunks, watch, end = choose_order(order).chunks, runs.watch, runs.watch.end

    def slow(action: Action) -> None:
        if action.verb in "FBIW":
            left = SECONDS * (2 if action.verb == "B" else 1) / chunks - (watch.clock() - watch._from)
            time.sleep(max(0.0, left))
        end(action)

    watch.end = slow
    batch = torch.ones(batches, 8)
    for _ in range(3):
        engine.train_batch(batch, lambda model, x: model(x).square().mean())
        engine.step()
    told = engine.stats().pipeline
    engine.close()
    assert told is not None
    return told.bubble, told.batch_seconds


def waits() -> None:
    print(f"{RANKS} ranks, actions of {1000 * SECONDS:g} ms a slot; bubble of the first rank until it is done\n")
    print("| order | micro-batches | simulated | measured |\n|---|---|---|---|")
    for order in ORDERS:
        for batches in (4 * RANKS, 8 * RANKS) if order in ("gpipe", "1f1b") else (4 * RANKS,):
            said = line_of(order, RANKS, batches).shares
            found = run_ranks(_padded, RANKS, order, RANKS, batches)
            measured = [bubble for bubble, _ in found]
            print(f"| `{order}` | {batches} | {sum(said) / RANKS:.3f} | {sum(measured) / RANKS:.3f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("picture").add_argument("path")
    commands.add_parser("waits")
    given = parser.parse_args()
    picture(given.path) if given.command == "picture" else waits()
