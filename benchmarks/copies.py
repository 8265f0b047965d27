"""Time of a step with copies of other ranks' states beside one without, over sockets.

python benchmarks/copies.py                               # zero1 and zero3 on 4 ranks: a table
python benchmarks/copies.py --rows 64 --steps 12 --rounds 9 --layouts zero3
python benchmarks/copies.py --near                        # in shared memory, as ranks of one host have it
python benchmarks/copies.py --saves /mnt/disk             # what saves beside the training take, without and with copies

Both engines are in the same processes, of a thread each, and take turns of some steps; the one that begins changes from
round to round. A round gives the ratio of its medians, so what else the machine does in it counts for both. `ratio` is
the median of rounds with the quartiles; `cpu` the same of processor time, of all threads of all ranks, which what waits
does not take. `parts`: milliseconds of a step on rank 0 from one operation's begin to the next one's, by verb, of those
that are there for copies alone.

With `--saves`, turns of 10 steps of which the first is behind a save beside the training, and turns without: `ratio` is
of their times, from one barrier to the next, by rounds; `cpu` that of processor time, with what a save takes beside
the steps until it is over; `stall` the milliseconds for which the call of a save stood still, at most of all ranks, and
their part of the turn; `own` the processor time of that call's thread; `held` what was taken out of the way of updates,
or copied before.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time, thread_time
from typing import Any

import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.engine.track import Section
from shardfold.testing import run_ranks
from shardfold.tools.recipes.gpt import GPT
from shardfold.tools.recipes.train_config import GPTConfig

PARTS = ("LOG", "WAIT log", "STORE log", "VOTE", "FETCH copies", "MIRROR", "STORE copies")


class Parts:
    """Seconds between the begin of an operation and that of the next one, by verb."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._what, self._since = "", 0.0

    def __call__(self, section: Section, number: int) -> None:
        now, op = perf_counter(), section.ops[number]
        if self._what in self.seconds:
            self.seconds[self._what] += now - self._since
        besides = op.target if op.verb == "WAIT" else op.source if op.verb in ("STORE", "FETCH") else ""
        self._what, self._since = f"{op.verb} {besides}".strip(), now


