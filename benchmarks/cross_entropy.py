"""Loss and gradients of a language model's head: memory and time beside plain PyTorch, as a Markdown table.

python benchmarks/cross_entropy.py                     # about 2 minutes and 1.5 GB on one thread

All ways get the same fp32 tensors in one process of one thread, and take turns in rounds, each round in another order.
A turn is forward and backward, from no gradients to those of hidden and weight. Its memory is the peak of resident
memory above what was resident before, less the bytes of these two gradients, which every way has to make. Its time is
the process's CPU time, which other work on the machine disturbs less than the clock on the wall. Figures are medians
over rounds; ratios are medians of each round's ratio. The error, of a smaller problem, is the largest difference from
an fp64 gradient, relative to its largest element.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import process_time

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import shardfold as sf
from shardfold.tools.bench._process_memory import clear_peak, peak_bytes, resident_bytes

CPU = torch.device("cpu")
REFERENCE = "F.cross_entropy(F.linear(...))"


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction=reduction)


def recomputed(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """Chunks of rows under activation checkpointing: what plain PyTorch offers."""
    losses = [
        checkpoint(plain, part, weight, wanted, "sum", use_reentrant=False)
        for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.stack(losses).sum() / len(targets)


def of_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """PyTorch's own chunks of rows, since 2.13."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=128)  # its default took ten times as long
    return F.linear_cross_entropy(hidden, weight, targets, options=options)


def turn(way: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[float, float]:
    """Bytes above the gradients, and CPU seconds."""
    hidden.grad = weight.grad = None
    clear_peak(CPU)
    before = resident_bytes(CPU)
    began = process_time()
    way(hidden, weight, targets).backward()
    seconds = process_time() - began
    peak = peak_bytes(CPU)
    assert before is not None and peak is not None and hidden.grad is not None and weight.grad is not None
    return peak - before - hidden.grad.nbytes - weight.grad.nbytes, seconds


def error(way: Callable[..., Tensor]) -> float:
    """Of gradients, on a small problem of the same kind."""
    draw = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(96, 64, generator=draw), torch.randn(4096, 64, generator=draw) * 0.1
    targets = torch.randint(4096, (96,), generator=draw)
    made = [each.requires_grad_() for each in (hidden, weight)]
    exact = [each.detach().double().requires_grad_() for each in made]
    got = torch.autograd.grad(way(*made, targets), made)
    expected = torch.autograd.grad(plain(*exact, targets), exact)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=131072)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(given.rows, given.width, requires_grad=True)
    weight = (torch.randn(given.vocab, given.width) * 0.02).requires_grad_()
    targets = torch.randint(given.vocab, (given.rows,))
    ways: dict[str, Callable[..., Tensor]] = {
        REFERENCE: plain,
        "64 rows, checkpointed": partial(recomputed, rows=64),
        "chunked_cross_entropy": sf.nn.chunked_cross_entropy,
        "chunked_cross_entropy, chunk=32": partial(sf.nn.chunked_cross_entropy, chunk=32),
    }
    if hasattr(F, "linear_cross_entropy"):
        ways["F.linear_cross_entropy, 128 rows"] = of_torch
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    names = list(ways)
    for way in ways.values():  # warms up
        turn(way, hidden[:32].detach().requires_grad_(), weight, targets[:32])
    for number in range(given.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken[name].append(turn(ways[name], hidden, weight, targets))
    print(f"{given.rows} rows, width {given.width}, vocabulary {given.vocab}, fp32, 1 thread\n")
    print("| way | memory, MB | of plain | CPU time, s | of plain | error of gradients |\n|---|---|---|---|---|---|")
    for name, way in ways.items():
        row = [name]
        for which, digits, unit in ((0, 0, 1e6), (1, 2, 1)):
            ratios = [a[which] / b[which] for a, b in zip(taken[name], taken[REFERENCE], strict=True)]
            row += [f"{median(each[which] for each in taken[name]) / unit:.{digits}f}", f"{median(ratios):.3f}"]
        print("| " + " | ".join([*row, f"{error(way):.1e}"]) + " |")


if __name__ == "__main__":
    main()
