"""``deepspeed.comm.config``."""

from shardfold.compat.deepspeed.config_models import CommsLoggerConfig, DeepSpeedCommsConfig

__all__ = ["CommsLoggerConfig", "DeepSpeedCommsConfig"]
