"""``deepspeed.runtime.zero.stage3``."""

from shardfold.compat.deepspeed.optimizer import DeepSpeedZeroOptimizer_Stage3
from shardfold.compat.deepspeed.zero.estimates import (
    estimate_zero3_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from shardfold.compat.deepspeed.zero.offload import unwrap_model_for_generation

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]
