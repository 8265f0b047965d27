"""``deepspeed.runtime.fp16.unfused_optimizer``: what ``isinstance`` is asked about a returned optimizer."""

from shardfold.compat.deepspeed.optimizer import FP16_UnfusedOptimizer

__all__ = ["FP16_UnfusedOptimizer"]
