"""``deepspeed.runtime.zero.parameter_offload``."""

from shardfold.compat.deepspeed.zero.offload import DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
