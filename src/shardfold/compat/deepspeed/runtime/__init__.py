"""DeepSpeed's inner modules that users import from."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(
    __name__,
    {"DeepSpeedOptimizer": "runtime.base_optimizer", "ZeROOptimizer": "runtime.base_optimizer"},
    (
        "activation_checkpointing",
        "base_optimizer",
        "config",
        "dataloader",
        "engine",
        "lr_schedules",
        "utils",
        "zero",
    ),
)
