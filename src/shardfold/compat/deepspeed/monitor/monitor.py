"""All monitors that a config enables, as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardfold.compat.deepspeed.config_view import MonitorConfig
from shardfold.compat.deepspeed.monitor.base import Event, Monitor, is_rank_0
from shardfold.compat.deepspeed.monitor.comet import CometMonitor
from shardfold.compat.deepspeed.monitor.csv_monitor import csvMonitor
from shardfold.compat.deepspeed.monitor.tensorboard import TensorBoardMonitor
from shardfold.compat.deepspeed.monitor.wandb import WandbMonitor

__all__ = ["Monitor", "MonitorMaster"]


class MonitorMaster(Monitor):
    """Passes events to each monitor that is enabled; on other ranks than 0 it does nothing.

    Args:
        monitor_config: the ``monitor_config`` of a DeepSpeedConfig, or Settings.

    Raises:
        DeepSpeedConfigError: a monitor is enabled whose package is not installed.
    """

    def __init__(self, monitor_config: Any) -> None:
        super().__init__(monitor_config if hasattr(monitor_config, "enabled") else MonitorConfig(monitor_config))
        self.tb_monitor = self.wandb_monitor = self.csv_monitor = self.comet_monitor = None
        if is_rank_0():
            config = self.monitor_config
            self.tb_monitor = TensorBoardMonitor(config.tensorboard) if config.tensorboard.enabled else None
            self.wandb_monitor = WandbMonitor(config.wandb) if config.wandb.enabled else None
            self.csv_monitor = csvMonitor(config.csv_monitor) if config.csv_monitor.enabled else None
            self.comet_monitor = CometMonitor(config.comet) if config.comet.enabled else None

    def write_events(self, event_list: Iterable[Event]) -> None:
        events = list(event_list)
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor, self.comet_monitor):
            if monitor is not None:
                monitor.write_events(events)
