"""Every key of DeepSpeed's JSON, as data: what it is, and what it does here.

One row per key. Reading, errors, the notes at start, ``shardfold explain --config`` and the table in
``docs/from-deepspeed.md`` all come from these rows, so that none of them can say something else than the others.

    honoured   it has its documented effect
    noted      it has no effect here and the training is the same: said once at start, with the reason
    refused    to ignore it would change the training: an error, unless its value asks for nothing (``off``)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import inf
from typing import Any

__all__ = ["HONOURED", "KEYS", "NOTED", "REFUSED", "Key"]

HONOURED, NOTED, REFUSED = "honoured", "noted", "refused"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        path: sections and name, with dots.
        kind: honoured, noted or refused.
        type: a name of :data:`shardfold.compat.deepspeed.config_check.TYPES`.
        default: what holds when it is absent.
        why: what it does here, or why it does nothing, or why it is refused.
        choices: legal values of a string; letter case does not matter.
        low, high: legal range of a number.
        aliases: other names of the same key, in the same section.
        off: values that ask for nothing that is not so anyway: not noted, not refused.
        switch: of an object: the number or boolean in it that switches it on; 0, 1, false or absent: off.
    """

    path: str
    kind: str
    type: str
    default: Any
    why: str
    choices: tuple[str, ...] = ()
    low: float = -inf
    high: float = inf
    aliases: tuple[str, ...] = ()
    off: tuple[Any, ...] = (None, False)
    switch: str = ""


def _honoured(path: str, type: str, default: Any, why: str, **more: Any) -> Key:
    return Key(path=path, kind=HONOURED, type=type, default=default, why=why, **more)


def _noted(path: str, type: str, default: Any, why: str, **more: Any) -> Key:
    return Key(path=path, kind=NOTED, type=type, default=default, why=why, **more)


def _refused(path: str, type: str, default: Any, why: str, **more: Any) -> Key:
    return Key(path=path, kind=REFUSED, type=type, default=default, why=why, **more)


def _within(section: str, *keys: Key) -> tuple[Key, ...]:
    """Keys of a section, which are named without it."""
    return tuple(replace(key, path=f"{section}.{key.path}") for key in keys)


DTYPES = ("fp32", "fp16", "bf16")
LEVELS = ("debug", "info", "warning", "error", "critical")
WIDE_DTYPES = (*DTYPES, "float32", "float16", "bfloat16", "float", "half")
BUCKETS = "what is sent together is a unit of the model, not a bucket of so many elements"
HOST_BUFFERS = "what travels between host and device has buffers of its own size"
PINNED = "host memory that a GPU copies from and to is always pinned"
HOST_UPDATE = "the update of what rests on the host has all of its threads, and is one pass"
GONE = "DeepSpeed itself has removed it"
LEAF_CLASSES = [
    f"transformers.models.{module}.modeling_{module}.{name}SparseMoeBlock"
    for module, name in (("mixtral", "Mixtral"), ("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"))
]

BATCH = (
    _honoured("train_batch_size", "integer", None, "samples per optimizer step on all ranks", low=1),
    _honoured("train_micro_batch_size_per_gpu", "integer", None, "samples per rank and backward", low=1),
    _honoured(
        "gradient_accumulation_steps", "integer", None, "backwards per optimizer step; 1 if nothing says more", low=1
    ),
    _honoured(
        "managed_gradient_accumulation",
        "boolean",
        True,
        "false: each engine.step() ends an accumulation, and gradient_accumulation_steps only divides losses",
    ),
    _honoured(
        "gradient_clipping",
        "number",
        1.0,
        "largest norm of all gradients; 0 does not clip. Absent, DeepSpeed's 1.0 holds",
        low=0,
    ),
    _honoured("dataloader_drop_last", "boolean", False, "of the loader that initialize(training_data=...) makes"),
)

