"""The engine, where DeepSpeed has it."""

from shardfold.compat.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
