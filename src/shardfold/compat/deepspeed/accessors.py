"""The engine's questions about its config, each a method of DeepSpeed's, as data."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardfold.compat.deepspeed.config import Settings
from shardfold.compat.deepspeed.config_view import Section

__all__ = ["ConfigAccessors"]

ZERO = "zero_optimization."
PATHS: Mapping[str, str] = {
    **{
        f"zero_{name}": ZERO + name
        for name in (
            "reduce_scatter",
            "overlap_comm",
            "sub_group_size",
            "reduce_bucket_size",
            "allgather_bucket_size",
            "contiguous_gradients",
            "load_from_fp32_weights",
            "elastic_checkpoint",
            "allgather_partitions",
            "round_robin_gradients",
            "ignore_unused_parameters",
            "compute_grad_norm",
        )
    },
    "zero_hpz_partition_size": ZERO + "zero_hpz_partition_size",
    "zero_quantized_weights": ZERO + "zero_quantized_weights",
    "zero_quantized_gradients": ZERO + "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights": ZERO + "zero_quantized_nontrainable_weights",
    "zero_multi_rank_bucket_allreduce": ZERO + "use_multi_rank_bucket_allreduce",
    "zero_max_live_parameters": ZERO + "stage3_max_live_parameters",
    "zero_max_reuse_distance": ZERO + "stage3_max_reuse_distance",
    "zero_prefetch_bucket_size": ZERO + "stage3_prefetch_bucket_size",
    "zero_param_persistence_threshold": ZERO + "stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": ZERO + "stage3_model_persistence_threshold",
    "zero_gather_16bit_weights_on_model_save": ZERO + "stage3_gather_16bit_weights_on_model_save",
    "zero_legacy_stage1": ZERO + "legacy_stage1",
    "zero_log_trace_cache_warnings": ZERO + "log_trace_cache_warnings",
    "zero_allgather_sequential": ZERO + "stage3_allgather_sequential",
    "zero_module_granularity_threshold": ZERO + "stage3_module_granularity_threshold",
    "zero_parameter_alignment": ZERO + "parameter_alignment",
    "zero_save_muon_momentum_buffer_in_memory": ZERO + "save_muon_momentum_buffer_in_memory",
    "zero_partial_offload": ZERO + "offload_optimizer.ratio",
    "is_sanity_checks_enabled": ZERO + "enable_sanity_checks",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "log_level": "log_level",
    "elasticity_enabled": "elasticity.enabled",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "dataloader_drop_last": "dataloader_drop_last",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    **{
        f"autotuning_{name}": f"autotuning.{name}"
        for name in (
            "enabled",
            "start_profile_step",
            "end_profile_step",
            "metric",
        )
    },
    "tensorboard_enabled": "tensorboard.enabled",
    "tensorboard_output_path": "tensorboard.output_path",
    "tensorboard_job_name": "tensorboard.job_name",
}
#: What is not here, whatever the config asks for: the answers are no, and None for a section.
NEVER = (
    "amp_enabled",
    "compile_autosp",
    "compile_autotp",
    "compile_zero_optimization_stage",
    "checkpoint_writer_enabled",
    "curriculum_enabled_legacy",
    "curriculum_learning_enabled",
    "data_efficiency_enabled",
    "data_sampling_enabled",
    "eigenvalue_enabled",
    "is_deepcompile_active",
    "is_deepcompile_enabled",
    "pld_enabled",
    "autotuning_profile_model_info",
    "quantize_training",
    "random_ltd_enabled",
    "sparse_gradients_enabled",
    "super_offload",
    "uses_parallelization_pass_only",
)
NO_SECTION = (
    "amp_params",
    "curriculum_params_legacy",
    "pld_params",
    "swap_tensor_config",
    "zenflow_config",
)
#: Sections that would choose what is trained on: all of it is off.
OFF: Mapping[str, Mapping[str, Any]] = {
    "curriculum_learning_config": {"enabled": False},
    "data_sampling_config": {"enabled": False, "curriculum_learning": {"enabled": False}},
    "random_ltd_config": {"enabled": False, "layer_token_lr_schedule": {"enabled": False}},
    "data_efficiency_config": {
        "enabled": False,
        "data_sampling": {"enabled": False, "curriculum_learning": {"enabled": False}},
        "data_routing": {
            "enabled": False,
            "random_ltd": {"enabled": False, "layer_token_lr_schedule": {"enabled": False}},
        },
    },
}
SAFE_MODULES = (
    "torch.nn.modules.linear.Linear",
    *(f"torch.nn.modules.conv.Conv{n}d" for n in (1, 2, 3)),
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class ConfigAccessors:
    """Methods named as DeepSpeed's that tell what the config says, with DeepSpeed's defaults."""

    _settings: Settings

    def _setting(self, path: str) -> Any:
        return self._settings.values[path]

    def zero_optimization(self) -> bool:
        """Whether the stage is 1, 2 or 3."""
        return self._settings.stage > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self._settings.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether the stage is 2 or 3."""
        return self._settings.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether the stage is 3."""
        return self._settings.stage >= 3

    def zero_offload_optimizer(self) -> Section | None:
        """That section of the config, or None."""
        return Section(self._settings, "zero_optimization").offload_optimizer

    def zero_offload_param(self) -> Section | None:
        """That section of the config, or None."""
        return Section(self._settings, "zero_optimization").offload_param

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's states rest in host memory."""
        return self._settings.offload.get("moments", "").startswith("host")

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the host updates the masters, because they rest there."""
        return "master" in self._settings.offload

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's states rest in a file."""
        return self._settings.offload.get("moments", "").startswith("disk")

    def postscale_gradients(self) -> bool:
        """The contrary of the config's ``prescale_gradients``."""
        return not self._setting("prescale_gradients")

    def optimizer_params(self) -> dict[str, Any] | None:
        """Arguments of the config's optimizer."""
        return self._settings.optimizer[1] if self._settings.optimizer else None

    def scheduler_name(self) -> str | None:
        """Type of the config's scheduler."""
        return self._settings.scheduler[0] if self._settings.scheduler else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Arguments of the config's scheduler."""
        return self._settings.scheduler[1] if self._settings.scheduler else None

    def managed_gradient_accumulation(self) -> bool:
        """Whether the engine counts micro-batches; else each ``step()`` ends an accumulation."""
        return self._setting("managed_gradient_accumulation")

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Of fp16's dynamic loss scale, as the arguments of DeepSpeed's ``DynamicLossScaler``."""
        fp16 = Section(self._settings, "fp16")
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
        }

    def dynamic_loss_scale(self) -> bool:
        """Whether fp16's loss scale moves."""
        return not self._setting("fp16.loss_scale")

    def loss_scale(self) -> float:
        """fp16's static loss scale, 0.0 if it is dynamic."""
        return float(self._setting("fp16.loss_scale"))

    def initial_dynamic_scale(self) -> int:
        """The first of fp16's dynamic loss scales."""
        return 2 ** self._setting("fp16.initial_scale_power")

    def cpuadam_cores_perc(self) -> float:
        """The config's ``offload_optimizer.cpuadam_cores_perc``, 0.9 without that section, as in DeepSpeed."""
        return self._setting(ZERO + "offload_optimizer.cpuadam_cores_perc") if self.zero_offload_optimizer() else 0.9

    def autotuning_metric_path(self) -> str:
        """The config's ``autotuning.metric_path``, or a file in the current folder."""
        return self._setting("autotuning.metric_path") or os.path.join(os.getcwd(), "autotuning_metric.json")

    def autotuning_model_info_path(self) -> str:
        """The config's ``autotuning.model_info_path``, or a file in the current folder."""
        return self._setting("autotuning.model_info_path") or os.path.join(os.getcwd(), "autotuning_model_info.json")

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """The config's ``torch_autocast.lower_precision_safe_modules``, or DeepSpeed's own."""
        named = self._setting("torch_autocast.lower_precision_safe_modules")
        return [*SAFE_MODULES] if named is None else named

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Of the forward under ``torch.autocast``; None without."""
        precision = self._settings.precision
        return DTYPES[precision.autocast] if precision.autocast else None

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare the tag of a checkpoint."""
        return self._settings.tag_validation != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ are an error."""
        return self._settings.tag_validation == "fail"

    def is_first_weights_partition_group(self) -> bool:
        """Whether weights are split, over one group."""
        return self.zero_optimization_partition_weights()

    def aio_config(self) -> dict[str, Any]:
        """That section of the config, whose effect is none."""
        names = (path for path in self._settings.values if path.startswith("aio.") and path != "aio.thread_count")
        return {name[4:]: self._setting(name) for name in names}

    def tensor_parallel_config(self) -> Section:
        """That section of the config."""
        return Section(self._settings, "tensor_parallel")

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the model's parameters, and in which gradients accumulate."""
        precision = self._settings.precision
        return DTYPES[precision.compute], DTYPES[precision.grads]

    @property
    def communication_data_type(self) -> torch.dtype:
        """In which gradients are reduced."""
        return DTYPES[self._settings.precision.reduce]


def _reads(path: str) -> Callable[[ConfigAccessors], Any]:
    def read(self: ConfigAccessors) -> Any:
        return self._setting(path)

    read.__doc__ = f"The config's ``{path}``."
    return read


def _off(section: Mapping[str, Any]) -> Callable[[ConfigAccessors], dict[str, Any]]:
    def say(self: ConfigAccessors) -> dict[str, Any]:
        return copy.deepcopy(dict(section))

    say.__doc__ = "A section with everything switched off: that is not here."
    return say


def _answers(answer: bool | None) -> Callable[[ConfigAccessors], Any]:
    def say(self: ConfigAccessors) -> Any:
        return answer

    say.__doc__ = f"{answer}: that is not here."
    return say


for _names, _answer in ((NEVER, False), (NO_SECTION, None)):
    for _name in _names:
        setattr(ConfigAccessors, _name, _answers(_answer))
for _name, _section in OFF.items():
    setattr(ConfigAccessors, _name, _off(_section))
for _name, _path in PATHS.items():
    setattr(ConfigAccessors, _name, _reads(_path))