ELASTICITY = _within(
    "elasticity",
    _honoured("enabled", "boolean", False, "the batch is the one that most numbers of ranks can train with"),
    _honoured(
        "max_train_batch_size",
        "integer",
        None,
        "samples per optimizer step; more only if micro-batches have no smaller multiple",
        low=1,
    ),
    _honoured("micro_batch_sizes", "list of integers", None, "samples per rank and backward: the largest that divides"),
    _honoured("min_gpus", "integer", 1, "ranks, at least", low=1),
    _honoured("max_gpus", "integer", 10000, "ranks, at most", low=1),
    _honoured(
        "prefer_larger_batch", "boolean", True, "of batches for equally many numbers of ranks; false: the smaller"
    ),
    _honoured("version", "number", 0.2, "0.1 counts ranks, 0.2 nodes of num_gpus_per_node ranks", low=0.1, high=0.2),
    _honoured("num_gpus_per_node", "integer", 1, "ranks of a node, for version 0.2", low=1),
    _honoured(
        "ignore_non_elastic_batch_info", "boolean", False, "true: batch sizes beside the section are passed over"
    ),
    _noted("min_time", "integer", 0, "it is for a scheduler, which nothing here is", low=0, off=(None, 0)),
    _refused(
        "model_parallel_size",
        "integer",
        1,
        "DeepSpeed divides by it twice, so that its batch sizes do not multiply up: set the batch sizes",
        low=1,
        off=(None, 1),
    ),
)

OPTIMIZER = (
    _honoured(
        "optimizer.type",
        "string",
        None,
        "Adam, AdamW, Lamb, Lion, OneBitAdam, OneBitLamb, ZeroOneAdam, Muon, or a class of torch.optim",
    ),
    _honoured("optimizer.params", "object", {}, "its arguments, each checked"),
    _noted("optimizer.legacy_fusion", "boolean", False, "optimizers run on flat shards, in blocks"),
    _honoured(
        "scheduler.type",
        "string",
        None,
        "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or a class of torch.optim.lr_scheduler",
    ),
    _honoured("scheduler.params", "object", {}, "its arguments, each checked"),
    _noted(
        "zero_allow_untested_optimizer",
        "boolean",
        False,
        "every element-wise optimizer works under every stage",
        off=(None, False, True),
    ),
    _noted("zero_force_ds_cpu_optimizer", "boolean", True, "the host takes any optimizer", off=(None, True, False)),
)

