"""Long contexts: what a rank saves of a sequence that is cut over ranks, and the longest that trains in 2 GiB.

    python benchmarks/long_context.py saved                       # bytes of activations beside a formula
    python benchmarks/long_context.py tiles                       # bytes of a token, with tiles and without
    python benchmarks/long_context.py windows                     # a sliding window beside dense attention
    python benchmarks/long_context.py longest --ranks 2           # adds its points to long-context.json
    python benchmarks/long_context.py draw long-context.png       # their picture

``saved`` counts the storages that autograd holds between forward and backward on one rank, each once, without
parameters, of 1, 2 and 4 ranks along the axis of sequence (Ulysses). ``longest`` puts each rank into a control group
(v1 or v2) of its own, whose memory the kernel limits to 2 GiB, and finds the longest sequence, in steps of 64 tokens
of each rank, of which a step of training ends: one sequence, SGD, no recomputation; once as it is and once with
feed-forward layers in tiles. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from control_group import Group
from torch import Tensor

import shardfold as sf
from shardfold.testing import run_ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.support.held import HeldBytes

MIB, GIB = 2**20, 2**30
SGD = partial(torch.optim.SGD, lr=1e-3)
TILES = {"*.feed_forward": "tile:256", "*": "keep"}
WAYS: dict[str, Any] = {"as it is": None, "in tiles": TILES}
COLORS, INK, MUTED, GRID = {"as it is": "#b8bfc7", "in tiles": "#2166ac"}, "#22252b", "#6b7480", "#e7e9ec"


# -- what is saved

SAVED = GPTConfig(vocab=256, d_model=256, layers=6, heads=4, context=2048, d_ff=704)


def engine_of(shape: GPTConfig, ranks: int, activations: Any = None) -> sf.Engine:
    torch.manual_seed(0)
    return sf.Engine(
        GPT(shape),
        optimizer=SGD,
        layout="ddp",
        parallel=sf.Parallel(mesh={"sequence": ranks}, attention="ulysses"),
        activations=activations,
    )


def given_of(shape: GPTConfig, engine: sf.Engine) -> dict[str, Any]:
    tokens = torch.randint(shape.vocab, (1, shape.context + 1), generator=torch.Generator().manual_seed(0))
    return sf.sequence_shard({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}, engine=engine)


def saved(ranks: int) -> list[tuple[str, int]]:
    """Bytes by unit."""
    engine = engine_of(SAVED, ranks)
    given = given_of(SAVED, engine)
    with engine.count_saved() as found:
        engine.backward(engine(**given))
    engine.step()
    engine.close()
    return [(row.unit, row.device) for row in found.rows]


def terms(ranks: int) -> dict[str, float]:
    """What a rank saves, in bytes.

    A block saves, in multiples of s h elements: 3 for each of two norms (input, normalized, scaled), 3 of queries, keys
    and values as they come from the exchange, 2 of what attention gives, 4 f of the gated feed-forward layer of width
    f h. The rest: input and normalized of the last norm, and the gradient of what the head gets.
    """
    n, h, a, f = SAVED.layers, SAVED.d_model, SAVED.heads, SAVED.d_ff / SAVED.d_model
    tokens = SAVED.context // ranks
    return {
        "n (11 + 4f) s h / N": n * (11 + 4 * f) * tokens * h * 4,
        "last norm, loss: 3 s h / N": 3 * tokens * h * 4,
        "sums of scores, norms: (n a + 2 n + 1) s / N": (n * a + 2 * n + 1) * tokens * 4,
        "angles, tokens": tokens * (h // a * 4 + 8),
        "the head's gradient": SAVED.vocab * h * 4,
    }


def print_saved() -> None:
    print(f"| ranks | saved, MiB | of 1 / N of one rank's | of the formula | {' | '.join(terms(1))} |")
    print("|---" * (4 + len(terms(1))) + "|")
    whole = 0
    for ranks in (1, 2, 4):
        found = run_ranks(saved, ranks, ranks, timeout=300)[0]
        total, parts = sum(size for _, size in found), terms(ranks).values()
        whole = whole or total
        cells = " | ".join(f"{size / MIB:.2f}" for size in parts)
        share = f"{total * ranks / whole:.4f} | {total / sum(parts):.4f}"
        print(f"| {ranks} | {total / MIB:.2f} | {share} | {cells} |", flush=True)


# -- tiles


def of_tokens(activations: Any) -> tuple[int, int, float]:
    """Bytes that are held between forward and backward, the most at once with what is temporary, and the loss."""
    engine = engine_of(SAVED, 1, activations)
    given = given_of(SAVED, engine)
    for _ in range(2):
        with HeldBytes([*given.values(), *engine.module.parameters()]).watching() as made:
            loss = engine(**given)
            made.end_forward()
            between = made.peak
            engine.backward(loss)
        engine.step()
    engine.close()
    return between, made.live, loss.item()


def print_tiles() -> None:
    rest = {"*.feed_forward": "tile:256"}
    ways = {
        "as it is": "keep", "feed-forward in tiles of 256": {**rest, "*": "keep"},
        "blocks recomputed": "recompute", "blocks recomputed, feed-forward in tiles": {**rest, "*": "recompute"},
    }  # fmt: skip
    print("| | between forward and backward, bytes of a token | at most at once | loss |\n|---|---|---|---|")
    for name, activations in ways.items():
        between, most, loss = of_tokens(activations)
        print(f"| {name} | {between / SAVED.context:,.0f} | {most / SAVED.context:,.0f} | {loss:.6f} |", flush=True)


# -- windows

WINDOW = {"tokens": 512, "times": 10, "width": 256, "heads": 4, "rounds": 3}


class OneAttention(torch.nn.Module):
    """A layer of attention alone."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        width = WINDOW["width"]
        self.qkv, self.attend, self.window = (
            torch.nn.Linear(width, 3 * width),
            sf.parallel.Attention(WINDOW["heads"]),
            window,
        )

    def forward(self, inputs_embeds: Tensor, position_ids: Tensor) -> Tensor:
        q, k, v = self.qkv(inputs_embeds).unflatten(-1, (3, WINDOW["heads"], -1)).transpose(1, 3).unbind(2)
        return self.attend(q, k, v, is_causal=True, window=self.window).square().mean()


