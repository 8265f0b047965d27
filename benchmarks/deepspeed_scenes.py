# ruff: noqa: E501, a table of expressions
"""The scenes of ``deepspeed_engines.py``: what is run, under which ranks, stages and precisions; and what differs on purpose."""

from __future__ import annotations

__all__ = ["KNOWN", "SCENES", "SETUP"]

SETUP = """
import argparse, copy, gc, glob, json, math, os, logging, importlib
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
import deepspeed
m = importlib.import_module
U = m("deepspeed.utils")
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
BASE = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 1000, "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("seen", torch.zeros(1))
    def forward(self, x): return self.down(torch.tanh(self.up(x))).float().square().mean()
engines = []
torch.manual_seed(0)
def conf(**more):
    c = copy.deepcopy(BASE) | {"zero_optimization": {"stage": stage}}
    if precision == "bf16": c["bf16"] = {"enabled": True}
    if precision == "fp16": c["fp16"] = {"enabled": True, "initial_scale_power": 8}
    for k, v in more.items():
        c[k] = {**c[k], **v} if isinstance(c.get(k), dict) and isinstance(v, dict) and k != "optimizer" else v
    return {k: v for k, v in c.items() if v != "none"}
def make(model=None, client=None, lr_scheduler=None, training_data=None, params=True, **more):
    torch.manual_seed(0)
    net = model if model is not None else Net()
    made = deepspeed.initialize(model=net, model_parameters=net.parameters() if params else None, optimizer=client,
        lr_scheduler=lr_scheduler, training_data=training_data, config=conf(**more))
    engines.append(made[0])
    return made[0]
def x(i=0, scale=1.0): return (torch.arange(8.0).view(2, 4) / 8 + 0.1 * i + 0.3 * rank).to(DTYPE) * scale
def micro(e, i=0, scale=1.0):
    loss = e(x(i, scale)); e.backward(loss); e.step()
    return float(loss)
def train(e, n): return [round(micro(e, i), 5) for i in range(n)]
def end():
    for e in engines:
        try: e.destroy()
        except Exception: pass
    engines.clear(); gc.collect()
def raised(f, *a, **k):
    f(*a, **k)
    return "nothing"
def under(d, deep=True): return sorted(os.path.relpath(p, d) for p in glob.glob(d + "/**", recursive=deep) if os.path.isfile(p))
def barrier(): dist.barrier()
"""

QUESTIONS = [
    "aio_config",
    "autotp_size",
    "autotuning_enabled",
    "autotuning_end_profile_step",
    "autotuning_metric",
    "autotuning_profile_model_info",
    "autotuning_start_profile_step",
    "bf16_master_weights_and_gradients",
    "bf16_optimizer_states",
    "bfloat16_enabled",
    "checkpoint_serialization_enabled",
    "checkpoint_tag_validation_enabled",
    "checkpoint_tag_validation_fail",
    "checkpoint_writer_enabled",
    "cpuadam_cores_perc",
    "curriculum_learning_enabled",
    "data_efficiency_enabled",
    "data_sampling_enabled",
    "dataloader_drop_last",
    "dump_state",
    "dynamic_loss_scale",
    "dynamic_loss_scale_args",
    "flops_profiler_detailed",
    "flops_profiler_enabled",
    "flops_profiler_module_depth",
    "flops_profiler_output_file",
    "flops_profiler_profile_step",
    "flops_profiler_recompute_fwd_factor",
    "flops_profiler_top_modules",
    "fp16_auto_cast",
    "fp16_enabled",
    "fp16_master_weights_and_gradients",
    "get_batch_info",
    "get_data_types",
    "get_lr",
    "get_mom",
    "get_type",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "initial_dynamic_scale",
    "is_deepcompile_enabled",
    "is_first_weights_partition_group",
    "is_gradient_accumulation_boundary",
    "load_universal_checkpoint",
    "log_level",
    "loss_scale",
    "managed_gradient_accumulation",
    "memory_breakdown",
    "optimizer_legacy_fusion",
    "optimizer_name",
    "optimizer_params",
    "postscale_gradients",
    "random_ltd_enabled",
    "scheduler_name",
    "scheduler_params",
    "steps_per_print",
    "torch_autocast_dtype",
    "torch_autocast_enabled",
    "torch_autocast_lower_precision_safe_modules",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "use_node_local_storage",
    "wall_clock_breakdown",
    "was_step_applied",
    "zenflow_config",
    "zero_allgather_bucket_size",
    "zero_allgather_partitions",
    "zero_allgather_sequential",
    "zero_allow_untested_optimizer",
    "zero_compute_grad_norm",
    "zero_contiguous_gradients",
    "zero_cpu_offload",
    "zero_elastic_checkpoint",
    "zero_force_ds_cpu_optimizer",
    "zero_gather_16bit_weights_on_model_save",
    "zero_hpz_partition_size",
    "zero_ignore_unused_parameters",
    "zero_legacy_stage1",
    "zero_load_from_fp32_weights",
    "zero_log_trace_cache_warnings",
    "zero_max_live_parameters",
    "zero_max_reuse_distance",
    "zero_model_persistence_threshold",
    "zero_module_granularity_threshold",
    "zero_multi_rank_bucket_allreduce",
    "zero_nvme_offload_optimizer",
    "zero_offload_optimizer",
    "zero_offload_param",
    "zero_optimization",
    "zero_optimization_partition_gradients",
    "zero_optimization_partition_weights",
    "zero_optimization_stage",
    "zero_overlap_comm",
    "zero_param_persistence_threshold",
    "zero_parameter_alignment",
    "zero_partial_offload",
    "zero_prefetch_bucket_size",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
    "zero_reduce_bucket_size",
    "zero_reduce_scatter",
    "zero_round_robin_gradients",
    "zero_save_muon_momentum_buffer_in_memory",
    "zero_sub_group_size",
    "zero_use_cpu_optimizer",
]
ATTRIBUTES = [
    "global_steps",
    "global_samples",
    "micro_steps",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "world_size",
    "global_rank",
    "local_rank",
    "gradient_average",
    "training",
    "is_compiled",
    "has_moe_layers",
    "pipeline_parallelism",
    "dist_backend",
    "enable_backward_allreduce",
    "warn_unscaled_loss",
    "use_ds_comm",
    "losses",
    "loaded_checkpoint_dp_world_size",
    "loaded_checkpoint_mp_world_size",
    "inside_no_sync_ctxt",
    "client_optimizer",
    "client_lr_scheduler",
    "lr_scheduler",
    "training_dataloader",
    "communication_data_type",
    "basic_optimizer",
    "module",
    "tput_timer",
]
MORE = [
    "[float(v) for v in [e.get_global_grad_norm()] if v is not None] if stage else None",
    "type(e.optimizer).__name__ if stage else None",
]
ASKED = "\n".join([f"e.{name}()" for name in QUESTIONS] + [f"e.{name}" for name in ATTRIBUTES] + MORE)
RICH = (
    """
> e = make(train_batch_size=4 * ranks, gradient_accumulation_steps=2, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}, gradient_clipping=0.7, dataloader_drop_last=True, memory_breakdown=False, zero_optimization={"reduce_bucket_size": 1000, "allgather_bucket_size": 2000, "overlap_comm": False, "contiguous_gradients": False, "sub_group_size": 5000, "stage3_max_live_parameters": 7, "stage3_max_reuse_distance": 8, "stage3_prefetch_bucket_size": 9, "stage3_param_persistence_threshold": 10, "stage3_gather_16bit_weights_on_model_save": True, "round_robin_gradients": False, "load_from_fp32_weights": False, "elastic_checkpoint": False, "ignore_unused_parameters": True}, checkpoint={"tag_validation": "Ignore", "use_node_local_storage": False}, flops_profiler={"enabled": False, "profile_step": 3, "module_depth": 2, "top_modules": 4, "detailed": False}, activation_checkpointing={"number_checkpoints": 2})
"""
    + ASKED
)

