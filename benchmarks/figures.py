"""The figures of docs/measured.md, as the Markdown rows that stand there.

python benchmarks/figures.py losses      # largest relative difference of 30 losses from plain PyTorch, by layout
python benchmarks/figures.py bytes       # bytes held and sent beside table and program, by layout and ranks
python benchmarks/figures.py time        # seconds of a step beside DistributedDataParallel, alternating rounds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shardfold as sf
from shardfold.recipes.gpt import GPT, GPTConfig
from shardfold.report import human
from shardfold.testing import Ranks, run_ranks, same_training

ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
LAYOUTS = list(sf.PRESETS)


def small() -> torch.nn.Module:
    return GPT(GPTConfig.named("demo", d_model=64, layers=3, heads=4, context=32))


def tokens(steps: int, rows: int, context: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(256, (rows, context), generator=generator),
            torch.randint(256, (rows, context), generator=generator),
        )
        for _ in range(steps)
    ]


def mesh_of(layout: str, world: int) -> dict[str, int] | None:
    """Layouts that tell nodes apart get two of them where the ranks allow it."""
    return {"inter": 2, "intra": world // 2} if layout in ("hsdp", "hpz") and world % 2 == 0 else None


def losses() -> None:
    print("| layout | 1 rank | 2 ranks | 3 ranks | 4 ranks |\n|---|---|---|---|---|")
    with Ranks(4) as ranks:
        for layout in LAYOUTS:
            cells = []
            for world in (1, 2, 3, 4):
                worst = 0.0
                for accumulate in (1, 4):
                    for clip in (None, 0.5):
                        match = same_training(
                            small, tokens(30, 48, 32), layout=layout, world_size=world, accumulate=accumulate,
                            clip_norm=clip, optimizer=ADAMW, mesh=mesh_of(layout, world), ranks=ranks, tol=1.0,
                        )  # fmt: skip
                        worst = max(worst, match.max_loss_difference)
                cells.append(f"{worst:.1e}")
            print(f"| `{layout}` | {' | '.join(cells)} |", flush=True)


def _bytes(layout: str, accumulate: int) -> tuple[float, float, int, float, int]:
    torch.manual_seed(0)
    engine = sf.Engine(
        small(), optimizer=ADAMW, layout=layout, accumulate=accumulate, precision="bf16", clip_norm=1.0,
        mesh=mesh_of(layout, dist.get_world_size()),
    )  # fmt: skip
    for batch in tokens(2 * accumulate, 4, 32):
        engine.backward(engine(*batch))
        engine.step()
    memory, traffic = engine.memory(), engine.traffic()
    engine.close()
    return memory.table, memory.padding, memory.held, traffic.program, traffic.sent


def held_and_sent() -> None:
    print("| layout | ranks | table | padding | held | program, 1 / 4 micro-batches | sent |")
    print("|---|---|---|---|---|---|---|")
    with Ranks(4) as ranks:
        for layout in LAYOUTS:
            for world in (1, 2, 4):
                one, four = (ranks.run(_bytes, layout, k, world_size=world)[0] for k in (1, 4))
                print(
                    f"| `{layout}` | {world} | {human(one[0])} | {human(one[1])} | {human(one[2])} | "
                    f"{human(one[3])} / {human(four[3])} | {human(one[4])} / {human(four[4])} |",
                    flush=True,
                )


def _seconds(contender: str, context: int, rows: int) -> float:
    torch.manual_seed(0)
    model: Any = GPT(GPTConfig.named("demo", d_model=512, layers=12, heads=8, context=context))
    step: Callable[[torch.Tensor], object]
    if contender == "DDP":
        model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step(x: torch.Tensor) -> None:
            model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        engine = sf.Engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-4), layout=contender)

        def step(x: torch.Tensor) -> None:
            engine.backward(engine(x, x))
            engine.step()

    x = torch.randint(256, (rows, context))
    spent = []
    for _ in range(8):
        begin = time.perf_counter()
        step(x)
        spent.append(time.perf_counter() - begin)
    return median(spent[2:])


def step_time(context: int, rows: int, rounds: int) -> None:
    contenders = ["DDP", *LAYOUTS[:4]]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in contenders:
            seconds[name].append(max(run_ranks(_seconds, 2, name, context, rows, timeout=600)))
    print(f"| {rows} x {context} tokens per rank | step / DDP |\n|---|---|")
    for name in contenders:
        print(f"| {name} | {median(seconds[name]) / median(seconds['DDP']):.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "bytes", "time"])
    parser.add_argument("--context", type=int, default=64, help="bytes of context, for `time`")
    parser.add_argument("--rows", type=int, default=1, help="sequences per rank, for `time`")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which contenders alternate, for `time`")
    given = parser.parse_args()
    what = given.what
    if what == "losses":
        losses()
    elif what == "bytes":
        held_and_sent()
    else:
        step_time(given.context, given.rows, given.rounds)


if __name__ == "__main__":
    main()