def attended(ranks: int, way: str, tokens: int, window: int | None) -> tuple[float, int]:
    """Seconds of forward and backward on the slower rank, the median of rounds, and the most bytes at once."""
    torch.manual_seed(0)
    engine = sf.Engine(
        OneAttention(window), optimizer=SGD, layout="ddp", parallel=sf.Parallel(mesh={"sequence": ranks}, attention=way)
    )  # fmt: skip
    x = torch.randn(1, tokens, WINDOW["width"], generator=torch.Generator().manual_seed(0))
    times, most = [], 0
    for number in range(WINDOW["rounds"] + 1):
        given = sf.sequence_shard({"inputs_embeds": x})
        torch.distributed.barrier()
        begin = perf_counter()
        if number == 0:  # counted, not timed
            with HeldBytes([*given.values(), *engine.module.parameters()]).watching() as made:
                engine.backward(engine(**given))
            most = made.live
        else:
            engine.backward(engine(**given))
            times.append(perf_counter() - begin)
        engine.step()
    engine.close()
    return median(times), most


def print_windows() -> None:
    short, long = WINDOW["tokens"], WINDOW["tokens"] * WINDOW["times"]
    print("| 2 ranks | tokens | each sees | ms | most at once, MiB |\n|---|---|---|---|---|")
    for way in ("ulysses", "ring"):
        for tokens, window in ((short, None), (long, None), (long, short)):
            found = run_ranks(attended, 2, 2, way, tokens, window, timeout=600)
            seconds, most = (max(each) for each in zip(*found, strict=True))
            sees = f"the last {window:,}" if window else "all before"
            print(f"| {way} | {tokens:,} | {sees} | {seconds * 1e3:,.0f} | {most / MIB:.1f} |", flush=True)


# -- the longest

LONGEST = {"d_model": 768, "layers": 12, "heads": 12}
LIMIT = 2 * GIB


def train(rank: int, ranks: int, context: int, way: str, store: str) -> None:
    """One rank, inside of its group: two steps."""
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    shape = GPTConfig(**LONGEST, context=context)
    engine = engine_of(shape, ranks, WAYS[way])
    given = given_of(shape, engine)
    engine.backward(engine(**given))
    engine.step()
    print("trained", flush=True)
    os._exit(0)