#: ``{scene: (numbers of ranks, stages, precisions, lines)}``
SCENES: dict[str, tuple[tuple[int, ...], tuple[int, ...], str, str]] = {
    "profiles": (
        (1,),
        (0,),
        "fp32",
        """
> F = m("deepspeed.profiling.flops_profiler"); q = F.FlopsProfiler(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))); q.start_profile(); q.model(torch.ones(3, 4)); q.stop_profile()
q.get_total_flops(), q.get_total_macs(), q.get_total_params(), q.get_total_flops(as_string=True), q.get_total_macs(as_string=True), q.get_total_params(as_string=True)
type(q.get_total_duration()).__name__
> q.end_profile()
F.get_model_profile(nn.Conv2d(3, 8, 3), (1, 3, 8, 8), print_profile=False, as_string=False)[:3], F.get_model_profile(nn.Conv2d(3, 8, 3), (1, 3, 8, 8), print_profile=False)[:3]
F.get_model_profile(nn.MultiheadAttention(8, 2), args=[torch.ones(3, 1, 8)] * 3, print_profile=False, as_string=False)[:3]
F.get_model_profile(nn.LayerNorm(8), (2, 8), print_profile=False, as_string=False)[:3], F.get_model_profile(nn.Embedding(8, 4), args=[torch.zeros(3, dtype=torch.long)], print_profile=False, as_string=False)[:3]
F.get_model_profile(nn.BatchNorm1d(4), (3, 4), print_profile=False, as_string=False)[:3]
F.get_model_profile(nn.Sequential(nn.GELU(), nn.Softmax(-1), nn.Tanh(), nn.Sigmoid(), nn.ReLU6(), nn.Dropout(), nn.SiLU()), (3, 4), print_profile=False, as_string=False)[:3]
F.get_model_profile(nn.Sequential(nn.Conv1d(2, 4, 3), nn.MaxPool1d(2), nn.AvgPool1d(2), nn.Flatten()), (1, 2, 10), print_profile=False, as_string=False)[:3]
""",
    ),
    "questions": ((1,), (0, 1, 2, 3), "fp32 bf16", "> e = make()\n" + ASKED),
    "questions in fp16": (
        (1,),
        (0, 2, 3),
        "fp16",
        "> e = make(fp16={'initial_scale_power': 10, 'loss_scale_window': 50, 'hysteresis': 3, 'min_loss_scale': 2, 'consecutive_hysteresis': True})\n"
        + ASKED,
    ),
    "questions of a rich config": ((2,), (1, 2, 3), "fp32", RICH),
    "questions behind steps": (
        (2,),
        (0, 2, 3),
        "fp32 bf16",
        "> e = make(gradient_accumulation_steps=2)\ntrain(e, 5)\n" + ASKED,
    ),
    "counting": (
        (1, 2),
        (0, 1, 2, 3),
        "fp32 bf16",
        """
> e = make(gradient_accumulation_steps=2, gradient_clipping=0.05, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_max_lr": 0.02, "warmup_num_steps": 2, "warmup_type": "linear"}})
e.is_gradient_accumulation_boundary(), e.was_step_applied(), e.get_lr()
micro(e), e.micro_steps, e.global_steps, e.global_samples, e.was_step_applied(), e.is_gradient_accumulation_boundary()
micro(e, 1), e.micro_steps, e.global_steps, e.global_samples, e.was_step_applied(), e.is_gradient_accumulation_boundary()
float(e.get_global_grad_norm()) if stage else None
e.get_lr(), e.lr_scheduler.get_last_lr(), e.get_mom()
train(e, 4)
float(e.get_global_grad_norm()) if stage else None
e.get_lr(), e.lr_scheduler.last_batch_iteration, e.lr_scheduler.state_dict()
type(e(x())).__name__, type(e.backward(e(x()))).__name__
> e.zero_grad()
> e.set_train_batch_size(e.train_batch_size() * 2)
e.train_batch_size(), e.gradient_accumulation_steps()
> e.set_train_micro_batch_size(5)
e.train_batch_size(), e.train_micro_batch_size_per_gpu(), e.gradient_accumulation_steps()
> e.set_train_batch_size(7)
(e.eval(), e.training, e.module.training)[1:], (e.train(), e.module.training)[1], (e.train(False), e.training)[1]
sorted(k for k in e.state_dict())[:2]
[n for n, _ in e.named_parameters()][:2], [n for n, _ in e.module.named_buffers()]
""",
    ),
    "an overflow": (
        (1, 2),
        (1, 2, 3),
        "fp16",
        """
> e = make(fp16={"initial_scale_power": 6, "hysteresis": 1, "loss_scale_window": 2}, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}})
e.optimizer.cur_scale, e.optimizer.loss_scale, e.loss_scale(), e.dynamic_loss_scale(), e.optimizer.overflow
train(e, 1), e.optimizer.cur_scale, e.skipped_steps, e.was_step_applied(), e.get_lr()
> micro(e, 0, float("inf"))
e.optimizer.cur_scale, e.skipped_steps, e.global_steps, e.global_samples, e.was_step_applied(), e.get_lr(), e.optimizer.overflow
float(e.get_global_grad_norm()) if stage else None
train(e, 1), e.optimizer.cur_scale, e.skipped_steps, e.was_step_applied(), e.optimizer.overflow
train(e, 3), e.optimizer.cur_scale, e.skipped_steps, e.get_lr()
e.lr_scheduler.last_batch_iteration, e.global_steps, e.micro_steps
> e = make(fp16={"loss_scale": 32.0})
e.optimizer.cur_scale, e.loss_scale(), e.dynamic_loss_scale(), e.optimizer.dynamic_loss_scale
train(e, 2), e.optimizer.cur_scale, float(e.get_global_grad_norm())
""",
    ),
    "states": (
        (1, 2),
        (1, 2, 3),
        "fp32 bf16",
        """
> e = make(zero_optimization={"stage": stage, "reduce_scatter": True})
> p, b = e.module.down.weight, e.module.down.bias
U.safe_get_full_fp32_param(p)
> loss = e(x()); e.backward(loss)
U.safe_get_full_grad(p)
U.safe_get_full_grad(b)
p.grad is None, e.module.up.weight.grad is None
> e.step()
U.safe_get_full_fp32_param(p)
U.safe_get_full_optimizer_state(p, "exp_avg")
U.safe_get_full_optimizer_state(b, "exp_avg_sq")
> U.safe_set_full_fp32_param(b, torch.full((2,), 0.25))
U.safe_get_full_fp32_param(b)
> U.safe_set_full_optimizer_state(b, torch.full((2,), 0.125), "exp_avg")
U.safe_get_full_optimizer_state(b, "exp_avg")
> e.backward(e(x(1)))
> U.safe_set_full_grad(b, torch.full((2,), 0.5))
U.safe_get_full_grad(b)
> e.step()
U.safe_get_full_fp32_param(b)
train(e, 2)
""",
    ),
    "local states": (
        (1, 2),
        (3,),
        "fp32 bf16",
        """
> e = make(zero_optimization={"stage3_param_persistence_threshold": 0})
> b, w = e.module.down.bias, e.module.up.weight
U.safe_get_local_fp32_param(w).shape, U.safe_get_local_fp32_param(w).dtype
U.safe_get_local_fp32_param(b)
> e.backward(e(x()))
U.safe_get_local_grad(b)
U.safe_get_local_grad(w)
> e.step()
U.safe_get_local_optimizer_state(b, "exp_avg")
U.safe_get_local_optimizer_state(w, "exp_avg_sq")
> U.safe_set_local_fp32_param(w, torch.full_like(U.safe_get_local_fp32_param(w), 0.5))
U.safe_get_full_fp32_param(w)
> U.safe_set_local_optimizer_state(w, torch.full_like(U.safe_get_local_fp32_param(w), 0.25), "exp_avg")
U.safe_get_full_optimizer_state(w, "exp_avg")
w.ds_shape, w.ds_numel, w.ds_tensor.numel(), w.ds_tensor.dtype, w.ds_id >= 0
b.ds_shape, b.ds_numel, b.ds_tensor.ds_numel, len(w.ds_summary()) > 0, w.partition_numel()
(lambda c: [c.__enter__(), w.shape, w.ds_status.name, c.__exit__(None, None, None)][1:3])(deepspeed.zero.GatheredParameters([w, b]))
> c = deepspeed.zero.GatheredParameters([b], modifier_rank=0); c.__enter__(); b.data.fill_(3.0 + rank); c.__exit__(None, None, None)
U.safe_get_full_fp32_param(b)
> c = deepspeed.zero.GatheredParameters(b); c.__enter__(); t = b.detach().clone(); c.__exit__(None, None, None)
t
(lambda c: [c.__enter__(), c.__exit__(None, None, None)][0])(deepspeed.zero.GatheredParameters([], modifier_rank=0))
(lambda c: [c.__enter__(), w.ds_status.name, c.__exit__(None, None, None)][1])(deepspeed.zero.GatheredParameters([w], enabled=False))
""",
    ),
    "made under Init": (
        (1, 2),
        (3,),
        "fp32 bf16",
        """
> c = deepspeed.zero.Init(config_dict_or_path=conf(train_micro_batch_size_per_gpu=2)); torch.manual_seed(0); c.__enter__(); net = Net(); c.__exit__(None, None, None)
net.up.weight.ds_shape, net.up.weight.ds_status.name, net.up.weight.ds_numel, net.up.weight.dtype
hasattr(net.up.weight, "ds_id"), hasattr(net.seen, "ds_id"), net.up.weight.ds_tensor.numel()
deepspeed.zero.Init.__name__, m("deepspeed.runtime.zero").Init is deepspeed.zero.Init
> e = make(model=net)
train(e, 3)
U.safe_get_full_fp32_param(net.down.bias)
> c = deepspeed.zero.Init(enabled=False); c.__enter__(); net2 = Net(); c.__exit__(None, None, None)
hasattr(net2.up.weight, "ds_id"), net2.up.weight.shape
> c = deepspeed.zero.Init(dtype=torch.float16); c.__enter__(); lin = nn.Linear(2, 2); c.__exit__(None, None, None)
lin.weight.dtype, lin.weight.ds_shape
> lin3 = nn.Linear(3, 3); deepspeed.zero.Init(module=lin3, config_dict_or_path=conf())
lin3.weight.ds_shape, lin3.weight.ds_status.name
> deepspeed.zero.register_external_parameter(net, net.down.weight)
> deepspeed.zero.unregister_external_parameter(net, net.down.weight)
> deepspeed.zero.register_external_parameter(1, net.down.weight)
> deepspeed.zero.register_external_parameter(net, torch.ones(1))
""",
    ),
    "states asked for wrongly": (
        (1,),
        (1, 2, 3),
        "fp32",
        """
> e = make()
> p, b = e.module.down.weight, e.module.down.bias
> train(e, 1)
U.safe_get_full_optimizer_state(p, "nothing")
> U.safe_set_full_optimizer_state(b, torch.ones(2), "nothing")
> U.safe_set_full_fp32_param(b, torch.ones(5))
U.safe_get_full_fp32_param(nn.Parameter(torch.ones(2))), U.safe_get_full_grad(nn.Parameter(torch.ones(2)))
U.safe_get_full_optimizer_state(nn.Parameter(torch.ones(2)), "exp_avg")
p.grad is None
""",
    ),
    "checkpoints": (
        (1, 2),
        (0, 1, 2, 3),
        "fp32 bf16",
        """
> e = make(zero_optimization={"stage3_gather_16bit_weights_on_model_save": True}, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear"}})
train(e, 2)
> d = folder + "/c"; os.makedirs(d, exist_ok=True)
e.save_checkpoint(d)
open(d + "/latest").read()
e.save_checkpoint(d, tag="mine", client_state={"epoch": 3, "best": [1.5, "x"]})
open(d + "/latest").read(), sorted(n for n in os.listdir(d) if os.path.isdir(d + "/" + n))
e.save_checkpoint(d, tag="quiet", save_latest=False), open(d + "/latest").read()
sorted(e.module_state_dict()), e.module_state_dict()["up.weight"].dtype, e.module_state_dict()["up.weight"].shape
(barrier(), e.save_16bit_model(folder + "/w"), barrier())[1]
(lambda s: [sorted(s), s["up.weight"].dtype, s["up.weight"].shape])(torch.load(folder + "/w/pytorch_model.bin"))
e.save_16bit_model(folder + "/w", "other.bin"), (barrier(), os.path.exists(folder + "/w/other.bin"))[1]
e.save_fp16_model(folder + "/w2"), (barrier(), os.listdir(folder + "/w2"))[1]
train(e, 2)
> path, state = e.load_checkpoint(d)
os.path.relpath(path, d).split("/")[0], state["epoch"], state["best"]
e.global_steps, e.global_samples, e.skipped_steps, e.micro_steps, e.get_lr(), e.lr_scheduler.last_batch_iteration
e.loaded_checkpoint_dp_world_size, e.loaded_checkpoint_mp_world_size
train(e, 2)
> path, state = e.load_checkpoint(d, tag="global_step2")
os.path.relpath(path, d).split("/")[0], e.global_steps
train(e, 1)
e.load_checkpoint(d, tag="mine", load_optimizer_states=False)[1]["epoch"], e.get_lr()
e.load_checkpoint(d, tag="mine", load_lr_scheduler_states=False)[1]["epoch"]
e.load_checkpoint(d, tag="mine", load_module_only=True)[1]["epoch"], e.global_steps
e.load_checkpoint(folder + "/nowhere")
e.load_checkpoint(d, tag="absent")
> z = m("deepspeed.utils.zero_to_fp32")
sorted(z.get_fp32_state_dict_from_zero_checkpoint(d)) if stage else None
(lambda s: [s["up.weight"].dtype, s["up.weight"].shape, s["down.bias"].dtype, float(s["down.bias"].sum())])(z.get_fp32_state_dict_from_zero_checkpoint(d, "mine")) if stage else None
raised(z.get_fp32_state_dict_from_zero_checkpoint, d, "absent")
raised(z.get_fp32_state_dict_from_zero_checkpoint, folder + "/nowhere")
float(z.load_state_dict_from_zero_checkpoint(Net(), d).down.bias.sum()) if stage else None
(barrier(), z.convert_zero_checkpoint_to_fp32_state_dict(d, folder + f"/o{rank}", tag="mine"))[1] if stage else None
sorted(os.listdir(folder + f"/o{rank}")) if stage else None
(z.convert_zero_checkpoint_to_fp32_state_dict(d, folder + f"/s{rank}", safe_serialization=True), sorted(os.listdir(folder + f"/s{rank}")))[1] if stage else None
(z.convert_zero_checkpoint_to_fp32_state_dict(d, folder + f"/t{rank}", max_shard_size="1KB"), sorted(os.listdir(folder + f"/t{rank}")))[1] if stage else None
> e2 = make(zero_optimization={"stage3_gather_16bit_weights_on_model_save": False})
e2.save_16bit_model(folder + "/w3")
> e2.load_module_state_dict({"module": {"up.weight": torch.zeros(8, 4)}}) if stage < 3 else None
""",
    ),
    "mistakes": (
        (1,),
        (0, 1, 2, 3),
        "fp32",
        """
> make(train_batch_size=3, gradient_accumulation_steps=2)
> make(train_batch_size=0)
> make(train_micro_batch_size_per_gpu="none")
> make(optimizer={"type": "Nonsense", "params": {}})
> make(scheduler={"type": "Nonsense", "params": {}})
> make(zero_optimization={"stage": 4})
> make(zero_optimization={"stage": "two"})
> make(fp16={"enabled": True}, bf16={"enabled": True})
> make(gradient_accumulation_steps=-1)
> make(zero_optimization={"overlap_comm": "perhaps"})
> make(optimizer={"params": {"lr": 1}})
> make(optimizer={"type": "Adam", "params": {"nonsense": 1, "torch_adam": True}})
> make(scheduler={"type": "WarmupLR", "params": {"nonsense": 1}})
> deepspeed.initialize(model=Net())
> deepspeed.initialize(model=None, config=conf())
> deepspeed.initialize(model=Net(), config=5)
> deepspeed.initialize(model=Net(), config=folder + "/nowhere.json")
> deepspeed.initialize(args=argparse.Namespace(deepspeed_config=folder + "/no.json"), model=Net())
> deepspeed.initialize(model=Net(), config=conf(), config_params=conf())
> open(folder + "/bad.json", "w").write("{]")
> deepspeed.initialize(model=Net(), config=folder + "/bad.json")
> open(folder + "/twice.json", "w").write('{"train_batch_size": 2, "train_batch_size": 4}')
> deepspeed.initialize(model=Net(), config=folder + "/twice.json")
> e = make()
> e.backward(e.module.up(x()))
> e.set_train_batch_size(3)
> e.step(); e.step()
e.global_steps, e.micro_steps
> e.train_batch_size(1)
> e.nothing_such
> e.load_checkpoint(None)
> e.save_checkpoint(folder + "/k", tag=None, client_state=[1])
> c = e.no_sync(); c.__enter__(); c.__exit__(None, None, None)
> c = e.no_sync(); c.__enter__(); e.step()
> e.inside_no_sync_ctxt = False
> f = make(optimizer="none")
type(f.optimizer).__name__, f.lr_scheduler, f.training_dataloader, f.optimizer_name(), f.optimizer_params()
> f.backward(f(x()))
> f.step()
> m("deepspeed.runtime.config").DeepSpeedConfig({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2})
> m("deepspeed.runtime.config").DeepSpeedConfig({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})
(lambda c: [c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps])(m("deepspeed.runtime.config").DeepSpeedConfig({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}))
(lambda c: [c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps])(m("deepspeed.runtime.config").DeepSpeedConfig({"train_batch_size": 8, "gradient_accumulation_steps": 2}))
(lambda c: [c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps])(m("deepspeed.runtime.config").DeepSpeedConfig({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}))
(lambda c: [c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps])(m("deepspeed.runtime.config").DeepSpeedConfig({"train_batch_size": 8}))
(lambda c: [c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps])(m("deepspeed.runtime.config").DeepSpeedConfig({"train_micro_batch_size_per_gpu": 3}))
""",
    ),
    "optimizers of a config": (
        (1,),
        (0, 2, 3),
        "fp32",
        "\n".join(
            f"""
> e = make(optimizer={{"type": "{kind}", "params": {{{more}}}}}, zero_allow_untested_optimizer=True)
type(e.basic_optimizer).__name__, e.optimizer_name(), e.optimizer_params(), e.get_lr(), e.get_mom() # {kind} {more}
train(e, 3), float(sum(U.safe_get_full_fp32_param(p).sum() for p in e.module.parameters())) if stage else 0.0 # {kind} {more}
{{k: v for k, v in e.optimizer.param_groups[0].items() if k in ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "bias_correction", "amsgrad")}} # {kind} {more}"""
            for kind, more in (
                ("Adam", '"torch_adam": True, "lr": 0.02'),
                ("AdamW", '"torch_adam": True, "lr": 0.02, "betas": [0.8, 0.99], "weight_decay": 0.3'),
                ("Adam", '"torch_adam": True, "adam_w_mode": False, "weight_decay": 0.3, "lr": 0.01'),
                ("Adam", '"torch_adam": True, "weight_decay": 0.3, "lr": 0.01'),
                ("SGD", '"lr": 0.1, "momentum": 0.9'),
                ("RMSprop", '"lr": 0.01'),
                ("Adagrad", '"lr": 0.1'),
                ("adamw", '"torch_adam": True'),
                ("Adam", '"torch_adam": True, "eps": 0.001, "amsgrad": True'),
                ("Adadelta", '"lr": 0.5'),
            )
        ),
    ),
    "schedules of a config": (
        (1,),
        (0, 2),
        "fp32",
        "\n".join(
            f"""
> e = make(scheduler={{"type": "{kind}", "params": {{{more}}}}})
type(e.lr_scheduler).__name__, e.scheduler_name(), e.get_lr(), e.get_mom() # {kind} {more}
[(micro(e), e.get_lr(), e.get_mom(), e.lr_scheduler.get_last_lr())[1:] for _ in range(7)] # {kind} {more}
e.lr_scheduler.state_dict() # {kind} {more}"""
            for kind, more in (
                ("WarmupLR", '"warmup_max_lr": 0.1, "warmup_num_steps": 4'),
                ("WarmupLR", '"warmup_min_lr": 0.01, "warmup_num_steps": 3, "warmup_type": "linear"'),
                ("WarmupDecayLR", '"total_num_steps": 6, "warmup_max_lr": 0.1, "warmup_num_steps": 2'),
                ("WarmupCosineLR", '"total_num_steps": 6, "warmup_num_steps": 2, "cos_min_ratio": 0.1'),
                (
                    "OneCycle",
                    '"cycle_min_lr": 0.001, "cycle_max_lr": 0.1, "cycle_first_step_size": 3, "decay_lr_rate": 0.1, "decay_step_size": 1',
                ),
                (
                    "LRRangeTest",
                    '"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 2.0',
                ),
                (
                    "LRRangeTest",
                    '"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 2, "lr_range_test_staircase": True',
                ),
                ("WarmupLR", ""),
            )
        ),
    ),
    "arguments of initialize": (
        (1, 2),
        (0, 2, 3),
        "fp32",
        """
> net = Net(); o = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5); s = torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
> e = make(model=net, client=o, lr_scheduler=s, optimizer="none", params=False, zero_allow_untested_optimizer=True)
e.client_optimizer is o, e.lr_scheduler is s, e.optimizer_name(), e.scheduler_name(), e.basic_optimizer is o
train(e, 2), e.get_lr(), e.get_mom()
> e = make(client=lambda ps: torch.optim.SGD(ps, lr=0.2), optimizer="none", zero_allow_untested_optimizer=True)
type(e.lr_scheduler).__name__, e.get_lr(), e.get_mom(), (train(e, 2), e.get_lr())[1]
> net = Net(); e = make(model=net, params=False)
len(e.optimizer.param_groups), e.get_lr()
> net = Net(); made = deepspeed.initialize(model=net, model_parameters=[{"params": [net.up.weight], "lr": 0.5}, {"params": [net.down.weight, net.down.bias]}], config=conf()); e = made[0]; engines.append(e)
len(made), type(made[0]).__name__, [g["lr"] for g in made[1].param_groups], e.get_lr(), e.get_mom()
train(e, 2), e.module.up.bias.requires_grad
> data = TensorDataset(torch.arange(96.0).view(24, 4) / 96)
> e = make(training_data=data, gradient_accumulation_steps=2)
type(e.training_dataloader).__name__, len(e.training_dataloader), e.training_dataloader.batch_size
[b[0].shape for b in e.training_dataloader][:2], [b[0].flatten()[:1].tolist() for b in e.deepspeed_io(data, route="eval")][:2]
len(e.deepspeed_io(data, batch_size=3)), len(e.deepspeed_io(data, batch_size=5, route="predict"))
[next(i)[0].shape for i in [iter(deepspeed.utils.RepeatingLoader(e.training_dataloader))] for _ in range(3)]
e.is_map_style_dataset(data), e.is_iterable_style_dataset(data), e.is_map_style_dataset(1)
""",
    ),
    "collectives": (
        (1, 2),
        (0,),
        "fp32",
        """
> C = deepspeed.comm
> t = torch.full((4,), float(rank + 1))
C.get_rank(), C.get_world_size(), C.get_local_rank(), C.is_initialized(), C.is_available(), C.get_world_group() is not None
C.all_reduce(t)
t
> C.all_reduce(t, op=C.ReduceOp.MAX); C.all_reduce(t, C.ReduceOp.SUM, async_op=False)
t
type(C.all_reduce(t, async_op=True).wait()).__name__
> C.broadcast(t := torch.full((2,), float(rank)), 0)
t
> out = [torch.zeros(2) for _ in range(ranks)]; C.all_gather(out, torch.full((2,), float(rank)))
out
> out = torch.zeros(2 * ranks); C.all_gather_into_tensor(out, torch.full((2,), float(rank)))
out
> out = torch.zeros(2 * ranks); C.allgather_fn(out, torch.full((2,), float(rank)))
out
> out = torch.zeros(2); C.reduce_scatter_tensor(out, torch.arange(2.0 * ranks))
out
> out = torch.zeros(2); C.reduce_scatter_fn(out, torch.arange(2.0 * ranks))
out
> C.reduce(t := torch.full((2,), float(rank + 1)), 0)
t if rank == 0 else None
> C.gather(torch.full((1,), float(rank)), [torch.zeros(1) for _ in range(ranks)] if rank == 0 else None, 0)
> C.scatter(t := torch.zeros(1), [torch.full((1,), 5.0 + r) for r in range(ranks)] if rank == 0 else None, 0)
t
> out = torch.zeros(ranks); C.all_to_all_single(out, torch.arange(float(ranks)) + 10 * rank)
out
> o = [None] * ranks; C.all_gather_object(o, {"r": rank})
o
> o = [{"a": 1}] if rank == 0 else [None]; C.broadcast_object_list(o, 0)
o
> C.barrier(); C.monitored_barrier()
C.inference_all_reduce(torch.ones(1)) if ranks == 1 else None
> C.all_reduce_coalesced([torch.ones(1), torch.ones(2)])
> C.send(torch.ones(1), 1) if rank == 0 and ranks == 2 else C.recv(t := torch.zeros(1), 0) if ranks == 2 else None
> g = C.new_group(list(range(ranks)))
C.get_world_size(g), C.get_rank(g), C.get_global_rank(g, 0), C.get_all_ranks_from_group(g)
C.has_all_gather_into_tensor(), C.has_reduce_scatter_tensor(), C.has_all_reduce_coalesced(), C.has_coalescing_manager()
C.get_backend() if hasattr(C, "get_backend") else None
C.is_backend_available("gloo") if hasattr(C, "is_backend_available") else None
> G = m("deepspeed.utils.groups")
[f() for f in (G._get_data_parallel_world_size, G._get_data_parallel_rank, G._get_model_parallel_world_size, G._get_sequence_parallel_world_size, G._get_sequence_parallel_rank, G._get_sequence_data_parallel_world_size)]
[f() for f in (G.get_data_parallel_world_size, G.get_data_parallel_rank, G.get_model_parallel_world_size, G.get_tensor_model_parallel_world_size, G.get_tensor_model_parallel_rank)]
C.log_summary()
C.initialize_mesh_device((ranks, 1), ("a", "b")).shape
m("deepspeed.runtime.utils").see_memory_usage("x", force=True)
[round(float(v), 4) for v in [m("deepspeed.runtime.utils").clip_grad_norm_([(lambda p: (setattr(p, "grad", torch.tensor([3.0, 4.0])), p)[1])(nn.Parameter(torch.zeros(2)))], 1.0)]]
""",
    ),
    "monitors and profiles": (
        (1, 2),
        (0, 2, 3),
        "fp32",
        """
> e = make(csv_monitor={"enabled": True, "output_path": folder + "/csv", "job_name": "j"}, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 4}}, gradient_accumulation_steps=2, wall_clock_breakdown=False, flops_profiler={"enabled": True, "profile_step": 1, "output_file": folder + "/flops.txt", "detailed": True})
e.monitor.enabled, e.flops_profiler_enabled()
train(e, 6)
> barrier()
{n: open(folder + "/csv/j/" + n).read().splitlines()[0] for n in sorted(os.listdir(folder + "/csv/j")) if "elapsed" not in n and "train_loss" not in n}
[(r.split(",")[0], round(float(r.split(",")[1]), 4)) for r in open(folder + "/csv/j/Train_Samples_lr.csv").read().splitlines()[1:]]
> barrier()
e.monitor.write_events([("My/Own", 1.5, 3)]), (barrier(), open(folder + "/csv/j/My_Own.csv").read().splitlines())[1]
sorted(set((l.split(":")[0].strip(), l.split(":")[1].strip()) for l in open(folder + "/flops.txt").read().splitlines() if ":" in l and l.startswith(("params per GPU", "fwd MACs per GPU", "world size", "data parallel size", "batch size per GPU"))))
""",
    ),
    "more of an engine": (
        (1, 2),
        (0, 1, 2, 3),
        "fp32",
        """
> e = make(gradient_accumulation_steps=3)
> l = e(x())
float(e.backward(l)), float(l)
> e.step()
> e.backward(e(x(1)), scale_wrt_gas=False); e.step(); e.backward(e(x(2))); e.step()
e.global_steps, float(U.safe_get_full_fp32_param(e.module.down.bias).sum()) if stage else 0.0
> e.set_gradient_accumulation_boundary(True)
e.is_gradient_accumulation_boundary()
> e.backward(e(x())); e.step()
e.global_steps, e.micro_steps
> e.set_gradient_accumulation_boundary(False); e.backward(e(x())); e.step()
e.global_steps, e.micro_steps, e.was_step_applied()
> with_scale = e.scale(e(x()))
float(with_scale)
> e.set_gradient_accumulation_boundary(True); with_scale.backward(); e.step() if stage else None
e.global_steps
> e.eval()
float(e(x())), e.training
[(k, v.shape) for k, v in sorted(e.module_state_dict().items())]
> e.load_module_state_dict({k: v for k, v in [("module", {k: v.clone() * 0 for k, v in e.module_state_dict().items()})]}["module"]) if stage < 3 else None
len(list(e.parameters())), e.up.in_features, e.module is e.module, isinstance(e, nn.Module), callable(e)
e.zero_optimization_partition_weights(), e.zero_optimization_partition_gradients()
type(e.optimizer).__name__, isinstance(e.optimizer, m("deepspeed.runtime.base_optimizer").DeepSpeedOptimizer) if stage else None, isinstance(e.optimizer, torch.optim.Optimizer) if not stage else None
sorted(k for k in e.optimizer.param_groups[0] if k in ("lr", "betas", "params", "eps")), hasattr(e.optimizer, "state")
> e.optimizer.zero_grad()
> for g in e.optimizer.param_groups: g["lr"] = 0.123
e.get_lr()
e.destroy()
""",
    ),
    "other modules": (
        (1,),
        (0,),
        "fp32",
        """
> K = deepspeed.checkpointing
K.is_configured()
> K.configure(None, num_checkpoints=2, partition_activations=False)
K.is_configured()
> p = nn.Parameter(torch.ones(2)); out = K.checkpoint(lambda t: (t * 3).sum(), p); out.backward()
p.grad
type(K.get_cuda_rng_tracker()).__name__
> K.reset(); K.set_num_layers(3)
K.is_configured()
> A = deepspeed.accelerator.get_accelerator() if hasattr(deepspeed.accelerator, "get_accelerator") else m("deepspeed.accelerator").get_accelerator()
A.device_name(), A.device_name(0), A.is_available(), A.communication_backend_name(), A.current_device_name(), A.is_synchronized_device()
A.is_bf16_supported(), A.supported_dtypes() != [], A.amp() is None, A.range_push("x"), A.is_triton_supported(), A.on_accelerator(torch.ones(1))
A.get_accelerator() if hasattr(A, "get_accelerator") else None
deepspeed.get_accelerator().device_count() > 0
U.logger.name, U.logger.level, U.log_dist("x", ranks=[0]), U.log_dist("x")
[h.formatter is not None for h in U.logger.handlers][:1], U.logger.propagate
raised(U.set_log_level_from_string, "nonsense")
U.set_log_level_from_string("warning"), U.logger.level
(U.set_log_level_from_string("info"), U.logger.level)[1]
> make(curriculum_learning={"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64, "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8}})
> make(progressive_layer_drop={"enabled": True, "theta": 0.5, "gamma": 0.001})
> make(eigenvalue={"enabled": True})
> make(elasticity={"enabled": True, "max_train_batch_size": 8, "micro_batch_sizes": [2]})
> make(data_efficiency={"enabled": True})
> make(compression_training={})
> make(nonsense=1)
> make(zero_optimization={"nonsense": 1})
> make(fp16={"nonsense": 1})
> make(autotuning={"enabled": False})
> make(sparse_gradients=True)
> make(aio={"block_size": 2})
> make(tensorboard={"enabled": False}, wandb={"enabled": False})
> make(sequence_parallel_size=1)
> make(pipeline={"stages": "auto"})
> make(amp={"enabled": False})
> make(train_batch_size="auto")
""",
    ),
}

