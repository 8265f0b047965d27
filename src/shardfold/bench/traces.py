"""One step under PyTorch's profiler, as plain events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["profiled"]


def profiled(step: Callable[[], object]) -> dict[str, Any]:
    """Runs ``step`` and gives its events: ``[name, thread, begin, end]``, in microseconds since the step began."""
    from torch.profiler import ProfilerActivity, profile, record_function

    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
        step()
    events = [[event.name, event.thread, event.time_range.start, event.time_range.end] for event in profiler.events()]
    (begin, end, thread) = next((b, e, t) for name, t, b, e in events if name == "step")
    inside = [[n, t, b - begin, e - begin] for n, t, b, e in events if n != "step" and b < end]
    return {"events": inside, "length": end - begin, "thread": thread}
