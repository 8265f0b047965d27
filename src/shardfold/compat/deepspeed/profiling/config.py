"""``deepspeed.profiling.config``."""

from shardfold.compat.deepspeed.config_models import DeepSpeedFlopsProfilerConfig

__all__ = ["DeepSpeedFlopsProfilerConfig"]
