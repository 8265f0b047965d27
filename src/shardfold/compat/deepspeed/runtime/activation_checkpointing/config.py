"""``deepspeed.runtime.activation_checkpointing.config``."""

from shardfold.compat.deepspeed.config_models import DeepSpeedActivationCheckpointingConfig

__all__ = ["ACT_CHKPT", "DeepSpeedActivationCheckpointingConfig"]

ACT_CHKPT = "activation_checkpointing"
