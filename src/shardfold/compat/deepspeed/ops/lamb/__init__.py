"""LAMB."""

from shardfold.compat.deepspeed.ops.lamb.fused_lamb import DeepSpeedCPULamb, FusedLamb

__all__ = ["DeepSpeedCPULamb", "FusedLamb"]
