"""Orders of a pipeline: their picture, and what ranks wait for.

python benchmarks/pipeline.py picture docs/pictures/orders.png    # slots of every order, by the simulator
python benchmarks/pipeline.py waits                               # measured beside simulated, with padded actions
python benchmarks/pipeline.py balance gpt                         # cuts by count, by parameters and as measured
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import shardfold as sf
from shardfold.parallel.pipeline.action import Action
from shardfold.parallel.pipeline.flow import Made
from shardfold.parallel.pipeline.point_to_point import Parcel, PointToPoint
from shardfold.parallel.pipeline.simulate import Timeline, timeline
from shardfold.parallel.pipeline.stage_order import choose_order, make_order
from shardfold.parallel.pipeline.watch import Watch
from shardfold.testing import run_ranks
from shardfold.tools.recipes.gpt import GPT, GPTConfig

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
    panels = figure.subplots(len(ORDERS), 1, sharex=True)
    for axes, name in zip(panels, ORDERS, strict=True):
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
    panels[-1].set_xlabel(
        "slots: a forward of a rank's layers, and each part of their backward, takes one", color=MUTED
    )
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
    stages = sf.Parallel(mesh={"pipeline": ranks}, pipeline=order)
    engine = sf.Engine(model, optimizer=adam, layout="zero1", parallel=stages, accumulate=batches)
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


VOCAB = 12288


def _gpt() -> torch.nn.Module:
    """A language model in which the head takes more than half of the time, and the table most of the memory."""
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=8, d_model=64, heads=4, d_ff=128, context=64, vocab=VOCAB))


def _t5() -> torch.nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        d_model=96, d_kv=24, d_ff=256, num_layers=4, num_decoder_layers=4, num_heads=4, vocab_size=VOCAB,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


MODELS = {"gpt": (_gpt, 2), "t5": (_t5, 3)}


def _loss(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    tokens, targets = batch
    if hasattr(model, "generation_config"):
        return model(input_ids=tokens, labels=targets).loss
    return model(tokens, targets)


class _Ideal(Watch):
    """Counts CPU seconds of this thread, as if every rank had a core for itself, whatever else runs."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self._thread = 0.0
        self.clock = lambda: self.now

    def start(self) -> None:
        self.now = 0.0
        super().start()

    def begin(self, action: Action) -> None:
        super().begin(action)
        self._thread = time.thread_time()

    def end(self, action: Action) -> None:
        if action.verb in "FBIW":
            self.now += time.thread_time() - self._thread
        super().end(action)


class _Stamped(PointToPoint):
    """Sends with everything when that was, on the clock of the rank that sends."""

    watch: _Ideal

    def begin(self, coming: dict[int, list[Parcel]], forms: Mapping[Parcel, Sequence[Made]]) -> None:
        super().begin(coming, {parcel: [*made, Made((1,), torch.float64, False)] for parcel, made in forms.items()})

    def send(self, tensors: Sequence[torch.Tensor], place: int, parcel: Parcel) -> None:
        super().send([*tensors, torch.tensor([self.watch.now], dtype=torch.float64)], place, parcel)

    def receive(self, place: int, parcel: Parcel) -> list[torch.Tensor]:
        *found, sent = super().receive(place, parcel)
        self.watch.now = max(self.watch.now, sent.item())
        return found


Taken = dict[str, list[tuple[float, float]]]


def _rates(name: str, ranks: int, rounds: int) -> tuple[str, Taken, dict[str, Sequence[str]]]:
    """Seconds of steps of each cut, by turns: those of the wall, and those of batches on the counted clock."""
    torch.set_num_threads(1)
    make, _ = MODELS[name]
    generator = torch.Generator().manual_seed(1)
    parts, rows = 4 * ranks, 2
    batch = (torch.randint(VOCAB, (parts * rows, 64), generator=generator),) * 2
    costs = sf.measure_pieces(make(), tuple(t[:rows] for t in batch), _loss, repeats=10)
    paths = [piece.path for piece in costs.pieces]
    equal = [paths[round(len(paths) * stage / ranks)] for stage in range(1, ranks)]
    adam = partial(torch.optim.AdamW, lr=1e-3, foreach=True)
    options: dict[str, Any] = {"layout": "zero1", "accumulate": parts}
    cuts: dict[str, Any] = {"equal count": equal, "parameters": None, "measured": costs}
    engines = {
        cut: sf.Engine(make(), optimizer=adam, parallel=sf.Parallel(mesh={"pipeline": ranks}, stages=given), **options)
        for cut, given in cuts.items()
    }
    begins: dict[str, Sequence[str]] = {}
    for cut, engine in engines.items():
        runs, told = cast("Any", engine._pipelined), engine.stats().pipeline
        runs.watch, runs._wire = _Ideal(), _Stamped(engine.sharded.comm, "pipeline")
        runs._wire.watch = runs.watch
        begins[cut] = told.stages if told is not None else ()
    taken: Taken = {cut: [] for cut in cuts}
    for _ in range(rounds):
        for cut, engine in engines.items():
            begun = time.perf_counter()
            engine.train_batch(batch, _loss)
            engine.step()
            watch = cast("Any", engine._pipelined).watch
            taken[cut].append((time.perf_counter() - begun, watch.now))
    for engine in engines.values():
        engine.close()
    return str(costs), taken, begins


def balance(name: str, stages: int | None, rounds: int) -> None:
    ranks = stages or MODELS[name][1]
    found = run_ranks(_rates, ranks, name, ranks, rounds, timeout=900)
    costs, _, begins = found[0]
    print(f"{name} over {ranks} stages, {4 * ranks} micro-batches; {rounds} steps of each cut by turns: median, least")
    print(f"\n{costs}\n")
    print("| cut | stages begin with | step | batch, with a core for each rank | its rate |\n|---|---|---|---|---|")
    steps = {cut: median(max(each)[0] for each in zip(*(taken[cut][1:] for _, taken, _ in found), strict=True))
             for cut in begins}  # fmt: skip
    ideal = {cut: min(max(last for _, last in each) for each in zip(*(t[cut][1:] for _, t, _ in found), strict=True))
             for cut in begins}  # fmt: skip
    for cut, names in begins.items():
        rate = ideal["equal count"] / ideal[cut]
        print(f"| {cut} | {', '.join(names)} | {1000 * steps[cut]:.0f} ms | {1000 * ideal[cut]:.0f} ms | {rate:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("picture").add_argument("path")
    commands.add_parser("waits")
    balanced = commands.add_parser("balance")
    balanced.add_argument("model", choices=sorted(MODELS))
    balanced.add_argument("--stages", type=int, help="ranks; those of the model, if not given")
    balanced.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    if given.command == "balance":
        balance(given.model, given.stages, given.rounds)
    else:
        picture(given.path) if given.command == "picture" else waits()