PRECISION = (
    _honoured("fp16.enabled", "boolean", False, "parameters and activations in fp16, masters in fp32"),
    _honoured(
        "fp16.auto_cast",
        "boolean",
        False,
        "floating inputs of forward are cast to fp16; otherwise, and under bf16, they stay as they are",
    ),
    _honoured("fp16.loss_scale", "number", 0, "0: dynamic; else this scale", low=0),
    _honoured("fp16.initial_scale_power", "integer", 16, "the first dynamic scale is 2 to this power", low=0, high=126),
    _honoured("fp16.loss_scale_window", "integer", 1000, "steps without overflow until the scale doubles"),
    _honoured("fp16.hysteresis", "integer", 2, "so many overflows lower the scale for the first time", low=1),
    _honoured("fp16.consecutive_hysteresis", "boolean", False, "each step without overflow refills the hysteresis"),
    _honoured("fp16.min_loss_scale", "number", 1, "the scale is not lowered below it; an overflow there ends the run"),
    _refused(
        "fp16.fp16_master_weights_and_grads",
        "boolean",
        False,
        "masters in fp16 lose small updates: bf16 with bf16_master_weights_and_grads is the mode for so little memory",
    ),
    _honoured("bf16.enabled", "boolean", False, "parameters and activations in bf16, masters in fp32"),
    _noted("bf16.immediate_grad_update", "boolean", False, "gradients are always accumulated as they arrive"),
    _honoured(
        "bf16.check_grad_overflow",
        "boolean",
        True,
        "a step with inf or NaN in its gradients is skipped",
        aliases=("check_overflow",),
    ),
    _honoured(
        "bf16.bf16_master_weights_and_grads",
        "boolean",
        False,
        "masters and gradients in bf16; with bf16_optimizer_states only",
    ),
    _honoured(
        "bf16.bf16_optimizer_states",
        "boolean",
        False,
        "the optimizer's moments in bf16 too; with bf16_master_weights_and_grads only",
    ),
    _honoured("torch_autocast.enabled", "boolean", False, "forward runs under torch.autocast, parameters stay fp32"),
    _honoured(
        "torch_autocast.dtype",
        "string",
        "bfloat16",
        "of autocast",
        choices=("bfloat16", "float16", "bf16", "fp16", "half", "torch.bfloat16", "torch.float16"),
    ),
    _noted(
        "torch_autocast.lower_precision_safe_modules",
        "list of strings",
        None,
        "it only narrows what is sent: communication_data_type says that here",
    ),
    _honoured(
        "data_types.grad_accum_dtype",
        "string",
        "fp32",
        "in which gradients accumulate. Absent, it is fp32 here and the model's dtype in DeepSpeed",
        choices=WIDE_DTYPES,
    ),
    _honoured("data_types.param_dtype", "string", None, "must agree with fp16 and bf16", choices=WIDE_DTYPES),
    _honoured(
        "data_types.buffer_dtype",
        "string",
        None,
        "buffers keep their dtype, or follow the parameters'",
        choices=WIDE_DTYPES,
    ),
    _noted("data_types.keep_in_fp32_modules", "any", "auto", "buffers keep their dtype anyway", off=("auto", None, [])),
    _honoured(
        "communication_data_type",
        "string",
        "fp32",
        "in which gradients are reduced. Absent, it is fp32 here and the model's dtype in DeepSpeed",
        choices=DTYPES,
    ),
    _honoured("fp32_allreduce", "boolean", False, "older word for communication_data_type fp32"),
    _honoured(
        "seq_parallel_communication_data_type",
        "string",
        "fp32",
        "in which gradients are reduced where sequence_parallel_size is more than 1",
        choices=DTYPES,
    ),
    _noted("prescale_gradients", "boolean", False, "gradients are divided as they arrive, in the dtype they travel in"),
    _noted("gradient_predivide_factor", "number", 1.0, "the same mean either way", off=(None, 1)),
    _honoured(
        "gradient_allreduce_op",
        "string",
        "mean",
        "of the ranks' gradients: their mean or their sum",
        choices=("mean", "sum"),
    ),
)

