"""DeepSpeed's public interface: what its users call, done by calling the engine.

The names are imported when they are first asked for. What DeepSpeed documents and is not here raises when it is used,
with one sentence: :mod:`shardfold.compat.deepspeed.absent` lists it.
"""

from shardfold.compat import finder
from shardfold.compat.deepspeed.lazy import attach, enter_absent

__version__ = version = finder.VERSION
__version_major__, __version_minor__, __version_patch__ = map(int, finder.VERSION.split("."))
__git_hash__ = git_hash = "unknown"
__git_branch__ = git_branch = "unknown"
HAS_TRITON = False
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500

__getattr__, __dir__ = attach(
    __name__,
    {
        "DeepSpeedConfig": "config",
        "DeepSpeedConfigError": "config",
        "DeepSpeedDataLoader": "runtime.dataloader",
        "DeepSpeedEngine": "engine",
        "DeepSpeedInferenceConfig": "inference.config",
        "DeepSpeedOptimizer": "runtime.base_optimizer",
        "DeepSpeedOptimizerCallable": "runtime.base_optimizer",
        "DeepSpeedSchedulerCallable": "runtime.base_optimizer",
        "InferenceEngine": "inference.engine",
        "OnDevice": "utils.init_on_device",
        "PipelineEngine": "pipeline_engine",
        "PipelineModule": "pipeline_module",
        "add_config_arguments": "arguments",
        "add_tuning_arguments": "runtime.lr_schedules",
        "checkpointing": "runtime.activation_checkpointing.checkpointing:",
        "default_inference_config": "inference.config",
        "dist": "comm:",
        "get_accelerator": "accelerator",
        "init_distributed": "comm",
        "init_inference": "inference.engine",
        "initialize": "initialize",
        "log_dist": "utils.logging",
        "logger": "utils.logging",
        "set_autotp_mode": "tensor",
        "tp_model_init": "tensor",
    },
    (
        "accelerator",
        "checkpoint",
        "comm",
        "constants",
        "inference",
        "launcher",
        "monitor",
        "git_version_info",
        "ops",
        "pipe",
        "profiling",
        "runtime",
        "sequence",
        "utils",
        "zero",
    ),
)

enter_absent()
