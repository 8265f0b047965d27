"""What this machine can do: rates of products by dtype, of copies, of collectives by size, of the disk.

The result is a profile that ``shardfold plan --gpus 2xFILE.json`` reads. Times are medians; collectives are between two
processes that this one starts, over Gloo (NCCL where there are two CUDA devices).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardfold import accelerator
from shardfold.comm.backend import device_backend
from shardfold.errors import ShardfoldError
from shardfold.planner.hardware import Device, Link
from shardfold.tiers.limit import memory_limit

__all__ = ["Measured", "measure"]

SIZE, ON_CPU = 2048, 384  # of the matrices: CPUs may have no instructions for a dtype
COPIED = 2**27  # bytes
SENT = (2**12, 2**18, 2**22, 2**24)  # bytes of a collective
ROUNDS = 7
RANKS = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VERBS = ("all_gather", "reduce_scatter", "all_reduce")


class Measured(NamedTuple):
    """The profile, and seconds of each collective by bytes of its whole tensor."""

    device: Device
    collectives: dict[str, dict[int, float]]


def measure(folder: Path) -> Measured:
    """Takes about a minute; files of the disk's part are in ``folder``.

    Raises:
        ShardfoldError: the processes that send could not be started, or failed.
    """
    device = accelerator.found() or torch.device("cpu")
    found = _collectives(device)
    flops = {name: _flops(device, dtype) for name, dtype in DTYPES.items()}
    memory = accelerator.total_memory(device) or (memory_limit() or 0) / RANKS
    profile = Device(
        name=f"{os.uname().nodename}-{device.type}",
        memory=memory,
        flops=flops,
        bandwidth=_bandwidth(device),
        near=_link(found),
        far=_link(found),
        disk=_disk(folder),
        reached=1.0,
        launch=_launch(device),
        reserve=0.0 if device.type == "cpu" else Device.reserve,
        source="measured by shardfold doctor --measure",
        streams=accelerator.has_streams(device),
    )
    return Measured(profile, found)


def _seconds(function: Callable[[], Any], device: torch.device, rounds: int = ROUNDS) -> float:
    function()
    times: list[float] = []
    for _ in range(rounds):
        began = _now(device)
        function()
        times.append(_now(device) - began)
    return statistics.median(times)


def _now(device: torch.device) -> float:
    """The time behind all that was asked of the device."""
    accelerator.synchronize(device)
    return time.perf_counter()


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    size = ON_CPU if device.type == "cpu" else SIZE
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: a @ b, device, 3)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / _seconds(lambda: target.copy_(source), device)  # read and written


def _launch(device: torch.device) -> float:
    small = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(100):
            small.add_(1.0)

    return _seconds(many, device) / 100


def _disk(folder: Path) -> float:
    """Bytes per second of a write that has reached the disk."""
    block = os.urandom(2**24)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(4):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return 4 * len(block) / (time.perf_counter() - began)


def _link(found: dict[str, dict[int, float]]) -> Link:
    """Latency and rate from the smallest and the largest all-gather: each rank sends half of it to the other."""
    gathers = found["all_gather"]
    small, large = min(gathers), max(gathers)
    rate = (large - small) * (RANKS - 1) / RANKS / max(gathers[large] - gathers[small], 1e-9)
    return Link(rate, gathers[small])


def _collectives(device: torch.device) -> dict[str, dict[int, float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __name__, folder]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), device.type], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for rank in range(RANKS)
        ]
        said = [rank.communicate() for rank in ranks]
        for number, rank in enumerate(ranks):
            if rank.returncode:
                last = (said[number][1].strip().splitlines() or ["without a word"])[-1]
                raise ShardfoldError(f"rank {number} of {RANKS} that measured collectives ended with {last!r}.")
    return {verb: {int(size): t for size, t in row.items()} for verb, row in json.loads(said[0][0]).items()}


def rank(folder: str, number: int, kind: str) -> None:
    """One of the processes: rank 0 prints seconds by collective and bytes."""
    here = torch.device(kind)
    two = accelerator.count(here) >= RANKS and accelerator.has_streams(here)
    device = torch.device(kind, number) if two else torch.device("cpu")
    if two:
        accelerator.use(device)
    where = f"file://{os.path.join(folder, 'store')}"
    dist.init_process_group(device_backend(device), init_method=where, rank=number, world_size=RANKS)
    found: dict[str, dict[int, float]] = {verb: {} for verb in VERBS}
    for size in SENT:
        full = torch.zeros(size // 4, device=device)
        part = full.chunk(RANKS)[number].clone()
        calls: dict[str, Callable[[], Any]] = {
            "all_gather": lambda full=full, part=part: dist.all_gather_into_tensor(full, part),
            "reduce_scatter": lambda full=full, part=part: dist.reduce_scatter_tensor(part, full),
            "all_reduce": lambda full=full: dist.all_reduce(full),
        }
        for verb, call in calls.items():
            found[verb][size] = _seconds(call, device)
    if number == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2]), sys.argv[3])
