"""``deepspeed.runtime.zero.stage_1_and_2``."""

from shardfold.compat.deepspeed.optimizer import DeepSpeedZeroOptimizer
from shardfold.compat.deepspeed.zero.estimates import (
    estimate_zero2_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "DeepSpeedZeroOptimizer",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
