"""DeepSpeed's inner modules that users import from."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(
    __name__,
    {"DeepSpeedOptimizer": "runtime.base_optimizer", "ZeROOptimizer": "runtime.base_optimizer"},
    (
        "activation_checkpointing",
        "base_optimizer",
        "bf16_optimizer",
        "config",
        "constants",
        "dataloader",
        "engine",
        "fp16",
        "lr_schedules",
        "pipe",
        "precision_config",
        "sequence_parallel",
        "utils",
        "zero",
    ),
)