ZERO = _within(
    "zero_optimization",
    _honoured("stage", "integer", 0, "the layout: 0 ddp, 1 zero1, 2 zero2, 3 zero3"),
    _noted("contiguous_gradients", "boolean", True, "gradients are always written into flat buffers", off=(None, True)),
    _noted("reduce_scatter", "boolean", True, "the layout says which collective reduces", off=(None, True)),
    _noted("reduce_bucket_size", "integer", 500_000_000, BUCKETS, low=1),
    _noted("use_multi_rank_bucket_allreduce", "boolean", True, BUCKETS, off=(None, True)),
    _noted("allgather_partitions", "boolean", True, "updated parameters are always all-gathered", off=(None, True)),
    _noted("allgather_bucket_size", "integer", 500_000_000, BUCKETS, low=0),
    _honoured(
        "overlap_comm",
        "boolean",
        None,
        "false: a gradient is reduced before backward goes on. Absent or true, it may be on its way on a GPU",
    ),
    _honoured(
        "compute_grad_norm",
        "boolean",
        True,
        "false: get_global_grad_norm() is None unless gradients are clipped; at stages 1 and 2 only",
    ),
    _noted("load_from_fp32_weights", "boolean", True, "masters are restored in fp32", off=(None, True)),
    _noted("elastic_checkpoint", "boolean", False, "every checkpoint loads on any number of ranks"),
    _noted("sub_group_size", "integer", 1_000_000_000, "the update goes in blocks of its own size", low=0),
    _honoured(
        "offload_param.device",
        "string",
        "none",
        "cpu, at stage 3: parameters, gradients and "
        "the optimizer's states rest in host memory; nvme: parameters in a file",
        choices=("none", "cpu", "nvme"),
    ),
    _honoured("offload_param.nvme_path", "path", None, "the folder of that file"),
    _noted("offload_param.buffer_count", "integer", 5, HOST_BUFFERS, low=0),
    _noted("offload_param.buffer_size", "integer", 100_000_000, HOST_BUFFERS, low=0),
    _noted("offload_param.max_in_cpu", "integer", 1_000_000_000, HOST_BUFFERS, low=0),
    _noted("offload_param.pin_memory", "boolean", True, PINNED, off=(None, True)),
    _honoured(
        "offload_optimizer.device",
        "string",
        "none",
        "cpu: masters, moments and, at stages 2 "
        "and 3, gradients rest in host memory, where they are updated; nvme: at stage 3 they rest in files, "
        "below as cpu",
        choices=("none", "cpu", "nvme"),
    ),
    _honoured("offload_optimizer.nvme_path", "path", None, "the folder of those files"),
    _noted("offload_optimizer.buffer_count", "integer", 4, HOST_BUFFERS, low=0),
    _noted("offload_optimizer.pin_memory", "boolean", True, PINNED, off=(None, True)),
    _noted("offload_optimizer.pipeline_read", "boolean", False, "a file is always read ahead", off=(None, True)),
    _noted(
        "offload_optimizer.pipeline_write",
        "boolean",
        False,
        "a file is always written behind the update",
        off=(None, True),
    ),
    _noted("offload_optimizer.fast_init", "boolean", False, "states are made where they rest"),
    _honoured(
        "offload_optimizer.ratio",
        "number",
        1.0,
        "the part of the optimizer's states that rests there at least, in whole units; 0: none",
        low=0,
        high=1,
    ),
    _noted("offload_optimizer.super_offload", "boolean", False, HOST_UPDATE),
    _noted("offload_optimizer.cpuadam_cores_perc", "number", 0.8, HOST_UPDATE, low=0, high=1),
    _honoured("cpu_offload", "boolean", False, "older word for offload_optimizer.device cpu"),
    _honoured(
        "cpu_offload_param",
        "boolean",
        False,
        "older word for offload_param.device cpu",
        aliases=("cpu_offload_params",),
    ),
    _noted("cpu_offload_use_pin_memory", "boolean", False, PINNED, off=(None, True)),
    _refused("zenflow", "object", None, "it delays the update of most gradients"),
    _honoured(
        "stage3_prefetch_bucket_size",
        "integer",
        50_000_000,
        "0: nothing is gathered ahead of its use; else one unit is, of whatever size",
        low=0,
        aliases=("prefetch_bucket_size",),
    ),
    _honoured(
        "stage3_param_persistence_threshold",
        "integer",
        100_000,
        "parameters of at most so many elements stay whole on every rank; their gradients and masters are split",
        low=0,
        aliases=("param_persistence_threshold",),
    ),
    _noted(
        "stage3_model_persistence_threshold",
        "integer",
        sys.maxsize,
        "small parameters stay whole however many there are",
        low=0,
        aliases=("model_persistence_threshold",),
    ),
    _noted(
        "stage3_max_live_parameters",
        "integer",
        1_000_000_000,
        "two units are full at a time",
        low=0,
        aliases=("max_live_parameters",),
    ),
    _noted(
        "stage3_max_reuse_distance",
        "integer",
        1_000_000_000,
        "two units are full at a time",
        low=0,
        aliases=("max_reuse_distance",),
    ),
    _honoured(
        "stage3_gather_16bit_weights_on_model_save",
        "boolean",
        False,
        "whether save_16bit_model gathers the parameters of stage 3",
        aliases=("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"),
    ),
    _noted(
        "stage3_module_granularity_threshold",
        "integer",
        0,
        "units are found by the model's blocks",
        off=(None, 0),
        aliases=("module_granularity_threshold",),
    ),
    _noted(
        "stage3_use_all_reduce_for_fetch_params",
        "boolean",
        False,
        "units are all-gathered in place",
        aliases=("use_all_reduce_for_fetch_params",),
    ),
    _noted(
        "stage3_allgather_sequential",
        "boolean",
        False,
        "units are all-gathered in place",
        aliases=("allgather_sequential",),
    ),
    _noted("ignore_unused_parameters", "boolean", True, "unused parameters are always legal", off=(None, True)),
    _noted("legacy_stage1", "boolean", False, "there is one implementation"),
    _noted("round_robin_gradients", "boolean", False, "each rank copies its own shard to the host"),
    _noted("parameter_alignment", "boolean", False, "every parameter begins at a multiple of 256 bytes anyway"),
    _honoured(
        "zero_hpz_partition_size",
        "integer",
        1,
        "stage 3 keeps a second copy of the parameters, split over so many ranks, for backward: layout hpz",
        low=0,
    ),
    _honoured(
        "mics_shard_size",
        "integer",
        -1,
        "stage 3 splits states over so many ranks and replicates them between such groups: layout hsdp",
    ),
    _noted("mics_hierarchical_params_gather", "boolean", False, "hsdp gathers within a group only"),
    _honoured(
        "zero_quantized_weights",
        "boolean",
        False,
        "stage 3 gathers blocks of int8, between nodes and then within them: gather int8x2",
    ),
    _refused("zero_quantized_nontrainable_weights", "boolean", False, "frozen parameters in INT8 change the numbers"),
    _honoured(
        "zero_quantized_gradients",
        "boolean",
        False,
        "stage 3 sums blocks of int4, within nodes and then between them: reduce int4x2",
    ),
    _honoured(
        "zeropp_loco_param",
        "object",
        None,
        "with zero_quantized_gradients: what a reduction "
        "loses is added to the next, reduce int4x2+error; all of it, whatever err_beta and reset_T say",
    ),
    _noted("memory_efficient_linear", "boolean", True, "linear layers are PyTorch's own", off=(None, True, False)),
    _noted("pipeline_loading_checkpoint", "boolean", False, "checkpoints are read in parallel"),
    _noted("override_module_apply", "boolean", True, "Module.apply works on sharded models", off=(None, True)),
    _noted("log_trace_cache_warnings", "boolean", False, "there is no trace cache"),
    _noted("enable_sanity_checks", "boolean", False, "ranks compare what they do in any case"),
    _noted(
        "save_muon_momentum_buffer_in_memory", "boolean", False, "momentum rests where the optimizer's other states do"
    ),
    *(
        _honoured(
            f"leaf_module.{name}",
            "list of strings",
            default,
            f"modules of {which} are flagged, as set_z3_leaf_modules() does",
        )
        for name, default, which in (
            ("classes", LEAF_CLASSES, "these classes"),
            ("names", [], "these names"),
            ("name_suffixes", [], "names that end so"),
        )
    ),
)

