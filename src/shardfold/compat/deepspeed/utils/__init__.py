"""``deepspeed.utils``: what its users import from there, each from the module that has it."""

from shardfold.compat.deepspeed.lazy import attach

_FRAGMENTS = (
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
)
_LEAVES = (
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "z3_leaf_parameter",
)
_GROUPS = (
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_src_rank",
    "get_tensor_model_parallel_world_size",
)
_LOGGING = ("log_dist", "log_dist_once", "logger", "print_rank_0", "set_log_level_from_string", "warning_once")

__getattr__, __dir__ = attach(
    __name__,
    {
        **dict.fromkeys(_FRAGMENTS, "utils.tensor_fragment"),
        **dict.fromkeys(_LEAVES, "utils.z3_leaf_module"),
        **dict.fromkeys(_LOGGING, "utils.logging"),
        **dict.fromkeys(_GROUPS, "utils.groups"),
        "get_caller_func": "utils.comms_logging",
        "OnDevice": "utils.init_on_device",
        "RepeatingLoader": "runtime.dataloader",
        "instrument_w_nvtx": "utils.nvtx",
        "is_initialized": "comm",
    },
    (
        "comms_logging",
        "groups",
        "init_on_device",
        "logging",
        "nvtx",
        "tensor_fragment",
        "timer",
        "z3_leaf_module",
        "zero_to_fp32",
    ),
)
