"""Bytes at rest and at the peak of a step: what the engine says, beside what the device's allocator counted."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold import accelerator
from shardfold.plan.checks import human
from shardfold.plan.lifetimes import Behaviour, peak_bytes
from tests.support.gpu.ranks import Field, Here, how_many
from tests.support.gpu.section import Asked, Notes, Outcome
from tests.support.gpu.setting import Setting, rank_settings
from tests.support.gpu.watched import reserved_peak
from tests.support.options import grouped

__all__ = ["CASES", "Measured", "Size", "difference", "run"]

NEAR = 0.03  # of what is measured: the promise
ROUNDED = 512  # bytes to which an allocator rounds a tensor, at most so many per tensor
STEPS = 3
NEEDS = 6.0  # seconds that a case is begun with

#: Layout, precision, least ranks.
CASES = (
    ("ddp", "fp32", 1), ("zero1", "fp32", 1), ("zero2", "fp32", 1), ("zero3", "fp32", 1), ("ddp", "bf16", 1),
    ("zero1", "bf16", 1), ("zero2", "bf16", 1), ("zero3", "bf16", 1), ("fsdp2", "bf16", 1), ("hpz", "bf16", 4),
    ("hsdp", "bf16", 4),
)  # fmt: skip


class Size(NamedTuple):
    """Of the model, and how many rows a batch has: so few that activations weigh next to nothing."""

    width: int
    layers: int
    rows: int


REAL, REHEARSED = Size(1536, 8, 8), Size(256, 8, 1)


class Block(nn.Module):
    """Four square matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layers(x))


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x).float().square().mean()


class Measured(NamedTuple):
    """Of one rank, in bytes above what was there before: predicted and counted. ``reserved`` is what the process took
    from the device at most, all in all."""

    rest: float
    rest_found: int
    peak: float
    peak_found: int
    reserved: int | None
    tensors: int


def run(asked: Asked, notes: Notes) -> None:
    if asked.device == "cpu":
        notes.not_run("all cases", "nobody counts the tensors of the CPU: benchmarks/peak.py reads its resident set")
        return
    size = REHEARSED if asked.small else REAL
    settings = rank_settings(asked.device, asked.ranks, how_many(asked.device))
    with Field(asked.device, notes.clock) as field:
        for layout, precision, ranks in CASES:
            for setting in settings:
                name = f"{layout}, {precision} ({setting})"
                if setting.ranks < ranks:
                    notes.not_run(name, f"needs {ranks} ranks")
                    continue
                notes.attempt(
                    name, lambda at=setting, a=layout, b=precision: _compared(field, at, a, b, size), needs=NEEDS
                )


def _compared(field: Field, setting: Setting, layout: str, precision: str, size: Size) -> tuple[str, dict[str, Any]]:
    answers = [Measured(*each) for each in field.run(setting, _measured, layout, precision, size)]
    most = max(answers, key=lambda each: each.peak_found)
    rest, peak = difference(most.rest, most.rest_found), difference(most.peak, most.peak_found)
    figures: dict[str, Any] = {
        "at rest": human(most.rest_found), "predicted": human(most.rest), "peak": human(most.peak_found),
        "peak predicted": human(most.peak), "off": f"{peak:+.1%}",
    }  # fmt: skip
    if most.reserved is not None:
        figures["reserved"] = human(most.reserved)
    slack = most.tensors * ROUNDED
    if abs(most.rest - most.rest_found) > NEAR * most.rest_found + slack:
        raise Outcome(f"what rests is predicted {rest:+.1%} off, beyond {NEAR:.0%}", **figures)
    if abs(most.peak - most.peak_found) > NEAR * most.peak_found + slack:
        raise Outcome(f"the peak is predicted {peak:+.1%} off, beyond {NEAR:.0%}", **figures)
    return "", figures


def difference(predicted: float, found: float) -> float:
    """How far off, relative to what was found."""
    return (predicted - found) / found if found else float("inf")


def _measured(here: Here, layout: str, precision: str, size: Size) -> Measured:
    _trained(here, layout, precision, Size(64, 2, size.rows)).close()  # libraries take memory when they first run
    gc.collect()
    accelerator.synchronize(here.device)
    accelerator.give_back(here.device)
    before = accelerator.allocated(here.device) or 0
    accelerator.reset_peak(here.device)
    engine = _trained(here, layout, precision, size)
    try:
        accelerator.synchronize(here.device)
        peak = (accelerator.peak(here.device) or 0) - before
        gc.collect()
        held = engine.memory().held
        found = (accelerator.allocated(here.device) or 0) - before
        behaviour = Behaviour(streams=True, transport=engine.sharded.comm.transport.kind)
        bound = peak_bytes(engine._runner.orders.bound, behaviour, rest=held)
        tensors = 4 * sum(len(unit.segments) for unit in engine.units)
        return Measured(held, found, bound, peak, reserved_peak(here.device), tensors)
    finally:
        engine.close()


def _trained(here: Here, layout: str, precision: str, size: Size) -> sf.Engine:
    """An engine behind a few steps; of it alone is what is allocated then."""
    mesh = {"mesh": {"intra": 2}} if layout in ("hpz", "hsdp") else {}
    with sf.meta_init():
        model = Model(size)
    engine = sf.Engine(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        **grouped(layout=layout, units=["blocks.*"], device=here.device, **mesh),
        precision=precision,
    )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.randn(size.rows, size.width, dtype=dtype).to(here.device)
    for _ in range(STEPS):
        engine.backward(engine(x))
        engine.step()
    return engine
