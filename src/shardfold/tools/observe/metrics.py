"""Metrics: one JSON object per optimizer step, one per line, readable while the run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["StepMetrics"]

OPTIONAL = (
    "bits_per_byte",
    "held_out_loss",
    "straggler",
)  # of other recipes: the lines of those that lack them do not name them


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What is known after one optimizer step."""

    step: int
    loss: float
    """Mean over the global batch, of cross-entropy in nats, or of what else a recipe makes smaller."""
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    """Over all ranks."""
    seconds: float
    """Since training began."""
    memory_bytes: int
    """Held by this rank for the model's state."""
    bits_per_byte: float | None = None
    """Of text that is read byte by byte."""
    held_out_bits_per_byte: float | None = None
    """Where the held-out text was evaluated after this step."""
    held_out_loss: float | None = None
    """The same of rows."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What a recipe tells besides, such as the share of pairs that are ranked right; each is a key of its own."""
    mfu: float | None = None
    """Model FLOPs utilization of all devices in this step, without attention between tokens; None where what a device
    could do is not known."""
    loss_scale: float | None = None
    """What this step's losses were multiplied by, in fp16."""
    skipped: int = 0
    """Steps so far, this one included, that were left out because gradients overflowed."""
    straggler: str | None = None
    """What makes steps longer, a rank or a link, and by what factor."""

    def row(self) -> dict[str, Any]:
        """A line of ``metrics.jsonl``."""
        found = {**asdict(self), **self.figures}
        del found["figures"]
        return {name: value for name, value in found.items() if value is not None or name not in OPTIONAL}
