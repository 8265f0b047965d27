"""The simulated caching allocator beside the device's own: the same requests, and the bytes taken from the device."""

from __future__ import annotations

import json
import os
from typing import Any

from shardfold.plan.checks import human
from tests.support.gpu.recorded import LOOPS, Trace, record_all, replayed
from tests.support.gpu.section import Asked, Notes, Outcome

__all__ = ["compared", "run"]

NEEDS = 20.0  # seconds that the loops are begun with
KEPT = "SHARDFOLD_TRACES"  # variable: a file for the traces


def run(asked: Asked, notes: Notes) -> None:
    if asked.device != "cuda":
        notes.not_run("all loops", "PyTorch records the requests of CUDA's allocator only")
        return
    traces: dict[str, Trace] = {}

    def recorded() -> tuple[str, dict[str, Any]]:
        traces.update(record_all(asked.device))
        if kept := os.environ.get(KEPT):
            with open(kept, "w", encoding="utf-8") as file:
                json.dump(traces, file, separators=(",", ":"))
        return f"{sum(map(len, traces.values())):,} events", {}

    notes.attempt("requests are recorded", recorded, needs=NEEDS)
    for name in traces:
        notes.attempt(name, lambda of=name: compared(traces[of], expandable=LOOPS[of][2]))


def compared(trace: Trace, *, expandable: bool) -> tuple[str, dict[str, Any]]:
    """Behind every event as many bytes are taken from the device as there were.

    Raises:
        Outcome: at one event others are.
    """
    found, real = replayed(trace, expandable=expandable), [reserved for _, reserved in trace]
    figures = {"events": len(trace), "reserved": human(max(real)), "simulated": human(max(found))}
    for number, (mine, theirs) in enumerate(zip(found, real, strict=True)):
        if mine != theirs:
            size = trace[number][0]
            what = f"event {number} of {len(trace)}, " + (f"request {-size} freed" if size < 0 else f"{size:,} bytes")
            raise Outcome(f"{what}: {theirs:,} bytes are reserved and {mine:,} simulated", **figures)
    return "", figures
