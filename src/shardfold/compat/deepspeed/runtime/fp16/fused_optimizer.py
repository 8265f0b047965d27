"""``deepspeed.runtime.fp16.fused_optimizer``: what ``isinstance`` is asked about a returned optimizer."""

from shardfold.compat.deepspeed.optimizer import FP16_Optimizer  # noqa: F401

COMPUTE_NORM_TIMER, OVERFLOW_CHECK_TIMER, UNSCALE_AND_CLIP_TIMER = "compute_norm", "overflow_check", "unscale_and_clip"
BASIC_STEP_TIMER, UPDATE_FP16_TIMER = "basic_step", "update_fp16"
OVERFLOW_TIMERS = [COMPUTE_NORM_TIMER, OVERFLOW_CHECK_TIMER]
STEP_TIMERS = [*OVERFLOW_TIMERS, UNSCALE_AND_CLIP_TIMER, BASIC_STEP_TIMER, UPDATE_FP16_TIMER]
