"""``deepspeed.runtime.zero.config``: the stages by name, and the section ``zero_optimization`` as an object."""

from enum import IntEnum
from typing import Any

from shardfold.compat.deepspeed.config_models import DeepSpeedZeroConfig
from shardfold.compat.deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    OffloadDeviceEnum,
)

__all__ = [
    "ZERO_OPTIMIZATION",
    "DeepSpeedZeroConfig",
    "DeepSpeedZeroOffloadOptimizerConfig",
    "DeepSpeedZeroOffloadParamConfig",
    "OffloadDeviceEnum",
    "ZeroStageEnum",
    "get_zero_config",
]

ZERO_OPTIMIZATION = "zero_optimization"


class ZeroStageEnum(IntEnum):
    """What is split: nothing, the optimizer's states, gradients too, parameters too."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


def get_zero_config(param_dict: dict[str, Any]) -> DeepSpeedZeroConfig:
    """That section of a whole config; ``true`` is stage 1."""
    said = param_dict.get(ZERO_OPTIMIZATION, {})
    return DeepSpeedZeroConfig(**(said if isinstance(said, dict) else {"stage": int(said)}))
