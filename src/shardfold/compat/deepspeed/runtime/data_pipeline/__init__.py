"""``deepspeed.runtime.data_pipeline``: what of it is arithmetic."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(__name__, {}, ("curriculum_scheduler",))
