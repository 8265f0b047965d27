"""What the figures of a run come to: its last loss and the mean of late ones, what was held out, how fast it goes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from shardfold.tools.observe.run_files import opened
from shardfold.tools.observe.run_status import RunStatus

__all__ = ["RunFigures"]

MEAN = 32
"""Steps of which the mean loss is told: that of one step says more of its rows than of the model."""
FAR = 2**20  # bytes from the end in which a held-out figure is looked for
LINE = 16 * 1024  # bytes in which a whole line is
HELD_OUT = re.compile(rb'"held_out_(?:loss|bits_per_byte)":\s*[-\d]')


@dataclass(frozen=True)
class RunFigures:
    """Of a run, as far as it is.

    Attributes:
        last: of the last step, by name.
        mean: of the losses of the last ``MEAN`` steps; None: there are none.
        held_out: ``{"figure": "loss" or "bits_per_byte", "value", "step"}``, the last one; None: there is none yet.
        pace: seconds of a step, by the later half of the run, evaluations and saving included; None: not known.
        size: bytes of the file that this was read from.
    """

    last: Mapping[str, Any]
    mean: float | None = None
    held_out: Mapping[str, Any] | None = None
    pace: float | None = None
    size: int = 0

    @classmethod
    def of(cls, status: RunStatus, before: RunFigures | None = None) -> RunFigures:
        """Read what the folder says.

        Args:
            before: what was read of the same file when it was shorter: no held-out figure is looked for in it again.
        """
        rows = status.last_rows(MEAN)
        last = rows[0] if rows else {}
        key = next((key for key in last if key.rpartition("/")[2] == "loss"), "loss")  # TensorBoard's train/loss
        losses = [row[key] for row in rows if is_finite(row.get(key))]
        mean = sum(losses) / len(losses) if losses else None
        last = {**last, "loss": last.get("loss", last.get(key))}
        with opened(status.folder / "metrics.jsonl") as file, suppress(OSError):
            if file is not None:
                size = os.fstat(file).st_size
                known = before if before is not None and before.size <= size else None
                found = _held_out(file, max(0, size - FAR, known.size - LINE if known is not None else 0), size)
                return cls(last, mean, found or (known and known.held_out), _pace(file, size, last), size)
        return cls(last, mean)


def _held_out(file: int, begin: int, end: int) -> dict[str, Any] | None:
    """The last one between two places."""
    piece = os.pread(file, end - begin, begin)
    for match in reversed(list(HELD_OUT.finditer(piece))):
        start = piece.rfind(b"\n", 0, match.start()) + 1
        row = _row(piece[start : piece.find(b"\n", match.end())])
        for figure in ("bits_per_byte", "loss"):
            if is_finite(value := row.get(f"held_out_{figure}")):
                return {"figure": figure, "value": value, "step": row.get("step")}
    return None


def _pace(file: int, size: int, last: Mapping[str, Any]) -> float | None:
    step: Any = last.get("step")
    seconds: Any = last.get("seconds")
    if not (is_finite(step) and is_finite(seconds) and step > 0):
        return None
    # A row of the middle; where there is none of this attempt, the first, as a run that goes on begins at another step.
    for place in (size // 2, 0):
        piece = os.pread(file, LINE, place)
        start = piece.find(b"\n") + 1 if place else 0
        row = _row(piece[start : piece.find(b"\n", start)])
        begun: Any = row.get("step")
        before: Any = row.get("seconds")
        if is_finite(begun) and is_finite(before) and 0 < begun < step and 0 <= before < seconds:
            return (seconds - before) / (step - begun)
    return seconds / step


def _row(line: bytes) -> dict[str, Any]:
    """Empty where it is no object."""
    with suppress(ValueError, RecursionError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return {}


def is_finite(value: Any) -> bool:
    """Whether it is a number that JSON has."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and abs(value) < 1e300
    )
