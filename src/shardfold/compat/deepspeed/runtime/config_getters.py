"""``get_train_batch_size(param_dict)`` and its like: what a config's dict says, or DeepSpeed's default.

They look a key up and check nothing else; ``DeepSpeedConfig`` checks a config as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardfold.compat.deepspeed.config_errors import DeepSpeedConfigError
from shardfold.compat.deepspeed.runtime import constants as c
from shardfold.compat.deepspeed.runtime.dtypes import DtypeEnum

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PIPELINE = {
    "stages": "auto",
    "partition": "best",
    "seed_layers": False,
    "activation_checkpoint_interval": 0,
    "pipe_partitioned": True,
    "grad_partitioned": True,
}

Config = Mapping[str, Any]


def _getter(name: str, key: str, default: Any) -> Callable[[Config], Any]:
    def get(param_dict: Config) -> Any:
        return param_dict.get(key, default)

    get.__name__ = get.__qualname__ = name
    get.__doc__ = f"``{key}``, {default!r} where it is absent."
    return get


get_train_batch_size = _getter("get_train_batch_size", c.TRAIN_BATCH_SIZE, c.TRAIN_BATCH_SIZE_DEFAULT)
get_train_micro_batch_size_per_gpu = _getter(
    "get_train_micro_batch_size_per_gpu", c.TRAIN_MICRO_BATCH_SIZE_PER_GPU, c.TRAIN_MICRO_BATCH_SIZE_PER_GPU_DEFAULT
)
get_gradient_accumulation_steps = _getter(
    "get_gradient_accumulation_steps", c.GRADIENT_ACCUMULATION_STEPS, c.GRADIENT_ACCUMULATION_STEPS_DEFAULT
)
get_managed_gradient_accumulation = _getter(
    "get_managed_gradient_accumulation", c.MANAGED_GRADIENT_ACCUMULATION, c.MANAGED_GRADIENT_ACCUMULATION_DEFAULT
)
get_gradient_clipping = _getter("get_gradient_clipping", c.GRADIENT_CLIPPING, c.GRADIENT_CLIPPING_DEFAULT)
get_prescale_gradients = _getter("get_prescale_gradients", c.PRESCALE_GRADIENTS, c.PRESCALE_GRADIENTS_DEFAULT)
get_gradient_predivide_factor = _getter(
    "get_gradient_predivide_factor", c.GRADIENT_PREDIVIDE_FACTOR, c.GRADIENT_PREDIVIDE_FACTOR_DEFAULT
)
get_steps_per_print = _getter("get_steps_per_print", c.STEPS_PER_PRINT, c.STEPS_PER_PRINT_DEFAULT)
get_disable_allgather = _getter("get_disable_allgather", c.DISABLE_ALLGATHER, c.DISABLE_ALLGATHER_DEFAULT)
get_disable_python_gc = _getter("get_disable_python_gc", c.DISABLE_PYTHON_GC, c.DISABLE_PYTHON_GC_DEFAULT)
get_dump_state = _getter("get_dump_state", c.DUMP_STATE, c.DUMP_STATE_DEFAULT)
get_wall_clock_breakdown = _getter("get_wall_clock_breakdown", c.WALL_CLOCK_BREAKDOWN, c.WALL_CLOCK_BREAKDOWN_DEFAULT)
get_memory_breakdown = _getter("get_memory_breakdown", c.MEMORY_BREAKDOWN, c.MEMORY_BREAKDOWN_DEFAULT)
get_dataloader_drop_last = _getter("get_dataloader_drop_last", c.DATALOADER_DROP_LAST, c.DATALOADER_DROP_LAST_DEFAULT)
get_log_level = _getter("get_log_level", c.LOG_LEVEL, c.LOG_LEVEL_DEFAULT)
get_zero_allow_untested_optimizer = _getter(
    "get_zero_allow_untested_optimizer", c.ZERO_ALLOW_UNTESTED_OPTIMIZER, c.ZERO_ALLOW_UNTESTED_OPTIMIZER_DEFAULT
)
get_zero_force_ds_cpu_optimizer = _getter(
    "get_zero_force_ds_cpu_optimizer", c.ZERO_FORCE_DS_CPU_OPTIMIZER, c.ZERO_FORCE_DS_CPU_OPTIMIZER_DEFAULT
)
get_expert_data_topo_config = _getter(
    "get_expert_data_topo_config", c.USE_DATA_BEFORE_EXPERT_PARALLEL, c.USE_DATA_BEFORE_EXPERT_PARALLEL_DEFAULT
)
get_checkpoint_params = _getter("get_checkpoint_params", c.CHECKPOINT, {})
get_data_types_params = _getter("get_data_types_params", c.DATA_TYPES, {})


def get_communication_data_type(
    param_dict: Config, comm_type: str = c.COMMUNICATION_DATA_TYPE, comm_data_type_default: str | None = None
) -> torch.dtype | None:
    """The dtype that a key names, in small or capital letters; None where neither it nor the default says one.

    Raises:
        ValueError: it is none of fp32, fp16 and bf16.
    """
    said = param_dict.get(comm_type, comm_data_type_default)
    if said is None:
        return None
    if said.lower() not in DTYPES:
        raise ValueError(f"Invalid {comm_type} {said!r}: it is one of {', '.join(DTYPES)}.")
    return DTYPES[said.lower()]


def get_gradient_allreduce_op(param_dict: Config) -> str:
    """``"mean"`` or ``"sum"``, in small letters.

    Raises:
        ValueError: it is another.
    """
    said = param_dict.get(c.GRADIENT_ALLREDUCE_OP, c.GRADIENT_ALLREDUCE_OP_DEFAULT)
    op = said.lower() if isinstance(said, str) else said
    if op not in c.GRADIENT_ALLREDUCE_OP_SUPPORTED:
        raise ValueError(f"Invalid {c.GRADIENT_ALLREDUCE_OP} {said!r}: it is 'mean' or 'sum'.")
    return op


# -- sections


def _type(param_dict: Config, section: str) -> Any:
    return param_dict.get(section, {}).get(c.TYPE)


def _params(param_dict: Config, section: str) -> Any:
    return param_dict[section].get("params") if _type(param_dict, section) is not None else None


def get_optimizer_name(param_dict: Config) -> str | None:
    """``optimizer.type`` as it is written."""
    return _type(param_dict, c.OPTIMIZER)


def get_optimizer_params(param_dict: Config) -> Any:
    """``optimizer.params``; None without it or a type."""
    return _params(param_dict, c.OPTIMIZER)


def get_optimizer_gradient_clipping(param_dict: Config) -> float | None:
    """``optimizer.params.max_grad_norm``."""
    return (get_optimizer_params(param_dict) or {}).get(c.MAX_GRAD_NORM)


def get_optimizer_legacy_fusion(param_dict: Config) -> bool:
    """``optimizer.legacy_fusion``."""
    return param_dict.get(c.OPTIMIZER, {}).get(c.LEGACY_FUSION, c.LEGACY_FUSION_DEFAULT)


def get_scheduler_name(param_dict: Config) -> str | None:
    """``scheduler.type`` as it is written."""
    return _type(param_dict, c.SCHEDULER)


def get_scheduler_params(param_dict: Config) -> Any:
    """``scheduler.params``; None without it or a type."""
    return _params(param_dict, c.SCHEDULER)


def get_pipeline_config(param_dict: Config) -> dict[str, Any]:
    """``pipeline`` over its defaults."""
    return PIPELINE | dict(param_dict.get("pipeline", {}))


def get_torch_autocast_enabled(param_dict: Config) -> bool:
    """``torch_autocast.enabled``."""
    return param_dict.get(c.TORCH_AUTOCAST, {}).get(c.TORCH_AUTOCAST_ENABLED, c.TORCH_AUTOCAST_ENABLED_DEFAULT)


def get_torch_autocast_dtype(param_dict: Config) -> torch.dtype | None:
    """``torch_autocast.dtype``.

    Raises:
        ValueError: it names no dtype.
    """
    said = param_dict.get(c.TORCH_AUTOCAST, {}).get(c.TORCH_AUTOCAST_DTYPE)
    return DtypeEnum(said).value if said is not None else None


def get_lower_precision_safe_modules(param_dict: Config) -> list[str] | None:
    """``torch_autocast.lower_precision_safe_modules``.

    Raises:
        ValueError: it is no list of strings.
    """
    said = param_dict.get(c.TORCH_AUTOCAST, {}).get(c.TORCH_AUTOCAST_LOWER_PRECISION_SAFE_MODULES)
    if said is not None and not all(isinstance(name, str) for name in said):
        raise ValueError(
            f"Invalid module names {said!r} for torch_autocast: they are strings such as 'torch.nn.Linear'."
        )
    return said


def get_checkpoint_tag_validation_mode(checkpoint_params: Config) -> str:
    """``tag_validation`` of the section ``checkpoint``, in capitals.

    Raises:
        DeepSpeedConfigError: it is none of Warn, Ignore and Fail.
    """
    said = checkpoint_params.get(c.CHECKPOINT_TAG_VALIDATION, c.CHECKPOINT_TAG_VALIDATION_DEFAULT)
    if said.upper() not in c.CHECKPOINT_TAG_VALIDATION_MODES:
        raise DeepSpeedConfigError(f"checkpoint.tag_validation is {said!r}: it is Warn, Ignore or Fail.")
    return said.upper()


def get_checkpoint_parallel_write_pipeline(checkpoint_params: Config) -> bool:
    """``parallel_write.pipeline_stage`` of the section ``checkpoint``.

    Raises:
        DeepSpeedConfigError: it is no boolean.
    """
    section = checkpoint_params.get(c.CHECKPOINT_PARALLEL_WRITE, {})
    said = section.get(c.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE, c.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT)
    if said not in (True, False):
        raise DeepSpeedConfigError(f"checkpoint.parallel_write.pipeline_stage is {said!r}: it is true or false.")
    return said


__all__ = [name for name in dir() if name.startswith("get_")]  # pyright: ignore[reportUnsupportedDunderAll]
