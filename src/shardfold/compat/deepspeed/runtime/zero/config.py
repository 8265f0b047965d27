"""``deepspeed.runtime.zero.config``: the stages by name. Configs are read by ``shardfold.compat.deepspeed.config``."""

from enum import IntEnum

from shardfold.compat.deepspeed.config_models import DeepSpeedZeroConfig
from shardfold.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

__all__ = ["DeepSpeedZeroConfig", "OffloadDeviceEnum", "ZeroStageEnum"]


class ZeroStageEnum(IntEnum):
    """What is split: nothing, the optimizer's states, gradients too, parameters too."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
