"""One step of GaLore beside one of AdamW, on one thread, and what a new projector costs, as a Markdown table.

python benchmarks/galore.py                    # about 1 minute and 0.5 GB; --width 2048 --rank 512 for more

All ways update matrices of their own, of the same shapes, in one process and take turns in rounds. Ratios are medians
of each round's ratio to torch's fused AdamW. ``with projectors`` is the mean over ``update_proj_gap`` steps, one of
which makes a projector of a singular value decomposition.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch
from torch import nn

import shardfold as sf

GAP = 200


def timed(call: Callable[[], object]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def matrices(width: int) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((width, width), (4 * width, width))]
    for p in made:
        p.grad = torch.randn(p.shape, generator=draw)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    options = {"rank": given.rank, "update_proj_gap": GAP}
    plain = torch.optim.AdamW(matrices(given.width), fused=True)
    ours = {
        "GaLore": sf.optim.GaLore(matrices(given.width), **options),
        "GaLore, 8 bits": sf.optim.GaLore(matrices(given.width), bits=8, **options),
    }
    plain.step()
    svd = {name: timed(optimizer.step) for name, optimizer in ours.items()}  # the first step makes projectors
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    seconds: dict[str, list[float]] = {name: [] for name in ("AdamW", *ours)}
    for _ in range(given.rounds):
        base = timed(plain.step)
        seconds["AdamW"].append(base)
        for name, optimizer in ours.items():
            seconds[name].append(timed(optimizer.step))
            ratios[name].append(seconds[name][-1] / base)
    held = {name: _state(optimizer) for name, optimizer in {"AdamW": plain, **ours}.items()}
    print(f"width {given.width}, rank {given.rank}, one thread\n")
    print("| | bytes of state | a step | with projectors | of AdamW's time | with projectors |")
    print("|---|---|---|---|---|---|")
    base = median(seconds["AdamW"])
    print(f"| AdamW | {held['AdamW']:,} | {base * 1e3:.1f} ms | | 1 | |")
    for name in ours:
        step, ratio = median(seconds[name]), median(ratios[name])
        mean = step + (svd[name] - step) / GAP
        print(
            f"| {name} | {held[name]:,} | {step * 1e3:.1f} ms | {mean * 1e3:.1f} ms | {ratio:.2f} | "
            f"{ratio * mean / step:.2f} |"
        )


def _state(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.dim())


if __name__ == "__main__":
    main()