def trains(ranks: int, context: int, way: str) -> int | None:
    """The most that a rank's group had in use, in bytes; None: one was ended by the limit."""
    groups = [Group(f"rank-{rank}", LIMIT) for rank in range(ranks)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank, group in enumerate(groups):
                words = [sys.executable, __file__, "longest", "--ranks", str(ranks), "--rank", str(rank)]
                words += ["--context", str(context), "--way", way, "--store", f"{folder}/store"]
                # Ranks send over sockets, as between hosts: what one reads of another's memory is in no group.
                quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                started.append(group.start(words, {"SHARDFOLD_NEAR": "0"}, **quiet))
            while started and all(one.poll() in (None, 0) for one in started):
                if all(one.poll() == 0 for one in started):
                    return max(group.peak() for group in groups)
                with suppress(subprocess.TimeoutExpired):
                    started[0].wait(0.2)
            return None
    finally:
        for one in started:
            one.kill()
            one.wait()
        for group in groups:
            group.close()


def longest(ranks: int, way: str, first: int) -> dict[str, Any]:
    """From a first guess on in steps of 64 tokens of each rank, up or down, until one trains and the next does not."""
    low, high, peak, length = 0, 0, 0, first
    while not low or not high:
        found = trains(ranks, length, way)
        said = "do not fit" if found is None else f"take {found // MIB} MiB"
        print(f"{ranks} ranks, {way}: {length} tokens {said}", file=sys.stderr, flush=True)
        if found is None:
            high, length = length, length - 64 * ranks
        else:
            low, peak, length = length, found, length + 64 * ranks
    return {"ranks": ranks, "way": way, "tokens": low, "not": high, "peak": peak}


FIRST = {"as it is": {1: 1088, 2: 2048, 4: 3840}, "in tiles": {1: 1728, 2: 2944, 4: 6144}}  # as it was found


def find_longest(given: argparse.Namespace) -> None:
    try:
        Group("try", LIMIT).close()
    except OSError as error:
        print(f"No control group can be made here, which needs root: {error}: skipped.")
        return
    known: list[dict[str, Any]] = json.loads(given.json.read_text()) if given.json.exists() else []
    for way in given.ways:
        found = longest(given.ranks, way, given.first or FIRST[way].get(given.ranks, 1024 * given.ranks))
        known = [each for each in known if (each["ranks"], each["way"]) != (given.ranks, way)] + [found]
        given.json.write_text(json.dumps(known, indent=1) + "\n")
    print("| ranks | | trains | does not | most in use, MiB |\n|---|---|---|---|---|")
    for each in sorted(known, key=lambda each: (each["way"], each["ranks"])):
        print(f"| {each['ranks']} | {each['way']} | {each['tokens']} | {each['not']} | {each['peak'] / MIB:.0f} |")


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """The longest context against the number of ranks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    highest = max(each["tokens"] for each in rows)
    for way, color in COLORS.items():
        points = sorted((each["ranks"], each["tokens"]) for each in rows if each["way"] == way)
        if not points:
            continue
        at, tokens = zip(*points, strict=True)
        axes.plot(at, [tokens[0] * rank / at[0] for rank in at], color=color, linestyle="--", linewidth=1)
        axes.plot(
            at,
            tokens,
            color=color,
            marker="o",
            linewidth=1.8,
            label=f"feed-forward layers {'as they are' if way == 'as it is' else way}",
        )
        for rank, count in points:
            axes.annotate(f"{count:,}", (rank, count), xytext=(0, -16), textcoords="offset points", ha="center",
                          color=INK, fontsize=9)  # fmt: skip
    axes.set_xticks([1, 2, 4])
    axes.set_xlim(0.7, 4.3)
    axes.set_ylim(0, highest * 1.18)
    axes.set_xlabel("ranks along the axis of sequence, 2 GiB each (dashed: in proportion)", color=INK)
    axes.set_ylabel("tokens of the longest sequence that trains", color=INK)
    axes.set_title("The longest context in 2 GiB per rank", color=INK, loc="left", fontsize=11)
    axes.legend(frameon=False, loc="upper left")
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["saved", "tiles", "windows", "longest", "draw"])
    parser.add_argument("file", type=Path, nargs="?", default=Path("long-context.png"), help="of the picture")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--first", type=int, help="tokens to begin with")
    parser.add_argument("--json", type=Path, default=Path("long-context.json"))
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.rank, given.ranks, given.context, given.way, given.store)
    elif given.what == "saved":
        print_saved()
    elif given.what == "tiles":
        print_tiles()
    elif given.what == "windows":
        print_windows()
    elif given.what == "longest":
        find_longest(given)
    else:
        draw(given.file, json.loads(given.json.read_text()))


if __name__ == "__main__":
    main()