CUT_BY_ITSELF = "the model's own plan says how it is cut, or it is found by tracing: the same numbers"
TENSOR_RANKS = "ranks of tensor are those that follow each other, as many as autotp_size says"

PARALLEL = (
    _honoured("tensor_parallel.autotp_size", "integer", 0, "so many ranks share every layer: an axis of tensor", low=0),
    _honoured(
        "tensor_parallel.partition_config",
        "object",
        {},
        "which layers are cut, and how, by patterns of the "
        "names of their weights, beside the model's own plan or (use_default_specs false) in its place",
    ),
    _honoured(
        "tensor_parallel.vocab_parallel_lm_head",
        "boolean",
        None,
        "false: each rank has all of the head and of the embedding of words",
    ),
    _noted(
        "tensor_parallel.vocab_parallel_ce_backend",
        "string",
        "torch",
        "the loss is the model's",
        choices=("torch", "liger"),
        off=("torch",),
    ),
    _noted("tensor_parallel.preset_model", "string", None, CUT_BY_ITSELF),
    _noted("tensor_parallel.injection_policy_tuple", "any", None, CUT_BY_ITSELF),
    _noted("tensor_parallel.tp_overlap_comm", "boolean", False, "a layer's sum is waited for where it is used"),
    _noted("tensor_parallel.keep_module_on_host", "boolean", False, "the model stays where it is until it is cut"),
    _noted(
        "tensor_parallel.replace_with_kernel_inject",
        "boolean",
        False,
        "layers are PyTorch's own",
        aliases=("kernel_inject",),
    ),
    _noted("tensor_parallel.dtype", "any", None, "bf16 and fp16 say it"),
    _honoured("tensor_parallel.tp.tp_size", "integer", 1, "must be autotp_size, or 1", low=1),
    _noted(
        "tensor_parallel.tp.tp_grain_size", "integer", 1, "layers are cut between heads and rows", low=1, off=(None, 1)
    ),
    _noted("tensor_parallel.tp.tp_group", "any", None, TENSOR_RANKS),
    _noted("tensor_parallel.tp.mpu", "any", None, TENSOR_RANKS),
    _honoured(
        "sequence_parallel_size",
        "integer",
        1,
        "so many ranks have parts of the same sequences; attention "
        "crosses them by deepspeed.runtime.sequence_parallel or deepspeed.sequence.layer",
        low=1,
    ),
    _honoured("data_parallel_size", "integer", None, "must be all ranks / those of tensor and of sequence", low=1),
    _refused("expert_parallel", "object", None, "deepspeed.moe.layer.MoE(ep_size=...) says it", switch="enabled"),
    _noted("pipeline.stages", "any", "auto", "PipelineModule(num_stages=...) says it", off=(None, "auto")),
    _noted("pipeline.partition", "string", "best", "PipelineModule(partition_method=...) says it", off=(None, "best")),
    _noted("pipeline.seed_layers", "boolean", False, "PipelineModule(seed_layers=...) says it"),
    _honoured(
        "pipeline.activation_checkpoint_interval",
        "integer",
        0,
        "above 0 layers of a PipelineModule run again in backward, each by itself",
        low=0,
    ),
    _noted("pipeline.pipe_partitioned", "boolean", True, "activations travel whole between stages", off=(None, False)),
    _noted("pipeline.grad_partitioned", "boolean", True, "gradients travel whole between stages", off=(None, False)),
    _noted(
        "pipeline.use_reentrant", "boolean", True, "layers run again without re-entrant autograd", off=(None, False)
    ),
    _noted("use_data_before_expert_parallelism", "boolean", False, "such ranks are neighbours"),
)

