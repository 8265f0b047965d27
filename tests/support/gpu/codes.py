"""Formats on the device: the payload and the values it stands for are those of the CPU, to the bit; a scale that is a
sum differs by its rounding."""

from __future__ import annotations

import time
from typing import Any

import torch

from shardfold import accelerator
from shardfold.comm.mesh import pick_device
from shardfold.plan.formats import FORMATS
from tests.support.gpu.section import Asked, Notes, Outcome
from tests.support.gpu.setting import SIM

__all__ = ["run"]

NAMES = (
    "bf16", "int8/256", "int8/256:zero", "int8/256:stochastic", "int4/256", "int4/256:zero", "int4/128:error",
    "fp8/256", "int8/128:error", "sign/1024:error",
)  # fmt: skip
SUMMED = 1e-6
"""How far values may be off, relative to the largest, where a scale is a sum of a block."""
LENGTHS = {True: 1 << 14, False: 1 << 24}  # elements; True: of a rehearsal
ROUNDS = 5


def run(asked: Asked, notes: Notes) -> None:
    if asked.device in ("cpu", SIM):
        notes.not_run("all formats", "the processor is compared with itself")
        return
    device = pick_device(asked.device)
    for name in NAMES:
        notes.attempt(name, lambda of=name: _compared(of, device, LENGTHS[asked.small]), needs=2.0)


def _compared(name: str, device: torch.device, length: int) -> tuple[str, dict[str, Any]]:
    form = FORMATS[name]
    values = torch.randn(1, length, generator=torch.Generator().manual_seed(0))
    values[0, :1024] = 0.0
    there = values.to(device)
    here_codes, here = _there_and_back(form, values)
    codes, back = _there_and_back(form, there)
    accelerator.synchronize(device)
    begun = time.perf_counter()
    for _ in range(ROUNDS):
        _there_and_back(form, there)
    accelerator.synchronize(device)
    seconds = (time.perf_counter() - begun) / ROUNDS
    figures = {"GB/s there and back": round(4 * length / seconds / 1e9, 1), "bytes": codes.numel() / length}
    if name.startswith("sign"):
        off = ((back.cpu() - here).abs().max() / here.abs().max()).item()
        if off > SUMMED:
            raise Outcome(f"values differ by {off:.1e}, beyond {SUMMED}", **figures)
        return "", figures
    if not torch.equal(codes.cpu(), here_codes):
        off = int((codes.cpu() != here_codes).sum())
        raise Outcome(f"{off} of {codes.numel()} bytes of the payload differ", **figures)
    if not torch.equal(back.cpu(), here):
        raise Outcome(f"values differ by {(back.cpu() - here).abs().max().item():.1e}", **figures)
    return "", figures


def _there_and_back(form: Any, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    payload = torch.empty(1, form.nbytes(values.shape[1]), dtype=torch.uint8, device=values.device)
    state = torch.zeros_like(values) if form.state else None
    back = torch.empty_like(values)
    with torch.no_grad():
        form.encode(values, payload, state)
        form.decode(payload, back)
    return payload, back
