"""``deepspeed.zero``: models built split, whole parameters for a while, and what a split parameter tells of itself."""

from shardfold.compat.deepspeed.runtime.zero.linear import MemoryEfficientLinear
from shardfold.compat.deepspeed.zero.external import register_external_parameter, unregister_external_parameter
from shardfold.compat.deepspeed.zero.gathered import GatheredParameters
from shardfold.compat.deepspeed.zero.init import Init
from shardfold.compat.deepspeed.zero.offload import (
    DeepSpeedZeRoOffload,
    note_parameters,
    unwrap_model_for_generation,
)
from shardfold.compat.deepspeed.zero.status import DeepSpeedTensorOverride, ZeroParamStatus, ZeroParamType
from shardfold.compat.deepspeed.zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "DeepSpeedTensorOverride",
    "DeepSpeedZeRoOffload",
    "GatheredParameters",
    "Init",
    "MemoryEfficientLinear",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "note_parameters",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]
