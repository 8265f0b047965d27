"""What looking for inf and NaN costs in steps that are finite: ratios of step times, as a Markdown table.

python benchmarks/numerics.py                          # some minutes; --rounds 3 for less

The GPT of `shardfold bench`, 46 million parameters on two ranks of one thread, fp32, AdamW, `zero2`, 1 x 64 tokens. All
variants are engines of the same two processes. They take turns in rounds, each round in another order; a turn is one
step that is not counted and some that are. Time is the CPU time of a rank's process, which other work on the machine
disturbs less than the clock on the wall. A figure is the median over rounds of the ratio, in the same round, of two
variants' median steps, and the quartiles of these ratios. Two engines that do the same (the last row) show what the
machine alone makes of a ratio.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median, quantiles
from time import process_time
from typing import Any

import torch

import shardfold as sf
from shardfold.testing import run_ranks
from shardfold.tools.bench import jobs
from shardfold.tools.bench.settings import Settings

SCALE = sf.LossScale(initial=1024.0, interval=10**6)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"loss_scale": SCALE},
    "watched": {},
    "the same": {},
}
ROWS = (
    ("a loss scale looks for overflows", "scaled", "plain"),
    ("an open Watch", "watched", "plain"),
    ("nothing", "the same", "plain"),
)


def measure(settings: Settings, rounds: int, steps: int, layout: str) -> dict[str, list[float]]:
    """Median CPU seconds of a step of each variant, by round."""
    torch.set_num_threads(1)
    optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
    engines = {
        name: sf.Engine(jobs.build(settings), optimizer=optimizer, layout=layout, **options)
        for name, options in VARIANTS.items()
    }
    sf.numerics.Watch(engines["watched"])
    batches = jobs.batches(settings, next(iter(engines.values())).rank)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            engine, taken = engines[name], []
            for step in range(steps + 1):
                began = process_time()
                engine.backward(engine(*batches[(number + step) % len(batches)]))
                assert engine.step().updated
                taken.append(process_time() - began)
            if number:  # the first round warms up
                seconds[name].append(median(taken[1:]))
    for engine in reversed(engines.values()):
        engine.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=float, default=46e6)
    parser.add_argument("--rows", type=int, default=1, help="sequences per rank")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="counted, of a turn")
    parser.add_argument("--layout", default="zero2")
    given = parser.parse_args()
    settings = Settings(params=given.params, rows=given.rows)
    by_rank = run_ranks(measure, 2, settings, given.rounds, given.steps, given.layout, timeout=600)
    taken = {name: [sum(each) for each in zip(*(said[name] for said in by_rank), strict=True)] for name in VARIANTS}
    print(f"{settings.title()}, {given.layout}; plain: {median(taken['plain']) * 1e3:.0f} ms of CPU\n")
    print("| what | step / step without, median | quartiles |\n|---|---|---|")
    for what, name, reference in ROWS:
        ratios = [a / b for a, b in zip(taken[name], taken[reference], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        print(f"| {what} | {median(ratios):.3f} | {low:.3f}-{high:.3f} |")


if __name__ == "__main__":
    main()
