"""Layouts, dtypes, tiers, axes and orders that meet: a table in which every two of them do.

What one of them does alone has tests of its own, most of them under `zero3`. Faults hide where two meet, so each pair
of values of two columns stands in a row, as far as the engine takes the two together.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import shardfold as sf
from shardfold.tools.recipes.gpt import GPT, GPTConfig
from tests.parallel.models import ADAM, VOCAB
from tests.pipeline.training import batches
from tests.support.options import grouped

__all__ = ["COLUMNS", "ROWS", "Row", "train"]

LAYOUTS = tuple(sf.PRESETS)
# By which a model trains, and how near its losses are to those of fp64: what products are rounded to, a few times.
PRECISIONS = {"fp64": 1e-11, "fp32": 1e-5, "bf16": 2**-6, "fp16": 2**-9}
TIERS: dict[str, Any] = {"": None, "host": "host", "disk": {"optimizer": "disk", "grads": "host"}}
AXES: dict[str, dict[str, Any]] = {
    "": {},
    "tensor": {"tensor": "auto"},
    "sequence": {"attention": "ulysses"},
    "pipeline": {"pipeline": "1f1b"},
    "expert": {},
}
ORDERS: dict[str, sf.Overlap | None] = {
    "": None,
    "any": sf.Overlap(order="any"),
    "far": sf.Overlap(prefetch=3, reduces_in_flight=1),
    "once": sf.Overlap(reduce_once=True),
    "thread": sf.Overlap(update_thread=True),
}
COLUMNS = dict(
    layout=LAYOUTS, precision=tuple(PRECISIONS), tier=tuple(TIERS), axis=tuple(AXES), order=tuple(ORDERS)
)  # fmt: skip
PARTS, STEPS, LIMIT = 4, 2, 0.1


@dataclass(frozen=True)
class Row:
    """One value of each column; an empty one: as it is where nothing is said."""

    layout: str
    precision: str
    tier: str = ""
    axis: str = ""
    order: str = ""

    @property
    def mesh(self) -> dict[str, int]:
        """Two ranks of data, in nodes of their own where the layout tells nodes apart, and two along the axis."""
        nodes = self.layout in ("hsdp", "hpz")
        return {"inter" if nodes else "intra": 2} | ({self.axis: 2} if self.axis else {"intra": 2} if nodes else {})

    @property
    def ranks(self) -> int:
        return 2 if len(self.mesh) == 1 else 4

    def __str__(self) -> str:
        return "-".join(filter(None, (self.layout, self.precision, self.tier, self.axis, self.order)))


ROWS = [
    Row("ddp", "bf16", "host", "pipeline", "thread"),
    Row("ddp", "fp16", "disk", "expert", "far"),
    Row("ddp", "fp32", "", "tensor", "any"),
    Row("ddp", "fp64", "host", "", ""),
    Row("ddp", "fp64", "", "sequence", "once"),
    Row("zero1", "bf16", "disk", "tensor", "far"),
    Row("zero1", "fp16", "", "", ""),
    Row("zero1", "fp32", "host", "pipeline", "thread"),
    Row("zero1", "fp64", "", "expert", "any"),
    Row("zero1", "fp64", "disk", "sequence", "once"),
    Row("zero2", "bf16", "disk", "expert", "any"),
    Row("zero2", "bf16", "", "sequence", "far"),
    Row("zero2", "fp16", "disk", "pipeline", ""),
    Row("zero2", "fp16", "disk", "sequence", "far"),
    Row("zero2", "fp32", "host", "tensor", "thread"),
    Row("zero2", "fp64", "host", "", "once"),
    Row("zero3", "bf16", "disk", "expert", "once"),
    Row("zero3", "fp16", "", "", "any"),
    Row("zero3", "fp32", "host", "sequence", ""),
    Row("zero3", "fp32", "disk", "tensor", "thread"),
    Row("zero3", "fp64", "disk", "pipeline", "far"),
    Row("fsdp2", "bf16", "disk", "tensor", ""),
    Row("fsdp2", "fp16", "", "", "thread"),
    Row("fsdp2", "fp32", "host", "pipeline", "far"),
    Row("fsdp2", "fp32", "host", "sequence", "once"),
    Row("fsdp2", "fp64", "host", "expert", "any"),
    Row("hsdp", "bf16", "disk", "sequence", "any"),
    Row("hsdp", "fp16", "host", "expert", "far"),
    Row("hsdp", "fp16", "", "pipeline", "once"),
    Row("hsdp", "fp32", "", "", ""),
    Row("hsdp", "fp64", "host", "tensor", "thread"),
    Row("hpz", "bf16", "disk", "", "any"),
    Row("hpz", "fp16", "host", "pipeline", "thread"),
    Row("hpz", "fp32", "host", "tensor", "far"),
    Row("hpz", "fp64", "", "expert", ""),
    Row("hpz", "fp64", "disk", "sequence", "once"),
    Row("offload", "bf16", "disk", "tensor", "once"),
    Row("offload", "fp16", "host", "expert", "any"),
    Row("offload", "fp16", "disk", "pipeline", ""),
    Row("offload", "fp32", "", "", "far"),
    Row("offload", "fp64", "host", "sequence", "thread"),
    Row("infinity", "bf16", "", "sequence", "once"),
    Row("infinity", "fp16", "host", "tensor", "far"),
    Row("infinity", "fp32", "", "", ""),
    Row("infinity", "fp32", "disk", "expert", "thread"),
    Row("infinity", "fp64", "", "pipeline", "any"),
]


def _model(routed: bool) -> GPT:
    """With experts where they are split: without a loss of their balance, which is of what is computed at once."""
    torch.manual_seed(0)
    experts = {"experts": 4, "balance": 0.0} if routed else {}
    model = GPT(GPTConfig(layers=2, d_model=16, heads=4, d_ff=24, context=12, vocab=VOCAB, **experts)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype), alpha=0.05)
    return model


@cache
def _plain(routed: bool) -> list[float]:
    """Losses of one process in fp64."""
    model, losses = _model(routed), list[float]()
    optimizer = ADAM(model.parameters())
    for batch in batches(PARTS, STEPS):
        loss = model(*batch)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _compute(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return model(**sf.sequence_shard({"tokens": tokens, "targets": targets}))


def _engine(row: Row) -> sf.Engine:
    model, readers = (
        _model(row.axis == "expert"),
        4 if row.axis == "expert" or (len(row.mesh) == 2 and not row.axis) else 2,
    )
    return sf.Engine(
        model if row.precision == "fp64" else model.float(),
        optimizer=ADAM,
        **grouped(layout=row.layout, mesh=row.mesh, clip_norm=LIMIT, **AXES[row.axis]),
        precision="fp32" if row.precision == "fp64" else row.precision,
        offload=TIERS[row.tier],
        loss_scale=256.0 if row.precision == "fp16" else None,  # one that overflows in no step
        overlap=ORDERS[row.order],
        accumulate=PARTS // readers,
    )


def train(rows: list[Row]) -> list[str]:
    """On each rank: which rows do not train as plain PyTorch."""
    wrong: list[str] = []
    for row in rows:
        engine, near = _engine(row), PRECISIONS[row.precision]
        for batch, expected in zip(batches(PARTS, STEPS), _plain(row.axis == "expert"), strict=True):
            mine = tuple(t.chunk(engine.data_ranks)[engine.data_rank] for t in batch)
            loss = engine.mean(engine.train_batch(mine, _compute if engine.sequence is not None else None).item())
            engine.step()
            if not abs(loss - expected) <= near * expected:
                wrong.append(f"{row}: a loss of {loss} for {expected}")
        engine.close()
    return wrong
