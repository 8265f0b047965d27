"""``deepspeed.runtime.activation_checkpointing.config``."""

from shardfold.compat.deepspeed.config_models import DeepSpeedActivationCheckpointingConfig  # noqa: F401

# Names of the keys and what holds where they are absent
ACT_CHKPT = "activation_checkpointing"
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION = "contiguous_memory_optimization"
ACT_CHKPT_CONTIGUOUS_MEMORY_OPTIMIZATION_DEFAULT = False
ACT_CHKPT_CPU_CHECKPOINTING = "cpu_checkpointing"
ACT_CHKPT_CPU_CHECKPOINTING_DEFAULT = False
ACT_CHKPT_DEFAULT = {
    "partition_activations": False,
    "number_checkpoints": None,
    "contiguous_memory_optimization": False,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
    "cpu_checkpointing": False,
}
ACT_CHKPT_NUMBER_CHECKPOINTS = "number_checkpoints"
ACT_CHKPT_NUMBER_CHECKPOINTS_DEFAULT = None
ACT_CHKPT_PARTITION_ACTIVATIONS = "partition_activations"
ACT_CHKPT_PARTITION_ACTIVATIONS_DEFAULT = False
ACT_CHKPT_PROFILE = "profile"
ACT_CHKPT_PROFILE_DEFAULT = False
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY = "synchronize_checkpoint_boundary"
ACT_CHKPT_SYNCHRONIZE_CHECKPOINT_BOUNDARY_DEFAULT = False
