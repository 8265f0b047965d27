"""What the device does by itself: copies, products, and formats of the wire beside the bandwidth of its memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from shardfold import accelerator
from shardfold.comm.mesh import pick_device
from shardfold.plan.formats import FORMATS
from shardfold.planner.hardware import known_device
from tests.support.gpu.section import Asked, Notes, Skip
from tests.support.gpu.setting import SIM

__all__ = ["FORMATS_MEASURED", "run"]

FORMATS_MEASURED = ("bf16", "int8/256", "int4/256", "fp8/256", "int8/256:zero", "int4/128:error", "sign/1024:error")
ELEMENTS = {True: 1 << 14, False: 1 << 26}
"""Of what is copied and encoded; True: in a rehearsal."""
SIDE = {True: 64, False: 8192}
"""Of square matrices."""
ROUNDS = 5
LEAST = 0.02  # seconds of a round: short work is done often
NEEDS = 3.0  # seconds that a case is begun with
FP8 = 448.0  # the largest number of its 8 bits


def run(asked: Asked, notes: Notes) -> None:
    if asked.device == SIM:
        notes.not_run("all cases", "times of the simulated device say nothing")
        return
    device = pick_device(asked.device)
    accelerator.use(device)
    length, side = ELEMENTS[asked.small], SIDE[asked.small]
    known = known_device(accelerator.product(device) or "")
    moved: list[float] = []

    def copied() -> tuple[str, dict[str, Any]]:
        source = torch.zeros(length, device=device)
        target = torch.empty_like(source)
        moved.append(8 * length / _seconds(partial(target.copy_, source), device))
        printed = {} if known is None else {"of its maker's": f"{moved[0] / known.bandwidth:.0%}"}
        return "bytes read and written", {"GB/s": round(moved[0] / 1e9, 1), **printed}

    notes.attempt("memory, copied", copied, needs=NEEDS)
    for name, up in (("host to device, pinned", True), ("device to host, pinned", False)):
        notes.attempt(name, partial(_crossed, device, length, up), needs=NEEDS)
    for name in ("bf16", "fp8"):
        notes.attempt(f"products in {name}", partial(_multiplied, device, side, name), needs=NEEDS)
    for name in FORMATS_MEASURED:
        for way in ("encode", "decode"):
            notes.attempt(f"{name}, {way}", partial(_coded, name, way, device, length, moved), needs=NEEDS)


def _seconds(do: Callable[[], object], device: torch.device) -> float:
    """Of one time, the median of a few rounds."""

    def often(times: int) -> float:
        accelerator.synchronize(device)
        begun = time.perf_counter()
        for _ in range(times):
            do()
        accelerator.synchronize(device)
        return (time.perf_counter() - begun) / times

    do()
    times = max(1, min(1000, round(LEAST / max(often(1), 1e-6))))
    return median(often(times) for _ in range(ROUNDS))


def _crossed(device: torch.device, length: int, up: bool) -> tuple[str, dict[str, Any]]:
    if not accelerator.has_streams(device):
        raise Skip("the device is the host")
    host = accelerator.host_memory((length,), torch.float32, device, zero=True)
    there = torch.zeros(length, device=device)
    target, source = (there, host) if up else (host, there)
    return "", {"GB/s": round(4 * length / _seconds(lambda: target.copy_(source, non_blocking=True), device) / 1e9, 1)}


def _multiplied(device: torch.device, side: int, name: str) -> tuple[str, dict[str, Any]]:
    a, b = (torch.randn(side, side, device=device) / FP8 for _ in range(2))
    if name == "bf16":
        left, right = a.bfloat16(), b.bfloat16()
        seconds = _seconds(lambda: left @ right.t(), device)
    else:
        if device.type != "cuda":
            raise Skip("products in fp8 are a GPU's")
        left, right = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        one = torch.ones((), device=device)
        seconds = _seconds(
            lambda: torch._scaled_mm(left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16), device
        )
    return f"{side} x {side} each", {"TFLOP/s": round(2 * side**3 / seconds / 1e12, 1)}


def _coded(
    name: str, way: str, device: torch.device, length: int, moved: list[float]
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """Bytes of values and of their codes, read and written once, a second; beside what a copy moves."""
    form = FORMATS[name]
    values = torch.randn(1, length, device=device)
    payload = torch.zeros(1, form.nbytes(length), dtype=torch.uint8, device=device)
    state = torch.zeros_like(values) if form.state else None
    with torch.no_grad():
        form.encode(values, payload, state)
        do = partial(form.encode, values, payload, state) if way == "encode" else partial(form.decode, payload, values)
        seconds = _seconds(do, device)
    rate = (values.nbytes + payload.nbytes) / seconds
    beside = {"of a copy's": f"{rate / moved[0]:.0%}"} if moved else {}
    return "", {"GB/s": round(rate / 1e9, 1), **beside, "ms": round(1e3 * seconds, 3)}
