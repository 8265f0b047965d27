"""``deepspeed.runtime.config``: the config under the name that clients import."""

from shardfold.compat.deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError

__all__ = ["DeepSpeedConfig", "DeepSpeedConfigError"]
