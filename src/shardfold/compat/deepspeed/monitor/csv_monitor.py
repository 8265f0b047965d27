"""One CSV file per quantity, with the columns ``step`` and the last part of its name."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardfold.compat.deepspeed.monitor.base import Event, Monitor, is_rank_0

__all__ = ["csvMonitor"]


class csvMonitor(Monitor):
    """Writes ``output_path/job_name/Train_Samples_lr.csv`` for ``Train/Samples/lr``, and so on; a run that goes on
    appends."""

    def __init__(self, csv_config: Any) -> None:
        super().__init__(csv_config)
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.log_dir = str(Path(self.output_path or "", self.job_name))
        self.filenames: list[str] = []
        if self.enabled and is_rank_0():
            Path(self.log_dir).mkdir(parents=True, exist_ok=True)

    def write_events(self, event_list: Iterable[Event]) -> None:
        if not self.enabled or not is_rank_0():
            return
        for name, value, samples in ((event[0], event[1], event[2]) for event in event_list):
            filename = name.replace("/", "_").replace(" ", "_")
            with open(Path(self.log_dir, f"{filename}.csv"), "a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if filename not in self.filenames:
                    self.filenames.append(filename)
                    writer.writerow(["step", name.rpartition("/")[2]])
                writer.writerow([samples, float(value) if hasattr(value, "item") else value])
