"""A head of twice the backbone's parameters on two ranks: classes split over them, beside all classes on each.

    python benchmarks/face.py [--rounds 7] [--steps 6] [--classes 15000] [--batch 4,16,32] [--layout ddp,zero2]
    python benchmarks/face.py --link 1gbit,10gbit,none      # two nodes of one rank each; needs root
    python benchmarks/face.py --parts                       # CPU seconds of a step, by part
    python benchmarks/face.py --drift                       # how far apart losses are, and how far rounding takes them

Both heads train in turns, on the same images, in the same processes. Prints a row for each case: images/s of all ranks,
the median of the rounds' ratios, the head's states on a rank, and what a node sends in a step. A link of `none` is two
nodes without a limit (see shardfold.testing.links); without --link both ranks are on one node and nothing is sent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import cycle, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardfold.plan.cost import state_bytes
from shardfold.plan.placement import UnitSpec
from shardfold.testing import run_ranks
from shardfold.testing.links import Links, sent, why_not
from shardfold.tools.recipes.face.drawn import DrawnFaces
from shardfold.tools.recipes.face.face_config import FaceConfig
from shardfold.tools.recipes.face.images import Drawn
from shardfold.tools.recipes.face.train import FaceRun

HEADS = ("replicated", "sharded")
EMBEDDING = 96
SHOWN = (1, 4, 8, 12, 16, 24, 32, 48)
"""Steps whose losses `--drift` compares."""
PARTS = ("backbone and neck, forward", "head, with its gradients", "backward", "step: norm and update")
Batch = tuple[Tensor, Tensor]


def made(head: str, classes: int, batch: int, layout: str, number: int) -> tuple[FaceRun, list[Batch]]:
    """A run, and its first batches."""
    settings = {"identities": classes, "shots": 2, "held_out": 2, "batch": batch, "width": 128, "layers": 3, "heads": 4,
                "embedding": EMBEDDING, "layout": layout, "steps": 1000, "warmup": 100, "augment": False}  # fmt: skip
    images = Drawn(DrawnFaces(classes, 2)), Drawn(DrawnFaces(2, 2, first=10**8))
    run = FaceRun(FaceConfig.load({**settings, "head": head}), images)
    batches = run.batches()
    return run, [next(batches) for _ in range(number)]


def head_bytes(run: FaceRun) -> float:
    """Of what this rank holds of the head: parameters, gradients, masters and moments."""
    found = 0.0
    for segment in run.engine.sharded.segments():
        mine = sum(slot.numel for slot in segment.spec.slots if slot.name.startswith("head."))
        share = mine / sum(slot.numel for slot in segment.spec.slots)
        states = state_bytes(run.engine.layout, [UnitSpec("", (segment.spec,))], run.engine.mesh.sizes)
        found += share * sum(states.values())
    return found


def measure(rounds: int, steps: int, classes: int, batch: int, layout: str, nodes: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    made_of = {head: made(head, classes, batch, layout, steps) for head in HEADS}
    runs = {head: run for head, (run, _) in made_of.items()}
    batches = {head: cycle(some) for head, (_, some) in made_of.items()}
    for head in HEADS:
        for _ in range(3):
            runs[head].step(batches[head])
    ratios: list[float] = []
    rates: dict[str, list[float]] = {head: [] for head in HEADS}
    crossed = dict.fromkeys(HEADS, 0)
    for _ in range(rounds):
        for head in HEADS:
            run = runs[head]
            dist.barrier()
            before, began = sent() if nodes else 0, time.perf_counter()
            for _ in range(steps):
                run.step(batches[head])
            rates[head].append(steps * run.images_per_step / (time.perf_counter() - began))
            crossed[head] += sent() - before if nodes else 0
        ratios.append(rates["sharded"][-1] / rates["replicated"][-1])
    found = {
        "parameters": sum(s.spec.numel for s in runs["replicated"].engine.sharded.segments()),
        "rates": {head: statistics.median(each) for head, each in rates.items()},
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "bytes": {head: head_bytes(run) for head, run in runs.items()},
        "sent": {head: crossed[head] / rounds / steps for head in HEADS},
    }
    for run in runs.values():
        run.engine.close()
    return found


def parts(head: str, steps: int, classes: int, batch: int, layout: str) -> dict[str, float]:
    """CPU milliseconds of this rank in each part of a step; the least of all steps, as other processes only add."""
    torch.set_num_threads(1)
    run, batches = made(head, classes, batch, layout, steps)
    inside = 0.0
    began = 0.0

    def enter(*_: Any) -> None:
        nonlocal began
        began = time.process_time()

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = time.process_time() - began

    engine, times = run.engine, []
    engine.module.head.register_forward_pre_hook(enter)
    engine.module.head.register_forward_hook(leave)
    for images, labels in batches:
        marks = [time.process_time()]
        loss = engine(images, labels)
        marks.append(time.process_time())
        engine.backward(loss)
        marks.append(time.process_time())
        engine.step()
        marks.append(time.process_time())
        forward, backward, step = (1000 * (b - a) for a, b in pairwise(marks))
        times.append((forward - 1000 * inside, 1000 * inside, backward, step))
    engine.close()
    return dict(zip(PARTS, (min(each) for each in zip(*times[3:], strict=True)), strict=True))


def drifted(case: str, classes: int, batch: int, dtype: torch.dtype) -> list[float]:
    """Losses of a run: `split` and `whole` heads, and of whole heads `rows` of each batch in another order, so that
    sums are made in another, and `ulp`, with one number of the first layer the next one that there is."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    try:
        run, batches = made("sharded" if case == "split" else "replicated", classes, batch, "ddp", SHOWN[-1])
        if case == "ulp":
            with run.engine.gathered("neck.linear.weight", write=True), torch.no_grad():
                first = run.engine.module.neck.linear.weight.view(-1)[:1]
                first.copy_(torch.nextafter(first, first + 1))
        if case == "rows":
            order = torch.randperm(batch, generator=torch.Generator().manual_seed(0))
            batches = [(images[order], labels[order]) for images, labels in batches]
        given = iter(batches)
        for _ in batches:
            run.step(given)
    finally:
        torch.set_default_dtype(torch.float32)
    run.engine.close()
    return run.losses