def turn(engine: sf.Engine, tokens: torch.Tensor, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and processor seconds of one."""
    took, begun = list[float](), process_time()
    for _ in range(steps):
        start = perf_counter()
        engine.backward(engine(tokens, tokens))
        engine.step()
        took.append(perf_counter() - start)
    return median(took), (process_time() - begun) / steps


def measured(layout: str, args: argparse.Namespace) -> dict[str, Any]:
    """On one rank."""
    torch.set_num_threads(1)
    shape = GPTConfig(d_model=args.width, layers=args.layers, heads=args.width // 64, context=args.context)
    tokens = torch.randint(256, (args.rows, args.context), generator=torch.Generator().manual_seed(dist.get_rank()))
    make = partial(sf.Engine, optimizer=partial(torch.optim.AdamW, lr=1e-4), layout=layout, offload=args.offload)
    with ExitStack() as held:
        engines = {
            name: held.enter_context(closing(make(GPT(shape), runtime=sf.Runtime(survive=survive))))
            for name, survive in (("plain", None), ("copies", "rank"))
        }
        for engine in engines.values():
            turn(engine, tokens, 3)
        rounds: list[dict[str, tuple[float, float]]] = []
        for number in range(args.rounds):
            order = list(engines)[:: 1 if number % 2 == 0 else -1]
            rounds.append({name: turn(engines[name], tokens, args.steps) for name in order})
        Section.observer = parts = Parts()
        turn(engines["copies"], tokens, args.steps)
        Section.observer = None
        sent = {name: engine.traffic().sent for name, engine in engines.items()}
    numel = sum(p.numel() for p in GPT(shape).parameters())
    milliseconds = {verb: 1e3 * seconds / args.steps for verb, seconds in parts.seconds.items() if seconds}
    return {"rounds": rounds, "parts": milliseconds, "sent": sent, "params": numel}


def saved(layout: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """On one rank: seconds of turns without and with a save, and what its call stood still for."""
    torch.set_num_threads(1)
    shape = GPTConfig(d_model=args.width, layers=args.layers, heads=args.width // 64, context=args.context)
    tokens = torch.randint(256, (args.rows, args.context), generator=torch.Generator().manual_seed(dist.get_rank()))
    make = partial(sf.Engine, optimizer=partial(torch.optim.AdamW, lr=1e-4), layout=layout)
    found: dict[str, Any] = {}
    for name, survive in (("plain", None), ("copies", "rank")):
        with closing(make(GPT(shape), runtime=sf.Runtime(survive=survive))) as engine:
            turn(engine, tokens, 3)
            engine.save(f"{folder}/{name}/first", wait=True)
            if (first := engine.save(f"{folder}/{name}/second")) is not None:  # takes the memory that others use again
                turn(engine, tokens, 1)
                first.wait()
            rounds, since = list[dict[str, float]](), perf_counter()
            while len(rounds) < args.rounds and (len(rounds) < 2 or engine.mean(perf_counter() - since) < args.seconds):
                took: dict[str, float] = {}
                for which in ("without", "with")[:: 1 if len(rounds) % 2 == 0 else -1]:
                    dist.barrier()
                    begun, busy = perf_counter(), process_time()
                    own, saving = thread_time(), None
                    if which == "with":
                        saving = engine.save(f"{folder}/{name}/{len(rounds)}", keep=1)
                        took["own"] = thread_time() - own
                    turn(engine, tokens, 10)
                    dist.barrier()
                    took[which] = perf_counter() - begun
                    if saving is not None:
                        report = saving.wait()
                        took |= {"stall": report.stall_seconds, "held": report.held_bytes, "bytes": report.num_bytes}
                    took[f"cpu {which}"] = process_time() - busy
                rounds.append(took)
                if dist.get_rank() == 0:
                    times = f"10 steps in {took['without']:.1f} s, with a save {took['with']:.1f}"
                    print(f"{layout} {name}, round {len(rounds)}: {times}", file=sys.stderr, flush=True)
            found[name] = rounds
    return found


def saves_shown(layout: str, found: list[dict[str, Any]]) -> str:
    lines: list[str] = []
    for name in ("plain", "copies"):
        first, without = found[0][name], 100 * median(each["without"] for each in found[0][name])
        ratios = [each["with"] / each["without"] for each in first]
        every = list(zip(*(rank[name] for rank in found), strict=True))
        busy = [sum(r["cpu with"] for r in each) / sum(r["cpu without"] for r in each) for each in every]
        stall, own = (1e3 * median(max(r[what] for r in each) for each in every) for what in ("stall", "own"))
        held, size = (median(each[what] for each in first) / 2**20 for what in ("held", "bytes"))
        lines.append(
            f"{layout:<10}{name:<8}{without:>7.0f} ms   {spread(ratios):<26}{spread(busy):<26}"
            f"{stall:>6.1f} ms, {10 * stall / without:.2f} %{own:>8.1f} ms{held:>9.1f} of {size:.1f} MiB"
        )
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    low, middle, high = quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def shown(layout: str, found: list[dict[str, Any]]) -> str:
    """A line of the table, and one of the parts."""

    def ratios(of: Callable[[list[tuple[float, float]]], float]) -> list[float]:
        rounds = zip(*(each["rounds"] for each in found), strict=True)
        return [of([r["copies"] for r in every]) / of([r["plain"] for r in every]) for every in rounds]

    clock = ratios(lambda every: max(seconds for seconds, _ in every))
    cpu = ratios(lambda every: sum(seconds for _, seconds in every))
    plain = 1e3 * median(each["plain"][0] for each in found[0]["rounds"])
    more = found[0]["sent"]["copies"] / found[0]["sent"]["plain"] - 1
    parts = ", ".join(f"{verb} {milliseconds:.1f}" for verb, milliseconds in found[0]["parts"].items())
    return (
        f"{layout:<10}{found[0]['params'] / 1e6:>7.1f}M{plain:>9.0f} ms   {spread(clock):<26}{spread(cpu):<26}"
        f"{100 * more:>5.1f} %\n          parts: {parts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["zero1", "zero3"])
    parser.add_argument("--offload", default=None, help="as Engine(offload=) takes it")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="texts of a micro-batch")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=6, help="of a turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20.0, help="after which no round of saves begins")
    parser.add_argument("--near", action="store_true", help="ranks read each other's memory")
    parser.add_argument("--saves", type=Path, help="a folder for checkpoints")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["SHARDFOLD_NEAR"] = "1" if args.near else "0"
    if args.saves:
        print(f"{'layout':<10}{'':<8}{'step':>10}   {'ratio':<26}{'cpu':<26}{'stall':>9}{'own':>18}{'held':>9}")
        for layout in args.layouts:
            with tempfile.TemporaryDirectory(dir=args.saves) as folder:
                print(saves_shown(layout, run_ranks(saved, args.ranks, layout, folder, args, timeout=3600)), flush=True)
        return
    print(f"{'layout':<10}{'params':>8}{'step':>12}   {'ratio':<26}{'cpu':<26}{'sent':>7}")
    every: dict[str, Any] = {}
    for layout in args.layouts:
        every[layout] = run_ranks(measured, args.ranks, layout, args, timeout=3600)
        print(shown(layout, every[layout]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(every, indent=1))


if __name__ == "__main__":
    main()