OBSERVERS = (
    _honoured(
        "steps_per_print",
        "number",
        None,
        "a line of progress every so many steps, at the level INFO of deepspeed.utils.logger; infinity: none",
        low=1,
    ),
    _honoured("wall_clock_breakdown", "boolean", False, "seconds of forward, backward and step, at each such line"),
    _honoured("memory_breakdown", "boolean", False, "bytes by state, at each such line"),
    _honoured("dump_state", "boolean", False, "the settings and the engine's table, printed at start"),
    _honoured("flops_profiler.enabled", "boolean", False, "counts floating-point operations of one step"),
    _honoured("flops_profiler.recompute_fwd_factor", "number", 0.0, "how much of forward is computed again", low=0),
    _honoured("flops_profiler.profile_step", "integer", 1, "which step", low=0),
    _honoured("flops_profiler.module_depth", "integer", -1, "how deep modules are listed; -1: all"),
    _honoured("flops_profiler.top_modules", "integer", 1, "how many modules of each depth are listed", low=1),
    _honoured("flops_profiler.detailed", "boolean", True, "whether the model is printed with its figures"),
    _honoured("flops_profiler.output_file", "path", None, "where to write; absent: standard output"),
    _honoured("comms_logger.enabled", "boolean", False, "bytes and calls by collective, from the engine's own count"),
    _honoured("comms_logger.verbose", "boolean", False, "a line after each step"),
    _honoured("comms_logger.prof_all", "boolean", True, "all operations, or those of prof_ops"),
    _honoured("comms_logger.prof_ops", "list of strings", [], "operations to list"),
    _noted("comms_logger.debug", "boolean", False, "operations are named by purpose and axes in any case"),
    _honoured("timers.throughput.enabled", "boolean", True, "engine.tput_timer counts samples per second"),
    _noted("timers.throughput.synchronized", "boolean", True, "the device is never waited for", off=(None, False)),
    *(
        _honoured(f"{monitor}.{name}", type, default, why)
        for monitor, what, more in (
            ("tensorboard", "TensorBoard files", ()),
            ("csv_monitor", "one CSV file per quantity", ()),
            (
                "wandb",
                "Weights & Biases",
                (
                    ("group", "string", None, "of runs"),
                    ("team", "string", None, "the entity"),
                    ("project", "string", "deepspeed", "its name"),
                ),
            ),
            (
                "comet",
                "Comet",
                (
                    ("samples_log_interval", "integer", 100, "samples between two reports"),
                    ("project", "string", None, "its name"),
                    ("workspace", "string", None, "its name"),
                    ("api_key", "string", None, "of the account"),
                    ("experiment_name", "string", None, "shown"),
                    ("experiment_key", "string", None, "of an experiment that goes on"),
                    ("online", "boolean", None, "false: into a file"),
                    ("mode", "string", None, "get, create or get_or_create"),
                ),
            ),
        )
        for name, type, default, why in (
            ("enabled", "boolean", False, f"loss, rate and loss scale go to {what}"),
            *(
                more
                or (
                    ("output_path", "path", "", "the folder"),
                    ("job_name", "string", "DeepSpeedJobName", "a folder in it"),
                )
            ),
        )
    ),
)

