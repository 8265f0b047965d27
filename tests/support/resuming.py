"""Runs that are broken off and resumed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardfold as sf
from shardfold.optim import galore_groups, muon_groups, warmup_cosine
from tests.support.keeping import WIDTH, WORDS, Odd, Setting, adamw, batches, contents, mesh
from tests.support.options import grouped

STOCHASTIC = sf.Precision(compute="bf16", master="bf16", moments="bf16", rounding="stochastic")


class Wet(Odd):
    """With dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.append(nn.Dropout(0.2))  # pyright: ignore


class Plain(nn.Module):
    """Some optimizers take no parameters in fp64 or without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 29), nn.GELU(), nn.Linear(29, WIDTH)) for _ in "ab")
        self.unused = nn.Linear(5, 3)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())


class Case(NamedTuple):
    """An engine to be: its model, its optimizer by name, further arguments."""

    build: Callable[[], nn.Module]
    optimizer: str = "adamw"
    precision: Any = "fp32"
    options: tuple[tuple[str, Any], ...] = ()
    average: bool = False
    accumulate: int = 1

    def engine(self, setting: Setting, seed: int = 0) -> sf.Engine:
        torch.manual_seed(seed)
        model = self.build()
        torch.manual_seed(100 + seed + torch.distributed.get_rank() if torch.distributed.is_initialized() else seed)
        engine = sf.Engine(
            model,
            optimizer=OPTIMIZERS[self.optimizer](model),
            **grouped(layout=setting.layout, mesh=mesh(setting.layout, setting.ranks), **dict(self.options)),
            precision=self.precision,
            accumulate=self.accumulate,
        )
        if self.average:
            sf.Average(engine, 0.9, warmup=True)
        return engine


def _of(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **options)


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": adamw,
    "amsgrad": partial(adamw, amsgrad=True),
    "SGD": _of(torch.optim.SGD, lr=0.05, momentum=0.9, dampening=0.1),
    "RMSprop": _of(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda model: partial(torch.optim.Adagrad, lr=0.02),
    "NAdam": _of(torch.optim.NAdam, lr=1e-3),
    "LAMB": _of(sf.optim.LAMB, lr=1e-2),
    "Lion": _of(sf.optim.Lion, lr=1e-3),
    "Adafactor": _of(sf.optim.Adafactor, lr=1e-2),
    "AdamW8bit": _of(sf.optim.AdamW8bit, lr=1e-2, block=16, min_8bit_size=64),
    "GaLore": lambda model: sf.optim.GaLore(galore_groups(model, rank=4, update_proj_gap=4), lr=1e-2),
    "Muon": lambda model: sf.optim.Muon(muon_groups(model, lr=1e-2, adamw_lr=3e-3)),
}

GROWING = sf.LossScale(initial=2.0**16, interval=3)
CASES: dict[str, tuple[Case, Setting]] = {
    "dropout, schedule, clipping, accumulation": (
        Case(
            Wet, precision="bf16", average=True, accumulate=2,
            options=(("clip_norm", 0.5), ("lr_schedule", warmup_cosine(warmup=4, total=300))),
        ),
        Setting("zero3", 2),
    ),
    "fp16": (Case(Wet, precision="fp16", average=True, options=(("loss_scale", GROWING),)), Setting("zero2", 2)),
    "stochastic rounding": (Case(Wet, precision=STOCHASTIC), Setting("hpz", 2)),
    "GaLore": (Case(Plain, "GaLore"), Setting("zero3", 2)),
    "Muon": (Case(Plain, "Muon", average=True), Setting("zero1", 2)),
    "AdamW8bit": (Case(Plain, "AdamW8bit", precision="bf16"), Setting("fsdp2", 2)),
    "Adafactor": (Case(Plain, "Adafactor"), Setting("zero3", 2)),
    "LAMB": (Case(Plain, "LAMB"), Setting("hsdp", 2)),
    "Lion": (Case(Plain, "Lion"), Setting("zero2", 2)),
    "amsgrad": (Case(Odd, "amsgrad"), Setting("zero3", 2)),
    "SGD": (Case(Odd, "SGD"), Setting("ddp", 2)),
    "RMSprop": (Case(Odd, "RMSprop", precision="bf16"), Setting("zero1", 2)),
    "Adagrad": (Case(Odd, "Adagrad"), Setting("zero3", 2)),
    "NAdam": (Case(Odd, "NAdam"), Setting("zero2", 2)),
}  # fmt: skip


class Ended(NamedTuple):
    """How a run ended: the losses of rank 0's steps, and everything that has values."""

    losses: list[float]
    contents: dict[str, Any]
    skipped: list[bool]
    scales: list[float]


def drive(engine: sf.Engine, steps: int) -> Ended:
    """Steps, each with data of its own, wherever the run stands."""
    losses: list[float] = []
    skipped: list[bool] = []
    scales: list[float] = []
    done = engine.steps + (engine.loss_scale.skipped if engine.loss_scale is not None else 0)
    for step in range(done, done + steps):
        total = 0.0
        for micro in range(engine.accumulate):
            (batch,) = batches(1, seed=2 * step + micro)
            loss = engine(*(t.chunk(engine.world_size)[engine.rank] for t in batch))
            engine.backward(loss)
            report = engine.step()
            total += loss.item() / engine.accumulate
        losses.append(engine.mean(total))
        skipped.append(report.skipped)
        scales.append(report.loss_scale)
    found = contents(engine)
    for number, average in enumerate(engine.sharded.run.averages):
        found[f"average {number}"] = average.state_dict()
    return Ended(losses, found, skipped, scales)


def unbroken(name: str, folder: str, steps: int) -> Ended:
    """Half of the steps, a save in the background, the other half."""
    case, setting = CASES[name]
    engine = case.engine(setting)
    before = drive(engine, steps // 2)
    engine.save(f"{folder}/{name}", latest=False)  # beside those of other engines
    after = drive(engine, steps - steps // 2)
    engine.close()
    return after._replace(skipped=before.skipped + after.skipped, scales=before.scales + after.scales)


def resumed(name: str, folder: str, steps: int, setting: Setting | None = None) -> Ended:
    """The other half, by a process that knows nothing of the first."""
    case, usual = CASES[name]
    engine = case.engine(setting or usual, seed=9)
    engine.load(f"{folder}/{name}")
    ended = drive(engine, steps - steps // 2)
    engine.close()
    return ended


def many_unbroken(names: list[str], folder: str, steps: int) -> dict[str, Ended]:
    return {name: unbroken(name, folder, steps) for name in names}


def many_resumed(names: list[str], folder: str, steps: int, setting: Setting | None = None) -> dict[str, Ended]:
    return {name: resumed(name, folder, steps, setting) for name in names}
