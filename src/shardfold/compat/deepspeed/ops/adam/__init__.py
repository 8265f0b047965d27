"""Adam and AdamW."""

from shardfold.compat.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from shardfold.compat.deepspeed.ops.adam.fused_adam import FusedAdam

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]
