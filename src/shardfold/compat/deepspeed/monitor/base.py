"""What every monitor is."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

__all__ = ["Event", "Monitor", "is_rank_0"]

Event = tuple[str, Any, int]
"""Name, value and the number of samples processed so far."""


class Monitor(ABC):
    """Takes events. Only rank 0 makes and calls one."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled = bool(monitor_config.enabled)

    @abstractmethod
    def write_events(self, event_list: Iterable[Event]) -> None:
        """Writes ``(name, value, samples)`` triples."""


def is_rank_0() -> bool:
    """Whether this is the rank that writes."""
    dist = sys.modules.get("torch.distributed")
    return not (dist is not None and dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0
