"""Metrics: one JSON object per optimizer step, one per line, readable while the run goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

from shardfold.comm.launcher_notes import refuse_without_lease

__all__ = ["MetricsWriter", "StepMetrics"]

OPTIONAL = ("bits_per_byte", "held_out_loss")  # of other recipes: the lines of those that lack them do not name them


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


class MetricsWriter:
    """Appends a line per step to a file."""

    def __init__(self, path: Path) -> None:
        # Line-buffered: who follows the file, or reads it after a crash, sees every finished step.
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, metrics: StepMetrics) -> None:
        """
        Raises:
            CollectiveError: this process was stopped or cut off, and others may have gone on with the run.
        """
        refuse_without_lease("a line of metrics")
        # JSON has no nan or inf: a value that is not finite is written as null.
        found = {**asdict(metrics), **metrics.figures}
        del found["figures"]
        absent = {name for name in OPTIONAL if found[name] is None}
        row = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in found.items()
            if name not in absent
        }
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
