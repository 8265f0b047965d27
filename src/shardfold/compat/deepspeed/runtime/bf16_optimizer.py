"""``deepspeed.runtime.bf16_optimizer``: what ``isinstance`` is asked about a returned optimizer."""

from shardfold.compat.deepspeed.optimizer import BF16_Optimizer

__all__ = ["BF16_Optimizer"]
