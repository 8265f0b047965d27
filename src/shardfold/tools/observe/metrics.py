"""Metrics: one JSON object per optimizer step, one per line, readable while the run goes on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["MetricsWriter", "StepMetrics"]


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What is known after one optimizer step."""

    step: int
    loss: float
    """Mean cross-entropy over the global batch, in nats."""
    bits_per_byte: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    """Over all ranks."""
    seconds: float
    """Since training began."""
    memory_bytes: int
    """Held by this rank for the model's state."""
    held_out_bits_per_byte: float | None = None
    """Where the held-out text was evaluated after this step."""
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
        # JSON has no nan or inf: a value that is not finite is written as null.
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(metrics).items()}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
