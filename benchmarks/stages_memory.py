"""A model four times the memory of a rank, which trains over four stages.

    python benchmarks/stages_memory.py

Each rank is a process in a control group (v1 or v2) of its own, whose memory the kernel limits to 1 GiB. The model is a
GPT whose parameters, gradients and moments in fp32 are 4.2 GiB: its parameters alone do not fit into a group, so it can
train only where no rank ever builds more than its stage. It is tried on one rank, on four without stages, on four
stages of one rank, and on four stages of two ranks each; and with the optimizer's states on disk, on one rank and on
four. Of those that train, each rank's memory is told beside the sum of terms that are known before:

    libraries     resident before the model is built: interpreter, torch, connections, what a tiny model ran
    table         what the table of the layout says of this stage, and its padding
    in use        gathered units, gradients under way, the transport's copies: ``plan.lifetimes``
    activations   of the micro-batches that the order keeps, by the run without values

Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from control_group import Group

import shardfold as sf
from shardfold.plan.lifetimes import Behaviour, peak_bytes
from shardfold.tools.recipes.gpt import GPT, GPTConfig

MIB, GIB = 2**20, 2**30
LIMIT = GIB
MODEL: dict[str, Any] = {"layers": 56, "d_model": 640, "heads": 10, "d_ff": 1728, "context": 32, "vocab": 256}
TINY: dict[str, Any] = {"layers": 4, "d_model": 32, "heads": 2, "d_ff": 64, "context": 32, "vocab": 64}
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
STEPS, MICRO_BATCHES = 2, 8


class Way(NamedTuple):
    """How it is tried."""

    words: str
    mesh: dict[str, int]
    options: dict[str, Any]


DISK = {"layout": "zero1", "offload": {"optimizer": "disk"}}
WAYS = (
    Way("one rank", {"intra": 1}, {"layout": "zero3"}),
    Way("4 ranks, `zero3`, no stages", {"intra": 4}, {"layout": "zero3"}),
    Way("4 stages of one rank", {"pipeline": 4}, {"layout": "zero3"}),
    Way("4 stages of 2 ranks, `zero3`", {"pipeline": 4, "intra": 2}, {"layout": "zero3"}),
    Way("one rank, optimizer on disk", {"intra": 1}, DISK),
    Way("4 stages of one rank, optimizer on disk", {"pipeline": 4}, DISK),
)


# -- a rank


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` (the largest so far) of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def trained(shape: dict[str, Any], way: Way, folder: str, steps: int) -> tuple[sf.Engine, Any, list[float]]:
    """An engine behind some steps, the batch, and the losses."""
    tempfile.tempdir = folder
    with sf.meta_init():
        model = GPT(GPTConfig(**shape))
    engine = sf.Engine(model, optimizer=ADAMW, parallel=way.mesh, accumulate=MICRO_BATCHES, **way.options)
    draw = torch.Generator().manual_seed(engine.data_rank)
    tokens = torch.randint(shape["vocab"], (MICRO_BATCHES, shape["context"]), generator=draw)
    losses: list[float] = []
    for _ in range(steps):
        losses.append(engine.train_batch((tokens, tokens)).item())
        engine.step()
    return engine, (tokens, tokens), losses


def train(number: int, rank: int, folder: str) -> None:
    """One rank, inside of its group; writes what it found."""
    torch.set_num_threads(1)
    way = WAYS[number]
    ranks = prod(way.mesh.values())
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    trained(TINY, way, folder, 2)[0].close()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins again at what is resident now
    libraries, begun = resident("VmRSS"), perf_counter()
    print(f"libraries {libraries / MIB:.0f}", flush=True)
    engine, batch, losses = trained(MODEL, way, folder, STEPS)
    peak, seconds = resident("VmHWM"), perf_counter() - begun
    memory, behaviour = engine.memory(), Behaviour(streams=False, transport=engine.sharded.comm.transport.kind)
    used = peak_bytes(engine._runner.orders.bound, behaviour, rest=0.0)
    place = engine.mesh.coords.get("pipeline", 0)
    kept = re.search("at most, by rank, bytes: ([0-9, ]+)", engine.explain(batch))
    activations = int(kept[1].split(", ")[place].replace(",", "")) if kept else 0
    parameters = sum(p.numel() for p in engine.module.parameters())
    found = {
        "libraries": libraries, "held": memory.tiers.get("device", 0), "used": used, "activations": activations,
        "peak": peak, "seconds": seconds, "losses": losses, "place": place, "parameters": parameters,
    }  # fmt: skip
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


# -- around them


def tried(number: int, folder: str) -> list[dict[str, Any]] | int:
    """What ranks found; or the exit status of one that was ended."""
    ranks = prod(WAYS[number].mesh.values())
    groups = [Group(f"stages-{rank}", LIMIT) for rank in range(ranks)]
    started: list[Any] = []
    try:
        for rank, group in enumerate(groups):
            words = [sys.executable, __file__, "--way", str(number), "--rank", str(rank), "--folder", folder]
            # Ranks send over sockets, as between hosts: what one reads of another's memory is in no group.
            with Path(folder, f"{rank}.log").open("w") as log:
                started.append(group.start(words, {"SHARDFOLD_NEAR": "0"}, stdout=log, stderr=log))
        while all(one.poll() in (None, 0) for one in started):
            if all(one.poll() == 0 for one in started):
                told = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]
                return [each | {"group": group.peak()} for each, group in zip(told, groups, strict=True)]
            with suppress(Exception):
                started[0].wait(0.3)
        statuses = [one.poll() for one in started]
        return -9 if -9 in statuses else next(status for status in statuses if status)
    finally:
        for one in started:
            one.kill()
            one.wait()
        for group in groups:
            group.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=int, nargs="+", default=range(len(WAYS)), help="numbers of those above")
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help="of states on disk, on a drive")
    given = parser.parse_args()
    if given.rank is not None:
        train(given.way, given.rank, given.folder)
        return
    try:
        Group("stages", LIMIT).close()
    except OSError as error:
        print(f"No control group can be made here, which needs root: {error}: skipped.")
        return
    with sf.meta_init():
        states = 16 * sum(p.numel() for p in GPT(GPTConfig(**MODEL)).parameters())
    print(f"states of {states / GIB:.2f} GiB, {states / LIMIT:.1f} times the limit; MiB, of the rank with most\n")
    print("| | | libraries | table | in use | activations | sum | most resident | / sum | most in the group |")
    print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for number in given.ways:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            found = tried(number, folder)
            if isinstance(found, int):
                ended = "ended by the kernel" if found == -9 else f"failed with {found}"
                if found != -9:
                    print(next(Path(folder).glob("*.log")).read_text()[-2000:], file=sys.stderr)
                print(f"| {WAYS[number].words} | {ended} |" + " |" * 8, flush=True)
                continue
        row = max(found, key=lambda each: each["peak"])
        terms = [row["libraries"], row["held"], row["used"], row["activations"]]
        cells = " | ".join(f"{each / MIB:.0f}" for each in [*terms, sum(terms), row["peak"]])
        trains = f"trains, {row['seconds'] / STEPS:.0f} s a step"
        print(f"| {WAYS[number].words} | {trains} | {cells} | {row['peak'] / sum(terms):.3f} | "
              f"{max(each['group'] for each in found) / MIB:.0f} |", flush=True)  # fmt: skip
        print([[round(loss, 4) for loss in each["losses"]] for each in found], file=sys.stderr)


if __name__ == "__main__":
    main()
