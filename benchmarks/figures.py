"""The figures of docs/measured.md, as Markdown rows: the page has those of most ranks.

python benchmarks/figures.py losses      # largest relative difference of 30 losses from plain PyTorch, by layout
python benchmarks/figures.py bytes       # bytes held and sent beside table and program, by layout and ranks
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
import torch.distributed as dist

import shardfold as sf
from shardfold.plan.checks import human
from shardfold.testing import Ranks, same_training
from shardfold.tools.recipes.gpt import GPT, GPTConfig

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
                            clip_norm=clip, optimizer=ADAMW, parallel=mesh_of(layout, world), ranks=ranks, tol=1.0,
                        )  # fmt: skip
                        worst = max(worst, match.max_loss_difference)
                cells.append(f"{worst:.1e}")
            print(f"| `{layout}` | {' | '.join(cells)} |", flush=True)


def _bytes(layout: str, accumulate: int) -> tuple[float, float, int, float, int]:
    torch.manual_seed(0)
    engine = sf.Engine(
        small(), optimizer=ADAMW, layout=layout, accumulate=accumulate, precision="bf16", clip_norm=1.0,
        parallel=mesh_of(layout, dist.get_world_size()),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "bytes"])
    if parser.parse_args().what == "losses":
        losses()
    else:
        held_and_sent()


if __name__ == "__main__":
    main()
