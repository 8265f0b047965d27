"""A head of twice the backbone's parameters on two ranks: classes split over them, beside all classes on each.

    python benchmarks/face.py [--rounds 7] [--steps 6] [--classes 15000] [--batch 16]

Both train in turns, on the same images, in the same processes. Prints images/s of all ranks, the median of the rounds'
ratios, bytes of the head's states on a rank, and how far the losses of both are apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from shardfold.testing import run_ranks
from shardfold.tools.recipes.face.config import FaceConfig
from shardfold.tools.recipes.face.drawn import DrawnFaces
from shardfold.tools.recipes.face.images import Drawn
from shardfold.tools.recipes.face.train import FaceRun

HEADS = ("replicated", "sharded")


def head_bytes(run: FaceRun) -> int:
    """Of what this rank holds of the head: parameters, gradients, masters and moments."""
    return sum(
        segment.spec.length * 4 * 4  # in fp32 and without a master of its own: values, gradients, two moments
        for segment in run.engine.sharded.segments()
        if any(slot.name.startswith("head.") for slot in segment.spec.slots)
    )


def measure(rounds: int, steps: int, classes: int, batch: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    settings = {"identities": classes, "shots": 2, "held_out": 2, "batch": batch, "width": 128, "layers": 3, "heads": 4,
                "embedding": 96, "layout": "ddp", "steps": 1000, "warmup": 100, "augment": False}  # fmt: skip
    images = Drawn(DrawnFaces(classes, 2)), Drawn(DrawnFaces(2, 2, first=10**8))
    runs = {head: FaceRun(FaceConfig.load({**settings, "head": head}), images) for head in HEADS}
    batches = {head: run.batches() for head, run in runs.items()}
    for head in HEADS:
        for _ in range(2):
            runs[head].step(batches[head])
    ratios: list[float] = []
    rates: dict[str, list[float]] = {head: [] for head in HEADS}
    for _ in range(rounds):
        for head in HEADS:
            run = runs[head]
            before = len(run.seconds)
            dist.barrier()
            for _ in range(steps):
                run.step(batches[head])
            rates[head].append(steps * run.images_per_step / sum(run.seconds[before:]))
        ratios.append(rates["sharded"][-1] / rates["replicated"][-1])
    losses = [run.losses for run in runs.values()]
    found = {
        "parameters": sum(s.spec.numel for s in runs["replicated"].engine.sharded.segments()),
        "head": classes * 96,
        "rates": {head: statistics.median(each) for head, each in rates.items()},
        "ratio": statistics.median(ratios),
        "bytes": {head: head_bytes(run) for head, run in runs.items()},
        "apart": max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)),
    }
    for run in runs.values():
        run.engine.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 7), ("steps", 6), ("classes", 15000), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    began = time.perf_counter()
    found = run_ranks(measure, 2, given.rounds, given.steps, given.classes, given.batch, timeout=1200.0)[0]
    backbone = found["parameters"] - found["head"]
    print(f"head {found['head']:,} parameters, the rest {backbone:,} ({found['head'] / backbone:.2f} times)")
    for head in HEADS:
        print(f"{head:<11} {found['rates'][head]:7.1f} images/s  {found['bytes'][head] / 2**20:7.1f} MiB of the head")
    share = found["bytes"]["sharded"] / found["bytes"]["replicated"]
    print(f"{found['ratio']:.2f} times the images/s (median of rounds), {100 * share:.1f}% of the head's memory")
    print(f"losses differ by {found['apart']:.1e} at most; {time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
