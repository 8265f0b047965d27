"""Lion."""

from shardfold.compat.deepspeed.ops.lion.cpu_lion import DeepSpeedCPULion
from shardfold.compat.deepspeed.ops.lion.fused_lion import FusedLion

__all__ = ["DeepSpeedCPULion", "FusedLion"]