NO_GROUPS = "all ranks are data-parallel, whether an mpu was given or not"
CHECKED = "a config error says what is known, for every wrong key alike"
#: ``{(scene or "" for all, beginning of a line): why its value is another here}``
KNOWN: dict[tuple[str, str], str] = {
    ("", "e.get_batch_info()"): "DeepSpeed gives three methods; its documentation says numbers",
    ("", "e.get_data_types()"): "gradients accumulate in fp32 unless the config says otherwise",
    ("", "e.communication_data_type"): "gradients travel in fp32 unless the config says otherwise",
    ("", "(e.eval(), e.training"): "the engine's own mode is its module's; DeepSpeed's engine stays in training mode",
    (
        "an overflow",
        "train(e, 3)",
    ): "in the step behind which the scale grows, DeepSpeed divides gradients by the new scale",
    (
        "questions behind steps",
        "train(e, 5)",
    ): "stage 0 in bf16: DeepSpeed's optimizer counts a step of zero gradients at start",
    ("states asked for wrongly", ""): "one kind of error at every stage, and a sentence; with one rank .grad is shown",
    (
        "states",
        "train(e, 2)",
    ): "safe_set_full_fp32_param() sets what the next forward reads; DeepSpeed's is seen after a step",
    ("states", "p.grad is None"): "with one rank the gradient is shown",
    ("local states", "U.safe_get_full"): "what is set in one rank's part of the fp32 copy",
    ("made under Init", "> deepspeed.zero.unregister"): "it is registered, so it can be taken off",
    (
        "checkpoints",
        'e.load_checkpoint(d, tag="mine", load_optimizer_states=False)',
    ): "a schedule that is loaded sets the rates at once",
    ("checkpoints", 'e.load_checkpoint(d, tag="absent")'): "a CheckpointError that lists the tags there are",
    ("mistakes", "> make(optimizer="): CHECKED,
    ("mistakes", "> make(scheduler="): CHECKED,
    ("mistakes", "> e.step(); e.step()"): "a step without a backward is refused",
    ("mistakes", "e.global_steps, e.micro_steps"): "as above",
    ("mistakes", '> f = make(optimizer="none")'): "without an optimizer every stage runs forward",
    ("mistakes", "type(f.optimizer)"): "as above",
    ("mistakes", "> f.backward(f(x()))"): "as above: and refuses what needs one",
    ("mistakes", "> f.step()"): "as above",
    (
        "monitors and profiles",
        "sorted(set((l.split",
    ): "DeepSpeed counts linear layers twice at stage 3, where it replaces torch's function",
    ("collectives", "[f() for f in (G.get_data"): NO_GROUPS,
    ("more of an engine", "float(with_scale)"): "stage 0: DeepSpeed ignores scale_wrt_gas=False there",
    ("more of an engine", "float(e(x())), e.training"): "the engine's own mode is its module's",
    ("more of an engine", "e.global_steps"): "stage 0: DeepSpeed refuses loss.backward() there",
    ("more of an engine", "> e.set_gradient_accumulation_boundary(True); with_scale"): "as above",
    ("more of an engine", "type(e.optimizer)"): "at stage 0 in fp32 DeepSpeed gives the plain optimizer",
    ("other modules", "> make(data_efficiency"): "what changes what is trained on is refused",
    ("other modules", "> make(compression_training={})"): "an empty section asks for nothing",
    ("other modules", "> make(amp="): "what is switched off asks for nothing",
    ("other modules", "> make(nonsense=1)"): "an unknown key is an error at every level",
    ("other modules", "> make(pipeline="): "'auto' is a client's to fill in",
    ("other modules", '> make(train_batch_size="auto")'): "as above: a config error",
}
