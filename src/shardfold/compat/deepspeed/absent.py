"""What DeepSpeed documents and this layer does not do: each name can be imported, and says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from shardfold.errors import UsageError

__all__ = ["ABSENT", "MODULES", "absent"]

_INFERENCE = "inference kernels are not here; deepspeed.init_inference() runs the model with PyTorch's operations"
_PIPELINE = "this order is not here; PipelineModule trains in one forward and one backward at a time (1F1B)"
_SCHEDULE = "lists of instructions are not here; PipelineModule trains in one forward and one backward at a time (1F1B)"
_EXPERTS = "there is no section expert_parallel here; deepspeed.moe.layer.MoE(ep_size=...) shares experts out"
_KERNEL = "the kernel is not here; use torch.nn.functional.scaled_dot_product_attention and torch.nn's layers"
_COMPRESSION = "compression is not here; use torch.ao.quantization or torch.nn.utils.prune on engine.module"
_TUNING = "the autotuner is not here; shardfold explain shows what a configuration holds and sends"
_ONEBIT = (
    "the config's optimizer types OneBitAdam, OneBitLamb and ZeroOneAdam act; the classes are those of "
    "shardfold.optim, with signs=shardfold.Signs() in the layout"
)
_HYBRID = "the hybrid engine is not here; gather with deepspeed.zero.GatheredParameters and call generate()"
_CHECKPOINT = "parts of a checkpoint are not shown here; read it whole with deepspeed.utils.zero_to_fp32"
_DATA = "data efficiency is not here; sort the data in a sampler"
_LINEAR = "quantized and LoRA layers are not here; use the peft library on the model before initialize()"

#: ``{name below deepspeed: what is not here, and what to use in its place}``
ABSENT: dict[str, str] = {
    "replace_transformer_layer": _INFERENCE,
    "module_inject.replace_transformer_layer": _INFERENCE,
    "DeepSpeedHybridEngine": _HYBRID,
    "DeepSpeedTransformerLayer": _KERNEL,
    "DeepSpeedTransformerConfig": _KERNEL,
    "ops.DeepSpeedTransformerLayer": _KERNEL,
    "ops.DeepSpeedTransformerConfig": _KERNEL,
    "ops.transformer.DeepSpeedTransformerLayer": _KERNEL,
    "ops.transformer.DeepSpeedTransformerConfig": _KERNEL,
    "ops.sparse_attention.SparseSelfAttention": _KERNEL,
    "ops.sparse_attention.SparsityConfig": _KERNEL,
    "runtime.fp16.onebit.OnebitAdam": _ONEBIT,
    "runtime.fp16.onebit.OnebitLamb": _ONEBIT,
    "runtime.fp16.onebit.ZeroOneAdam": _ONEBIT,
    "runtime.fp16.onebit.adam.OnebitAdam": _ONEBIT,
    "runtime.fp16.onebit.lamb.OnebitLamb": _ONEBIT,
    "runtime.fp16.onebit.zoadam.ZeroOneAdam": _ONEBIT,
    "runtime.pipe.schedule.DualPipeVSchedule": _PIPELINE,
    "runtime.pipe.schedule.PipeSchedule": _SCHEDULE,
    "runtime.pipe.schedule.TrainSchedule": _SCHEDULE,
    "runtime.pipe.schedule.InferenceSchedule": _SCHEDULE,
    "runtime.hybrid_engine.DeepSpeedHybridEngine": _HYBRID,
    "runtime.config.HybridEngineConfig": _HYBRID,
    "runtime.config.get_hybrid_engine_config": _HYBRID,
    "runtime.config.get_expert_parallel_config": _EXPERTS,
    "ops.sparse_attention.FixedSparsityConfig": _KERNEL,
    "ops.sparse_attention.BigBirdSparsityConfig": _KERNEL,
    "ops.sparse_attention.BSLongformerSparsityConfig": _KERNEL,
    "ops.sparse_attention.VariableSparsityConfig": _KERNEL,
    "compression.compress.init_compression": _COMPRESSION,
    "compression.compress.redundancy_clean": _COMPRESSION,
    "autotuning.Autotuner": _TUNING,
    "checkpoint.DeepSpeedCheckpoint": _CHECKPOINT,
    "runtime.data_pipeline.data_sampling.data_analyzer.DataAnalyzer": _DATA,
    "runtime.data_pipeline.data_routing.basic_layer.RandomLayerTokenDrop": _DATA,
    "runtime.data_pipeline.curriculum_scheduler.CurriculumScheduler": _DATA,
    "linear.OptimizedLinear": _LINEAR,
    "linear.LoRAConfig": _LINEAR,
    "linear.QuantizationConfig": _LINEAR,
}

#: Modules, below ``deepspeed``, that have nothing but these names.
MODULES = frozenset(name.rsplit(".", depth)[0] for name in ABSENT for depth in range(1, name.count(".") + 1))


class _Absent(type):
    """A class of which nothing can be used; ``isinstance`` and ``issubclass`` of it work."""

    reason: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(cls.reason)

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(cls.reason)


def absent(name: str) -> Any:
    """The class or function of that name in :data:`ABSENT`, which raises ``UsageError`` when it is used."""
    reason = f"deepspeed.{name}: {ABSENT[name]}."
    short = name.rpartition(".")[2]
    if short[0].isupper():
        return _Absent(short, (), {"reason": reason, "__module__": f"deepspeed.{name.rpartition('.')[0]}".rstrip(".")})

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(reason)

    refuse.__name__ = refuse.__qualname__ = short
    return refuse