CHECKPOINT = (
    _honoured(
        "checkpoint.tag_validation",
        "string",
        "Warn",
        "ranks that save under different tags: ignored, warned of or an error",
        choices=("ignore", "warn", "fail"),
    ),
    _noted("checkpoint.load_universal", "boolean", False, "every checkpoint loads on every layout and number of ranks"),
    _honoured("checkpoint.use_node_local_storage", "boolean", False, "each node keeps the part that its ranks wrote"),
    _noted("checkpoint.parallel_write.pipeline_stage", "boolean", False, "ranks always write in parallel"),
    _noted("checkpoint.checkpoint_serialization", "boolean", True, "files have their own format", off=(None, True)),
    *(
        _noted(f"checkpoint.writer.{name}", type, default, "there is one writer")
        for name, type, default in (
            ("type", "string", "fast"),
            ("io_buffer_size", "integer", 67108864),
            ("io_buffer_double", "boolean", True),
            ("show_statistics", "boolean", False),
            ("data_parallel", "string", None),
            ("decoupled", "boolean", False),
            ("io_multiplier", "integer", 1),
        )
    ),
    _noted("datastates_ckpt", "any", None, "there is one writer", off=(None, False)),
)

OTHERS = (
    *(
        _honoured(f"activation_checkpointing.{name}", type, default, f"for deepspeed.checkpointing.checkpoint: {why}")
        for name, type, default, why in (
            ("partition_activations", "boolean", False, "each rank of tensor keeps a slice of their arguments"),
            ("cpu_checkpointing", "boolean", False, "what is kept of their arguments waits in host memory"),
            ("contiguous_memory_optimization", "boolean", False, "slices lie in memory that each step uses again"),
            ("number_checkpoints", "integer", None, "as many as that memory is for"),
            ("synchronize_checkpoint_boundary", "boolean", False, "waits for the device before and after each"),
            ("profile", "boolean", False, "prints the time of each"),
        )
    ),
    *(
        _noted(f"aio.{name}", type, default, HOST_BUFFERS)
        for name, type, default in (
            ("block_size", "integer", 1048576),
            ("queue_depth", "integer", 8),
            ("intra_op_parallelism", "integer", 1),
            ("thread_count", "integer", 1),
            ("single_submit", "boolean", False),
            ("overlap_events", "boolean", True),
            ("use_gds", "boolean", False),
        )
    ),
    *(
        _noted(f"autotuning.{name}", type, default, "nothing is tuned by trying")
        for name, type, default in (
            ("enabled", "boolean", False),
            ("fast", "boolean", True),
            ("results_dir", "path", "autotuning_results"),
            ("exps_dir", "path", "autotuning_exps"),
            ("overwrite", "boolean", True),
            ("metric", "string", "throughput"),
            ("metric_path", "path", None),
            ("start_profile_step", "integer", 3),
            ("end_profile_step", "integer", 5),
            ("tuner_type", "string", "gridsearch"),
            ("tuner_early_stopping", "integer", 5),
            ("tuner_num_trials", "integer", 50),
            ("arg_mappings", "object", None),
            ("model_info", "object", None),
            ("model_info_path", "path", None),
            ("mp_size", "integer", 1),
            ("max_train_batch_size", "integer", None),
            ("min_train_batch_size", "integer", 1),
            ("max_train_micro_batch_size_per_gpu", "integer", 1024),
            ("min_train_micro_batch_size_per_gpu", "integer", 1),
            ("num_tuning_micro_batch_sizes", "integer", 3),
        )
    ),
    *(
        _noted(f"compile.{name}", type, default, "nothing is compiled but by engine.compile(): the same numbers")
        for name, type, default in (
            ("deepcompile", "boolean", False),
            ("autoep_non_moe", "boolean", False),
            ("free_activation", "boolean", False),
            ("free_activation_threshold", "integer", 10485760),
            ("offload_activation", "boolean", False),
            ("offload_activation_pin_memory", "boolean", True),
            ("offload_opt_states", "boolean", False),
            ("double_buffer", "boolean", True),
            ("symmetric_memory", "boolean", False),
            ("debug_log", "boolean", False),
            ("offload_parameters", "boolean", False),
            ("sync_before_reduce", "boolean", False),
            ("sync_after_reduce", "boolean", False),
            ("sync_before_allgather", "boolean", False),
            ("sync_after_allgather", "boolean", False),
            ("keep_int_input_tensors", "boolean", True),
            ("keep_all_input_tensors", "boolean", False),
        )
    ),
    _refused("compile.passes", "list of strings", None, "they split the model over ranks", off=(None, [])),
    _noted("disable_allgather", "boolean", False, "updated parameters are always all-gathered"),
    _noted("allgather_size", "integer", 500_000_000, BUCKETS),
    _noted("disable_python_gc", "boolean", False, "Python collects garbage as it does"),
    _honoured("log_level", "string", None, "of deepspeed.utils.logger", choices=LEVELS),
    _noted("vocabulary_size", "integer", None, "nothing is padded to it"),
    _refused("hybrid_engine", "object", None, "generate with the engine's module instead", switch="enabled"),
    _honoured("weight_quantization", "object", None, "weights rest in 8 or 4 bits, of a model that is not trained"),
    _refused(
        "data_efficiency",
        "object",
        None,
        "it would change what is trained on: sort the data in a sampler",
        switch="enabled",
    ),
    *(
        _refused(name, "any", None, f"{GONE}: {instead}", off=(None, False, {}))
        for name, instead in (
            ("amp", "enable torch_autocast, bf16 or fp16"),
            ("nebula", "checkpoints are written by save_checkpoint"),
            ("compression_training", "the model would train unquantized"),
            ("quantize_training", "the model would train unquantized"),
            ("sparse_gradients", "gradients are reduced dense"),
            ("eigenvalue", "it was for quantize_training"),
            ("sparse_attention", "attention is the model's"),
            ("graph_harvesting", "nothing captures graphs"),
            ("curriculum_learning", "sort the data in a sampler"),
            ("progressive_layer_drop", "drop layers in the model"),
        )
    ),
)

KEYS: dict[str, Key] = {
    key.path: key
    for key in (*BATCH, *ELASTICITY, *OPTIMIZER, *PRECISION, *ZERO, *PARALLEL, *OBSERVERS, *CHECKPOINT, *OTHERS)
}
"""Every key by its path."""
