"""Sections of a config by the class names that DeepSpeed documents: ``DeepSpeedZeroConfig(stage=3)``.

Each takes its section's keys as keywords, checks them as a whole config is checked, and answers every key of it.
"""

from __future__ import annotations

from typing import Any, ClassVar

from shardfold.compat.deepspeed.config_read import read
from shardfold.compat.deepspeed.config_view import CommsConfig, MonitorConfig, Section

__all__ = [
    "CSVConfig",
    "CometConfig",
    "CommsLoggerConfig",
    "DeepSpeedActivationCheckpointingConfig",
    "DeepSpeedBF16Config",
    "DeepSpeedCommsConfig",
    "DeepSpeedFP16Config",
    "DeepSpeedFlopsProfilerConfig",
    "DeepSpeedMonitorConfig",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "TensorBoardConfig",
    "WandbConfig",
]


class _Keys(Section):
    """A section of its own.

    Raises:
        DeepSpeedConfigError: a key is unknown, or its value is not legal.
    """

    place: ClassVar[str]

    def __init__(self, **data: Any) -> None:
        config: dict[str, Any] = data
        for name in reversed(self.place.split(".")):
            config = {name: config}
        super().__init__(read(config, early=True), self.place)


class DeepSpeedZeroConfig(_Keys):
    """``zero_optimization``."""

    place = "zero_optimization"


class DeepSpeedZeroOffloadParamConfig(_Keys):
    """``zero_optimization.offload_param``."""

    place = "zero_optimization.offload_param"


class DeepSpeedZeroOffloadOptimizerConfig(_Keys):
    """``zero_optimization.offload_optimizer``."""

    place = "zero_optimization.offload_optimizer"


class DeepSpeedFP16Config(_Keys):
    """``fp16``."""

    place = "fp16"


class DeepSpeedBF16Config(_Keys):
    """``bf16``."""

    place = "bf16"


class DeepSpeedFlopsProfilerConfig(_Keys):
    """``flops_profiler``."""

    place = "flops_profiler"


class CommsLoggerConfig(_Keys):
    """``comms_logger``."""

    place = "comms_logger"


class TensorBoardConfig(_Keys):
    """``tensorboard``."""

    place = "tensorboard"


class WandbConfig(_Keys):
    """``wandb``."""

    place = "wandb"


class CSVConfig(_Keys):
    """``csv_monitor``."""

    place = "csv_monitor"


class CometConfig(_Keys):
    """``comet``."""

    place = "comet"


class DeepSpeedMonitorConfig(MonitorConfig):
    """The sections of all monitors, each a keyword; ``enabled``: at least one is."""

    def __init__(self, **sections: Any) -> None:
        super().__init__(read(sections, early=True))


class DeepSpeedCommsConfig(CommsConfig):
    """``comms_logger`` of a whole config."""

    def __init__(self, ds_config: dict[str, Any]) -> None:
        super().__init__(read(ds_config, early=True))


class DeepSpeedActivationCheckpointingConfig(Section):
    """``activation_checkpointing`` of a whole config."""

    def __init__(self, param_dict: dict[str, Any]) -> None:
        super().__init__(read(param_dict, early=True), "activation_checkpointing")
