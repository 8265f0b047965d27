"""One AdamW update of host memory, 16-bit gradients in, fp32 states, 16-bit parameters out, as a Markdown table.

python benchmarks/update.py                    # about 3 minutes and 2.5 GB, on 1 and on 2 threads
DS_BUILD_OPS=0 pip install deepspeed ninja     # where that is, and a compiler, DeepSpeedCPUAdam is in the table too

All ways update the same tensors in one process and take turns in rounds, each round in another order. Figures are
medians over rounds; ratios are medians of each round's ratio. An update has to move 28 bytes per element: 2 of the
gradient and 12 of master and moments in, 12 and 2 out. Beside it stands a copy that moves as many.

``blocks`` is what an engine does, ``compiled`` with ``Overlap(compiled_update=True)``. ``separate passes`` cast all
gradients, run torch's fused kernel once, and cast all parameters back. ``looped`` is ``AdamW(foreach=False)`` of torch
over the parameters of a GPT, and ``DeepSpeedCPUAdam`` runs over one: both take fp32 gradients, so they stand between
the same casts. ``step only`` leaves these out.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from shardfold.optim.compiled import compiled_adam
from shardfold.optim.fused import FusedShard
from shardfold.optim.threads import UpdateThreads
from shardfold.plan.layout import PRECISIONS
from shardfold.plan.presets import ddp
from shardfold.tiers.device import DeviceTier
from shardfold.tiers.tier import Region
from shardfold.torch_internals import fused_adamw_

BYTES = 28
HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
GROUP = {**HYPER, "maximize": False, "amsgrad": False}
OURS, COMPILED, SEPARATE, LOOPED, COPY = "blocks", "compiled", "separate passes", "looped", "a copy of as many bytes"


class Held:
    """What is updated, ``(numel,)`` each."""

    def __init__(self, numel: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.gradients = torch.randn(numel, generator=draw).mul_(1e-2).bfloat16()
        self.master = torch.randn(numel, generator=draw).mul_(0.02)
        self.averages, self.squares = torch.zeros(numel), torch.zeros(numel)
        self.copy = self.master.bfloat16()
        self.wide = torch.zeros(numel)  # fp32 gradients, for who cannot take others
        self.spare = (
            torch.zeros(BYTES // 2 * numel, dtype=torch.uint8),
            torch.zeros(BYTES // 2 * numel, dtype=torch.uint8),
        )


class OneSegment:
    """What a :class:`FusedShard` asks of a segment, of one parameter."""

    def __init__(self, held: Held) -> None:
        self.adopted, self.master_is_rest = {}, False
        self.under_way = self.updated = None
        self.moments_come = False
        self.keeps_copy, self.shard_numel, self.dtype = True, held.master.numel(), held.copy.dtype
        self.table = ddp.bind(PRECISIONS["bf16"], {"data": 1})
        self.master, self.update_grads, self.compute_range = held.master, held.gradients, held.copy
        self.master_range = (0, held.master.numel())
        self.spec = self
        self.slots = [None]


def ours(
    held: Held, threads: UpdateThreads, block: int, compiled: Any = None, factor: torch.Tensor | None = None
) -> Callable[[], None]:
    memory = DeviceTier(torch.device("cpu"))
    regions: dict[str, Region] = {
        name: memory.adopt(value) for name, value in (("m", held.averages), ("v", held.squares))
    }
    segment: Any = OneSegment(held)
    shard = FusedShard(segment, torch.optim.AdamW, regions, threads=threads, compiled=compiled)
    return lambda: shard.update(GROUP, [True], factor, block)


def separate(held: Held) -> None:
    wide = held.gradients.float()
    fused_adamw_(
        [held.master], [wide], [held.averages], [held.squares], [], [torch.ones(())],
        lr=HYPER["lr"], beta1=0.9, beta2=0.999, eps=HYPER["eps"], weight_decay=HYPER["weight_decay"], amsgrad=False,
        maximize=False, grad_scale=None, found_inf=None,
    )  # fmt: skip
    held.copy.copy_(held.master)


def gpt_sizes(numel: int, width: int = 512, vocabulary: int = 50257) -> Iterator[int]:
    """Elements of each parameter of a GPT of about so many."""
    embedding = min(vocabulary * width, numel // 2)
    yield embedding
    left = numel - embedding
    while left > 12 * width * width + 13 * width:
        block = [width, width, 3 * width * width, 3 * width, width * width, width]
        block += [width, width, 4 * width * width, 4 * width, 4 * width * width, width]
        yield from block
        left -= sum(block)
    yield left


def with_optimizer(held: Held, sizes: list[int], make: Callable[..., Any]) -> Any:
    """An optimizer whose parameters and moments are parts of what is held."""
    parameters, parts = [], (each.split(sizes) for each in (held.master, held.wide, held.averages, held.squares))
    optimizer = None
    states = []
    for value, gradient, average, square in zip(*parts, strict=True):
        parameter = nn.Parameter(value)
        parameter.grad = gradient
        parameters.append(parameter)
        states.append((average, square))
    optimizer = make(parameters, **HYPER)
    optimizer.step()
    for parameter, (average, square) in zip(parameters, states, strict=True):
        optimizer.state[parameter].update(exp_avg=average, exp_avg_sq=square)
    return optimizer


def around(held: Held, step: Callable[[], Any]) -> None:
    """A step on fp32 gradients, between the casts that it needs."""
    held.wide.copy_(held.gradients)
    step()
    held.copy.copy_(held.master)


def deepspeed_adam() -> Any:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with suppress(ImportError):
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]

        return DeepSpeedCPUAdam
    return None


def measure(held: Held, threads: int, rounds: int, block: int) -> None:
    numel = held.master.numel()
    torch.set_num_threads(threads)
    pool = UpdateThreads(threads)
    loop = with_optimizer(held, list(gpt_sizes(numel)), partial(torch.optim.AdamW, foreach=False, fused=False))
    ways: dict[str, Callable[[], Any]] = {
        COPY: lambda: held.spare[0].copy_(held.spare[1]),
        OURS: ours(held, pool, block),
        COMPILED: ours(
            held, pool, 0, compiled_adam(True, *[torch.float32] * 2, *[torch.bfloat16] * 2, torch.device("cpu"))
        ),
        SEPARATE: partial(separate, held),
        LOOPED: partial(around, held, loop.step),
    }
    if (peer := deepspeed_adam()) is not None:
        step = with_optimizer(held, [numel], peer).step
        ways["DeepSpeedCPUAdam"] = partial(around, held, step)
        ways["DeepSpeedCPUAdam, step only"] = step
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(-1, rounds):  # the first warms up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            began = perf_counter()
            with torch.no_grad():
                ways[name]()
            if number >= 0:
                taken[name].append(perf_counter() - began)
    pool.close()
    for name in names:
        seconds = median(taken[name])
        ratios = [median(a / b for a, b in zip(taken[name], taken[other], strict=True)) for other in (COPY, OURS)]
        cells = [f"{seconds / numel * 1e9:.2f}", f"{BYTES * numel / seconds / 1e9:.1f}", *(f"{r:.2f}" for r in ratios)]
        print(f"| {threads} | {name} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--block", type=int, default=0, help="elements of a block, 0: as the engine does")
    given = parser.parse_args()
    held = Held(given.numel)
    print("| threads | way | ns per element | GB/s of 28 bytes | of the copy | of blocks |\n|---|---|---|---|---|---|")
    for threads in given.threads:
        measure(held, threads, given.rounds, given.block)


if __name__ == "__main__":
    main()
