"""What it costs a step to watch memory (`Runtime(checksums=True)`), and what ranks do to find who is slow.

python -m shardfold run --nproc-per-node 2 benchmarks/watching.py [--width 512] [--blocks 6] [--rows 256]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import nn

import shardfold as sf
from shardfold.engine.pace import Pace, Spent


def trained(width: int, blocks: int, rows: int, layout: str, *, checksums: bool) -> sf.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width)) for _ in range(blocks))
    )
    return sf.Engine(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        layout=layout,
        runtime=sf.Runtime(checksums=checksums),
    )


def seconds(engine: sf.Engine, batch: torch.Tensor) -> float:
    began = time.perf_counter()
    engine.backward(engine(batch).square().mean())
    engine.step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 512), ("blocks", 6), ("rows", 256), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    batch = torch.randn(given.rows, given.width)
    for layout in ("ddp", "zero1", "zero2", "zero3"):
        engines = [
            trained(given.width, given.blocks, given.rows, layout, checksums=checksums) for checksums in (False, True)
        ]
        took: list[list[float]] = [[], []]
        for number in range(given.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                took[which].append(seconds(engines[which], batch))
        without, with_them = (median(each[2:]) for each in took)
        if engines[0].rank == 0:
            print(f"{layout}: a step {without * 1e3:.1f} ms, with checksums {with_them * 1e3:.1f} ms", flush=True)
        for engine in engines:
            engine.close()
    for ranks in (2, 16):
        paces, said = [Pace(range(ranks), rank) for rank in range(ranks)], b""
        began = time.perf_counter()
        for _ in range(200):
            for pace in paces:
                pace.hear(said, lambda rank: "")
            said = bytes(map(max, *(pace.told(Spent(0.1, 0.01, 0.02)) or b"" for pace in paces)))
        print(f"who is slow of {ranks} ranks: {(time.perf_counter() - began) / 200 / ranks * 1e6:.0f} us a step")


if __name__ == "__main__":
    main()
