"""TensorBoard files, written by PyTorch's own writer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.monitor.base import Event, Monitor, is_rank_0

__all__ = ["TensorBoardMonitor"]


class TensorBoardMonitor(Monitor):
    """Writes into ``output_path/job_name``."""

    def __init__(self, tensorboard_config: Any) -> None:
        super().__init__(tensorboard_config)
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name
        self.summary_writer: Any = None
        if self.enabled and is_rank_0():
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise DeepSpeedConfigError(
                    "tensorboard.enabled is true, but the package is missing: pip install tensorboard."
                ) from None
            self.summary_writer = SummaryWriter(log_dir=str(Path(self.output_path or "", self.job_name)))

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        if self.summary_writer is not None:
            for event in event_list:
                self.summary_writer.add_scalar(*event)
            if flush:
                self.flush()

    def flush(self) -> None:
        """Writes what is waiting."""
        if self.summary_writer is not None:
            self.summary_writer.flush()
