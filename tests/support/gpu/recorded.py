"""What PyTorch's caching allocator was asked for in a training loop and what it took from the device, event by event.

python -m tests.support.gpu.recorded traces.json.gz     # of every loop here
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.gpu.allocator import CachingAllocator

__all__ = ["LOOPS", "Trace", "record", "record_all", "replayed"]

EVENTS = 200_000  # that the allocator keeps
STEPS = 3

#: Per event: bytes that are asked for, or the number of the request that is freed as a negative one (the first is -1);
#: and the bytes that the allocator has from the device behind it.
Trace = list[tuple[int, int]]


def _gpt(device: torch.device, precision: str) -> tuple[nn.Module, Callable[[int], Tensor]]:
    from shardfold.tools.recipes.gpt import GPT, GPTConfig

    model = GPT(GPTConfig(d_model=512, layers=6, heads=8, context=256)).to(device)

    def loss(step: int) -> Tensor:
        tokens = torch.randint(0, 200, (4 + step, 128 + 64 * step), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return model(tokens, tokens)

    return model, loss


def _images(device: torch.device, precision: str) -> tuple[nn.Module, Callable[[int], Tensor]]:
    widths = (3, 32, 64, 128, 256)
    layers = [
        layer
        for a, b in pairwise(widths)
        for layer in (nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 1000)).to(device)

    def loss(step: int) -> Tensor:
        images = torch.randn(16, 3, 96 + 32 * step, 96 + 32 * step, device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            return model(images).float().square().mean()

    return model, loss


#: Name: what makes the model and its loss, precision, whether segments expand.
LOOPS: dict[str, tuple[Callable[..., Any], str, bool]] = {
    "gpt": (_gpt, "fp32", False),
    "gpt, bf16": (_gpt, "bf16", False),
    "images": (_images, "fp32", False),
    "gpt, expandable": (_gpt, "fp32", True),
    "images, expandable": (_images, "bf16", True),
}


def record(name: str, kind: str = "cuda") -> Trace:
    """Trains with batches that grow from step to step, on one stream. In a process in which nothing has asked for
    memory before.

    Raises:
        RuntimeError: the events do not add up to what the allocator has in the end.
    """
    build, precision, expandable = LOOPS[name]
    device = torch.device(kind, 0)
    module: Any = torch.get_device_module(device)
    module.init()
    module.memory._set_allocator_settings(f"expandable_segments:{expandable}")
    module.memory._record_memory_history(max_entries=EVENTS, context=None)
    torch.manual_seed(0)
    model, loss = build(device, precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.synchronize()
    trace, reserved = _told(module.memory._snapshot()["device_traces"][0])
    if reserved != module.memory_reserved():
        raise RuntimeError(
            f"the events of {name!r} leave {reserved} bytes, the allocator has {module.memory_reserved()}"
        )
    return trace


def _told(events: Sequence[dict[str, Any]]) -> tuple[Trace, int]:
    """The events of a snapshot, and what the allocator has from the device behind the last."""
    found: Trace = []
    numbers: dict[int, int] = {}
    asked = reserved = 0
    for event in events:
        action, size, address = event["action"], event["size"], event["addr"]
        if action == "alloc":
            asked += 1
            numbers[address] = asked
            found.append((size, reserved))
        elif action == "free_completed" and address in numbers:
            found.append((-numbers.pop(address), reserved))
        elif action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
    return found, reserved


def replayed(trace: Trace, *, expandable: bool) -> list[int]:
    """The bytes that the simulated allocator has from the device behind each event."""
    allocator, blocks, found = CachingAllocator(expandable=expandable), list[int](), list[int]()
    for size, _ in trace:
        if size < 0:
            allocator.free(blocks[-size - 1])
        else:
            blocks.append(allocator.allocate(size))
        found.append(allocator.reserved)
    return found


def record_all(kind: str, names: Sequence[str] = tuple(LOOPS)) -> dict[str, Trace]:
    """The loops, each in a new process, side by side."""
    with ProcessPoolExecutor(len(names), mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        return dict(zip(names, pool.map(record, names, [kind] * len(names)), strict=True))


def main() -> None:
    """Writes the traces into a file."""
    Path(sys.argv[1]).write_bytes(
        gzip.compress(json.dumps(record_all("cuda"), separators=(",", ":")).encode(), mtime=0)
    )


if __name__ == "__main__":
    main()