def show_times(given: argparse.Namespace) -> None:
    print(
        "| link | layout | images per rank | replicated, images/s | split | times | MB sent | split | head's memory |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for link in given.link.split(",") if given.link else [""]:
        if link and (reason := why_not()):
            print(f"{reason}.")
            return
        for layout in given.layout.split(","):
            for batch in map(int, given.batch.split(",")):
                work = given.rounds, given.steps, given.classes, batch, layout, bool(link)
                if link:
                    with Links(2, 1, None if link == "none" else link) as links:
                        found = links.run(measure, *work, timeout=1200.0)[0]
                else:
                    found = run_ranks(measure, 2, *work, timeout=1200.0)[0]
                whole, split = (found["rates"][head] for head in HEADS)
                share = 100 * found["bytes"]["sharded"] / found["bytes"]["replicated"]
                crossed = " | ".join(f"{found['sent'][head] / 1e6:.1f}" for head in HEADS)
                print(
                    f"| {link or 'one node'} | {layout} | {batch} | {whole:.0f} | {split:.0f} | {found['ratio']:.2f} "
                    f"({min(found['ratios']):.2f} to {max(found['ratios']):.2f}) | {crossed} | {share:.1f} % |",
                    flush=True,
                )
    rest = found["parameters"] - given.classes * EMBEDDING
    print(
        f"The head has {given.classes * EMBEDDING:,} parameters, {given.classes * EMBEDDING / rest:.2f} times the rest."
    )


def show_parts(given: argparse.Namespace) -> None:
    print("| layout | images per rank | part | replicated, CPU ms | split |\n|---|---|---|---|---|")
    for layout in given.layout.split(","):
        for batch in map(int, given.batch.split(",")):
            work = given.steps * given.rounds, given.classes, batch, layout
            whole, split = (run_ranks(parts, 2, head, *work, timeout=1200.0)[0] for head in HEADS)
            for part in PARTS:
                print(f"| {layout} | {batch} | {part} | {whole[part]:.1f} | {split[part]:.1f} |", flush=True)
            print(f"| {layout} | {batch} | all | {sum(whole.values()):.1f} | {sum(split.values()):.1f} |", flush=True)


def show_drift(given: argparse.Namespace) -> None:
    print(f"| of a replicated head, in | to | {' | '.join(f'step {step}' for step in SHOWN)} |")
    print("|---|---|" + "---|" * len(SHOWN))
    batch = int(given.batch.split(",")[0])
    for dtype in (torch.float32, torch.float64):
        whole, *others = (
            run_ranks(drifted, 2, case, given.classes, batch, dtype, timeout=1200.0)[0]
            for case in ("whole", "split", "rows", "ulp")
        )
        for name, losses in zip(
            ("a split head", "rows in another order", "a weight moved by 1 ulp"), others, strict=True
        ):
            apart = [abs(a - b) / abs(a) for a, b in zip(whole, losses, strict=True)]
            most = (f"{max(apart[:step]):.0e}" for step in SHOWN)
            print(f"| {str(dtype).rpartition('.')[2]} | {name} | {' | '.join(most)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 7), ("steps", 6), ("classes", 15000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", default="16", help="images per rank, one number or several")
    parser.add_argument("--layout", default="ddp", help="one or several")
    parser.add_argument("--link", default="", help="rates between two nodes, as 1gbit,none")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--drift", action="store_true")
    given = parser.parse_args()
    began = time.perf_counter()
    (show_parts if given.parts else show_drift if given.drift else show_times)(given)
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
