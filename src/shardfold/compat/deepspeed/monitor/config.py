"""The sections of the monitors."""

from __future__ import annotations

from typing import Any

from shardfold.compat.deepspeed.config_models import (
    CometConfig,
    CSVConfig,
    DeepSpeedMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from shardfold.compat.deepspeed.config_read import read
from shardfold.compat.deepspeed.config_view import MONITORS, MonitorConfig

__all__ = [
    "CSVConfig",
    "CometConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]


def get_monitor_config(param_dict: dict[str, Any]) -> MonitorConfig:
    """The sections ``tensorboard``, ``wandb``, ``csv_monitor`` and ``comet`` of a config.

    Raises:
        DeepSpeedConfigError: a key of theirs is unknown or of the wrong type.
    """
    return MonitorConfig(read({name: param_dict[name] for name in MONITORS if name in param_dict}, early=True))
