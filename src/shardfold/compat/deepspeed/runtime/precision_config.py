"""``deepspeed.runtime.precision_config``."""

from shardfold.compat.deepspeed.config_models import DeepSpeedBF16Config, DeepSpeedFP16Config

__all__ = ["DeepSpeedBF16Config", "DeepSpeedFP16Config"]
