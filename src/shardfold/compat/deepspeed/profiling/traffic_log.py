"""What ``comms_logger`` shows of an engine: calls and bytes of each kind of collective, from the engine's own count."""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.utils.comms_logging import comms_logger
from shardfold.plan.checks import human
from shardfold.plan.report import TrafficReport

__all__ = ["TrafficLog"]


class TrafficLog:
    """Sums what steps have sent.

    Args:
        settings: its ``comms_logger`` says which operations, and whether each step is told.

    Attributes:
        sent: of each operation, by the bytes of one call: ``[calls, bytes]``.
    """

    def __init__(self, settings: Any) -> None:
        self.enabled: bool = settings["comms_logger.enabled"]
        self.verbose: bool = settings["comms_logger.verbose"]
        self._all: bool = settings["comms_logger.prof_all"]
        self._ops = {op.lower().replace("_", "") for op in settings["comms_logger.prof_ops"]}
        self.sent: dict[str, dict[int, list[int]]] = {}
        if self.enabled:
            comms_logger.engines.add(self)

    def add(self, report: TrafficReport) -> str:
        """Takes a step's traffic; what there is to say of it, one line for each kind of collective."""
        lines: list[str] = []
        for row in report.rows:
            name = row.op.lower()
            if not row.calls or not (self._all or name.replace("_", "") in self._ops):
                continue
            entry = self.sent.setdefault(name, {}).setdefault(row.sent // row.calls, [0, 0])
            entry[0] += row.calls
            entry[1] += row.sent
            axes = "+".join(row.axes)
            lines.append(f"comm op: {name} ({row.purpose}, {axes}) | calls: {row.calls} | sent: {human(row.sent)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        lines = [f"{'operation':<20}{'size of a call':>16}{'calls':>10}{'sent':>14}"]
        for name, sizes in sorted(self.sent.items()):
            for size, (calls, sent) in sorted(sizes.items()):
                lines.append(f"{name:<20}{human(size):>16}{calls:>10}{human(sent):>14}")
        return "\n".join(lines)
