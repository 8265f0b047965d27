"""``deepspeed.runtime.zero``: what ``deepspeed.zero`` has, under its older name."""

from shardfold.compat.deepspeed.lazy import attach

__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(
        (
            "DeepSpeedTensorOverride",
            "DeepSpeedZeRoOffload",
            "GatheredParameters",
            "Init",
            "MemoryEfficientLinear",
            "TiledLinear",
            "TiledLinearReturnBias",
            "ZeroParamStatus",
            "ZeroParamType",
            "register_external_parameter",
            "unregister_external_parameter",
            "unwrap_model_for_generation",
        ),
        "zero",
    ),
    (
        "config",
        "leaf_module_config",
        "linear",
        "offload_config",
        "parameter_offload",
        "partition_parameters",
        "stage3",
        "stage_1_and_2",
        "tiling",
        "utils",
    ),
)
